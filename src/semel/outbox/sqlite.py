"""The outbox in an SQLite file: one relay at a time, elected by a lock on a file beside it."""

import asyncio
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from semel.core.relay_flow import OutboxRow, RowFailure
from semel.errors import StoreRefused
from semel.outbox.tables import (
    COLUMNS,
    ENTRY_COLUMNS,
    FOREVER,
    KEEP_US,
    STATES,
    Entry,
    OutboxCounts,
    State,
    entry_of,
    row_of,
)
from semel.stores.sqlite.errors import to_store_error
from semel.stores.sqlite.store import SqliteStore

__all__ = ["SqliteRows"]

T = TypeVar("T")
LOOK_S = 0.02
"""How often an idle relay checks for writes of other connections; the check does not touch the disk."""
BUSY_WAIT_S = 10.0

_TAKE = f"""
SELECT {COLUMNS} FROM semel_outbox AS o
WHERE settled_at IS NULL AND state = 0 AND next_at <= :now AND (not_before IS NULL OR not_before <= :now)
    AND NOT EXISTS (
        SELECT 1 FROM semel_outbox AS b
        WHERE b.aggregate_type = o.aggregate_type AND b.aggregate_id = o.aggregate_id AND b.seq < o.seq
            AND b.settled_at IS NULL AND b.next_at > 0 AND b.next_at > :now)
ORDER BY seq LIMIT :rows
"""
_PUBLISHED = """
UPDATE semel_outbox SET
    state = 1, settled_at = :now, gone_at = :now + max(keep_us, :keep), next_at = 0, error = NULL
WHERE id = :id AND settled_at IS NULL
"""
_FAILED = """
UPDATE semel_outbox SET attempts = attempts + ?, error = coalesce(?, error), state = ?, next_at = ?
WHERE id = ? AND settled_at IS NULL AND state = 0
"""
_CLEAN = """
DELETE FROM semel_outbox WHERE seq IN (
    SELECT seq FROM semel_outbox
    WHERE gone_at <= :now AND settled_at <= :now - (SELECT coalesce(max(window_us), 0) FROM semel_windows)
    ORDER BY gone_at LIMIT :rows)
"""
_COUNTS = """
SELECT coalesce(sum(state = 0), 0), coalesce(sum(state = 2), 0),
    coalesce(max(CASE WHEN state = 0 THEN :now - created_at END), 0)
FROM semel_outbox WHERE settled_at IS NULL
"""
_RETRY = "UPDATE semel_outbox SET state = 0, attempts = 0, next_at = 0 WHERE settled_at IS NULL AND state = 2"
_DROP = """
UPDATE semel_outbox SET state = 3, settled_at = :now, gone_at = :now + max(keep_us, :keep), next_at = 0
WHERE id = :id AND settled_at IS NULL
"""


