"""The migrating store: two stores that are asked and written together. `rules` decides in which order."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from semel.core.commands import Answer, Item
from semel.core.protocols import AsyncStore
from semel.runtime.generators import adrive
from semel.stores.migrating.base import MigratingStoreBase
from semel.stores.migrating.sides import AskSide

__all__ = ["AsyncMigratingStore"]


class AsyncMigratingStore(MigratingStoreBase):
    """An old and a new store during a move from one to the other. Its name is its URL.

    An event runs only if neither store knows it, and its result is written to both. If one of them does not answer,
    nothing runs. `aclose` closes both.
    """

    old: AsyncStore
    new: AsyncStore

    def __init__(self, old: AsyncStore, new: AsyncStore) -> None:
        super().__init__(old, new)

    async def aopen(self) -> None:
        """Connect to both; idempotent."""
        self._closed = False
        try:
            await self.old.aopen()
            await self.new.aopen()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Close both, even if one of them raises; idempotent."""
        self._closed = True
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.old.aclose)
            stack.push_async_callback(self.new.aclose)

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Carry out the items: one round trip to each store, and a third for a claim that the new store refuses."""
        self._check_open()
        return await adrive(self._pair.carry_out(items), self._perform)

    async def _perform(self, step: AskSide) -> Any:
        return await (self.old if step.side == "old" else self.new).asend(step.items)
