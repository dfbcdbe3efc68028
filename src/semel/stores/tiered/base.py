"""Shared parts of the sync and async tiered store. `rules` decides which tier answers."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from msgspec.structs import replace

from semel.core.commands import Item
from semel.core.protocols import AsyncStore, Capabilities, Listener, Store
from semel.errors import PolicyInvalid, StoreClosed, StoreError, StoreUnavailable
from semel.runtime.process import restart_after_fork
from semel.stores.tiered.protocols import AsyncCache, Breaker, Cache, Filter
from semel.stores.tiered.rules import AskStore, Clear, Invalidate, ReadCopies, ReadCounts, Step, Tier, Write
from semel.windows import exact_text

__all__ = ["TieredStoreBase", "must_raise", "tiers_url"]


def tiers_url(parts: Mapping[str, Any]) -> str:
    """Return the URL of a tiered store. Its parts are URLs themselves."""
    return "tiered:?" + urlencode(parts, safe=":/@,[]?=")


class TieredStoreBase:
    """The cache, the truth, and the rules between them; for sync and async."""

    def __init__(
        self,
        cache: Cache | AsyncCache,
        truth: Store | AsyncStore,
        cache_window_us: int,
        filter: Filter | None,  # noqa: A002 - as users write it
        *,
        affine: bool,
    ) -> None:
        if not truth.capabilities.exact:
            raise PolicyInvalid(f"{truth.name} guesses, so it cannot be the truth; use an exact store")
        self.truth = truth
        self.cache = cache
        self.filter = filter
        self.affine = affine
        self.cache_window_us = cache_window_us
        self.name: str = tiers_url(
            {"cache": cache.name, "truth": truth.name, "cache_window": exact_text(cache_window_us)}
        )
        self.breaker: Breaker = Breaker(time.monotonic)
        self._tier = Tier(
            cache.stamp,
            cache_name=cache.name,
            cache_window_us=cache_window_us,
            breaker=self.breaker,
            filter=filter,
            affine=affine,
        )
        self._closed = False
        restart_after_fork(self)

    def __repr__(self) -> str:
        return f"<store {self.name}>"

    @property
    def capabilities(self) -> Capabilities:
        """The truth's capabilities, without the inbox: its marks never pass through this store."""
        return replace(self.truth.capabilities, transactional=False, instant=False)

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Notify `listener` of the truth's changes."""
        return self.truth.watch(listener)

    def _dispatch(self, step: Step, send: Callable[[Sequence[Item]], Any]) -> Any:
        """Send the step to the cache or the truth; the async store awaits the result."""
        match step:
            case ReadCopies(digests, counts):
                return self.cache.look(digests, counts)
            case AskStore(items):
                return send(items)
            case Write(puts, counts):
                return self.cache.put(puts, counts)
            case Invalidate(invalidated):
                return self.cache.invalidate(invalidated)
            case Clear():
                return self.cache.clear()
            case ReadCounts():
                return self.cache.read_counts()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"{self.name} is closed; open() it again to use it")

    def after_fork(self) -> None:
        """Drop the state of calls that are pending in the parent process."""
        self._tier.after_fork()


def must_raise(step: Step, error: StoreError) -> bool:
    """Whether the rules cannot handle the error: the truth refuses the call, and is not only unavailable."""
    return isinstance(step, AskStore) and not isinstance(error, StoreUnavailable)
