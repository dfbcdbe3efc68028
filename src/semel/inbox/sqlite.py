"""The statements of an inbox on SQLite."""

import asyncio
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from semel.client.items import ItemBuilder
from semel.connections import PauseStep, Row, Statement, Talk
from semel.core.commands import Lookup, Renew
from semel.core.ids import digest, holds_time, time_in
from semel.core.machine import check, differs, standing
from semel.errors import (
    IdsMismatch,
    ModeMismatch,
    OutcomeUnknown,
    StillRunning,
    StoreUnavailable,
    WrongDatabase,
)
from semel.inbox.base import InboxStatements, Value
from semel.runtime.jitter import jitter
from semel.stores.rows import QUARANTINE, SLIDING, STATE_MASK
from semel.stores.sqlite import SqliteStore, encoding, locks
from semel.stores.sqlite.batch import by_time
from semel.stores.sqlite.errors import is_busy, to_store_error
from semel.stores.sqlite.store import RETRY_MAX_S, RETRY_MIN_S
from semel.types import Id, Record

__all__ = ["BUSY_SNAPSHOT", "SqliteInboxStatements"]

BUSY_SNAPSHOT = 517
"""The transaction has read a stale state, so SQLite refuses its writes."""
_BARE = STATE_MASK | QUARANTINE | SLIDING
COLUMNS = ", ".join(
    f"+state & {_BARE}" if name == "state" else f"+{name}" for name in encoding.COLUMNS.split(", ")
)
"""The plus removes the columns' declared types, so that the caller's converters do not apply. A mark
needs neither the steps nor the journal of a claim, so the state does not say that there are some."""


