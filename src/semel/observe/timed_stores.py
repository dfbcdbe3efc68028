"""Report the round trips of a store to hooks."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from semel.core.commands import Answer, Count, Item, Purge, Purged
from semel.core.protocols import AsyncStore, Store
from semel.errors import StoreUnavailable
from semel.observe import events
from semel.observe.events import Hooks
from semel.types import Completed, Stats, Unavailable

__all__ = ["TimedAsyncStore", "TimedStore", "instrument_store"]


class _Timed:
    """Wraps a store and reports its round trips; everything else is passed on."""

    def __init__(self, store: Any, hooks: Hooks) -> None:
        self._store = store
        self._hooks = hooks
        self._stores_lost: int = getattr(store, "stores_lost", 0)

    @property
    def name(self) -> str:
        name: str = self._store.name
        return name

    @property
    def capabilities(self) -> Any:
        return self._store.capabilities

    def watch(self, listener: Any, /) -> Callable[[], None]:
        stop: Callable[[], None] = self._store.watch(listener)
        return stop

    def _note_sent(self, items: Sequence[Item], answers: Sequence[Answer], began: float) -> None:
        hooks = self._hooks
        op = _op(items)
        hooks(events.StoreSent(op, len(items), time.perf_counter() - began))
        failed: BaseException | None = None
        for item, answer in zip(items, answers, strict=True):
            kind = type(answer)
            if kind is Completed:
                if answer.recreated:
                    hooks(events.StoreLost())
            elif kind is Unavailable:
                failed = failed or answer.error
            elif kind is Purged and not (isinstance(item, Purge) and item.dry_run):
                hooks(events.PurgedEvent(answer.count, answer.lag_s, answer.partitions))
            elif kind is Stats and isinstance(item, Count) and item.tenant is None:
                hooks(events.Counted(answer))
        if failed is not None:
            hooks(events.StoreFailed(op, failed))
        lost = getattr(self._store, "stores_lost", 0)
        if lost > self._stores_lost:
            self._stores_lost = lost
            hooks(events.StoreLost())


def _op(items: Sequence[Item]) -> str:
    kinds = {type(items[0])} if len(items) == 1 else {type(item) for item in items}
    return kinds.pop().__struct_config__.tag if len(kinds) == 1 else "mixed"  # type: ignore[return-value]


class TimedStore(_Timed):
    """A store that blocks."""

    def open(self) -> None:
        """Connect."""
        self._store.open()

    def close(self) -> None:
        """Close."""
        self._store.close()

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Execute the items."""
        began = time.perf_counter()
        try:
            answers: list[Answer] = self._store.send(items)
        except StoreUnavailable as error:
            self._hooks(events.StoreFailed(_op(items), error))
            raise
        self._note_sent(items, answers, began)
        return answers


class TimedAsyncStore(_Timed):
    """A store for an event loop."""

    async def aopen(self) -> None:
        """Connect."""
        await self._store.aopen()

    async def aclose(self) -> None:
        """Close."""
        await self._store.aclose()

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Execute the items."""
        began = time.perf_counter()
        try:
            answers: list[Answer] = await self._store.asend(items)
        except StoreUnavailable as error:
            self._hooks(events.StoreFailed(_op(items), error))
            raise
        self._note_sent(items, answers, began)
        return answers


def instrument_store(store: Store | AsyncStore, hooks: Hooks) -> Store | AsyncStore:
    """Return the store, wrapped to report its round trips."""
    return TimedStore(store, hooks) if isinstance(store, Store) else TimedAsyncStore(store, hooks)
