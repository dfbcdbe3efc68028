"""A cache in front of a truth, for threads and for event loops. What is asked of whom is in `tier`."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import Any
from urllib.parse import urlencode

from msgspec.structs import replace

from semel.core.commands import Answer, Item
from semel.core.protocols import AsyncStore, Capabilities, HasAsyncTwin, Listener, Store
from semel.errors import PolicyInvalid, StoreClosed, StoreError, StoreUnavailable
from semel.runtime.generators import adrive, drive
from semel.runtime.process import restart_after_fork
from semel.stores.tiered.memory_cache import AsyncMemoryCache, MemoryCache
from semel.stores.tiered.protocols import AsyncCache, Breaker, Cache, Filter
from semel.stores.tiered.rules import AskStore, Bury, Clear, Look, ReadCounts, Step, Tier, Write
from semel.windows import exact_text

__all__ = ["AsyncTieredStore", "TieredStore", "tiers_url"]


def tiers_url(parts: Mapping[str, Any]) -> str:
    """The URL of a tiered store. Its parts are URLs themselves."""
    return "tiered:?" + urlencode(parts, safe=":/@,[]?=")


class _TieredBase:
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

    def _asked(self, step: Step, send: Callable[[Sequence[Item]], Any]) -> Any:
        """Ask whom the step is for; what comes back is awaited where the stores are for event loops."""
        match step:
            case Look(digests, counts):
                return self.cache.look(digests, counts)
            case AskStore(items):
                return send(items)
            case Write(puts, counts):
                return self.cache.put(puts, counts)
            case Bury(buried):
                return self.cache.bury(buried)
            case Clear():
                return self.cache.clear()
            case ReadCounts():
                return self.cache.counted()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"{self.name} is closed; open() it again to use it")

    def after_fork(self) -> None:
        """What the parent has under way is not the child's."""
        self._tier.after_fork()


def ends(step: Step, error: StoreError) -> bool:
    """Whether no rule has an answer to it: the truth refuses, and is not merely out of reach."""
    return isinstance(step, AskStore) and not isinstance(error, StoreUnavailable)


class TieredStore(_TieredBase):
    """A short, fast window in front of a long, durable one. Its name is its URL.

    What is recent and done is answered by the cache, everything else by the truth; a cache that is lost, slow or gone
    costs speed alone. `close` closes all that is behind it.
    """

    truth: Store
    cache: Cache

    def __init__(
        self,
        cache: Cache,
        truth: Store,
        *,
        cache_window_us: int,
        filter: Filter | None = None,  # noqa: A002
        affine: bool = False,
    ) -> None:
        super().__init__(cache, truth, cache_window_us, filter, affine=affine)

    def open(self) -> None:
        """Connect to both; idempotent. A cache out of reach is left alone for a while, one that refuses is raised."""
        self._closed = False
        try:
            self.truth.open()
            if self.filter is not None:
                self.filter.open()
            self._open_cache()
        except BaseException:
            self.close()
            raise

    def _open_cache(self) -> None:
        try:
            self.cache.open()
        except StoreUnavailable as error:
            self._tier.missed(error)

    def close(self) -> None:
        """Let go of all of them, whatever one of them says; idempotent."""
        first, self._closed = not self._closed, True
        with ExitStack() as stack:
            stack.callback(self.truth.close)
            if self.filter is not None:
                stack.callback(self.filter.close)
            stack.callback(self.cache.close)
            if first:
                drive(self._tier.parting(), self._perform)

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Carry out the items: one round trip to the cache, one to the truth for what is left, one for the copies."""
        self._check_open()
        return drive(self._tier.carry_out(items), self._perform)

    def _perform(self, step: Step) -> Any:
        try:
            return self._asked(step, self.truth.send)
        except StoreError as error:
            if ends(step, error):
                raise
            return error


class TwofoldTieredStore(TieredStore):
    """The same, where the truth has a native async twin."""

    def twin(self) -> "AsyncTieredStore":
        """The same store for an event loop, not yet connected. A filter is shared with it."""
        assert isinstance(self.truth, HasAsyncTwin)
        if self.filter is not None and not self.filter.instant:
            raise PolicyInvalid(
                "this filter waits for a server, and an event loop must not; use semel.stores.bloom.Bloom"
            )
        return AsyncTieredStore(
            async_cache(self.cache),
            self.truth.twin(),
            cache_window_us=self.cache_window_us,
            filter=self.filter,
            affine=self.affine,
        )


def async_cache(cache: Cache) -> AsyncCache:
    """The cache for an event loop."""
    if isinstance(cache, MemoryCache):
        return AsyncMemoryCache(cache)
    twin: AsyncCache = cache.twin()  # type: ignore[attr-defined]
    return twin


class AsyncTieredStore(_TieredBase):
    """The same store as `TieredStore`, for event loops: native, without a thread."""

    truth: AsyncStore
    cache: AsyncCache

    def __init__(
        self,
        cache: AsyncCache,
        truth: AsyncStore,
        *,
        cache_window_us: int,
        filter: Filter | None = None,  # noqa: A002
        affine: bool = False,
    ) -> None:
        super().__init__(cache, truth, cache_window_us, filter, affine=affine)

    async def aopen(self) -> None:
        """Connect to both; idempotent. A cache out of reach is left alone for a while, one that refuses is raised."""
        self._closed = False
        try:
            await self.truth.aopen()
            if self.filter is not None:
                self.filter.open()
            await self._open_cache()
        except BaseException:
            await self.aclose()
            raise

    async def _open_cache(self) -> None:
        try:
            await self.cache.aopen()
        except StoreUnavailable as error:
            self._tier.missed(error)

    async def aclose(self) -> None:
        """Let go of all of them, whatever one of them says; idempotent."""
        first, self._closed = not self._closed, True
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.truth.aclose)
            if self.filter is not None:
                stack.callback(self.filter.close)
            stack.push_async_callback(self.cache.aclose)
            if first:
                await adrive(self._tier.parting(), self._perform)

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Carry out the items: one round trip to the cache, one to the truth for what is left, one for the copies."""
        self._check_open()
        return await adrive(self._tier.carry_out(items), self._perform)

    async def _perform(self, step: Step) -> Any:
        try:
            return await self._asked(step, self.truth.asend)
        except StoreError as error:
            if ends(step, error):
                raise
            return error
