"""Rules of the items that are not about one record, the same in every store: pages, counts, windows, refusals."""

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
    """The page of a scan from one row more than it may hold: the last one says only that there are more."""
    rows = found[: item.limit]
    records: list[Record] = []
    for row in rows:
        try:
            record = read(row)
        except RecordCorrupt:
            if item.orphaned:
                continue  # one that does not read must not keep the others from being taken over
            raise
        if record is not None:
            records.append(record)
    return Page(records, cursor_of(rows[-1]) if len(found) > item.limit else None)


def cursor_refused(cursor: str | None) -> PolicyInvalid:
    """The error for a cursor that does not read."""
    return PolicyInvalid(f"{cursor!r} is no cursor that this store gave out")


def item_unknown(item: Item) -> TypeError:
    """The error for an item that no store knows."""
    return TypeError(f"{type(item).__name__} is no item that a store knows")


def window_in_force(
    windows: Collection[tuple[str, str, str]], tenant: str, consumer: str, event_type: str
) -> tuple[str, str, str]:
    """The name of the window that a record has: of its own type where there is one, else of its consumer."""
    own = (tenant, consumer, event_type)
    return own if own in windows else (tenant, consumer, "")


def lag_s(now_us: int, oldest_us: int | None) -> float:
    """For how long the oldest of those that are over has been over."""
    return 0.0 if oldest_us is None else (now_us - oldest_us) / 1e6


class StatsCounter:
    """Counts what a store holds; what the item does not ask for is left out."""

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
        """Count records that are over and still there."""
        self._expired += number
        self._oldest_us = min(self._oldest_us, oldest_us)

    def stats(self, *, purge_lag_s: float = 0.0, **others: Any) -> Stats:
        """The sums. `purge_lag_s`: a lag of something else; the longer one is reported."""
        return Stats(
            now_us=self._now_us,
            states=self._states,
            consumers=self._consumers,
            marks=self._marks,
            expired=self._expired,
            purge_lag_s=max(lag_s(self._now_us, self._oldest_us), purge_lag_s),
            **others,
        )
