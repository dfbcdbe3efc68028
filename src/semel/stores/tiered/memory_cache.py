"""A cache in this process's memory: the fastest one, but other processes cannot make it forget a key."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock

from semel.errors import PolicyInvalid
from semel.runtime.process import restart_after_fork
from semel.stores.tiered.protocols import Copy, CopyWrite, Counts, Stamp

__all__ = ["AsyncMemoryCache", "MemoryCache"]

COPIES_MAX = 100_000
BYTES_MAX = 64 * 1024 * 1024
"""The most bytes of all copies' values together."""


def _steady_us() -> int:
    return time.monotonic_ns() // 1000


class MemoryCache:
    """Keeps the most recently used copies. Its name: `memory:`."""

    name: str = "memory:"
    shared: bool = False

    def __init__(
        self,
        *,
        copies_max: int = COPIES_MAX,
        bytes_max: int = BYTES_MAX,
        now_us: Callable[[], int] = _steady_us,
    ) -> None:
        if copies_max < 1 or bytes_max < 1:
            raise PolicyInvalid("copies_max and bytes_max must be 1 or more")
        self._copies_max = copies_max
        self._bytes_max = bytes_max
        self._now_us = now_us
        self._copies: OrderedDict[bytes, tuple[int, Copy]] = OrderedDict()
        self._bytes = 0
        self._epoch = 0
        self._counts: dict[str, int] = {}
        self.after_fork()
        restart_after_fork(self)

    def after_fork(self) -> None:
        """Replace the lock, which another thread of the parent may have held, and drop all copies.

        The child does not learn which keys the parent forgets.
        """
        self._lock = Lock()
        self._drop_all()

    def open(self) -> None:
        """Nothing to connect."""

    def close(self) -> None:
        """Nothing to close: the copies stay, for a store opened on the same object."""

    def look(self, digests: Sequence[bytes], counts: Counts) -> list[Copy | None]:
        """Return the valid copies."""
        with self._lock:
            self._count(counts)
            now = self._now_us()
            return [self._live_copy(digest, now) for digest in digests]

    def stamp(self, digest: bytes) -> Stamp | None:  # noqa: ARG002 - all keys share one stamp
        """Return the state of the cache."""
        with self._lock:
            return Stamp(b"%d" % self._epoch, self._now_us())

    def put(self, puts: Sequence[CopyWrite], counts: Counts) -> int:
        """Write the copies that are still valid."""
        written = 0
        with self._lock:
            self._count(counts)
            now, epoch = self._now_us(), b"%d" % self._epoch
            for put in puts:
                over_at = put.stamp.at_us + put.rest_us
                if put.stamp.epoch != epoch or over_at <= now:
                    continue
                held = self._copies.get(put.digest)
                if held is not None and held[0] > now and held[1].fence > put.copy.fence:
                    continue
                self._drop(put.digest)
                self._copies[put.digest] = (over_at, put.copy)
                self._bytes += _size(put.copy)
                written += 1
            while len(self._copies) > self._copies_max or self._bytes > self._bytes_max:
                self._drop(next(iter(self._copies)))
        return written

    def invalidate(self, digests: Sequence[tuple[bytes, int]]) -> None:
        """Drop these copies. Pending copies have an older epoch, so no tombstone is needed here."""
        with self._lock:
            self._epoch += 1
            for digest, _fence in digests:
                self._drop(digest)

    def clear(self) -> None:
        """Drop all copies, and refuse all pending ones."""
        with self._lock:
            self._drop_all()

    def read_counts(self) -> dict[str, int]:
        """Return all counts of this process."""
        with self._lock:
            return dict(self._counts)

    def _live_copy(self, digest: bytes, now: int) -> Copy | None:
        held = self._copies.get(digest)
        if held is None:
            return None
        if held[0] <= now:
            self._drop(digest)
            return None
        self._copies.move_to_end(digest)
        return held[1]

    def _drop(self, digest: bytes) -> None:
        held = self._copies.pop(digest, None)
        if held is not None:
            self._bytes -= _size(held[1])

    def _drop_all(self) -> None:
        self._epoch += 1
        self._copies.clear()
        self._bytes = 0

    def _count(self, counts: Counts) -> None:
        for name, number in counts.items():
            self._counts[name] = self._counts.get(name, 0) + number


def _size(copy: Copy) -> int:
    return 0 if copy.value is None else len(copy.value)


class AsyncMemoryCache:
    """The same cache for an event loop: it never waits."""

    def __init__(self, cache: MemoryCache) -> None:
        self._cache = cache
        self.name: str = cache.name
        self.shared: bool = cache.shared

    async def aopen(self) -> None:
        """Nothing to connect."""

    async def aclose(self) -> None:
        """Nothing to close."""

    async def look(self, digests: Sequence[bytes], counts: Counts) -> list[Copy | None]:
        """Return the valid copies."""
        return self._cache.look(digests, counts)

    def stamp(self, digest: bytes) -> Stamp | None:
        """Return the state of the cache."""
        return self._cache.stamp(digest)

    async def put(self, puts: Sequence[CopyWrite], counts: Counts) -> int:
        """Write the copies that are still valid."""
        return self._cache.put(puts, counts)

    async def invalidate(self, digests: Sequence[tuple[bytes, int]]) -> None:
        """Drop these copies."""
        self._cache.invalidate(digests)

    async def clear(self) -> None:
        """Drop all copies."""
        self._cache.clear()

    async def read_counts(self) -> dict[str, int]:
        """Return all counts of this process."""
        return self._cache.read_counts()
