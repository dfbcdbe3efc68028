"""The table `events`: one row for each event that was processed, whoever processed it and however often."""

import asyncio
import re
import sqlite3
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, Self
from urllib.parse import unquote, urlsplit

from semel.errors import StoreUnavailable, StoreUnknown
from semel.intake import Event, Handler

__all__ = ["EventTable"]

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}", re.ASCII)
BUSY_S = 30.0
CONNECT_S = 10
LINES = 4
"""Connections to PostgreSQL: rows of one instance are written side by side."""

_POSTGRES = """
CREATE TABLE IF NOT EXISTS {table} (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_id text NOT NULL UNIQUE,
    type text NOT NULL,
    payload jsonb NOT NULL,
    processed_at timestamptz NOT NULL DEFAULT now()
)
"""
_SQLITE = """
CREATE TABLE IF NOT EXISTS {table} (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    event_id TEXT NOT NULL UNIQUE,
    type TEXT NOT NULL,
    payload TEXT NOT NULL,
    processed_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ'))
)
"""


class Place(Protocol):
    """A database that takes rows."""

    async def insert(self, event: Event) -> bool:
        """Whether the row is new."""

    async def close(self) -> None:
        """Let go."""


class EventTable:
    """Events in PostgreSQL (`postgresql://...`) or SQLite (`sqlite:///events.db`), made at first use.

    `persist` is a handler by itself; `after(handler)` runs yours first. Either may run again after a crash: the
    unique `event_id` keeps the row single, and what your handler does elsewhere needs the idempotency key.
    """

    def __init__(self, url: str, *, table: str = "events") -> None:
        if not _NAME.fullmatch(table):
            raise StoreUnknown(f"{table!r} is no name for a table; use a-z, 0-9 and _")
        self._place: Place
        if url.startswith(("postgresql://", "postgres://")):
            self._place = Postgres(url, table)
        elif url.startswith("sqlite:///"):
            self._place = Sqlite(Path(unquote(urlsplit(url).path[1:])), table)
        else:
            raise StoreUnknown("events are persisted to postgresql://... or sqlite:///file.db")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def persist(self, event: Event) -> None:
        """One row for this event, now or earlier. Raises `StoreUnavailable`, and the database's own errors."""
        await self._place.insert(event)

    def after(self, handler: Callable[[Event], Awaitable[Any]]) -> Handler:
        """A handler that runs yours, and persists what it returned from."""

        async def process(event: Event) -> None:
            await handler(event)
            await self.persist(event)

        return process

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._place.close()


class Sqlite:
    """One connection in one thread: SQLite blocks, and the loop must not."""

    def __init__(self, path: Path, table: str) -> None:
        self._path = path
        self._table = table
        self._connection: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, "semel-events")

    async def insert(self, event: Event) -> bool:
        """Whether the row is new. Committed before it returns, also if nobody waits any more."""
        written = asyncio.get_running_loop().run_in_executor(self._thread, self._insert, event)
        return await asyncio.shield(written)

    def _insert(self, event: Event) -> bool:
        try:
            if self._connection is None:
                self._connection = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.execute("PRAGMA synchronous=FULL")
                self._connection.execute(_SQLITE.format(table=self._table))
            cursor = self._connection.execute(
                f"INSERT INTO {self._table} (event_id, type, payload) VALUES (?, ?, ?)"  # noqa: S608 - checked
                " ON CONFLICT (event_id) DO NOTHING",
                (event.id, event.type, event.body.decode()),
            )
        except sqlite3.OperationalError as error:
            raise StoreUnavailable(f"{self._path}: {error}") from error
        return cursor.rowcount == 1

    async def close(self) -> None:
        """Close the connection where it was opened."""
        with suppress(RuntimeError):  # closed before
            await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Postgres:
    """A few connections, each made again when it breaks."""

    def __init__(self, url: str, table: str) -> None:
        try:
            import psycopg
        except ImportError:
            raise StoreUnknown(
                "PostgreSQL needs psycopg; install the extra: pip install 'semel[postgres]'"
            ) from None
        self._psycopg = psycopg
        self._url = url
        self._table = table
        self._free: list[Any] = []
        self._room = asyncio.Semaphore(LINES)
        self._made = asyncio.Lock()
        self._is_made = False

    async def insert(self, event: Event) -> bool:
        """Whether the row is new."""
        async with self._room:
            try:
                connection = self._free.pop() if self._free else await self._connect()
                try:
                    cursor = await connection.execute(
                        f"INSERT INTO {self._table} (event_id, type, payload) VALUES (%s, %s, %s::jsonb)"  # noqa: S608
                        " ON CONFLICT (event_id) DO NOTHING",
                        (event.id, event.type, event.body.decode()),
                    )
                finally:
                    if connection.closed or connection.broken:
                        await connection.close()
                    else:
                        self._free.append(connection)
            except self._psycopg.OperationalError as error:
                raise StoreUnavailable(f"the table of events: {error}") from error
            return bool(cursor.rowcount == 1)

    async def _connect(self) -> Any:
        connection = await self._psycopg.AsyncConnection.connect(
            self._url, autocommit=True, connect_timeout=CONNECT_S
        )
        async with self._made:
            if not self._is_made:
                # Instances that start together would otherwise make it twice, and one of them fail.
                async with connection.transaction():
                    await connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (self._table,))
                    await connection.execute(_POSTGRES.format(table=self._table))
                self._is_made = True
        return connection

    async def close(self) -> None:
        """Close what is open."""
        while self._free:
            await self._free.pop().close()
