"""The items that are not about one record: scan, purge, count, windows and modes."""

import re
from typing import Any

from msgspec.structs import replace

from semel.core.commands import (
    Admit,
    Answer,
    Count,
    Item,
    Page,
    Purge,
    Purged,
    ReadSettings,
    Scan,
    SetWindow,
    StoreSettings,
    SwitchMode,
)
from semel.core.ids import holds_time
from semel.core.machine import standing
from semel.errors import PolicyInvalid
from semel.stores.admin_rules import StatsCounter, build_page, cursor_refused, item_unknown, lag_s
from semel.stores.postgres import encoding
from semel.stores.postgres.batch import PostgresBatch, SendCalls, Talk, query_consumers
from semel.stores.postgres.calendar import ALARM_US, RECORDS
from semel.stores.postgres.partitions import PartitionState, live_us, look_all, maintain, set_up, warn
from semel.stores.rows import CODES, COUNTED
from semel.types import Mode, Record, Stats
from semel.windows import exact_text

MARKS_PER_BLOCK = 128
"""About how many marks are on one page of the table."""
EXAMINED_PER_REMOVED = 4
EARLY_PER_REMOVED = 4
"""For this many removed records one more is read: it may have been renewed, and is then postponed."""
MARKS, BYTES, TIMED = 1, 2, 3
"""The kinds of rows that the count queries return, in their second column; 0: records."""
TIMED_MODES: tuple[Mode, ...] = ("lease", "observe", "inbox")
"""The modes whose records are in partitions by the time in their ids, if ids are declared."""

_CURSOR = re.compile(r"(?:(-?\d{1,18}):)?([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})", re.ASCII)


def answer(batch: PostgresBatch, position: int) -> Talk[Answer]:
    """Return the talk that answers one such item."""
    item: Item = batch.items[position]
    match item:
        case Scan():
            return _scan(batch, item)
        case Count():
            return _count(batch, item)
        case Purge():
            return _would_purge(batch) if item.dry_run else _purge(batch, position, item)
        case ReadSettings():
            return _read_settings()
        case SetWindow():
            return _set_window(batch, item)
        case Admit():
            return _admit(batch, item)
        case SwitchMode():
            return _switch_mode(batch, item)
        case _:
            raise item_unknown(item)


def _scan(batch: PostgresBatch, item: Scan) -> Talk[Page]:
    """Return a page of effective records: by their digests, then those in partitions by the time of their ids."""
    after_time, after = _place(item.cursor)
    found: list[encoding.Row] = []
    parameters: dict[str, Any] = {
        "now": batch.now,
        "after": after,
        "tenant": None if item.tenant is None else _text(item.tenant),
        "consumer": None if item.consumer is None else _text(item.consumer),
        "state": None if item.state is None else CODES[item.state],
        "prefix": _text(item.prefix),
        "seen_before": item.seen_before,
        "limit": item.limit + 1,
    }
    if after_time is None:
        found += yield SendCalls("scan_orphaned" if item.orphaned else "scan", parameters)
        parameters["after"] = None
    if len(found) <= item.limit and not item.orphaned:
        parameters |= {"after_time": after_time or 0, "limit": item.limit + 1 - len(found)}
        found += yield SendCalls("scan_timed", parameters)
    return build_page(found, item, _read, _cursor)


def _read(row: encoding.Row) -> Record | None:
    """Decode the effective record of a row."""
    now, key, tenant, consumer, _, *columns = row
    name = str(columns[0]).replace("-", "") if key is None else encoding.original(key)
    record_id = (encoding.original(tenant), encoding.original(consumer), name)
    return standing(encoding.from_row(tuple(columns), record_id), now)


def _cursor(row: encoding.Row) -> str:
    """Return the cursor that continues after this row, of either table."""
    return str(row[5]) if row[4] is None else f"{row[4]}:{row[5]}"


def _place(cursor: str | None) -> tuple[int | None, str | None]:
    """Decode a cursor: the time of the id, if the record is in a partition, and a digest."""
    if cursor is None:
        return None, None
    found = _CURSOR.fullmatch(cursor)
    if found is None:
        raise cursor_refused(cursor)
    return None if found[1] is None else int(found[1]), found[2]


