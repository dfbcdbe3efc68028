"""Memory: against plain dicts and sets, and against the protocol written out by hand."""

import itertools
import time
from collections.abc import Callable, Iterator

import semel
from benchmarks.measure import Job, Row, compare
from semel.codec import encode
from semel.context import Context, _current
from semel.core.commands import Claim, Granted, Settle
from semel.forks import new_owner
from semel.keeper import Kept
from semel.keys import check
from semel.types import Done

COUNT = 20_000
BATCH = 500
WINDOW_US = 86_400_000_000
LEASE_US = 30_000_000
_round = itertools.count()


def keys() -> list[str]:
    """Fresh ids, 36 characters, never used before."""
    run = next(_round)
    return [f"0198c0de-{run:04x}-7000-8000-{at:012x}" for at in range(COUNT)]


def nothing(_body: object = None) -> None:
    """A handler that does nothing: what remains is semel."""


class Fresh:
    """Keys made before the clock starts."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def __call__(self) -> None:
        self.keys = keys()

    def batches(self, size: int) -> Iterator[list[str]]:
        """The keys, some at a time."""
        for at in range(0, len(self.keys), size):
            yield self.keys[at : at + size]


def rows() -> list[Row]:
    """All comparisons in memory."""
    return [
        single_mark(),
        batch_mark(),
        compact_mark(),
        run(),
        replay(),
        *[claim_complete(size) for size in (1, 10, 100, 500, 1000)],
    ]


def single_mark() -> Row:
    """One mark per call, against a dict with a clock call."""
    mine, theirs = Fresh(), Fresh()
    client = semel.open(semel.MemoryStore(records_max=10**7), consumer="m", mode="mark")
    client.mark("warm")
    seen: dict[str, int] = {}

    def subject() -> None:
        for key in mine.keys:
            client.mark(key)

    def limit() -> None:
        for key in theirs.keys:
            now = time.time_ns() // 1000
            expiry = seen.get(key)
            if expiry is None or expiry <= now:
                seen[key] = now + WINDOW_US

    return compare(
        "memory",
        "mark, one by one",
        Job(subject, COUNT, mine),
        "dict with a clock",
        Job(limit, COUNT, theirs),
        0.9,
    )


def batch_mark() -> Row:
    """Marks of 500, against a set comprehension."""
    mine, theirs = Fresh(), Fresh()
    client = semel.open(semel.MemoryStore(records_max=10**7), consumer="m", mode="mark")
    client.mark("warm")
    seen: set[str] = set()

    def subject() -> None:
        for batch in mine.batches(BATCH):
            client.mark_many(batch)

    def limit() -> None:
        add = seen.add
        for batch in theirs.batches(BATCH):
            [not (key in seen or add(key)) for key in batch]

    return compare(
        "memory",
        "mark_many of 500",
        Job(subject, COUNT, mine),
        "set comprehension",
        Job(limit, COUNT, theirs),
        0.8,
    )


def compact_mark() -> Row:
    """Packed marks of 500, against those in a set: what a fifth of the room costs."""
    mine, theirs = Fresh(), Fresh()
    packed = semel.open(semel.MemoryStore(records_max=10**7, compact=True), consumer="m", mode="mark")
    loose = semel.open(semel.MemoryStore(records_max=10**7), consumer="m", mode="mark")

    def pour(client: semel.Semel, fresh: Fresh) -> None:
        for batch in fresh.batches(BATCH):
            client.mark_many(batch)

    return compare(
        "memory",
        "mark_many of 500, compact",
        Job(lambda: pour(packed, mine), COUNT, mine),
        "mark_many of 500",
        Job(lambda: pour(loose, theirs), COUNT, theirs),
    )


def by_hand(client: semel.Semel, key: str, handler: Callable[[], object]) -> Done[object]:
    """What `run` does, written out without flows or drivers: the price of having the protocol in one place."""
    store, keeper = client._runtime.store, client._runtime.keeper
    record_id, owner, sent_at = ("", "twin", check(key)), new_owner(), time.monotonic()
    claim = Claim(record_id, owner, LEASE_US, WINDOW_US)
    granted = store.send((claim,))[0]  # type: ignore[union-attr]
    assert isinstance(granted, Granted)
    kept = Kept.since(claim, granted, sent_at, 900.0)
    keeper.keep(kept)
    token = _current.set(Context(kept, granted, None, 0))
    try:
        value = handler()
    finally:
        _current.reset(token)
    settle = Settle(record_id, owner, granted.fence, "done", encode(value), WINDOW_US, LEASE_US)
    store.send((settle,))  # type: ignore[union-attr]
    keeper.drop(owner)
    return Done(value)


def run() -> Row:
    """`run` of a handler that does nothing, against the same by hand on the same store."""
    mine, theirs = Fresh(), Fresh()
    client = semel.open(semel.MemoryStore(records_max=10**7), consumer="r")
    client.run("warm", nothing)

    def subject() -> None:
        for key in mine.keys:
            client.run(key, nothing)

    def limit() -> None:
        for key in theirs.keys:
            by_hand(client, key, nothing)

    return compare(
        "memory", "run, one by one", Job(subject, COUNT, mine), "by hand", Job(limit, COUNT, theirs), 0.6
    )


def replay() -> Row:
    """`run` of a duplicate, against `run` of a new event."""
    mine, theirs = Fresh(), Fresh()
    client = semel.open(semel.MemoryStore(records_max=10**7), consumer="r")

    def fresh() -> None:
        mine()
        for key in mine.keys:
            client.run(key, nothing)

    def subject() -> None:
        for key in mine.keys:
            client.run(key, nothing)

    def limit() -> None:
        for key in theirs.keys:
            client.run(key, nothing)

    return compare(
        "memory", "replay, one by one", Job(subject, COUNT, fresh), "run", Job(limit, COUNT, theirs), 1.0
    )


def claim_complete(size: int) -> Row:
    """Claims and completions in batches, against the same with batches of one."""
    mine, theirs = Fresh(), Fresh()
    client = semel.open(semel.MemoryStore(records_max=10**7), consumer="b")

    def claims(fresh: Fresh, batch_size: int) -> None:
        for batch in fresh.batches(batch_size):
            client.complete_many(client.claim_many(batch))  # type: ignore[arg-type]

    return compare(
        "memory",
        f"claim + complete of {size}",
        Job(lambda: claims(mine, size), COUNT, mine),
        "of 1",
        Job(lambda: claims(theirs, 1), COUNT, theirs),
    )
