"""Rules that every store shares for items that are not about one record: pages, counts, windows and errors."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from semel.core.commands import Count, Item, Page, Scan
from semel.errors import PolicyInvalid, RecordCorrupt
from semel.types import Record, Stats

__all__ = ["StatsCounter", "build_page", "cursor_refused", "item_unknown", "lag_s", "window_in_force"]

T = TypeVar("T")


def build_page(
    found: Sequence[T], item: Scan, read: Callable[[T], Record | None], cursor_of: Callable[[T], str]
) -> Page:
    """Build the page of a scan. `found` has one row more than the page if there are more rows; that row is left out."""
    rows = found[: item.limit]
    records: list[Record] = []
    for row in rows:
        try:
            record = read(row)
        except RecordCorrupt:
            if item.orphaned:
                continue  # a record that cannot be decoded must not keep the others from being taken over
            raise
        if record is not None:
            records.append(record)
    return Page(records, cursor_of(rows[-1]) if len(found) > item.limit else None)


def cursor_refused(cursor: str | None) -> PolicyInvalid:
    """Build the error for a cursor that cannot be decoded."""
    return PolicyInvalid(f"{cursor!r} is not a cursor of this store; pass the cursor of the previous page")


def item_unknown(item: Item) -> TypeError:
    """Build the error for an item of an unknown type."""
    return TypeError(f"{type(item).__name__} is not an item that a store knows")


def window_in_force(
    windows: Collection[tuple[str, str, str]], tenant: str, consumer: str, event_type: str
) -> tuple[str, str, str]:
    """Return the name of the window of a record: that of its event type if there is one, else that of its consumer."""
    own = (tenant, consumer, event_type)
    return own if own in windows else (tenant, consumer, "")


def lag_s(now_us: int, oldest_us: int | None) -> float:
    """Return how long ago the oldest expired record expired, in seconds; 0 if there is none."""
    return 0.0 if oldest_us is None else (now_us - oldest_us) / 1e6


class StatsCounter:
    """Counts the records and marks of a store that the item covers."""

    def __init__(self, item: Count, now_us: int) -> None:
        self._item = item
        self._now_us = self._oldest_us = now_us
        self._states: dict[str, int] = {}
        self._consumers: dict[str, int] = {}
        self._marks = self._expired = 0

    def add_records(self, tenant: str, consumer: str, state: str, number: int = 1) -> None:
        """Count live records of one state."""
        if self._item.covers(tenant, consumer):
            self._states[state] = self._states.get(state, 0) + number
            self._consumers[consumer] = self._consumers.get(consumer, 0) + number

    def add_marks(self, tenant: str, consumer: str, number: int) -> None:
        """Count live marks."""
        if number and self._item.covers(tenant, consumer):
            self._marks += number
            self._consumers[consumer] = self._consumers.get(consumer, 0) + number

    def add_expired(self, number: int, oldest_us: int) -> None:
        """Count expired records that are still stored."""
        self._expired += number
        self._oldest_us = min(self._oldest_us, oldest_us)

    def stats(self, *, purge_lag_s: float = 0.0, **others: Any) -> Stats:
        """Return the totals. `purge_lag_s`: the lag of something else; the longer one is reported."""
        return Stats(
            now_us=self._now_us,
            states=self._states,
            consumers=self._consumers,
            marks=self._marks,
            expired=self._expired,
            purge_lag_s=max(lag_s(self._now_us, self._oldest_us), purge_lag_s),
            **others,
        )
