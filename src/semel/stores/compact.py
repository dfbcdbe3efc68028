"""Marks in memory, packed: about 24 bytes each where text in a set takes 130, at a fraction of its speed.

A mark is 16 bytes of digest and 6 of expiry, in one of many short strings of bytes. Which one, the digest says;
the search in it is the interpreter's own. Strings are split one at a time as marks are added, so that no
call pays for all of them, and a hand goes round that takes out what is over.
"""

from collections.abc import Callable, Sequence
from threading import Lock

from semel.core.commands import Forget, Lookup
from semel.core.looks import mark_record
from semel.digests import digests_of
from semel.errors import StoreFull
from semel.keys.limits import check
from semel.stores.marks import Marker, Steady
from semel.types import Absent, Forgotten, Record

__all__ = ["CompactMarks"]

DIGEST = 16
ENTRY = DIGEST + 6
"""Microseconds since this table was made fit into six bytes for nine years."""
FULL_BYTES = 32 * ENTRY
"""How much a string holds on average: longer ones take longer to search, shorter ones cost more room for each mark."""
NEVER = b"\xff" * (ENTRY - DIGEST)
SWEEP_EVERY = 16
"""Added marks for each string that is looked through: what is over stays for half a lap at most."""


class CompactMarks:
    """The packed marks of one consumer; the same verbs as `Marks`. A linear hash table of strings of bytes."""

    def __init__(self, steady: Steady, tenant: str, consumer: str) -> None:
        self._steady = steady
        self._epoch = steady.now()
        self._scope = (tenant, consumer)
        self._buckets: list[bytes] = [b""]
        self._mask = 0
        """Of the digests' bits, those that chose a bucket before the present lap of splitting."""
        self._split = 0
        """The next bucket to be split; those before it use one bit more."""
        self._hand = 0
        self._until_sweep = SWEEP_EVERY
        self._soonest = NEVER
        """Nothing was ever added that is over before this: until then there is nothing to sweep."""
        self._count = 0
        self.after_fork()

    def after_fork(self) -> None:
        """Another thread of the parent may have held the lock."""
        self._lock = Lock()

    def __len__(self) -> int:
        return self._count

    def add(self, keys: Sequence[str], window_us: int) -> list[bool]:
        """Mark the keys; says for each whether it was the first, a later copy is not."""
        digests = digests_of(*self._scope, keys)
        with self._lock:
            now_us = self._now_us()
            now, expiry = _packed(now_us), _packed(now_us + window_us)
            before, buckets, mask, split = self._count, self._buckets, self._mask, self._split
            number_of, firsts = int.from_bytes, list[bool]()
            for digest in digests:  # as `_place` and `_find` do, without the calls
                number = number_of(digest[:4], "little")
                at = number & mask
                if at < split:
                    at = number & (2 * mask + 1)
                bucket = buckets[at]
                if digest in bucket and (found := _find(bucket, digest)) >= 0:
                    firsts.append(bucket[found + DIGEST : found + ENTRY] <= now)
                    if firsts[-1]:
                        self._replace(at, found, digest + expiry)
                else:
                    buckets[at] = bucket + digest + expiry
                    self._count += 1
                    firsts.append(True)
            self._tidy(self._count - before, now, expiry)
            return firsts

    def marker(
        self,
        window_us: Callable[[], int],
        room: Callable[[], int],
        full: Callable[[], StoreFull],
        of_type: Callable[[str, str], bool] | None = None,
    ) -> Marker:
        """A function that marks one key; `of_type` marks one whose event type was named."""

        def mark(key: str, *, event_type: str = "", meta: object = None) -> bool:  # noqa: ARG001 - for hooks
            if event_type and of_type is not None:
                return of_type(key, event_type)
            if room() <= 0 and not self.knows(check(key)):
                raise full()
            return self.add((check(key),), window_us())[0]

        return mark

    def knows(self, key: str) -> bool:
        """Whether the key is marked and its window runs."""
        with self._lock:
            return self._expiry(self._digest(key)) is not None

    def make_room(self) -> None:
        """Take out what is over."""
        self.purge()

    def purge(self) -> int:
        """Take out all that is over; returns how many that were."""
        with self._lock:
            before, now = self._count, _packed(self._now_us())
            for at in range(len(self._buckets)):
                self._sweep(at, now)
            return before - self._count

    def expired(self) -> int:
        """How many are over and still held."""
        with self._lock:
            now = _packed(self._now_us())
            return sum(entry[DIGEST:] <= now for bucket in self._buckets for entry in _entries(bucket))

    def apply(self, item: Lookup | Forget, now_us: int) -> Record | Absent | Forgotten:
        """Answer for a single mark: it is a done record without owner or value."""
        with self._lock:
            digest = self._digest(item.id[2])
            expiry = self._expiry(digest)
            if expiry is None:
                return Absent()
            if isinstance(item, Forget):
                at = self._place(digest)
                found = _find(self._buckets[at], digest)
                self._replace(at, found, b"")
                self._count -= 1
                return Forgotten(now_us)
            moment = self._epoch + int.from_bytes(expiry, "big") * 1000
            return mark_record(item.id, self._steady.date_us(moment))

    # --- under the lock ---

    def _now_us(self) -> int:
        return (self._steady.now() - self._epoch) // 1000

    def _digest(self, key: str) -> bytes:
        return digests_of(*self._scope, (key,))[0]

    def _place(self, digest: bytes) -> int:
        """The bucket that a digest belongs to."""
        number = int.from_bytes(digest[:4], "little")
        at = number & self._mask
        return at if at >= self._split else number & (2 * self._mask + 1)

    def _expiry(self, digest: bytes) -> bytes | None:
        """The expiry of a mark whose window runs."""
        bucket = self._buckets[self._place(digest)]
        found = _find(bucket, digest)
        expiry = bucket[found + DIGEST : found + ENTRY]
        return expiry if found >= 0 and expiry > _packed(self._now_us()) else None

    def _tidy(self, added: int, now: bytes, expiry: bytes) -> None:
        """After marks were added: sweep as many strings as are due for it, and split where they grow too long."""
        self._soonest = min(self._soonest, expiry)
        self._until_sweep -= added
        while self._until_sweep <= 0:
            self._until_sweep += SWEEP_EVERY
            if self._soonest <= now:
                self._sweep(self._hand, now)
                self._hand = (self._hand + 1) % len(self._buckets)
        while self._count * ENTRY > FULL_BYTES * len(self._buckets):
            self._grow()

    def _replace(self, at: int, found: int, entry: bytes) -> None:
        bucket = self._buckets[at]
        self._buckets[at] = bucket[:found] + entry + bucket[found + ENTRY :]

    def _sweep(self, at: int, now: bytes) -> None:
        """Take what is over out of one bucket."""
        bucket = self._buckets[at]
        kept = [entry for entry in _entries(bucket) if entry[DIGEST:] > now]
        over = len(bucket) // ENTRY - len(kept)
        if over:
            self._buckets[at] = b"".join(kept)
            self._count -= over

    def _grow(self) -> None:
        """Split the next bucket in two, by one bit more of the digests."""
        bit = self._mask + 1
        stays: list[bytes] = []
        goes: list[bytes] = []
        for entry in _entries(self._buckets[self._split]):
            (goes if int.from_bytes(entry[:4], "little") & bit else stays).append(entry)
        self._buckets[self._split] = b"".join(stays)
        self._buckets.append(b"".join(goes))
        self._split += 1
        if self._split == bit:
            self._mask, self._split = 2 * self._mask + 1, 0


def _packed(time_us: int) -> bytes:
    """Big end first: such bytes compare as their numbers do."""
    return time_us.to_bytes(ENTRY - DIGEST, "big")


def _entries(bucket: bytes) -> list[bytes]:
    return [bucket[at : at + ENTRY] for at in range(0, len(bucket), ENTRY)]


def _find(bucket: bytes, digest: bytes) -> int:
    """Where the entry of a digest starts; -1: there is none. What straddles two entries is no digest."""
    found = bucket.find(digest)
    while found >= 0 and found % ENTRY:
        found = bucket.find(digest, found + 1)
    return found
