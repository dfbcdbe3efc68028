"""What both colours of a tiered store share. Which tier is asked what is in `rules`."""

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
from semel.stores.tiered.rules import AskStore, Clear, Invalidate, Look, ReadCounts, Step, Tier, Write
from semel.windows import exact_text

__all__ = ["TieredStoreBase", "ends", "tiers_url"]


def tiers_url(parts: Mapping[str, Any]) -> str:
    """The URL of a tiered store. Its parts are URLs themselves."""
    return "tiered:?" + urlencode(parts, safe=":/@,[]?=")


class TieredStoreBase:
    """What both colours have in common: the two stores behind, and the rules between them."""

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
            raise PolicyInvalid(f"{truth.name} guesses, so it cannot be the truth; put an exact store there")
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
        """The truth's own, but for the inbox, whose marks never come through here."""
        return replace(self.truth.capabilities, transactional=False, instant=False)

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """The truth tells of its changes."""
        return self.truth.watch(listener)

    def _ask(self, step: Step, send: Callable[[Sequence[Item]], Any]) -> Any:
        """Execute a step on the cache or the truth; the result is awaited if the stores are async."""
        match step:
            case Look(digests, counts):
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
        """What the parent has under way is not the child's."""
        self._tier.after_fork()


def ends(step: Step, error: StoreError) -> bool:
    """Whether no rule has an answer to it: the truth refuses, and is not merely out of reach."""
    return isinstance(step, AskStore) and not isinstance(error, StoreUnavailable)