class SqliteInboxStatements(InboxStatements):
    """Decides about marks here, under the database's write lock, which the transaction holds."""

    def __init__(self, store: SqliteStore, plan: ItemBuilder) -> None:
        super().__init__(plan)
        self._store = store
        self._ids = plan.ids

    def first_many(
        self, keys: Sequence[str], event_type: str, window_us: int, fingerprint: bytes | None = None
    ) -> Talk[list[bool]]:
        """Mark distinct keys, with one statement for all keys that are new to the database."""
        yield from self._check_database()
        now = yield from self._lock()
        rows = yield from self._read(keys)
        new: dict[str, Record] = {}
        for key, (_, stored) in rows.items():
            record = standing(stored, now)
            orphaned = record is not None and record.state == "claimed" and record.lease_until_us <= now
            settled = record is not None and record.state in ("done", "failed")
            if record is not None and (orphaned or settled) and differs(fingerprint, record.fingerprint):
                raise self.mismatch(repr(key))
            mark = self._decide((self.tenant, self.consumer, key), stored, now, window_us, event_type)
            if mark is not None:
                known = record.fingerprint if record is not None and orphaned else None
                mark = replace(mark, fingerprint=fingerprint or known)
            if mark is not None:
                new[key] = mark
        if new:
            yield from self._write([(rows[key][0], record) for key, record in new.items()])
        return [key in new for key in keys]

    def unmark(self, keys: Sequence[str]) -> Talk[None]:
        """Remove marks of this transaction."""
        for some in encoding.chunks([self._digest(key) for key in keys]):
            places = ",".join("?" * len(some))
            yield from self._say(
                f"DELETE FROM semel_records WHERE digest IN ({places}) AND owner = ?", *some, self.attempt
            )

    def store(self, key: str, encoded: bytes) -> Talk[None]:
        """Store a value with the mark."""
        yield from self._check_database()
        now = yield from self._lock()
        rowid, stored = (yield from self._read([key]))[key]
        record = standing(stored, now)
        if record is None or record.state != "done":
            raise self.not_marked(key)
        yield from self._say("UPDATE semel_records SET value = ? WHERE id = ?", encoded, rowid)

    def replay(self, key: str) -> Talk[Value | None]:
        """Return the value stored with the mark. Takes no lock."""
        yield from self._check_database()
        ((last_us, offset_us),) = yield from self._say("SELECT +last_us, +offset_us FROM semel_clock")
        now, _ = self._store.clock.tick(last_us, offset_us)
        record = standing((yield from self._read([key]))[key][1], now)
        return None if record is None or record.state != "done" else Value(record.value)

    # --- on the store's own connection ---

    def committed(self, key: str) -> bool:
        """Whether the mark of this attempt is committed."""
        record_id: Id = (self.tenant, self.consumer, key)
        try:
            # A renewal of nothing takes the write lock, so it waits for the transaction that holds it.
            record = self._store.send([Renew(record_id, self.attempt, 0, 0), Lookup(record_id)])[1]
        except StoreUnavailable as error:
            raise StillRunning(
                f"a transaction that may have marked {key!r} is still open: {error}"
            ) from error
        return isinstance(record, Record) and record.state == "done" and record.owner == self.attempt

    async def acommitted(self, key: str) -> bool:
        """The same in a thread, as it may wait for the lock."""
        return await asyncio.to_thread(self.committed, key)

    # --- decisions ---

    def _decide(
        self, record_id: Id, stored: Record | None, now: int, window_us: int, event_type: str
    ) -> Record | None:
        """Return the mark to write; `None`: the event is done, or failed for good."""
        record = standing(stored, now)
        if record is not None and record.state in ("done", "failed"):
            return None
        if record is not None and record.state == "unknown":
            raise OutcomeUnknown(f"{record_id[2]!r} is quarantined: resolve it first")
        if record is not None and record.state == "claimed" and record.lease_until_us > now:
            rest_s = (record.lease_until_us - now) / 1e6
            raise StillRunning(f"another attempt holds {record_id[2]!r} for {rest_s:.3f} s", rest_s)
        orphan = record if record is not None and record.state == "claimed" else None
        return check(
            Record(
                id=record_id,
                state="done",
                owner=self.attempt,
                fence=now if stored is None or stored.fence < now else stored.fence + 1,
                lease_until_us=0,
                attempt=1 if orphan is None else orphan.attempt + 1,
                expires_at_us=now + window_us,
                first_seen_us=now if orphan is None else orphan.first_seen_us,
                settled_at_us=now,
                event_type=event_type,
                errors=() if orphan is None else orphan.errors,
            )
        )

    def _read(self, keys: Sequence[str]) -> Talk[dict[str, tuple[int | None, Record | None]]]:
        """Read the row number and record of each key."""
        digests = {self._digest(key): key for key in keys}
        found: dict[str, tuple[int | None, Record | None]] = dict.fromkeys(keys, (None, None))
        for some in encoding.chunks(list(digests)):
            for row in (yield from self._say(encoding.select_records(len(some), COLUMNS), *some)):
                key = digests[row[1]]
                found[key] = (row[0], encoding.from_row(row, (self.tenant, self.consumer, key)))
        return found

    def _write(self, marks: list[tuple[int | None, Record]]) -> Talk[None]:
        consumer_id = yield from self._consumer_id()
        inserts: list[encoding.Row] = []
        for rowid, record in marks:
            row = encoding.to_row(record, encoding.DONE)
            at = encoding.purge_at(record, None)
            if rowid is None:
                key = record.key if self._store.readable_keys else None
                inserts.append((None, self._digest(record.key), consumer_id, key, at, *row))
            else:
                yield from self._say(encoding.UPDATE_RECORD, *row, rowid)
                yield from self._say(encoding.MOVE_RECORD, at, rowid)
                yield from self._say("DELETE FROM semel_extras WHERE id = ?", rowid)
                yield from self._say("DELETE FROM semel_journal WHERE id = ?", rowid)
        for some in encoding.chunks(inserts):
            statement, _, places = encoding.INSERT_RECORD.partition(" VALUES ")
            yield from self._say(
                f"{statement} VALUES {','.join([places] * len(some))}",
                *[part for row in some for part in row],
            )

    def _digest(self, key: str) -> bytes:
        """Return the key of the record's row, as the store's own statements build it."""
        found = digest((self.tenant, self.consumer, key))
        return by_time(time_in(self._ids, key), found) if holds_time(self._ids) else found

    def _consumer_id(self) -> Talk[int]:
        """Return the consumer's number; the first mark records its mode and ids. Raises if others are recorded."""
        scope = (self.tenant, self.consumer)
        query = "SELECT +id, +mode FROM semel_consumers WHERE tenant = ? AND consumer = ?"
        rows = yield from self._say(query, *scope)
        if not rows:
            yield from self._say("INSERT INTO semel_consumers (tenant, consumer) VALUES (?, ?)", *scope)
            rows = yield from self._say(query, *scope)
            if self._ids:
                yield from self._say("INSERT INTO semel_meta VALUES ('ids:' || ?, ?)", rows[0][0], self._ids)
        ((number, mode),) = rows
        kind = yield from self._say("SELECT +value FROM semel_meta WHERE name = 'ids:' || ?", number)
        if (str(kind[0][0]) if kind else "") != self._ids:
            raise IdsMismatch(
                f"consumer {self.consumer!r} is recorded with other ids than {self._ids or None!r}"
            )
        if mode is None:
            yield from self._say("UPDATE semel_consumers SET mode = 'inbox' WHERE id = ?", number)
        elif mode != "inbox":
            raise ModeMismatch(f"consumer {self.consumer!r} works in mode {mode!r}, not 'inbox'")
        return int(number)

    # --- the caller's connection ---

    def _say(self, text: str, *parameters: Any) -> Talk[list[Row]]:
        try:
            return (yield Statement(text, parameters))
        except Exception as error:
            raw = driver_error(error)
            if raw is None:
                raise
            raise to_store_error(raw, self._store.path) from error

    def _check_database(self) -> Talk[None]:
        files = {name: file for _, name, file in (yield from self._say("PRAGMA database_list"))}
        main = files.get("main", "")
        if not main or not Path(main).samefile(self._store.path):
            where = main or "a database in memory"
            raise WrongDatabase(
                f"the connection is to {where}, the store is {self._store.path}; use one file for both"
            )

    def _lock(self) -> Talk[int]:
        """Take the write lock in the caller's transaction. Returns the time by the store's clock."""
        ((busy_ms,),) = yield from self._say("PRAGMA busy_timeout")
        yield from self._say("PRAGMA busy_timeout = 0")
        try:
            yield from self._wait_for_lock()
        finally:
            yield from self._say(f"PRAGMA busy_timeout = {int(busy_ms)}")
        locks.refuse_inherited(self._store.path)
        ((last_us, offset_us),) = yield from self._say("SELECT +last_us, +offset_us FROM semel_clock")
        now, offset_us = self._store.clock.tick(last_us, offset_us)
        yield from self._say("UPDATE semel_clock SET last_us = ?, offset_us = ?", now, offset_us)
        return now

    def _wait_for_lock(self) -> Talk[None]:
        deadline = time.monotonic() + self.lock_wait_s
        while True:
            try:
                # Writing first makes the driver open its transaction, and SQLite take the lock before we read.
                yield Statement("UPDATE semel_clock SET last_us = last_us")
                return
            except Exception as error:  # noqa: BLE001 - drivers wrap it in errors of their own
                self._wait_or_give_up(error, deadline)
            yield PauseStep(jitter.uniform(RETRY_MIN_S, RETRY_MAX_S))

    def _wait_or_give_up(self, error: Exception, deadline: float) -> None:
        raw = driver_error(error)
        if raw is None:
            raise error
        if not isinstance(raw, sqlite3.OperationalError) or not is_busy(raw):
            raise to_store_error(raw, self._store.path) from error
        if raw.sqlite_errorcode == BUSY_SNAPSHOT:
            raise StillRunning(
                "the transaction has read a stale state, so it cannot write: roll it back and try"
                " again; call first() before anything else, or use BEGIN IMMEDIATE"
            ) from error
        if time.monotonic() >= deadline:
            raise StillRunning(
                f"another writer has held the lock of {self._store.path} for {self.lock_wait_s:g} s"
            ) from error


def driver_error(error: BaseException) -> sqlite3.Error | None:
    """Return the driver's own error, below any wrapper."""
    for each in _causes(error):
        if isinstance(each, sqlite3.Error):
            return each
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = getattr(error, "orig", None) or error.__cause__
