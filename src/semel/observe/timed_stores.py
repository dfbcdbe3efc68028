"""Report the round trips of a store to hooks."""

import time
from collections.abc import Sequence

from semel.core.commands import Answer, Count, Item, Purge, Purged
from semel.core.protocols import AsyncStore, AsyncStoreWrapper, Store, StoreWrapper
from semel.errors import StoreUnavailable
from semel.observe import events
from semel.observe.events import Hooks
from semel.types import Completed, Stats, Unavailable

__all__ = ["TimedAsyncStore", "TimedStore", "instrument_store"]


class _RoundTrips:
    """Reports the round trips of a store."""

    def __init__(self, store: Store | AsyncStore, hooks: Hooks) -> None:
        self._store = store
        self._hooks = hooks
        self._stores_lost: int = getattr(store, "stores_lost", 0)

    def note_unavailable(self, items: Sequence[Item], error: StoreUnavailable) -> None:
        self._hooks(events.StoreFailed(_op(items), error))

    def note_sent(self, items: Sequence[Item], answers: Sequence[Answer], began: float) -> None:
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


class TimedStore(StoreWrapper):
    """A store that blocks."""

    def __init__(self, store: Store, hooks: Hooks) -> None:
        super().__init__(store)
        self._trips = _RoundTrips(store, hooks)

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Execute the items."""
        began = time.perf_counter()
        try:
            answers = self._store.send(items)
        except StoreUnavailable as error:
            self._trips.note_unavailable(items, error)
            raise
        self._trips.note_sent(items, answers, began)
        return answers


class TimedAsyncStore(AsyncStoreWrapper):
    """A store for an event loop."""

    def __init__(self, store: AsyncStore, hooks: Hooks) -> None:
        super().__init__(store)
        self._trips = _RoundTrips(store, hooks)

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Execute the items."""
        began = time.perf_counter()
        try:
            answers = await self._store.asend(items)
        except StoreUnavailable as error:
            self._trips.note_unavailable(items, error)
            raise
        self._trips.note_sent(items, answers, began)
        return answers


def instrument_store(store: Store | AsyncStore, hooks: Hooks) -> Store | AsyncStore:
    """Return the store, wrapped to report its round trips."""
    return TimedStore(store, hooks) if isinstance(store, Store) else TimedAsyncStore(store, hooks)
