"""The tiered store: a cache in front of a truth. `rules` decides which of them answers."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from semel.core.commands import Answer, Item
from semel.core.protocols import AsyncStore
from semel.errors import StoreError, StoreUnavailable
from semel.runtime.generators import adrive
from semel.stores.tiered.base import TieredStoreBase, must_raise
from semel.stores.tiered.protocols import AsyncCache, Filter
from semel.stores.tiered.rules import Step

__all__ = ["AsyncTieredStore"]


class AsyncTieredStore(TieredStoreBase):
    """A fast cache with a short window in front of a durable store with a long one. Its name is its URL.

    The cache answers what was done recently, the truth everything else. A lost, slow or missing cache only costs
    speed. `aclose` closes the cache, the truth and the filter.
    """

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
        """Connect to both; idempotent. An unavailable cache is skipped for a while; a cache that refuses raises."""
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
            self._tier.note_cache_error(error)

    async def aclose(self) -> None:
        """Close the cache, the truth and the filter, even if one of them raises; idempotent."""
        first, self._closed = not self._closed, True
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.truth.aclose)
            if self.filter is not None:
                stack.callback(self.filter.close)
            stack.push_async_callback(self.cache.aclose)
            if first:
                await adrive(self._tier.flush_counts(), self._perform)

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Carry out the items: one round trip to the cache, one to the truth for the rest, one to write copies."""
        self._check_open()
        return await adrive(self._tier.carry_out(items), self._perform)

    async def _perform(self, step: Step) -> Any:
        try:
            return await self._dispatch(step, self.truth.asend)
        except StoreError as error:
            if must_raise(step, error):
                raise
            return error
