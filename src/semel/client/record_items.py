"""Build the items of `records` and `windows` of a client, and read the answers."""

from typing import Any, Literal, TypeAlias

from semel.client.items import ItemBuilder
from semel.codec import encode
from semel.core.commands import Resolve, Scan, SetWindow, StoreSettings, answer_or_raise
from semel.types import Absent, Busy, Completed, Forgotten, Lost, State, Unavailable
from semel.windows import Duration, window_us

__all__ = ["Oblivion", "RecordItems", "Resolution"]

Resolution: TypeAlias = Completed | Forgotten | Lost[Any]
Oblivion: TypeAlias = Forgotten | Absent | Busy | Lost[Any]


class RecordItems:
    """Builds the items for the records and windows of one consumer."""

    def __init__(self, plan: ItemBuilder) -> None:
        self._plan = plan

    def scan(
        self, state: State | None, prefix: str, seen_before: int | None, cursor: str | None, limit: int
    ) -> Scan:
        """Build the scan of one page of this consumer's records."""
        plan = self._plan
        return Scan(plan.tenant, plan.consumer, state, prefix, seen_before, cursor=cursor, limit=limit)

    def resolve(
        self, key: str, fence: int, to: Literal["done", "absent"], value: Any, window: int
    ) -> Resolve:
        """Build the decision on an unknown record."""
        return Resolve(self._plan.id(key), fence, to, encode(value) if to == "done" else None, window)

    def window(self, event_type: str, window: Duration | None, *, existing: bool) -> SetWindow:
        """Build the item that stores a window."""
        us = None if window is None else window_us(window)
        return SetWindow(self._plan.tenant, self._plan.consumer, event_type, us, existing)

    def windows(self, settings: StoreSettings | Unavailable) -> dict[str, int]:
        """Return this consumer's stored windows by event type."""
        scope = (self._plan.tenant, self._plan.consumer)
        stored = answer_or_raise(settings).windows
        return {event_type: us for (*owner, event_type), us in stored.items() if tuple(owner) == scope}
