"""The table `events`: one row for each processed event, however often it was processed.

Tenant and id identify an event. Rows that come while others are being written share the next commit.
"""

import asyncio
import logging
import re
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, Self
from urllib.parse import unquote, urlsplit

from msgspec import Struct
from msgspec.structs import asdict, fields

from semel.brokers.routes import in_loop
from semel.errors import PolicyInvalid, StoreUnavailable, StoreUnknown
from semel.ingest.intake import Event, Handler
from semel.runtime.extras import install_command
from semel.stores.sqlite.schema import create_private

__all__ = ["EventTable"]

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}", re.ASCII)


class Columns(Struct, frozen=True, kw_only=True):
    """Column names of a table of events. `tenant=""`: no such column; it takes only events without a tenant.

    A table such as `events (event_id UNIQUE, event_type, payload, processed_at DEFAULT now())` is
    `Columns(type="event_type", tenant="")`.
    """

    event_id: str = "event_id"
    type: str = "type"
    payload: str = "payload"
    tenant: str = "tenant"

    def __post_init__(self) -> None:
        for field, name in asdict(self).items():
            if not (field == "tenant" and not name) and not _NAME.fullmatch(name):
                raise StoreUnknown(f"{name!r} is not a valid name for the column {field}; use a-z, 0-9 and _")

    @property
    def names(self) -> tuple[str, ...]:
        """The written columns, in the order of `values`."""
        written = (self.event_id, self.type, self.payload)
        return (self.tenant, *written) if self.tenant else written

    @property
    def identity(self) -> frozenset[str]:
        """The columns that must be unique together."""
        return frozenset({self.event_id, self.tenant} - {""})

    def values(self, tenant: str, event_id: str, kind: str, payload: str) -> tuple[str, ...]:
        """Return the values of `names`. Raises `PolicyInvalid` for a tenant if the table has no column for it."""
        if self.tenant:
            return (tenant, event_id, kind, payload)
        if tenant:
            raise PolicyInvalid(
                f"event {event_id!r} is of tenant {tenant!r}, and the table of events has no column for tenants: equal"
                " ids of two tenants would be taken for one event"
            )
        return (event_id, kind, payload)


def columns_of(text: str) -> Columns:
    """Parse column names such as `type=event_type,tenant=`. Raises `StoreUnknown`."""
    said = dict(part.partition("=")[::2] for part in text.split(",") if part)
    known = [field.name for field in fields(Columns)]
    unknown = set(said) - set(known)
    if unknown:
        raise StoreUnknown(f"{min(unknown)} is not a column of an event; known are {', '.join(known)}")
    return Columns(**said)


class Layout(Struct, frozen=True):
    """The definition of a table in the database."""

    columns: Mapping[str, bool]
    """By name: whether a row must have a value, because the column has no default and is not nullable."""
    unique: Collection[frozenset[str]]
    """The sets of columns with a unique index over all rows."""


def check_layout(table: str, layout: Layout, columns: Columns) -> None:
    """Check that events can be written into an existing table. Raises `PolicyInvalid` with the fix."""
    missing = sorted(set(columns.names) - layout.columns.keys())
    if missing:
        raise PolicyInvalid(
            f"there is a table {table} already, for something else: it has no {', '.join(missing)}; give the events"
            " another table, or name its columns: Columns(type=..., tenant=...)"
        )
    unfilled = sorted(name for name, needed in layout.columns.items() if needed and name not in columns.names)
    if unfilled:
        raise PolicyInvalid(
            f"the table {table} needs a value for {', '.join(unfilled)}, which an event does not have: give the"
            " column a default, or the events another table"
        )
    if columns.identity not in layout.unique:
        wanted = ", ".join(sorted(columns.identity))
        raise PolicyInvalid(
            f"the table {table} would hold an event twice: CREATE UNIQUE INDEX ON {table} ({wanted})"
        )


_log = logging.getLogger("semel")

BUSY_S = 30.0
CONNECT_S = 10
ROWS_MAX = 500
"""The most rows in one commit."""

