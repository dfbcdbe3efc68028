"""Marks in memory, packed into byte strings: a fifth of the memory of `MemoryMarks`, and slower."""

from collections.abc import Callable, Sequence
from threading import Lock

from semel.core.commands import Forget, Lookup
from semel.core.ids import digests_of
from semel.core.machine import mark_record
from semel.errors import StoreFull
from semel.keys.limits import check
from semel.stores.memory.marks import Marker, SteadyClock
from semel.types import Absent, Forgotten, Record

__all__ = ["CompactMarks"]

DIGEST = 16
ENTRY = DIGEST + 6
"""Six bytes hold the microseconds since this table was created for nine years."""
FULL_BYTES = 32 * ENTRY
"""Average size of a bucket: a longer one takes longer to search, a shorter one costs more memory for each mark."""
NEVER = b"\xff" * (ENTRY - DIGEST)
SWEEP_EVERY = 16
"""One bucket is swept for this many added marks: an expired mark stays for half a round at most."""


class CompactMarks:
    """The packed marks of one consumer, with the methods of `MemoryMarks`. A linear hash table of byte strings."""

    def __init__(self, steady: SteadyClock, tenant: str, consumer: str) -> None:
        self._steady = steady
        self._epoch = steady.now()
        self._scope = (tenant, consumer)
        self._buckets: list[bytes] = [b""]
        self._mask = 0
        """The bits of a digest that chose its bucket before the current round of splits."""
        self._split = 0
        """The next bucket to split; the buckets before it use one more bit."""
        self._hand = 0
        self._until_sweep = SWEEP_EVERY
        self._soonest = NEVER
        """The earliest expiry that was ever added: until then there is nothing to sweep."""
        self._count = 0
        self.after_fork()

    def after_fork(self) -> None:
        """Replace the lock: another thread of the parent may have held it."""
        self._lock = Lock()

    def __len__(self) -> int:
        return self._count

    def refresh(self, keys: Sequence[str], window_us: int) -> list[bool]:
        """As `add`, and the windows of known keys start again."""
        return self.add(keys, window_us, refresh=True)

    def add(self, keys: Sequence[str], window_us: int, *, refresh: bool = False) -> list[bool]:
        """Mark the keys. Returns for each whether it was new; a second copy within the batch is not."""
        digests = digests_of(*self._scope, keys)
        with self._lock:
            now_us = self._now_us()
            now, expiry = _pack(now_us), _pack(now_us + window_us)
            before, buckets, mask, split = self._count, self._buckets, self._mask, self._split
            number_of, firsts = int.from_bytes, list[bool]()
            for digest in digests:  # `_place` and `_find` inlined, to save the calls
                number = number_of(digest[:4], "little")
                at = number & mask
                if at < split:
                    at = number & (2 * mask + 1)
                bucket = buckets[at]
                if digest in bucket and (found := _find(bucket, digest)) >= 0:
                    held = bucket[found + DIGEST : found + ENTRY]
                    firsts.append(held <= now)
                    if firsts[-1] or (refresh and held < expiry):
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
        """Return a function that marks one key; `of_type` marks a key with an event type."""

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
        """Remove expired marks."""
        self.purge()

    def purge(self) -> int:
        """Remove all expired marks; returns their number."""
        with self._lock:
            before, now = self._count, _pack(self._now_us())
            for at in range(len(self._buckets)):
                self._sweep(at, now)
            return before - self._count

    def count_expired(self) -> int:
        """Return the number of expired marks that are still held."""
        with self._lock:
            now = _pack(self._now_us())
            return sum(entry[DIGEST:] <= now for bucket in self._buckets for entry in _entries(bucket))

    def apply(self, item: Lookup | Forget, now_us: int) -> Record | Absent | Forgotten:
        """Apply the item to one mark, which is answered as a done record without owner or value."""
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
        """Return the index of the bucket that a digest belongs to."""
        number = int.from_bytes(digest[:4], "little")
        at = number & self._mask
        return at if at >= self._split else number & (2 * self._mask + 1)

    def _expiry(self, digest: bytes) -> bytes | None:
        """Return the expiry of a mark whose window runs, else `None`."""
        bucket = self._buckets[self._place(digest)]
        found = _find(bucket, digest)
        expiry = bucket[found + DIGEST : found + ENTRY]
        return expiry if found >= 0 and expiry > _pack(self._now_us()) else None

    def _tidy(self, added: int, now: bytes, expiry: bytes) -> None:
        """After adding marks: sweep the buckets that are due, and split buckets while they are too long on average."""
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
        """Remove the expired marks of one bucket."""
        bucket = self._buckets[at]
        kept = [entry for entry in _entries(bucket) if entry[DIGEST:] > now]
        over = len(bucket) // ENTRY - len(kept)
        if over:
            self._buckets[at] = b"".join(kept)
            self._count -= over

    def _grow(self) -> None:
        """Split the next bucket in two, by one more bit of the digests."""
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


def _pack(time_us: int) -> bytes:
    """Encode big-endian: such bytes compare as their numbers do."""
    return time_us.to_bytes(ENTRY - DIGEST, "big")


def _entries(bucket: bytes) -> list[bytes]:
    return [bucket[at : at + ENTRY] for at in range(0, len(bucket), ENTRY)]


def _find(bucket: bytes, digest: bytes) -> int:
    """Return where the entry of a digest starts, or -1. A match that spans two entries does not count."""
    found = bucket.find(digest)
    while found >= 0 and found % ENTRY:
        found = bucket.find(digest, found + 1)
    return found