def _purge(batch: PostgresBatch, position: int, item: Purge) -> Talk[Purged]:
    """Remove expired records, oldest first, then continue through the marks. Only one cleaner runs at a time.

    Its lock ends with its transaction, so that a killed cleaner leaves no lock behind.
    """
    yield SendCalls("begin")
    ((elected,),) = yield SendCalls("elect")
    if not elected:
        who = yield SendCalls("cleaner")
        yield SendCalls("commit")
        return Purged(0, cleaner=who[0][0] if who else "another cleaner")
    purged = yield from _purge_batch(batch, item)
    if not purged.more:
        messages = yield SendCalls("purge_outbox", {"now": batch.now, "limit": item.limit})
        purged = replace(purged, count=purged.count + len(messages), more=len(messages) == item.limit)
    yield SendCalls("commit")
    found = yield from maintain(batch, position, batch.schema)
    for each in found:
        if each.low is not None and each.parent == RECORDS:
            yield SendCalls("purge_extras", {"low": each.low, "limit": item.limit})
    return replace(purged, lag_s=max(purged.lag_s, _lag_s(found)))


def _lag_s(found: list[PartitionState]) -> float:
    return max((each.lag_s() for each in found), default=0.0)


def _purge_batch(batch: PostgresBatch, item: Purge) -> Talk[Purged]:
    examined_max = item.limit + item.limit // EARLY_PER_REMOVED + 1
    ((now, count, oldest, gone, early, examined, latest),) = yield SendCalls(
        "purge", {"now": batch.now, "limit": item.limit, "examined": examined_max}
    )
    more = gone > item.limit or (
        examined == examined_max and bool(gone or early) and latest <= now // encoding.GRANULE_US
    )
    lag = lag_s(now, oldest)
    if count >= item.limit:
        return Purged(count, lag, more=True)
    marks, more_marks = yield from _purge_marks(batch, item.limit - count)
    return Purged(count + marks, lag, more or more_marks)