_POSTGRES = """
CREATE TABLE IF NOT EXISTS {table} (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    {tenant} text NOT NULL DEFAULT '',
    {event_id} text NOT NULL,
    {type} text NOT NULL,
    {payload} json NOT NULL,
    processed_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE ({event_id}, {tenant})
)
"""
_POSTGRES_COLUMNS = """
SELECT attname::text, attnotnull AND NOT atthasdef AND attidentity = '' FROM pg_attribute
WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped
"""
_POSTGRES_UNIQUE = """
SELECT array_agg(attname::text) FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY(indkey)
WHERE indrelid = to_regclass(%s) AND indisunique AND indisvalid AND indpred IS NULL AND indexprs IS NULL
GROUP BY indexrelid
"""
# json, not jsonb: that refuses texts with a NUL or half a surrogate pair, and such an event would never be persisted.
_SQLITE = """
CREATE TABLE IF NOT EXISTS {table} (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    {tenant} TEXT NOT NULL DEFAULT '',
    {event_id} TEXT NOT NULL,
    {type} TEXT NOT NULL,
    {payload} TEXT NOT NULL,
    processed_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ')),
    UNIQUE ({event_id}, {tenant})
)
"""


class TableBackend(Protocol):
    """A database that takes rows."""

    async def layout(self) -> Layout | None:
        """Return the table's definition, or `None` if it does not exist. Raises `StoreUnavailable`."""

    async def insert(self, events: Sequence[Event], /) -> None:
        """Insert missing rows in one transaction. Raises `StoreUnavailable`, and the database's errors."""

    async def find(self, tenant: str, event_id: str, /) -> tuple[str, str] | None:
        """Return type and payload of a row; the table must exist. Raises `StoreUnavailable`."""

    async def close(self) -> None:
        """Close the connection; it may be used again."""


