"""The runner's own connections to the store's database, one transaction at a time on each."""

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Protocol

from semel.connections import handle_for
from semel.errors import UsageError
from semel.runtime.extras import install_command
from semel.runtime.process import asyncio

__all__ = ["TransactionConnections", "desk_for"]


class TransactionConnections(Protocol):
    """Connects, and begins and ends transactions, with one driver."""

    at_once: int
    """The most transactions at the same time."""
    unavailable: tuple[type[Exception], ...]
    """The driver's errors that are not a message's fault: the database is unreachable, or busy with others."""

    async def connect(self) -> Any:
        """Open a new connection, outside any transaction."""
        ...

    async def let_go(self, connection: Any) -> None:
        """Close a connection in any state."""
        ...

    def handle(self, connection: Any) -> Any:
        """Return the handle for an inbox."""
        ...

    def transaction(self, connection: Any) -> Any:
        """Return a context manager for a transaction: it commits at the end, and rolls back after an error."""
        ...


def desk_for(store: Any, *, awaits: bool) -> TransactionConnections:
    """Return the connections to a store's database, for awaited or for blocking handlers."""
    if store.name.startswith("sqlite"):
        return AsyncSqliteConnections(store.path) if awaits else SqliteConnections(store.path)
    if store.name.startswith("postgresql"):
        return AsyncPostgresConnections(store.place) if awaits else PostgresConnections(store.place)
    raise UsageError(f"mode 'inbox' needs a store in a database with transactions, and this is {store.name}")


class _Postgres:
    at_once: int = 1000  # the runner's concurrency is the bound

    def __init__(self, place: Any) -> None:
        import psycopg

        self.unavailable: tuple[type[Exception], ...] = (psycopg.OperationalError, psycopg.InterfaceError)
        parameters = dict(place.parameters())
        parameters.pop("options")  # the store's own plans are not for the handler's statements
        if "options" in place.conninfo:
            parameters["options"] = place.conninfo["options"]
        if not place.pooler:
            del parameters["prepare_threshold"]
        self._parameters = parameters

    def handle(self, connection: Any) -> Any:
        """Return the handle for an inbox."""
        return handle_for(connection)


class AsyncPostgresConnections(_Postgres):
    """Connections of `psycopg.AsyncConnection`."""

    async def connect(self) -> Any:
        """Connect to the store's database."""
        import psycopg

        return await psycopg.AsyncConnection.connect(**self._parameters)

    async def let_go(self, connection: Any) -> None:
        """Close a connection."""
        await connection.close()

    def transaction(self, connection: Any) -> Any:
        """Return the driver's own transaction block; inside it the handler cannot commit."""
        return connection.transaction()


class PostgresConnections(_Postgres):
    """Connections of `psycopg.Connection`, used in threads."""

    async def connect(self) -> Any:
        """Connect to the store's database."""
        import psycopg

        return await asyncio.to_thread(psycopg.Connection.connect, **self._parameters)

    async def let_go(self, connection: Any) -> None:
        """Close a connection."""
        connection.close()

    def transaction(self, connection: Any) -> Any:
        """Return the driver's own transaction block; inside it the handler cannot commit."""
        return connection.transaction()


class _Sqlite:
    at_once: int = 1  # there is one writer
    unavailable: tuple[type[Exception], ...] = (sqlite3.OperationalError,)

    def __init__(self, path: Any) -> None:
        self._path = str(path)

    def handle(self, connection: Any) -> Any:
        """Return the handle for an inbox."""
        return handle_for(connection)


class SqliteConnections(_Sqlite):
    """Connections of `sqlite3`, used in threads, one after the other."""

    async def connect(self) -> Any:
        """Open the store's file."""
        return sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)

    async def let_go(self, connection: Any) -> None:
        """Close a connection."""
        connection.close()

    @contextmanager
    def transaction(self, connection: Any) -> Iterator[None]:
        """Begin without the lock: the inbox takes it with its first mark, and waits for it within its limit."""
        connection.execute("BEGIN")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise


class AsyncSqliteConnections(_Sqlite):
    """Connections of `aiosqlite`."""

    async def connect(self) -> Any:
        """Open the store's file."""
        try:
            import aiosqlite
        except ModuleNotFoundError as error:
            raise UsageError(
                f"an async handler in mode inbox needs aiosqlite: {install_command('aiosqlite')}"
            ) from error
        return await aiosqlite.connect(self._path, isolation_level=None)

    async def let_go(self, connection: Any) -> None:
        """Close a connection."""
        await connection.close()

    @asynccontextmanager
    async def transaction(self, connection: Any) -> AsyncIterator[None]:
        """Do the same as `SqliteDesk.transaction`, awaited."""
        await connection.execute("BEGIN")
        try:
            yield
            await connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                await connection.execute("ROLLBACK")
            raise