def _purge_marks(batch: PostgresBatch, limit: int) -> Talk[tuple[int, bool]]:
    """Continue through the table from where the last purge stopped; reads the pages of a few times `limit` marks."""
    ((block, blocks),) = yield SendCalls("marks_cursor")
    if block >= blocks:
        block = 0
    until = min(blocks, block + 1 + limit * EXAMINED_PER_REMOVED // MARKS_PER_BLOCK)
    if not blocks:
        return 0, False
    removed = yield SendCalls(
        "purge_marks", {"now": batch.now, "block": block, "until": until, "limit": limit}
    )
    if len(removed) == limit:
        until = block  # there may be more on the same pages
    more = until < blocks
    yield SendCalls("move_marks_cursor", {"block": str(until if more else 0)})
    return len(removed), more


def _would_purge(batch: PostgresBatch) -> Talk[Purged]:
    found = yield from look_all(batch)
    overdue = {each.parent: each.overdue() for each in found if each.overdue()}
    yield SendCalls("begin")
    yield SendCalls("any_plan")
    ((now, count, oldest, marks),) = yield SendCalls("would_purge", {"now": batch.now})
    ((messages,),) = yield SendCalls("would_purge_outbox", {"now": batch.now})
    timed = 0
    for parent, theirs in overdue.items():
        if parent == RECORDS:
            ((held,),) = yield SendCalls("would_remove", {"upper": theirs[-1].upper})
        else:
            slots = encoding.bigints([each.lower for each in theirs])
            ((held,),) = yield SendCalls("would_remove_marks", {"slots": slots})
        timed += held
    yield SendCalls("commit")
    lag = max(lag_s(now, oldest), _lag_s(found))
    return Purged(count + marks + messages + timed, lag, partitions=sum(map(len, overdue.values())))


def _count(batch: PostgresBatch, item: Count) -> Talk[Stats]:
    """Count all records and marks, row by row: a full scan, for which the planner may choose any plan."""
    parameters = {"now": batch.now, "tenant": None if item.tenant is None else _text(item.tenant)}
    found = [each for each in (yield from look_all(batch)) if each.live_us]
    rows: list[encoding.Row] = []
    yield SendCalls("begin")
    yield SendCalls("any_plan")
    for name in ("count_rest", "count", "count_timed"):
        rows += yield SendCalls(name, parameters)
    yield SendCalls("commit")
    counter = StatsCounter(item, rows[0][0])
    bytes_used: int | None = None
    for _, kind, tenant, consumer, state, live, number, extreme in rows:
        who = encoding.original(consumer)
        if kind == BYTES:
            bytes_used = extreme
        elif not live:
            if kind != TIMED:  # those are removed with their partition
                counter.add_expired(number, extreme)
        elif kind == MARKS:
            counter.add_marks(encoding.original(tenant), who, number)
        elif (counted := COUNTED.get(state)) is not None:
            counter.add_records(encoding.original(tenant), who, counted, number)
    for each in found:
        if each.ahead_us < ALARM_US:
            warn(each, batch.schema)
    return counter.stats(
        purge_lag_s=_lag_s(found),
        bytes_used=bytes_used,
        ahead_s=min(each.ahead_us for each in found) / 1e6 if found else None,
    )


def _read_settings() -> Talk[StoreSettings]:
    windows = yield SendCalls("read_windows")
    modes = yield SendCalls("read_modes")
    lived_us = (yield from live_us()) if any(ids for *_, ids in modes) else 0
    return StoreSettings(
        {
            (encoding.original(tenant), encoding.original(consumer), encoding.original(event_type)): window_us
            for tenant, consumer, event_type, window_us in windows
        },
        {
            (encoding.original(tenant), encoding.original(consumer)): mode
            for tenant, consumer, mode, _ in modes
        },
        {
            (encoding.original(tenant), encoding.original(consumer)): ids
            for tenant, consumer, _, ids in modes
            if ids
        },
        lived_us,
    )


def _set_window(batch: PostgresBatch, item: SetWindow) -> Talk[None]:
    """Store or remove a window; with `existing`, also move the expiries of settled records that are still live."""
    name: dict[str, Any] = {
        "tenant": _text(item.tenant),
        "consumer": _text(item.consumer),
        "event_type": _text(item.event_type),
    }
    if item.window_us is None:
        yield SendCalls("drop_window", name)
        return
    scope = (item.tenant, item.consumer)
    ids = (yield from query_consumers(batch, {scope: False})).get(scope, "")
    if ids:
        yield from _check_live(item.window_us)
    yield SendCalls("begin")
    yield SendCalls("set_window", {**name, "window": item.window_us})
    if item.existing:
        moved = {**name, "now": batch.now, "window": item.window_us}
        yield SendCalls("move_expiries_timed" if holds_time(ids) else "move_expiries", moved)
    yield SendCalls("commit")


def _check_live(window_us: int) -> Talk[None]:
    """Raise `PolicyInvalid` if a window is longer than partitions are kept."""
    lived_us = yield from live_us()
    if lived_us and window_us >= lived_us:
        raise PolicyInvalid(
            f"a window of {exact_text(window_us)} is not shorter than the {lived_us / 1e6:g}s that partitions live;"
            " open the store with a longer partition_live first"
        )


def _admit(batch: PostgresBatch, item: Admit) -> Talk[Mode]:
    """Return the consumer's mode; stores it if there was none. The kind of its ids is stored when it is first seen."""
    rows = yield SendCalls(
        "admit",
        {
            "tenant": _text(item.tenant),
            "consumer": _text(item.consumer),
            "mode": item.mode,
            "ids": item.ids,
        },
    )
    mode: Mode = rows[0][0]
    if rows[0][1]:
        yield from set_up(batch, batch.schema)
    return mode


def _switch_mode(batch: PostgresBatch, item: SwitchMode) -> Talk[int]:
    """Change the mode if there are no unfinished records; returns the number of unfinished records."""
    yield SendCalls("begin")
    ((consumer, ids, mode),) = yield SendCalls(
        "lock_mode", {"tenant": _text(item.tenant), "consumer": _text(item.consumer)}
    )
    allowed: tuple[Mode, ...] = ("mark",) if mode == "mark" else TIMED_MODES
    if ids and item.mode not in allowed:
        yield SendCalls("rollback")
        raise PolicyInvalid(
            f"consumer {item.consumer!r} has ids={ids!r}, so that its records are removed with their partition;"
            f" its mode must be {' or '.join(allowed)}"
        )
    unfinished: int
    name = "unfinished_timed" if holds_time(ids) else "unfinished"
    ((unfinished,),) = yield SendCalls(name, {"now": batch.now, "consumer": consumer})
    if not unfinished:
        yield SendCalls("put_mode", {"consumer": consumer, "mode": item.mode})
    yield SendCalls("commit")
    return unfinished


def _text(text: str) -> str:
    text.encode()  # raises UnicodeEncodeError if it is not valid text
    return encoding.storable(text)
