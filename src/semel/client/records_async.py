"""Look at, forget, decide and clean up records; read and change windows."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Literal, TypeAlias

from semel.client.items import ItemBuilder
from semel.client.record_items import Oblivion, RecordItems, Resolution
from semel.core.commands import (
    Count,
    Forget,
    Item,
    Lookup,
    Page,
    Purge,
    Purged,
    ReadSettings,
    answer_or_raise,
)
from semel.core.protocols import AnyStore
from semel.runtime import audit
from semel.runtime.generators import adrive
from semel.types import Absent, Record, State, Stats
from semel.windows import Duration

__all__ = ["AsyncRecords", "AsyncWindows"]

PAGE_MAX = 500
PURGE_BATCH = 5000

Ask: TypeAlias = Callable[[Item], Awaitable[Any]]


class AsyncRecords:
    """The records of one consumer (`stats` and `purge`: of the whole store). One round trip per call."""

    def __init__(self, plan: ItemBuilder, ask: Ask, *, audits: bool = False) -> None:
        self._plan = plan
        self._items = RecordItems(plan)
        self._ask = ask
        self._audits = audits
        """Whether the store writes the audit itself."""

    async def lookup(self, key: str) -> Record | None:
        """Return the record in its current state, without any effect on it; `None` if there is none."""
        record = answer_or_raise(await self._ask(Lookup(self._plan.id(key))))
        return None if isinstance(record, Absent) else record

    async def list(
        self,
        *,
        state: State | None = None,
        prefix: str = "",
        seen_before: int | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[Record]:
        """Iterate over the consumer's records in a stable order; fetches one page at a time."""
        cursor: str | None = None
        left = limit
        while left is None or left > 0:
            size = PAGE_MAX if left is None else min(left, PAGE_MAX)
            page: Page = answer_or_raise(
                await self._ask(self._items.scan(state, prefix, seen_before, cursor, size))
            )
            for record in page.records:  # sync: yield from page.records
                yield record  # sync: drop
            if page.cursor is None:
                return
            cursor, left = page.cursor, None if left is None else left - len(page.records)

    async def orphans(self, *, limit: int = 100) -> Sequence[Record]:
        """Return journaled claims whose owner is gone, or that were released: those that `sweep` would run."""
        return answer_or_raise(await self._ask(self._plan.orphans(limit))).records  # type: ignore[no-any-return]

    async def forget(
        self,
        key: str,
        *,
        force: bool = False,
        fence: int | None = None,
        state: State | None = None,
        actor: str | None = None,
    ) -> Oblivion:
        """Make the key new again. `Busy` while a claim runs, unless forced: its late completion is then `Lost`.

        With `fence` or `state` only a record with these is forgotten; `Lost` if it has changed since. Forcing it on a
        running claim writes an audit entry with the `actor` (this process's user by default).
        """
        record = await self.lookup(key) if force else None
        if record is not None and audit.is_forced(record):
            await self._write_trail(record, actor)
            audit.warn(record, actor)
        return answer_or_raise(await self._ask(Forget(self._plan.id(key), force, fence, state)))  # type: ignore[no-any-return]

    async def _write_trail(self, record: Record, actor: str | None) -> None:
        if not self._audits:
            await adrive(audit.trail(record, actor), self._ask)

    async def resolve(
        self, key: str, *, fence: int, to: Literal["done", "absent"], value: Any = None
    ) -> Resolution:
        """Decide an unknown record: it happened, or it did not. `Lost` if its fence is not the one you saw."""
        record = await self.lookup(key)
        settings = answer_or_raise(await self._ask(ReadSettings()))
        window = self._plan.window_us(settings.windows, "" if record is None else record.event_type)
        return answer_or_raise(await self._ask(self._items.resolve(key, fence, to, value, window)))  # type: ignore[no-any-return]

    async def purge(self, *, limit: int = PURGE_BATCH, dry_run: bool = False) -> Purged:
        """Remove up to `limit` expired records. It never changes an answer."""
        return answer_or_raise(await self._ask(Purge(limit, dry_run)))  # type: ignore[no-any-return]

    async def stats(self) -> Stats:
        """Return the counts of this tenant's records in the store."""
        return answer_or_raise(await self._ask(Count(self._plan.tenant or None)))  # type: ignore[no-any-return]


class AsyncWindows:
    """The windows stored for one consumer: data that can be changed while everything runs."""

    def __init__(
        self,
        plan: ItemBuilder,
        store: AnyStore,
        ask: Ask,
        changed: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._store = store
        self._items = RecordItems(plan)
        self._ask = ask
        self._changed = changed

    async def get(self, event_type: str = "") -> int:
        """Return the window in force for an event type, in microseconds; 0: off."""
        return self._plan.window_us(answer_or_raise(await self._ask(ReadSettings())).windows, event_type)

    async def set(self, window: Duration | None, *, event_type: str = "", existing: bool = False) -> None:
        """Store a window (`"24h"`, a preset, `"forever"`, `"off"`; `None` removes it). In force everywhere within 10 s.

        Existing records keep their expiry, unless `existing`. Raises `PolicyInvalid` if the store cannot keep it.
        """
        item = self._items.window(event_type, window, existing=existing)
        self._store.capabilities.check_window(item.window_us or 0, self._store.name)
        answer_or_raise(await self._ask(item))
        self._changed()

    async def list(self) -> dict[str, int]:
        """Return the stored windows by event type (empty: all types), in microseconds."""
        return self._items.windows(await self._ask(ReadSettings()))
