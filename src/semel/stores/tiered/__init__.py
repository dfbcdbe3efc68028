"""A fast cache in front of a durable store: the cache answers recent duplicates, the truth answers the rest."""

from collections.abc import Mapping
from typing import Any

from semel.core.protocols import HasAsyncTwin, Store
from semel.errors import PolicyInvalid
from semel.runtime.urls import check_names, option_texts, read_options
from semel.stores.registry import store_for
from semel.stores.tiered.base import tiers_url
from semel.stores.tiered.memory_cache import AsyncMemoryCache, MemoryCache
from semel.stores.tiered.protocols import AsyncCache, Cache, Copy, CopyWrite, Filter, Fullness, Stamp
from semel.stores.tiered.store import TieredStore
from semel.stores.tiered.store_async import AsyncTieredStore
from semel.windows import Duration, duration_us

__all__ = [
    "AsyncCache",
    "AsyncTieredStore",
    "Cache",
    "Copy",
    "CopyWrite",
    "Filter",
    "Fullness",
    "MemoryCache",
    "Stamp",
    "TieredStore",
    "from_url",
    "tiered",
    "url_of",
]  # fmt: skip

CACHE_WINDOW_MIN_US, CACHE_WINDOW_MAX_US = 20_000, 90 * 86400 * 10**6
_OPTIONS = ("cache", "truth", "cache_window")


class TieredStoreWithTwin(TieredStore):
    """A tiered store whose truth has a native async twin."""

    def twin(self) -> "AsyncTieredStore":
        """Return the same store for an event loop, not yet connected. Both share the filter."""
        assert isinstance(self.truth, HasAsyncTwin)
        if self.filter is not None and not self.filter.instant:
            raise PolicyInvalid(
                "this filter waits for a server, and an event loop must not; use semel.stores.bloom.Bloom"
            )
        return AsyncTieredStore(
            _async_cache(self.cache),
            self.truth.twin(),
            cache_window_us=self.cache_window_us,
            filter=self.filter,
            affine=self.affine,
        )


def _async_cache(cache: Cache) -> AsyncCache:
    """Return the cache for an event loop."""
    if isinstance(cache, MemoryCache):
        return AsyncMemoryCache(cache)
    twin: AsyncCache = cache.twin()  # type: ignore[attr-defined]
    return twin


def tiered(
    *,
    cache: str | Cache,
    truth: str | Store,
    cache_window: Duration = "1h",
    filter: Filter | None = None,  # noqa: A002 - the name that users know
    affine: bool = False,
) -> TieredStore:
    """Return a store that answers recent duplicates from `cache` and everything else from `truth`. Does no I/O.

    `cache`: a Redis or Valkey URL, or `memory:`; a copy lives there no longer than `cache_window`, nor than its record.
    `filter`: a Bloom filter whose accuracy is measured. With `affine`, for keys that always come to this same
    instance, the cache is not asked for keys that the filter never saw. Neither option can turn a new key into a
    duplicate.
    """
    window_us = duration_us(cache_window)
    if not CACHE_WINDOW_MIN_US <= window_us <= CACHE_WINDOW_MAX_US:
        raise PolicyInvalid(f"cache_window is {cache_window!r}; use 20ms to 90d")
    if affine and filter is None:
        raise PolicyInvalid("affine has no effect without a filter; give filter= too")
    behind = store_for(truth) if isinstance(truth, str) else truth
    if not isinstance(behind, Store):
        raise PolicyInvalid(f"{behind.name} serves event loops only; give its blocking form as the truth")
    if isinstance(behind, TieredStore):
        raise PolicyInvalid("the truth must be one store, not a tiered store")
    front = _cache(cache, window_us) if isinstance(cache, str) else cache
    if not isinstance(front, Cache):
        raise PolicyInvalid(f"{front!r} is not a cache; give a redis: URL, or memory:")
    kind = TieredStoreWithTwin if isinstance(behind, HasAsyncTwin) else TieredStore
    return kind(front, behind, cache_window_us=window_us, filter=filter, affine=affine)


def _cache(url: str, window_us: int) -> Cache:
    scheme = url.partition(":")[0]
    if scheme == "memory":
        if url.partition("?")[0] != "memory:":
            raise PolicyInvalid(f"{url!r} is not a cache; a cache in memory has no name: write memory:")
        return MemoryCache(**read_options(url, {"copies_max": int, "bytes_max": int}))
    if scheme.startswith(("redis", "valkey")):
        from semel.stores.tiered.redis_cache import RedisCache

        return RedisCache(url, cache_window_us=window_us)
    raise PolicyInvalid(f"{scheme}: cannot be a cache; a cache is redis:, valkey: or memory:")


def from_url(url: str) -> TieredStore:
    """Return the store for `tiered:?cache=...&truth=...&cache_window=1h`; its parts are percent-encoded URLs."""
    given = option_texts(url)
    if url.partition("?")[0] != "tiered:" or not {"cache", "truth"} <= given.keys():
        raise PolicyInvalid("write a tiered store as tiered:?cache=redis://...&truth=postgresql://...")
    return tiered(**_check_options(given))


def url_of(given: Mapping[str, Any]) -> str:
    """Return the URL for a configuration table with `cache`, `truth` and `cache_window`."""
    known = _check_options(given)
    if not {"cache", "truth"} <= known.keys():
        raise PolicyInvalid("a tiered store needs a cache and a truth; both are URLs")
    return tiers_url(known)


def _check_options(given: Mapping[str, Any]) -> dict[str, Any]:
    check_names("tiered", given, _OPTIONS)
    return dict(given)
