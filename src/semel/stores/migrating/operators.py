"""Lookups and the commands of operators on two stores: one item at a time, each repeatable after a crash."""

from collections.abc import Callable, Generator
from typing import Any, TypeAlias

from msgspec.structs import replace

from semel.core.commands import (
    Admit,
    Answer,
    Count,
    Forget,
    Item,
    Lookup,
    Page,
    Purge,
    Purged,
    ReadSettings,
    Resolve,
    Scan,
    SetWindow,
    StoreSettings,
    SwitchMode,
)
from semel.core.machine import fits
from semel.core.moves import MOVING_IN, moved_out, moving_in, note, without_moves
from semel.errors import StoreMoved
from semel.stores.migrating.sides import AskSide, Side, ask
from semel.types import Absent, Forgotten, Lost, Record, Stats, Unavailable

__all__ = ["OPERATORS"]

Steps: TypeAlias = Generator[AskSide, Any, Answer]
FROM_NEW = "new "
"""The start of a cursor into the new store. Others are cursors into the old one."""


def _one(side: Side, item: Item) -> Steps:
    return (yield from ask(side, [item]))[0]


def _pair(item: Item) -> Generator[AskSide, Any, tuple[Answer, Answer]]:
    """Send the item to both, the old one first. An item without an answer is not sent to the second."""
    old = yield from _one("old", item)
    return (old, old) if isinstance(old, Unavailable) else (old, (yield from _one("new", item)))


def _lookup(item: Lookup, *_names: str) -> Steps:
    old, new = yield from _pair(item)
    if isinstance(new, Unavailable):
        return new
    return new if _rank(new) > _rank(old) else old


def _rank(answer: Answer) -> int:
    """How much an answer says: a result more than an open question, that more than a claim, that more than nothing."""
    if not isinstance(answer, Record):
        return 0
    if answer.state == "claimed":
        return 2 if answer.owner else 1
    return 3 if answer.state == "unknown" else 4


def _forget(item: Forget, *_names: str) -> Steps:
    """Forget in both. With a fence or a state: if one of them has that record."""
    main: Side = "old"
    if item.fence is not None or item.state is not None:
        old, new = yield from _pair(Lookup(item.id))
        if isinstance(new, Unavailable):
            return new
        if isinstance(old, Absent) and isinstance(new, Absent):
            return old
        if not _is_meant(old, item):
            if _rank(new) <= _rank(old) or not _is_meant(new, item):
                return Lost()
            main = "new"
    first = yield from _one(main, item)
    if not isinstance(first, Forgotten | Absent):
        return first
    second = yield from _one("new" if main == "old" else "old", Forget(item.id, item.force))
    if isinstance(first, Forgotten) and isinstance(second, Forgotten | Absent):
        return first
    return second


def _is_meant(record: Answer, item: Forget) -> bool:
    return (
        isinstance(record, Record)
        and item.fence in (None, record.fence)
        and item.state in (None, record.state)
    )


def _resolve(item: Resolve, *_names: str) -> Steps:
    """Resolve the store that the fence is of last: until then, the same call may be repeated."""
    old, new = yield from _pair(Lookup(item.id))
    if isinstance(new, Unavailable):
        return new
    records: dict[Side, Answer] = {"old": old, "new": new}
    unknown: dict[Side, int] = {
        side: record.fence
        for side, record in records.items()
        if isinstance(record, Record) and record.state == "unknown"
    }
    main: Side = next(iter(unknown), "old")  # the store whose fence a caller was shown
    if unknown.get(main) != item.fence:
        return Lost()
    for side, fence in unknown.items():
        if side != main:
            answer = yield from _one(side, replace(item, fence=fence))
            if isinstance(answer, Unavailable | Lost):
                return answer
    return (yield from _one(main, item))


def _scan(item: Scan, *_names: str) -> Steps:
    """Show the records of the old store, then those that only the new store has."""
    records: list[Record] = []
    cursor = item.cursor
    if cursor is None or not cursor.startswith(FROM_NEW):
        page = yield from _one("old", item)
        if isinstance(page, Unavailable):
            return page
        if page.cursor is not None:
            return page
        records, cursor = page.records, FROM_NEW
        if len(records) >= item.limit:
            return Page(records, cursor)
    rest = replace(item, cursor=cursor.removeprefix(FROM_NEW) or None, limit=item.limit - len(records))
    page = yield from _one("new", rest)
    if isinstance(page, Unavailable):
        return page
    known = yield from ask("old", [Lookup(record.id) for record in page.records])
    for record, other in zip(page.records, known, strict=True):
        if isinstance(other, Unavailable):
            return other
        # A matching record of the old store was shown before. Its lease is over if that was asked for.
        if not (isinstance(other, Record) and fits(other, item, other.lease_until_us)):
            records.append(record)
    return Page(records, None if page.cursor is None else FROM_NEW + page.cursor)


