"""The items that are not about one record: scan, purge, count, windows and modes."""

import sqlite3
from typing import Any

from semel.core.commands import Admit, Count, Page, Purge, Purged, Scan, SetWindow, StoreSettings, SwitchMode
from semel.core.machine import standing
from semel.stores.admin_rules import StatsCounter, build_page, cursor_refused, lag_s
from semel.stores.rows import CODES, COUNTED, EXTRAS, JOURNAL, SLIDING
from semel.stores.sqlite import encoding, marks
from semel.stores.sqlite.encoding import (
    COUNTED_STATE,
    EPOCH_US,
    GONE_AT,
    GRANULE_US,
    LIVE,
    RUNNING,
    STANDING_STATE,
)
from semel.stores.sqlite.marks import EXAMINED_PER_REMOVED
from semel.types import Mode, Record, Stats

_MESSAGE_GONE = (
    "gone_at <= :now AND settled_at <= :now - (SELECT coalesce(max(window_us), 0) FROM semel_windows)"
)
_PURGE_OUTBOX = f"""
DELETE FROM semel_outbox WHERE seq IN (
    SELECT seq FROM semel_outbox WHERE {_MESSAGE_GONE} ORDER BY gone_at LIMIT :limit)
"""
_SCAN_COLUMNS = encoding.COLUMNS.replace("id,", "r.id,", 1)


def scan(connection: sqlite3.Connection, item: Scan, now: int) -> Page:
    """Return a page of effective records, in the order of their first arrival."""
    clauses = ["r.id > :after", "r.state & 7 <> 4", LIVE]
    parameters: dict[str, Any] = {
        "now": now - EPOCH_US,
        "after": _place(item.cursor),
        "limit": item.limit + 1,
    }
    for column, wanted in (("c.tenant", item.tenant), ("c.consumer", item.consumer)):
        if wanted is not None:
            clauses.append(f"{column} = :{column[2:]}")
            parameters[column[2:]] = wanted
    if item.state is not None:
        clauses.append(f"{STANDING_STATE} = :state")
        parameters["state"] = CODES[item.state]
    if item.prefix:
        clauses.append("substr(r.key, 1, length(:prefix)) = :prefix")
        parameters["prefix"] = item.prefix
    if item.seen_before is not None:
        clauses.append("r.fence - r.seen < :seen_before")
        parameters["seen_before"] = item.seen_before - EPOCH_US
    joins = "JOIN semel_consumers AS c ON c.id = r.consumer_id"
    if item.orphaned:
        joins += " JOIN semel_journal AS j ON j.id = r.id"
        clauses.append(f"{STANDING_STATE} = 0 AND NOT {RUNNING}")
    where = " AND ".join(clauses).replace("?1", ":now")
    found = connection.execute(
        f"SELECT {_SCAN_COLUMNS}, r.key, c.tenant, c.consumer FROM semel_records AS r {joins}"
        f" WHERE {where} ORDER BY r.id LIMIT :limit",
        parameters,
    ).fetchall()
    extras = dict(zip((row[0] for row in found), extras_of(connection, found), strict=True))

    def read(row: encoding.Row) -> Record | None:
        key, tenant, consumer = row[-3:]
        record_id = (tenant, consumer, row[1].hex() if key is None else key)
        return standing(encoding.from_row(row[:-3], record_id, *extras[row[0]]), now)

    return build_page(found, item, read, lambda row: str(row[0]))


def _place(cursor: str | None) -> int:
    """Decode the cursor: the row after which a page starts."""
    try:
        return int(cursor or 0)
    except ValueError:
        raise cursor_refused(cursor) from None


def extras_of(
    connection: sqlite3.Connection | sqlite3.Cursor, rows: list[encoding.Row]
) -> list[tuple[Any, ...]]:
    """Return steps, meta, anchor, horizon and journal of each row; rows without them cost nothing."""
    nothing = (None,) * 5
    wanted = [row[0] for row in rows if type(row[2]) is int and row[2] & (EXTRAS | JOURNAL)]
    if not wanted:
        return [nothing] * len(rows)
    found: dict[int, tuple[Any, ...]] = {}
    for ids in encoding.chunks(wanted):
        found |= {
            rowid: tuple(beside)
            for rowid, *beside in connection.execute(
                "SELECT +r.id, +e.steps, +e.meta, +e.anchor, +e.horizon, +j.payload FROM semel_records AS r"
                " LEFT JOIN semel_extras AS e ON e.id = r.id LEFT JOIN semel_journal AS j ON j.id = r.id"
                f" WHERE r.id IN ({encoding.places(len(ids))})",
                ids,
            )
        }
    return [found.get(row[0], nothing) for row in rows]