class SqliteRows:
    """The outbox in a store's file. Statements run in one thread of its own, so that no event loop waits for a disk."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self.name: str = store.name
        self._thread: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection | None = None
        self._lock = -1
        self._version = -1

    async def open(self) -> None:
        """Run the store's start checks, then connect."""

        def connect() -> sqlite3.Connection:
            self._store.open()
            self._store.close()
            connection = sqlite3.connect(
                self._store.path, timeout=BUSY_WAIT_S, isolation_level=None, check_same_thread=False
            )
            connection.execute("PRAGMA synchronous = NORMAL")  # a lost update means one more publication
            return connection

        self._thread = ThreadPoolExecutor(1, "semel-outbox")
        self._connection = await self._in_thread(connect)

    async def close(self) -> None:
        """Close the connection and release the lock."""
        connection, self._connection = self._connection, None
        thread, self._thread = self._thread, None
        if thread is not None:
            if connection is not None:
                await asyncio.get_running_loop().run_in_executor(thread, connection.close)
            thread.shutdown()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def share(self) -> bool:
        """Try to get the lock: one relay has all rows, the others wait."""
        if self._lock >= 0:
            return True
        descriptor = os.open(f"{self._store.path}-relay", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._lock = descriptor
        return True

    async def take(self, rows_max: int, bytes_max: int) -> list[OutboxRow]:
        """Take rows with one statement, up to the limits."""

        def read(connection: sqlite3.Connection) -> list[OutboxRow]:
            # Read the version first: later writes change it, even if the statement below sees them.
            self._version = connection.execute("PRAGMA data_version").fetchone()[0]
            rows: list[OutboxRow] = []
            size = 0
            for values in connection.execute(_TAKE, {"now": now_us(), "rows": rows_max}):
                row = row_of(values)
                size += len(row.payload)
                if rows and size > bytes_max:
                    break
                rows.append(row)
            return rows

        return await self._with(read)

    async def settle(self, published: Sequence[str], failures: Sequence[RowFailure], keep_us: int) -> None:
        """Run in one transaction."""
        now = now_us()

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany(
                _PUBLISHED, [{"now": now, "keep": keep_us, "id": each} for each in published]
            )
            connection.executemany(
                _FAILED,
                [
                    (
                        each.reason is not None,
                        each.reason,
                        2 if each.dead else 0,
                        _next_at(each, now),
                        each.id,
                    )
                    for each in failures
                ],
            )

        await self._with(write, writes=True)

    async def wait(self, wait_s: float) -> None:
        """Poll until another connection has written: SQLite has no notifications."""
        give_up_at = time.monotonic() + wait_s
        while time.monotonic() < give_up_at:
            (version,) = await self._with(
                lambda connection: connection.execute("PRAGMA data_version").fetchone()
            )
            if version != self._version:
                return
            await asyncio.sleep(min(LOOK_S, wait_s))

    async def clean(self, rows_max: int) -> int:
        """Remove old rows with one statement."""
        values = {"now": now_us(), "rows": rows_max}
        return await self._with(lambda connection: connection.execute(_CLEAN, values).rowcount, writes=True)

    # --- for operators ---

    async def counts(self) -> OutboxCounts:
        """Count by the index of unsettled rows."""
        pending, dead, age_us = await self._with(
            lambda connection: connection.execute(_COUNTS, {"now": now_us()}).fetchone()
        )
        return OutboxCounts(pending, dead, age_us / 1e6)

    async def entries(self, state: State | None, after: int, rows_max: int) -> list[Entry]:
        """List rows by number."""
        chosen = "1" if state is None else f"state = {STATES.index(state)}"
        if state in ("pending", "dead"):
            chosen += " AND settled_at IS NULL"
        text = f"SELECT {ENTRY_COLUMNS} FROM semel_outbox WHERE {chosen} AND seq > ? ORDER BY seq LIMIT ?"
        found = await self._with(lambda connection: connection.execute(text, (after, rows_max)).fetchall())
        return [entry_of(values) for values in found]

    async def entry(self, message_id: str) -> Entry | None:
        """Find a row by the index of ids."""
        text = f"SELECT {ENTRY_COLUMNS} FROM semel_outbox WHERE id = ?"
        found = await self._with(lambda connection: connection.execute(text, (message_id,)).fetchone())
        return None if found is None else entry_of(found)

    async def retry(self, message_ids: Sequence[str] | None) -> int:
        """Run in one transaction."""

        def write(connection: sqlite3.Connection) -> int:
            if message_ids is None:
                return connection.execute(_RETRY).rowcount
            return connection.executemany(f"{_RETRY} AND id = ?", [(each,) for each in message_ids]).rowcount

        return await self._with(write, writes=True)

    async def drop(self, message_ids: Sequence[str]) -> int:
        """Run in one transaction."""
        values = [{"now": now_us(), "keep": KEEP_US, "id": each} for each in message_ids]
        return await self._with(
            lambda connection: connection.executemany(_DROP, values).rowcount, writes=True
        )

    # --- the connection ---

    async def _with(self, work: Callable[[sqlite3.Connection], T], *, writes: bool = False) -> T:
        """Run in the thread; writes are one transaction."""
        connection = self._connection
        if connection is None:
            raise StoreRefused(f"the outbox in {self.name} is not open")

        def run() -> T:
            try:
                if not writes:
                    return work(connection)
                connection.execute("BEGIN IMMEDIATE")
                try:
                    done = work(connection)
                    connection.execute("COMMIT")
                finally:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
            except sqlite3.Error as error:
                raise to_store_error(error, self._store.path) from error
            return done

        return await self._in_thread(run)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        assert self._thread is not None
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def now_us() -> int:
    """This computer's clock."""
    return time.time_ns() // 1000


def _next_at(failure: RowFailure, now: int) -> int:
    if failure.passed:
        return 0
    return FOREVER if failure.dead else now + failure.delay_us
