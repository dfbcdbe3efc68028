"""Bloom: against the same filter in plain Python, from text ids to answers, in batches of 500."""

from collections.abc import Callable
from hashlib import sha256
from math import ceil, log
from pathlib import Path

from semel.cli.bench.measure import Fresh, Job, Measurement, compare
from semel.core.ids import digest
from semel.stores.bloom import Bloom
from semel.testing import ManualClock

BATCH = 500
COUNT = 20_000
CAPACITY = 1_000_000
ERROR_RATE = 0.001
BYTES_AIM = 2.2


class PlainBloom:
    """A filter written without a library: a bytearray, and two halves of a digest for all hashes."""

    def __init__(self, capacity: int, error_rate: float) -> None:
        self.bits = ceil(-capacity * log(error_rate) / log(2) ** 2)
        self.hashes = max(1, round(self.bits / capacity * log(2)))
        self.room = bytearray(-(-self.bits // 8))

    def places(self, key: str) -> list[int]:
        """Return the positions of the key's bits."""
        made = sha256(key.encode()).digest()
        first, second = int.from_bytes(made[:8]), int.from_bytes(made[8:16])
        return [(first + number * second) % self.bits for number in range(self.hashes)]

    def add(self, key: str) -> None:
        """Add the key."""
        for place in self.places(key):
            self.room[place >> 3] |= 1 << (place & 7)

    def maybe(self, key: str) -> bool:
        """Return whether the key may be in the filter."""
        return all(self.room[place >> 3] >> (place & 7) & 1 for place in self.places(key))


def rows(_folder: Path) -> list[Measurement]:
    """All comparisons."""
    return [look_and_add(), look_and_add(generations=4), room(), wrong()]


def look_and_add(generations: int = 1) -> Measurement:
    """Look up 500 ids, then add them; with several generations, the older ones are read, too."""
    mine, theirs = Fresh(COUNT), Fresh(COUNT)
    clock = ManualClock()
    bloom = Bloom(capacity=CAPACITY, error_rate=ERROR_RATE, window=90, clock=clock)
    for number in range(generations):
        bloom.add_many([digest(("", "old", f"{number} {at}")) for at in range(50_000)])
        if number < generations - 1:
            clock.advance(30)
    plain = [PlainBloom(CAPACITY // 3, ERROR_RATE / 4) for _ in range(generations)]

    def subject() -> None:
        for batch in mine.batches(BATCH):
            digests = [digest(("", "c", key)) for key in batch]
            bloom.maybe_many(digests)
            bloom.add_many(digests)

    def limit() -> None:
        for batch in theirs.batches(BATCH):
            for key in batch:
                any(each.maybe(key) for each in plain)
                plain[0].add(key)

    name = "look and add, 500" + ("" if generations == 1 else f", {generations} gen.")
    return compare(
        "bloom", name, Job(subject, 20_000, mine), "the same in Python", Job(limit, 20_000, theirs), 5.0
    )


def _fill_bloom() -> tuple[Bloom, int]:
    clock = ManualClock()
    bloom = Bloom(capacity=CAPACITY, error_rate=ERROR_RATE, window=90, clock=clock)
    held = 0
    for number in range(4):
        bloom.add_many([digest(("", "c", f"{number} {at}")) for at in range(CAPACITY // 3)])
        held += CAPACITY // 3
        clock.advance(30 if number < 3 else 0)
    return bloom, held


def room() -> Measurement:
    """Bytes per id of a filter at its capacity; the aim is a bound."""
    bloom, held = _fill_bloom()
    return _bound("bytes per id, full", BYTES_AIM, lambda: bloom.fullness().bytes_used / held)


def wrong() -> Measurement:
    """False positives of a full filter, against one and a half times the configured error rate."""
    bloom, _ = _fill_bloom()
    strangers = [digest(("", "c", f"stranger {at}")) for at in range(500_000)]
    return _bound(
        "false positives, full", 1.5 * ERROR_RATE, lambda: sum(bloom.maybe_many(strangers)) / len(strangers)
    )


def _bound(what: str, most: float, measure: Callable[[], float]) -> Measurement:
    """Return a row for a figure with an upper bound; the ratio is bound over figure, so 1 or more is within."""
    return Measurement(
        store="bloom", what=what, rate=most, limit=f"bound {most:g}", limit_rate=measure(), aim=1.0
    )
