"""A cache in front of a truth. Which of them is asked what is in `rules`."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from semel.core.commands import Answer, Item
from semel.core.protocols import AsyncStore
from semel.errors import StoreError, StoreUnavailable
from semel.runtime.generators import adrive
from semel.stores.tiered.base import TieredStoreBase, ends
from semel.stores.tiered.protocols import AsyncCache, Filter
from semel.stores.tiered.rules import Step

__all__ = ["AsyncTieredStore"]


class AsyncTieredStore(TieredStoreBase):
    """A short, fast window in front of a long, durable one. Its name is its URL.

    What is recent and done is answered by the cache, everything else by the truth; a cache that is lost, slow or gone
    costs speed alone. `aclose` closes all that is behind it.
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
            self._tier.note_cache_error(error)

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
            return await self._ask(step, self.truth.asend)
        except StoreError as error:
            if ends(step, error):
                raise
            return error