class EventTable:
    """A table of events in PostgreSQL (`postgresql://...`) or SQLite (`sqlite:///events.db`), created at first use.

    `persist` is a handler by itself; `after(handler)` runs yours first. Either may run again after a crash: tenant and
    `event_id` are unique together, so the row stays single; effects of your handler elsewhere need the idempotency
    key. An existing table is checked at the start of `async with` and of an `Intake` with it;
    `columns` names its columns. The URL may be that of a store: semel's own options are ignored.
    In PostgreSQL the table is in the first schema of the search path, not in semel's schema.
    """

    def __init__(self, url: str, *, table: str = "events", columns: Columns | None = None) -> None:
        if not _NAME.fullmatch(table):
            raise StoreUnknown(f"{table!r} is not a valid name for a table; use a-z, 0-9 and _")
        self._name = table
        self._columns = columns or Columns()
        self._place: TableBackend
        if url.startswith(("postgresql://", "postgres://")):
            self._place = Postgres(url, table, self._columns)
        elif url.startswith("sqlite:///"):
            self._place = Sqlite(Path(unquote(urlsplit(url).path[1:])), table, self._columns)
        else:
            raise StoreUnknown("events are persisted to postgresql://... or sqlite:///file.db")
        self._waiting: list[tuple[Event, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.check_at_start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def check(self) -> None:
        """Check that an existing table of that name takes events. Raises `PolicyInvalid`, `StoreUnavailable`."""
        layout = await self._place.layout()
        if layout is not None:
            check_layout(self._name, layout, self._columns)

    async def check_at_start(self) -> None:
        """As `check`, but only warns if the database does not answer: events wait for it."""
        try:
            await self.check()
        except StoreUnavailable as error:
            _log.warning("the table of events was not checked: %s", error)

    async def persist(self, event: Event) -> None:
        """Write the row of this event unless it exists. Raises `StoreUnavailable`, and the database's errors.

        Committed before it returns, even if the caller is cancelled.
        """
        self.check_event(event)  # refuse one bad event alone
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((event, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(), name="semel-events")
        await written

    async def find(self, tenant: str, event_id: str) -> Event | None:
        """Return the event of that tenant and id, or `None`. Raises `StoreUnavailable`."""
        found = await self._place.find(tenant, event_id) if await self._place.layout() is not None else None
        if found is None:
            return None
        return Event(id=event_id, type=found[0], tenant=tenant, body=found[1].encode())

    def check_event(self, event: Event) -> None:
        """Raise `PolicyInvalid` for an event with a tenant if the table has no column for it."""
        self._columns.values(event.tenant, event.id, event.type, event.body.decode())

    def after(self, handler: Callable[[Event], Any]) -> Handler:
        """Return a handler that runs yours (in a thread if it blocks), then persists the event."""
        call = in_loop(handler)

        @wraps(handler)
        async def process(event: Event) -> None:
            await call(event)
            await self.persist(event)

        process.check_at_start = self.check_at_start  # type: ignore[attr-defined]  # an intake awaits it
        return process

    async def close(self) -> None:
        """Write waiting rows and close the connections. Idempotent."""
        if self._writing is not None:
            await self._writing
        await self._place.close()

    async def _write(self) -> None:
        """Write queued rows until none is left."""
        while self._waiting:
            batch, self._waiting = self._waiting[:ROWS_MAX], self._waiting[ROWS_MAX:]
            error = await self._insert([event for event, _ in batch])
            if error is None or isinstance(error, StoreUnavailable):
                for _, written in batch:
                    _finish(written, error)
                continue
            for event, written in batch:  # one row is bad: write the others
                _finish(written, await self._insert([event]))

    async def _insert(self, events: list[Event]) -> Exception | None:
        try:
            # In the order of their ids, to avoid a deadlock of two instances that write the same rows.
            await self._place.insert(sorted(events, key=lambda event: (event.id, event.tenant)))
        except Exception as error:  # noqa: BLE001 - it belongs to those who wait for the rows
            return error
        return None


def _create_statement(statement: str, table: str, columns: Columns) -> str:
    """Return the CREATE TABLE statement; without tenants the key has no tenant either."""
    if not columns.tenant:
        lines = [line for line in statement.splitlines() if not line.strip().startswith("{tenant}")]
        statement = "\n".join(lines).replace("({event_id}, {tenant})", "({event_id})")
    return statement.format(table=table, **asdict(columns))


def _rows(columns: Columns, events: Sequence[Event]) -> list[tuple[str, ...]]:
    return [columns.values(event.tenant, event.id, event.type, event.body.decode()) for event in events]


def _of_tenant(
    query: str, mark: str, columns: Columns, event_id: str, tenant: str
) -> tuple[str, tuple[str, ...]]:
    if columns.tenant:
        return f"{query} AND {columns.tenant} = {mark}", (event_id, tenant)
    return query, (event_id,)


def _finish(written: asyncio.Future[None], error: Exception | None) -> None:
    if written.done():
        return  # the caller has gone
    if error is None:
        written.set_result(None)
    else:
        written.set_exception(error)


class Sqlite:
    """One connection in a thread of its own, because SQLite blocks."""

    def __init__(self, path: Path, table: str, columns: Columns) -> None:
        self._path = path
        self._table = table
        self._columns = columns
        self._connection: sqlite3.Connection | None = None
        self._thread: ThreadPoolExecutor | None = None

    async def layout(self) -> Layout | None:
        """Read the definition without creating a file."""
        return await asyncio.to_thread(self._layout)

    def _layout(self) -> Layout | None:
        rows = self._ask(f"PRAGMA table_info({self._table})")
        if not rows:
            return None
        keys = [name for _, name, *_, place in rows if place]
        unique = {frozenset(keys)} if keys else set()
        for _, index, is_unique, _, partial in self._ask(f"PRAGMA index_list({self._table})"):
            if is_unique and not partial:
                unique.add(frozenset(row[2] for row in self._ask(f'PRAGMA index_info("{index}")')))
        # INTEGER PRIMARY KEY fills itself
        needed = {
            name: bool(filled) and default is None and not (place and kind.upper() == "INTEGER")
            for _, name, kind, filled, default, place in rows
        }
        return Layout(needed, unique)

    async def find(self, tenant: str, event_id: str) -> tuple[str, str] | None:
        """Read on a separate connection."""
        names = self._columns
        query = f"SELECT {names.type}, {names.payload} FROM {self._table} WHERE {names.event_id} = ?"  # noqa: S608 - checked
        query, parameters = _of_tenant(query, "?", names, event_id, tenant)
        found = await asyncio.to_thread(self._ask, query, *parameters)
        return found[0] if found else None

    def _ask(self, query: str, *parameters: str) -> list[Any]:
        if not self._path.exists():
            return []
        try:
            with closing(sqlite3.connect(self._path, timeout=BUSY_S)) as connection:
                return connection.execute(query, parameters).fetchall()
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{self._path}: {error}") from error

    async def insert(self, events: Sequence[Event]) -> None:
        """Insert in one transaction."""
        self._thread = self._thread or ThreadPoolExecutor(1, "semel-events")
        await asyncio.get_running_loop().run_in_executor(self._thread, self._insert, events)

    def _insert(self, events: Sequence[Event]) -> None:
        try:
            connection = self._connection = self._connection or self._connect()
            connection.execute("BEGIN IMMEDIATE")
            try:
                names = self._columns.names
                connection.executemany(
                    f"INSERT INTO {self._table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"  # noqa: S608
                    " ON CONFLICT DO NOTHING",
                    _rows(self._columns, events),
                )
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        except sqlite3.OperationalError as error:
            raise StoreUnavailable(f"{self._path}: {error}") from error

    def _connect(self) -> sqlite3.Connection:
        create_private(self._path)
        connection = sqlite3.connect(
            self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(_create_statement(_SQLITE, self._table, self._columns))
        return connection

    async def close(self) -> None:
        """Close the connection and the thread."""
        thread, self._thread = self._thread, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if thread is not None:
            thread.shutdown()


class Postgres:
    """One connection, reopened when it breaks."""

    def __init__(self, url: str, table: str, columns: Columns) -> None:
        try:
            import psycopg
        except ImportError:
            raise StoreUnknown(
                f"PostgreSQL needs psycopg; install the extra: {install_command('postgres')}"
            ) from None
        self._psycopg = psycopg
        from semel.stores.postgres import split_url

        self._url = split_url(url)[0]
        self._table = table
        self._columns = columns
        self._connection: Any = None
        self._is_made = False

    async def layout(self) -> Layout | None:
        """Read the definition of the first table of that name in the search path."""
        rows = await self._ask(_POSTGRES_COLUMNS, self._table)
        if not rows:
            return None
        indexes = await self._ask(_POSTGRES_UNIQUE, self._table)
        return Layout(dict(rows), {frozenset(names) for (names,) in indexes})

    async def find(self, tenant: str, event_id: str) -> tuple[str, str] | None:
        """Read on a separate connection."""
        names = self._columns
        query = f"SELECT {names.type}, {names.payload}::text FROM {self._table} WHERE {names.event_id} = %s"  # noqa: S608
        query, parameters = _of_tenant(query, "%s", names, event_id, tenant)
        found = await self._ask(query, *parameters)
        return found[0] if found else None

    async def _ask(self, query: str, *parameters: str) -> list[Any]:
        try:
            async with await self._open_connection() as connection:
                rows: list[Any] = await (await connection.execute(query, parameters)).fetchall()
                return rows
        except self._psycopg.OperationalError as error:
            raise StoreUnavailable(f"the table of events: {error}") from error

    async def insert(self, events: Sequence[Event]) -> None:
        """Insert with one statement."""
        names = self._columns.names
        columns = [list(column) for column in zip(*_rows(self._columns, events), strict=True)]
        try:
            if self._connection is None:
                self._connection = await self._connect()
            await self._connection.execute(
                f"INSERT INTO {self._table} ({', '.join(names)})"  # noqa: S608 - checked
                f" SELECT {', '.join(names[:-1])}, {names[-1]}::json"
                f" FROM unnest({', '.join(['%s::text[]'] * len(names))}) AS e ({', '.join(names)})"
                " ON CONFLICT DO NOTHING",
                columns,
            )
        except self._psycopg.OperationalError as error:
            await self.close()
            raise StoreUnavailable(f"the table of events: {error}") from error

    async def _open_connection(self) -> Any:
        return await self._psycopg.AsyncConnection.connect(
            self._url, autocommit=True, connect_timeout=CONNECT_S
        )

    async def _connect(self) -> Any:
        connection = await self._open_connection()
        if not self._is_made:
            # Otherwise instances that start together would both create it, and one would fail.
            async with connection.transaction():
                await connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (self._table,))
                await connection.execute(_create_statement(_POSTGRES, self._table, self._columns))
            self._is_made = True
        return connection

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
