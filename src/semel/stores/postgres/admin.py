"""The items that are not about one record: scan, purge, count, windows and modes."""

from typing import Any

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
    Settings,
    SetWindow,
    SwitchMode,
)
from semel.core.machine import standing
from semel.errors import RecordCorrupt
from semel.stores.postgres import wire
from semel.stores.postgres.batch import Ask, Batch, Talk
from semel.stores.rows import CODES, STATES
from semel.types import Mode, Record, Stats

MARKS_PER_BLOCK = 128
"""About how many marks share a page of the table."""
EXAMINED_PER_REMOVED = 4


def answer(batch: Batch, item: Item) -> Talk[Answer]:
    """The talk of one such item."""
    match item:
        case Scan():
            return _scan(batch, item)
        case Count():
            return _count(batch, item)
        case Purge():
            return _would_purge(batch) if item.dry_run else _purge(batch, item)
        case ReadSettings():
            return _read_settings()
        case SetWindow():
            return _set_window(batch, item)
        case Admit():
            return _admit(item)
        case SwitchMode():
            return _switch_mode(batch, item)
        case _:
            raise TypeError(f"{type(item).__name__} is no item that a store knows")


def _scan(batch: Batch, item: Scan) -> Talk[Page]:
    """A page of records as they stand, in the order of their digests."""
    found = yield Ask(
        "scan_orphaned" if item.orphaned else "scan",
        {
            "now": batch.now,
            "after": item.cursor,
            "tenant": None if item.tenant is None else _text(item.tenant),
            "consumer": None if item.consumer is None else _text(item.consumer),
            "state": None if item.state is None else CODES[item.state],
            "prefix": _text(item.prefix),
            "seen_before": item.seen_before,
            "limit": item.limit + 1,
        },
    )
    rows = found[: item.limit]
    records: list[Record] = []
    for now, key, tenant, consumer, *columns in rows:
        name = str(columns[0]).replace("-", "") if key is None else wire.original(key)
        try:
            stored = wire.from_row(tuple(columns), (wire.original(tenant), wire.original(consumer), name))
        except RecordCorrupt:
            if item.orphaned:
                continue  # one that does not read must not keep the others from being taken over
            raise
        record = standing(stored, now)
        if record is not None:
            records.append(record)
    return Page(records, str(rows[-1][4]) if len(found) > item.limit else None)


def _purge(batch: Batch, item: Purge) -> Talk[Purged]:
    """Remove what is over, oldest first, then walk on through the marks."""
    ((now, count, oldest, gone, early, examined, latest),) = yield Ask(
        "purge", {"now": batch.now, "limit": item.limit}
    )
    more = gone > item.limit or (
        examined == item.limit * EXAMINED_PER_REMOVED
        and bool(gone or early)
        and latest <= now // wire.GRANULE_US
    )
    lag_s = 0.0 if oldest is None else (now - oldest) / 1e6
    if count >= item.limit:
        return Purged(count, lag_s, more=True)
    marks, more_marks = yield from _purge_marks(batch, item.limit - count)
    return Purged(count + marks, lag_s, more or more_marks)


def _purge_marks(batch: Batch, limit: int) -> Talk[tuple[int, bool]]:
    """Walk on through the table from where the last purge stopped, as many pages as hold a few times `limit`."""
    ((block, blocks),) = yield Ask("marks_cursor")
    if block >= blocks:
        block = 0
    until = min(blocks, block + 1 + limit * EXAMINED_PER_REMOVED // MARKS_PER_BLOCK)
    if not blocks:
        return 0, False
    removed = yield Ask("purge_marks", {"now": batch.now, "block": block, "until": until, "limit": limit})
    if len(removed) == limit:
        until = block  # there may be more on the same pages
    more = until < blocks
    yield Ask("move_marks_cursor", {"block": str(until if more else 0)})
    return len(removed), more


def _would_purge(batch: Batch) -> Talk[Purged]:
    ((now, count, oldest, marks),) = yield from _freely(Ask("would_purge", {"now": batch.now}))
    return Purged(count + marks, 0.0 if oldest is None else (now - oldest) / 1e6)


def _freely(ask: Ask) -> Talk[list[wire.Row]]:
    """Ask what reads whole tables: there the planner may choose, while for single keys it may not."""
    yield Ask("begin")
    yield Ask("any_plan")
    rows = yield ask
    yield Ask("commit")
    return rows


def _count(batch: Batch, item: Count) -> Talk[Stats]:
    """How much is held, counted row by row: a full scan."""
    tenant = None if item.tenant is None else _text(item.tenant)
    rows = yield from _freely(Ask("count", {"now": batch.now, "tenant": tenant}))
    states: dict[str, int] = {}
    consumers: dict[str, int] = {}
    now = oldest = rows[0][0]
    expired = marks = 0
    bytes_used: int | None = None
    for _, kind, consumer, state, live, number, extreme in rows:
        who = wire.original(consumer)
        if kind == 2:  # noqa: PLR2004 - the third part of the statement
            bytes_used = extreme
        elif kind == 1:
            marks += number
            consumers[who] = consumers.get(who, 0) + number
        elif not live:
            expired, oldest = expired + number, min(oldest, extreme)
        elif state < CODES["forgotten"]:
            states[STATES[state]] = states.get(STATES[state], 0) + number
            consumers[who] = consumers.get(who, 0) + number
    return Stats(
        now=now,
        states=states,
        consumers=consumers,
        marks=marks,
        expired=expired,
        purge_lag_s=(now - oldest) / 1e6,
        bytes_used=bytes_used,
    )


def _read_settings() -> Talk[Settings]:
    windows = yield Ask("read_windows")
    modes = yield Ask("read_modes")
    return Settings(
        {
            (wire.original(tenant), wire.original(consumer), wire.original(event_type)): window_us
            for tenant, consumer, event_type, window_us in windows
        },
        {(wire.original(tenant), wire.original(consumer)): mode for tenant, consumer, mode in modes},
    )


def _set_window(batch: Batch, item: SetWindow) -> Talk[None]:
    """Store or remove a window; with `existing`, move the expiries of settled records that still stand."""
    name: dict[str, Any] = {
        "tenant": _text(item.tenant),
        "consumer": _text(item.consumer),
        "event_type": _text(item.event_type),
    }
    if item.window_us is None:
        yield Ask("drop_window", name)
        return
    yield Ask("begin")
    yield Ask("set_window", {**name, "window": item.window_us})
    if item.existing:
        yield Ask("move_expiries", {**name, "now": batch.now, "window": item.window_us})
    yield Ask("commit")


def _admit(item: Admit) -> Talk[Mode]:
    """The consumer's mode, recorded now if it had none."""
    rows = yield Ask(
        "admit", {"tenant": _text(item.tenant), "consumer": _text(item.consumer), "mode": item.mode}
    )
    mode: Mode = rows[0][0]
    return mode


def _switch_mode(batch: Batch, item: SwitchMode) -> Talk[int]:
    """Change the mode; answers how many unfinished records forbid it."""
    yield Ask("begin")
    ((consumer,),) = yield Ask("lock_mode", {"tenant": _text(item.tenant), "consumer": _text(item.consumer)})
    unfinished: int
    ((unfinished,),) = yield Ask("unfinished", {"now": batch.now, "consumer": consumer})
    if not unfinished:
        yield Ask("put_mode", {"consumer": consumer, "mode": item.mode})
    yield Ask("commit")
    return unfinished


def _text(text: str) -> str:
    text.encode()  # raises where it is no text at all
    return wire.storable(text)