def _purge(item: Purge, *_names: str) -> Steps:
    old, new = yield from _pair(item)
    if isinstance(new, Unavailable):
        return new
    return Purged(
        max(old.count, new.count),
        max(old.lag_s, new.lag_s),
        old.more or new.more,
        old.partitions + new.partitions,
        old.cleaner or new.cleaner,
    )


def _count(item: Count, *_names: str) -> Steps:
    """Count the keys: nearly all are in both stores, so the larger number counts."""
    old, new = yield from _pair(item)
    if isinstance(new, Unavailable):
        return new
    used = [stats.bytes_used for stats in (old, new) if stats.bytes_used is not None]
    ahead = [stats.ahead_s for stats in (old, new) if stats.ahead_s is not None]
    return Stats(
        now_us=old.now_us,
        states=_larger(old.states, new.states),
        consumers=_larger(old.consumers, new.consumers),
        marks=max(old.marks, new.marks),
        expired=max(old.expired, new.expired),
        purge_lag_s=max(old.purge_lag_s, new.purge_lag_s),
        bytes_used=sum(used) if used else None,
        tiers=old.tiers or new.tiers,
        ahead_s=min(ahead) if ahead else None,
    )


def _larger(old: dict[str, int], new: dict[str, int]) -> dict[str, int]:
    return {name: max(old.get(name, 0), new.get(name, 0)) for name in {**old, **new}}


def _read_settings(item: ReadSettings, *_names: str) -> Steps:
    """Return the settings of both; the old store's count where both have one."""
    old, new = yield from _pair(item)
    if isinstance(new, Unavailable):
        return new
    lives = [each.live_us for each in (old, new) if each.live_us]
    return without_moves(
        StoreSettings(
            {**new.windows, **old.windows},
            {**new.modes, **old.modes},
            {**new.ids, **old.ids},
            min(lives, default=0),
        )
    )


def _set_window(item: SetWindow, *_names: str) -> Steps:
    _old, new = yield from _pair(item)
    return new


def _admit(item: Admit, old_name: str, new_name: str) -> Steps:
    """Record the consumer in both, and note in the new store that it moves in. Raises `StoreMoved`."""
    old, new = yield from _pair(ReadSettings())
    if isinstance(new, Unavailable):
        return new
    place = (item.tenant, item.consumer)
    closed, moving = moved_out(old.windows, *place), moving_in(new.windows, *place)
    others = {*closed, *moving_in(old.windows, *place)} - {new_name}
    others |= {*moving, *moved_out(new.windows, *place)} - {old_name}
    if others or moving_in(old.windows, *place) or moved_out(new.windows, *place):
        raise StoreMoved(
            f"consumer {item.consumer!r} is moving already, between {', '.join(sorted(others)) or 'these stores'};"
            f" finish that move before you move it from {old_name} to {new_name}"
        )
    mode = yield from _one("old", item)
    if isinstance(mode, Unavailable):
        return mode
    if not moving and not closed:
        noted = yield from _one("new", note(MOVING_IN, *place, old_name, 1))
        if isinstance(noted, Unavailable):
            return noted
    ids = old.ids.get(place, item.ids)
    second = yield from _one("new", Admit(item.tenant, item.consumer, mode, ids))
    return mode if second == mode else second


def _switch_mode(item: SwitchMode, *_names: str) -> Steps:
    """Switch the new store first, and back if the old one refuses."""
    settings = yield from _one("new", ReadSettings())
    if isinstance(settings, Unavailable):
        return settings
    second = yield from _one("new", item)
    if second != 0:
        return second
    first = yield from _one("old", item)
    before = settings.modes.get((item.tenant, item.consumer))
    if first != 0 and before is not None:
        yield from _one("new", SwitchMode(item.tenant, item.consumer, before))
    return first


OPERATORS: dict[type, Callable[..., Steps]] = {
    Lookup: _lookup,
    Forget: _forget,
    Resolve: _resolve,
    Scan: _scan,
    Purge: _purge,
    Count: _count,
    ReadSettings: _read_settings,
    SetWindow: _set_window,
    Admit: _admit,
    SwitchMode: _switch_mode,
}
"""How each kind of item is carried out on both stores; called with the names of the stores."""
