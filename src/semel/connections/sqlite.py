"""Connections of `sqlite3`, and of `aiosqlite`, which runs one in a thread."""

import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from semel.connections.base import (
    AsyncCallerConnection,
    CallerConnection,
    Dialect,
    Row,
    Statement,
    Talk,
    no_transaction,
)

__all__ = ["AiosqliteHandle", "SqliteHandle"]

T = TypeVar("T")


class SqliteHandle(CallerConnection):
    """A `sqlite3.Connection`."""

    dialect: Dialect = "sqlite"

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def require_transaction(self) -> None:
        """Raise `NoTransaction` in autocommit mode; by default Python opens a transaction before the first write."""
        connection = self._connection
        if connection.in_transaction:
            return
        autocommit = getattr(connection, "autocommit", -1)  # since Python 3.12
        if autocommit is True or (autocommit == -1 and connection.isolation_level is None):
            raise no_transaction("the connection is in autocommit mode: execute BEGIN first")

    def execute(self, statement: Statement) -> list[Row]:
        """Return the rows, through a cursor without the caller's factories."""
        connection = self._connection
        text_factory = connection.text_factory
        cursor = sqlite3.Connection.cursor(connection)
        cursor.row_factory = None
        connection.text_factory = str
        try:
            return cursor.execute(statement.text, statement.parameters).fetchall()
        finally:
            connection.text_factory = text_factory
            cursor.close()

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Open a savepoint inside a transaction, which is opened first: a savepoint alone would commit at its end."""
        self.set_savepoint()
        try:
            yield
        except BaseException:
            self.undo_savepoint()
            raise
        self._connection.execute("RELEASE semel")

    def set_savepoint(self) -> None:
        """Begin a savepoint, and a transaction where the driver would have begun one."""
        self.require_transaction()
        connection = self._connection
        if not connection.in_transaction:
            connection.execute(f"BEGIN {connection.isolation_level}")  # as the driver would
        connection.execute("SAVEPOINT semel")

    def undo_savepoint(self) -> None:
        """Undo all since the savepoint, and end it."""
        if self._connection.in_transaction:  # a full disk may have ended it
            self._connection.execute("ROLLBACK TO semel")
            self._connection.execute("RELEASE semel")


class AiosqliteHandle(AsyncCallerConnection):
    """An `aiosqlite.Connection`. A dialogue runs as a whole in the connection's thread."""

    dialect: Dialect = "sqlite"

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._inner = SqliteHandle(connection._conn)  # noqa: SLF001 - the connection that its thread uses

    async def require_transaction(self) -> None:
        """Check the inner connection in its thread: since Python 3.12 `sqlite3` checks the thread."""
        await self._in_thread(self._inner.require_transaction)

    async def execute(self, statement: Statement) -> list[Row]:
        """Return the rows of one statement."""
        return await self._in_thread(lambda: self._inner.execute(statement))

    async def run(self, talk: Talk[T]) -> T:
        """Run the whole dialogue in the thread with one hop. After a cancellation it still runs to its end."""
        return await self._in_thread(lambda: self._inner.run(talk))

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Open a savepoint on the inner connection."""
        await self._in_thread(self._inner.set_savepoint)
        try:
            yield
        except BaseException:
            await self._in_thread(self._inner.undo_savepoint)
            raise
        await self._connection.execute("RELEASE semel")

    async def _in_thread(self, function: Callable[[], T]) -> T:
        done: T = await self._connection._execute(function)  # noqa: SLF001 - it has no public way to run more than one statement
        return done
