"""Marks inside the transaction of a `sqlite3` connection."""

import contextlib
import random
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from semel import codec
from semel.core.machine import check, standing
from semel.digests import digest
from semel.errors import ModeMismatch, NoTransaction, OutcomeUnknown, StillRunning, UsageError, WrongDatabase
from semel.keys.limits import check_all
from semel.stores.sqlite import wire
from semel.stores.sqlite.admin import extras_of
from semel.stores.sqlite.store import RETRY_MAX_S, RETRY_MIN_S, SqliteStore
from semel.stores.sqlite.trouble import is_busy, translated
from semel.types import Done, Id, Record

__all__ = ["SqliteInbox"]

LOCK_WAIT_S = 2.0
VALUE_BYTES_MAX = 256 * 1024
_BUSY_SNAPSHOT = 517
"""The transaction has read an older state, from which SQLite lets nobody begin to write."""
_COLUMNS = ", ".join(f"+{name}" for name in wire.COLUMNS.split(", "))
"""The plus takes the columns' declared types away, so that no converter of the caller gets at them."""


class SqliteInbox:
    """An inbox on the caller's `sqlite3.Connection`: it joins its transaction and never ends it.

    A mark is a `done` record of the store. `first` takes the database's write lock, which the
    transaction then holds, and waits for it at most `lock_wait_s`. Nothing is kept in this object: after
    a rollback, also to a savepoint, the same key is first again.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        store: SqliteStore,
        tenant: str,
        consumer: str,
        window_us: Callable[[str], int],
        lock_wait_s: float = LOCK_WAIT_S,
        value_bytes_max: int = VALUE_BYTES_MAX,
    ) -> None:
        self._connection = connection
        self._store = store
        self._scope = (tenant, consumer)
        self._window_us = window_us
        self._lock_wait_s = lock_wait_s
        self._value_bytes_max = value_bytes_max
        store.send([])  # the start checks, and the tables
        self._check_database()

    def first(self, key: str, *, event_type: str = "") -> bool:
        """Mark the event in the caller's transaction; `False`: it was marked before.

        Raises `StillRunning` when another writer keeps the lock or a claim is running on the key,
        `NoTransaction` where nothing would hold the mark. The transaction stays usable.
        """
        return self.first_many([key], event_type=event_type)[0]

    def first_many(self, keys: Sequence[str], *, event_type: str = "") -> list[bool]:
        """Mark many events with one statement, all or none; a later copy of a key is `False`."""
        check_all(keys)
        window_us = self._window_us(event_type)
        with self._cursor(writes=True) as cursor:
            if not window_us:
                return [True] * len(keys)  # no deduplication for this type
            now = self._lock(cursor)
            rows = self._read(cursor, list(dict.fromkeys(keys)))
            new: dict[str, Record] = {}
            for key, (_, stored) in rows.items():
                mark = self._decide((*self._scope, key), stored, now, window_us, event_type)
                if mark is not None:
                    new[key] = mark
            self._write(cursor, [(rows[key][0], record) for key, record in new.items()])
            return [new.pop(key, None) is not None for key in keys]

    def store(self, key: str, value: Any) -> None:
        """Keep a value with the mark, for `replay`. Raises `UsageError` if the key is not marked."""
        encoded = codec.encode(value, bytes_max=self._value_bytes_max)
        with self._cursor(writes=True) as cursor:
            now = self._lock(cursor)
            rowid, stored = self._read(cursor, [key])[key]
            record = standing(stored, now)
            if record is None or record.state != "done":
                raise UsageError(f"{key!r} is not marked; call first({key!r}) before store()")
            cursor.execute("UPDATE semel_records SET value = ? WHERE id = ?", (encoded, rowid))

    def replay(self, key: str) -> Done[Any] | None:
        """What was kept with the mark; `None`: the event is not done. Changes nothing."""
        with self._cursor(writes=False) as cursor:
            last_us, offset_us = cursor.execute("SELECT +last_us, +offset_us FROM semel_clock").fetchone()
            now, _ = self._store.clock.tick(last_us, offset_us)
            record = standing(self._read(cursor, [key])[key][1], now)
        if record is None or record.state != "done":
            return None
        if record.value is None:
            return Done(None, replayed=True, kept=False)
        return Done(codec.decode(record.value), replayed=True)

    # --- what a key comes to ---

    def _decide(
        self, record_id: Id, stored: Record | None, now: int, window_us: int, event_type: str
    ) -> Record | None:
        """The mark to write; `None`: the event is done, or failed for good."""
        record = standing(stored, now)
        if record is not None and record.state in ("done", "failed"):
            return None
        if record is not None and record.state == "unknown":
            raise OutcomeUnknown(f"{record_id[2]!r} is quarantined: resolve it first")
        if record is not None and record.state == "claimed" and record.lease_until > now:
            rest_s = (record.lease_until - now) / 1e6
            raise StillRunning(f"another attempt holds {record_id[2]!r} for {rest_s:.3f} s", rest_s)
        orphan = record if record is not None and record.state == "claimed" else None
        return check(
            Record(
                id=record_id,
                state="done",
                owner=b"",
                fence=now if stored is None or stored.fence < now else stored.fence + 1,
                lease_until=0,
                attempt=1 if orphan is None else orphan.attempt + 1,
                expires_at=now + window_us,
                first_seen=now if orphan is None else orphan.first_seen,
                settled_at=now,
                event_type=event_type,
            )
        )

    def _read(self, cursor: sqlite3.Cursor, keys: list[str]) -> dict[str, tuple[int | None, Record | None]]:
        """The row number and record of each key."""
        digests = {digest((*self._scope, key)): key for key in keys}
        found: dict[str, tuple[int | None, Record | None]] = dict.fromkeys(keys, (None, None))
        for some in wire.chunks(list(digests)):
            cursor.execute(wire.select_records(len(some), _COLUMNS), some)
            rows = cursor.fetchall()
            for row, beside in zip(rows, extras_of(cursor, rows), strict=True):
                key = digests[row[1]]
                found[key] = (row[0], wire.from_row(row, (*self._scope, key), *beside))
        return found

    def _write(self, cursor: sqlite3.Cursor, marks: list[tuple[int | None, Record]]) -> None:
        if not marks:
            return
        consumer_id = self._consumer_id(cursor)
        inserts: list[wire.Row] = []
        for rowid, record in marks:
            row = wire.to_row(record, wire.DONE)
            at = wire.purge_at(record, None)
            if rowid is None:
                key = record.key if self._store.readable_keys else None
                inserts.append((None, digest(record.id), consumer_id, key, at, *row))
            else:
                cursor.execute(wire.UPDATE_RECORD, (*row, rowid))
                cursor.execute(wire.MOVE_RECORD, (at, rowid))
                cursor.execute("DELETE FROM semel_extras WHERE id = ?", (rowid,))
                cursor.execute("DELETE FROM semel_journal WHERE id = ?", (rowid,))
        for some in wire.chunks(inserts):
            statement, _, places = wire.INSERT_RECORD.partition(" VALUES ")
            cursor.execute(
                f"{statement} VALUES {','.join([places] * len(some))}", [part for row in some for part in row]
            )

    def _consumer_id(self, cursor: sqlite3.Cursor) -> int:
        """The consumer's number; its mode is recorded with its first mark. Raises `ModeMismatch`."""
        query = "SELECT +id, +mode FROM semel_consumers WHERE tenant = ? AND consumer = ?"
        row = cursor.execute(query, self._scope).fetchone()
        if row is None:
            cursor.execute("INSERT INTO semel_consumers (tenant, consumer) VALUES (?, ?)", self._scope)
            row = cursor.execute(query, self._scope).fetchone()
        number, mode = row
        if mode is None:
            cursor.execute("UPDATE semel_consumers SET mode = 'inbox' WHERE id = ?", (number,))
        elif mode != "inbox":
            raise ModeMismatch(f"consumer {self._scope[1]!r} works in mode {mode!r}, not 'inbox'")
        return int(number)

    # --- the caller's connection ---

    @contextlib.contextmanager
    def _cursor(self, *, writes: bool) -> Iterator[sqlite3.Cursor]:
        """A cursor that the caller's factories do not touch, closed again."""
        connection = self._connection
        if writes:
            self._check_transaction()
        text_factory = connection.text_factory
        cursor = sqlite3.Connection.cursor(connection)
        cursor.row_factory = None
        connection.text_factory = str
        try:
            yield cursor
        except sqlite3.Error as error:
            raise translated(error, self._store.path) from error
        finally:
            connection.text_factory = text_factory
            cursor.close()

    def _check_transaction(self) -> None:
        connection = self._connection
        if connection.in_transaction:
            return
        autocommit = getattr(connection, "autocommit", -1)  # since Python 3.12
        if autocommit is True or (autocommit == -1 and connection.isolation_level is None):
            raise NoTransaction(
                "the connection is in autocommit mode and no transaction is open, so nothing would hold mark and"
                " effect together; execute BEGIN first"
            )

    def _check_database(self) -> None:
        with self._cursor(writes=False) as cursor:
            files = {name: file for _, name, file in cursor.execute("PRAGMA database_list").fetchall()}
        main = files.get("main", "")
        if not main or not Path(main).samefile(self._store.path):
            where = main or "a database in memory"
            raise WrongDatabase(
                f"the connection is to {where}, the store is {self._store.path}; use one file for both"
            )

    def _lock(self, cursor: sqlite3.Cursor) -> int:
        """Take the write lock in the caller's transaction; the time by the store's clock."""
        (busy_ms,) = cursor.execute("PRAGMA busy_timeout").fetchone()
        cursor.execute("PRAGMA busy_timeout = 0")
        try:
            last_us, offset_us = self._wait_for_lock(cursor)
        finally:
            cursor.execute(f"PRAGMA busy_timeout = {busy_ms}")
        now, offset_us = self._store.clock.tick(last_us, offset_us)
        cursor.execute("UPDATE semel_clock SET last_us = ?, offset_us = ?", (now, offset_us))
        return now

    def _wait_for_lock(self, cursor: sqlite3.Cursor) -> tuple[int, int]:
        deadline = time.monotonic() + self._lock_wait_s
        while True:
            try:
                # Writing first makes the driver open its transaction, and SQLite take the lock before we read.
                cursor.execute("UPDATE semel_clock SET last_us = last_us")
                last_us, offset_us = cursor.execute("SELECT +last_us, +offset_us FROM semel_clock").fetchone()
                return last_us, offset_us
            except sqlite3.OperationalError as error:
                if not is_busy(error):
                    raise
                if error.sqlite_errorcode == _BUSY_SNAPSHOT:
                    raise StillRunning(
                        "the transaction has read before others wrote, so it cannot write any more: roll it back"
                        " and try again; call first() before anything else, or use BEGIN IMMEDIATE"
                    ) from error
                if time.monotonic() >= deadline:
                    raise StillRunning(
                        f"another writer has held the lock of {self._store.path} for {self._lock_wait_s:g} s"
                    ) from error
            time.sleep(random.uniform(RETRY_MIN_S, RETRY_MAX_S))  # noqa: S311 - no secret hangs on it