def purge(connection: sqlite3.Connection, item: Purge, now: int) -> tuple[Purged, bool]:
    """Remove expired rows, oldest first. The second result is whether anything was written."""
    if item.dry_run:
        return _would_purge(connection, now), False
    at = now - EPOCH_US
    minute = at // GRANULE_US
    rows = connection.execute(
        f"SELECT id, purge_at, {GONE_AT} FROM semel_records WHERE purge_at <= ? ORDER BY purge_at LIMIT ?",
        (minute + 1 + encoding.PURGE_SLACK, item.limit * EXAMINED_PER_REMOVED),
    ).fetchall()
    gone = [row for row in rows if row[2] <= at]
    early = [
        (-(-gone_at // GRANULE_US), rowid) for rowid, due, gone_at in rows if gone_at > at and due <= minute
    ]
    removed = gone[: item.limit]
    for ids in encoding.chunks([row[0] for row in removed]):
        for table in ("semel_records", "semel_extras", "semel_journal"):
            connection.execute(f"DELETE FROM {table} WHERE id IN ({encoding.places(len(ids))})", ids)
    connection.executemany(encoding.MOVE_RECORD, early)
    more = len(gone) > item.limit or (
        len(rows) == item.limit * EXAMINED_PER_REMOVED and bool(gone or early) and rows[-1][1] <= minute
    )
    marked, marks_more, moved = marks.purge(connection, item.limit - len(removed), at)
    lag = lag_s(at, min((row[2] for row in removed), default=None))
    messages = connection.execute(_PURGE_OUTBOX, {"now": now, "limit": item.limit}).rowcount
    return (
        Purged(len(removed) + marked + messages, lag, more or marks_more or messages == item.limit),
        bool(removed or early or marked or moved or messages),
    )


def _would_purge(connection: sqlite3.Connection, now: int) -> Purged:
    at = now - EPOCH_US
    count, oldest = connection.execute(
        f"SELECT count(*), min({GONE_AT}) FROM semel_records WHERE NOT {LIVE}", (at,)
    ).fetchone()
    (marked,) = connection.execute("SELECT count(*) FROM semel_marks WHERE expires_at <= ?", (at,)).fetchone()
    (messages,) = connection.execute(
        f"SELECT count(*) FROM semel_outbox WHERE {_MESSAGE_GONE}", {"now": now}
    ).fetchone()
    return Purged(count + marked + messages, lag_s(at, oldest))


def count(connection: sqlite3.Connection, item: Count, now: int) -> Stats:
    """Count all records and marks, row by row: a full scan."""
    counter, at = StatsCounter(item, now), now - EPOCH_US
    for tenant, consumer, state, live, number, gone_at in connection.execute(
        f"SELECT c.tenant, c.consumer, {COUNTED_STATE} AS standing, {LIVE} AS live, count(*), min({GONE_AT})"
        " FROM semel_records AS r JOIN semel_consumers AS c ON c.id = r.consumer_id"
        " WHERE ?2 IS NULL OR c.tenant = ?2 GROUP BY r.consumer_id, standing, live",
        (at, item.tenant),
    ):
        if not live:
            counter.add_expired(number, gone_at + EPOCH_US)
        elif (name := COUNTED.get(state)) is not None:
            counter.add_records(tenant, consumer, name, number)
    for tenant, consumer, number in connection.execute(
        "SELECT c.tenant, c.consumer, count(*) FROM semel_marks AS m"
        " JOIN semel_consumers AS c ON c.id = m.consumer_id"
        " WHERE m.expires_at > ?1 AND (?2 IS NULL OR c.tenant = ?2) GROUP BY m.consumer_id",
        (at, item.tenant),
    ):
        counter.add_marks(tenant, consumer, number)
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    return counter.stats(bytes_used=pages * page_bytes)


def read_settings(connection: sqlite3.Connection) -> StoreSettings:
    """Return all windows and modes."""
    windows = connection.execute("SELECT tenant, consumer, event_type, window_us FROM semel_windows")
    modes = connection.execute("SELECT tenant, consumer, mode FROM semel_consumers WHERE mode IS NOT NULL")
    return StoreSettings(
        {(tenant, consumer, event_type): window_us for tenant, consumer, event_type, window_us in windows},
        {(tenant, consumer): mode for tenant, consumer, mode in modes},
        read_ids(connection),
    )


def read_ids(connection: sqlite3.Connection) -> dict[tuple[str, str], str]:
    """Return the kind of ids of the consumers that declared one."""
    rows = connection.execute(
        "SELECT c.tenant, c.consumer, m.value FROM semel_meta AS m"
        " JOIN semel_consumers AS c ON c.id = CAST(substr(m.name, 5) AS INTEGER)"
        " WHERE m.name >= 'ids:' AND m.name < 'ids;'"
    )
    return {(tenant, consumer): ids for tenant, consumer, ids in rows}


def set_window(connection: sqlite3.Connection, item: SetWindow, now: int) -> None:
    """Store or remove a window; with `existing`, also move the expiries of settled records that are still live."""
    name = (item.tenant, item.consumer, item.event_type)
    if item.window_us is None:
        connection.execute(
            "DELETE FROM semel_windows WHERE tenant = ? AND consumer = ? AND event_type = ?", name
        )
        return
    connection.execute("INSERT OR REPLACE INTO semel_windows VALUES (?, ?, ?, ?)", (*name, item.window_us))
    if item.existing:
        moved = f"(CASE WHEN state & {SLIDING} THEN -seen ELSE coalesce(settled, 0) END + ?2)"
        connection.execute(
            f"UPDATE semel_records SET expires = {moved},"
            f" purge_at = (fence + {moved}) / {GRANULE_US} + 1"
            " WHERE consumer_id = (SELECT id FROM semel_consumers WHERE tenant = ?3 AND consumer = ?4)"
            " AND ?5 = coalesce((SELECT w.event_type FROM semel_windows AS w"  # the window that applies to it
            " WHERE w.tenant = ?3 AND w.consumer = ?4 AND w.event_type = semel_records.event_type), '')"
            f" AND state & 7 IN (1, 2) AND {LIVE}"
            f" AND NOT (state & {EXTRAS} AND EXISTS (SELECT 1 FROM semel_extras AS e"  # the window of its key counts
            " WHERE e.id = semel_records.id AND e.anchor IS NOT NULL))",
            (now - EPOCH_US, item.window_us, *name),
        )


def admit(connection: sqlite3.Connection, item: Admit) -> tuple[Mode, bool]:
    """Return the consumer's mode; stores `item.mode` if it had none. The second result is whether it was stored."""
    name = (item.tenant, item.consumer)
    stored = connection.execute(
        "SELECT mode FROM semel_consumers WHERE tenant = ? AND consumer = ?", name
    ).fetchone()
    if stored is not None and stored[0] is not None:
        mode: Mode = stored[0]
        return mode, False
    _put_mode(connection, *name, item.mode)
    if item.ids and stored is None:
        connection.execute(
            "INSERT INTO semel_meta SELECT 'ids:' || id, ? FROM semel_consumers WHERE tenant = ? AND consumer = ?",
            (item.ids, *name),
        )
    return item.mode, True


def switch_mode(connection: sqlite3.Connection, item: SwitchMode, now: int) -> int:
    """Change the mode if there are no unfinished records; returns the number of unfinished records."""
    unfinished: int
    (unfinished,) = connection.execute(
        "SELECT count(*) FROM semel_records"
        " WHERE consumer_id = (SELECT id FROM semel_consumers WHERE tenant = ?2 AND consumer = ?3)"
        f" AND {COUNTED_STATE} IN (0, 3) AND {LIVE}",
        (now - EPOCH_US, item.tenant, item.consumer),
    ).fetchone()
    if not unfinished:
        _put_mode(connection, item.tenant, item.consumer, item.mode)
    return unfinished


def _put_mode(connection: sqlite3.Connection, tenant: str, consumer: str, mode: Mode) -> None:
    connection.execute(
        "INSERT INTO semel_consumers (tenant, consumer, mode) VALUES (?, ?, ?)"
        " ON CONFLICT (tenant, consumer) DO UPDATE SET mode = excluded.mode",
        (tenant, consumer, mode),
    )
