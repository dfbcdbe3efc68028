"""The steps of a move that an operator decides: close the old store, and finish when its window is over."""

from collections.abc import Callable, Iterator

from msgspec import Struct

from semel.core.commands import Answer, Count, Item, Lookup, ReadSettings, Scan, answer_or_raise
from semel.core.ids import is_own
from semel.core.moves import MOVED_OUT, MOVING_IN, moved_out, moving_in, note
from semel.core.protocols import Store
from semel.types import Record

__all__ = ["StoreMove", "close", "finish", "moves"]

MARGIN_US = 60 * 10**6
"""How long after the note a client of the old store alone may still write: it reads the notes every few seconds."""
PAGE = 500


class StoreMove(Struct, frozen=True):
    """A consumer's move between two stores."""

    tenant: str
    consumer: str
    closed_at_us: int
    """When the old store was closed to clients of its own, by its clock; 0: it is open."""
    finished: bool


def moves(old: Store, new: Store) -> list[StoreMove]:
    """Return the moves between these stores."""
    left, right = _ask(old, ReadSettings()).windows, _ask(new, ReadSettings()).windows
    prefixes = {
        tenant: tenant.removeprefix(MOVING_IN).removeprefix(MOVED_OUT) for tenant, _, _ in [*left, *right]
    }
    places = {
        (prefixes[tenant], consumer)
        for windows, other, begin in ((left, new.name, MOVED_OUT), (right, old.name, MOVING_IN))
        for tenant, consumer, name in windows
        if tenant.startswith(begin) and name == other
    }
    return [
        StoreMove(
            *place,
            moved_out(left, *place).get(new.name, 0),
            old.name not in moving_in(right, *place),
        )
        for place in sorted(places)
    ]


def close(old: Store, new: Store, move: StoreMove) -> StoreMove:
    """Refuse clients of the old store alone from now on. The old window is counted from here."""
    now_us: int = _ask(old, Count(move.tenant)).now_us
    _ask(old, note(MOVED_OUT, move.tenant, move.consumer, new.name, now_us))
    return StoreMove(move.tenant, move.consumer, now_us, move.finished)


def finish(
    old: Store, new: Store, move: StoreMove, window_us: int, on_record: Callable[[], object] = lambda: None
) -> str:
    """Let clients use the new store alone, if it knows all that the old one knows. Returns why not; empty: done."""
    if not move.closed_at_us:
        return (
            "its old store is not closed yet; run semel move close when no process uses the old store alone"
        )
    rest_us = move.closed_at_us + window_us + MARGIN_US - _ask(old, Count(move.tenant)).now_us
    if rest_us > 0:
        return f"the window of the old store is over in {rest_us / 1e6:,.0f} s; run this again then"
    for record in _only_old(old, new, move, on_record):
        return (
            f"{record.key!r} is {record.state} in the old store and not known in the new one: a client of the old store"
            " alone has written it, or a window is longer than the one you gave; wait until it has expired"
        )
    _ask(new, note(MOVING_IN, move.tenant, move.consumer, old.name, None))
    return ""


def _only_old(old: Store, new: Store, move: StoreMove, on_record: Callable[[], object]) -> Iterator[Record]:
    """Yield the records that only the old store has."""
    cursor: str | None = None
    while True:
        page = _ask(old, Scan(tenant=move.tenant, consumer=move.consumer, cursor=cursor, limit=PAGE))
        records = [record for record in page.records if not is_own(record.tenant, record.consumer)]
        found = new.send([Lookup(record.id) for record in records])
        for record, answer in zip(records, found, strict=True):
            on_record()
            if not isinstance(answer_or_raise(answer), Record):
                yield record
        cursor = page.cursor
        if cursor is None:
            return


def _ask(store: Store, item: Item) -> Answer:
    return answer_or_raise(store.send([item])[0])
