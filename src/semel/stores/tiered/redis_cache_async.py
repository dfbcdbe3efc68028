"""A cache in Redis or Valkey that all processes share. It uses the connections of the Redis store."""

from collections.abc import Sequence
from typing import Any

from semel.clock import Clock
from semel.runtime.urls import option_texts
from semel.stores.redis import AsyncRedisStore
from semel.stores.tiered.protocols import Copy, CopyWrite, Counts, Stamp
from semel.stores.tiered.redis_calls import CacheCalls

# sync: from semel.stores.tiered.redis_cache_async import AsyncRedisCache

__all__ = ["AsyncRedisCache"]

ANSWER_S, CONNECT_S = 0.5, 0.5
"""How long to wait for a cache: it saves a round trip to the truth, so it is not worth waiting much longer than one."""


class AsyncRedisCache:
    """A cache in a server, a cluster or behind sentinels; options as for the store, in the URL."""

    shared: bool = True

    def __init__(self, url: str, *, cache_window_us: int, clock: Clock | None = None) -> None:
        # sync: self._made_with = (url, cache_window_us, clock)
        self._store = AsyncRedisStore(url, clock=clock, **_options(url))
        self._talk = CacheCalls(self._store.core, cache_window_us)
        self.name: str = self._store.name

    # sync: def twin(self) -> AsyncRedisCache:
    # sync:     """Return the same cache for an event loop, not yet connected."""
    # sync:     url, cache_window_us, clock = self._made_with
    # sync:     return AsyncRedisCache(url, cache_window_us=cache_window_us, clock=clock)
    # sync:
    async def aopen(self) -> None:
        """Connect; idempotent."""
        await self._store.aopen()

    async def aclose(self) -> None:
        """Close all connections; idempotent."""
        await self._store.aclose()

    async def look(self, digests: Sequence[bytes], counts: Counts) -> list[Copy | None]:
        """Return the valid copies, in one round trip."""
        return await self._store.run(self._talk.look(digests, counts))  # type: ignore[no-any-return]

    def stamp(self, digest: bytes) -> Stamp | None:
        """Return the last known state of the cache."""
        return self._talk.stamp(digest)

    async def put(self, puts: Sequence[CopyWrite], counts: Counts) -> int:
        """Write the copies that are still valid."""
        return await self._store.run(self._talk.put(puts, counts))  # type: ignore[no-any-return]

    async def invalidate(self, digests: Sequence[tuple[bytes, int]]) -> None:
        """Drop these copies, and refuse pending ones."""
        await self._store.run(self._talk.invalidate(digests))

    async def clear(self) -> None:
        """Drop all copies."""
        await self._store.run(self._talk.clear())

    async def read_counts(self) -> dict[str, int]:
        """Return the counts of all processes."""
        return await self._store.run(self._talk.read_counts())  # type: ignore[no-any-return]


def _options(url: str) -> dict[str, Any]:
    """Return the defaults for options that the URL does not set. A cache may evict: that only costs speed."""
    given = option_texts(url)
    options = {"answer_s": ANSWER_S, "connect_s": CONNECT_S, "allow_eviction": True}
    return {name: value for name, value in options.items() if name not in given}
