"""SQLAlchemy 2: `Connection` and `Session`, and their async forms, on PostgreSQL and SQLite.

Statements go through SQLAlchemy, which opens its transaction by itself, logs them and wraps their errors.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.util import await_only

from semel.connections.base import (
    AsyncCallerConnection,
    CallerConnection,
    Dialect,
    Row,
    Statement,
    Talk,
    no_transaction,
)

__all__ = ["AsyncConnectionHandle", "AsyncSessionHandle", "ConnectionHandle", "SessionHandle"]

T = TypeVar("T")
_PLACE = re.compile(r"\$\d+")
DIALECTS: dict[str, Dialect] = {"postgresql": "postgresql", "sqlite": "sqlite"}


class ConnectionHandle(CallerConnection):
    """A `Connection`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.dialect: Dialect = dialect_of(connection.dialect.name)

    def require_transaction(self) -> None:
        """Raise `NoTransaction` with isolation level AUTOCOMMIT; otherwise SQLAlchemy begins one."""
        driver: Any = self._connection.connection.dbapi_connection
        if self.dialect == "sqlite":
            if driver.isolation_level is None and not self._is_begun():
                self._connection.exec_driver_sql(
                    "SELECT 1"
                )  # a listener may execute BEGIN when SQLAlchemy begins
                if not self._is_begun():
                    raise no_transaction("take the isolation level AUTOCOMMIT off the connection")
        elif driver.autocommit:
            raise no_transaction("take the isolation level AUTOCOMMIT off the connection")

    def execute(self, statement: Statement) -> list[Row]:
        """Return the rows as tuples."""
        connection = self._connection
        text = statement.text
        if self.dialect == "postgresql" and connection.dialect.paramstyle in ("format", "pyformat"):
            text = _PLACE.sub("%s", text)
        result = connection.exec_driver_sql(text, statement.parameters or None)
        return [tuple(row) for row in result] if result.returns_rows else []

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Open a nested transaction."""
        self.begin()
        with self._connection.begin_nested():
            yield

    def begin(self) -> None:
        """Open the driver's transaction: on SQLite a savepoint alone would commit at its end."""
        self.require_transaction()
        if self.dialect == "sqlite" and not self._is_begun():
            self._connection.exec_driver_sql("BEGIN")

    def _is_begun(self) -> bool:
        driver: Any = self._connection.connection.driver_connection
        return bool(driver.in_transaction)


class SessionHandle(CallerConnection):
    """A `Session`, or the one that a `scoped_session` gives: the connection of its transaction."""

    def __init__(self, session: Session | scoped_session[Session]) -> None:
        self._session: Session = session() if isinstance(session, scoped_session) else session
        self.dialect: Dialect = dialect_of(self._session.get_bind().dialect.name)

    def require_transaction(self) -> None:
        """Check the connection of its transaction."""
        self.current().require_transaction()

    def execute(self, statement: Statement) -> list[Row]:
        """Return the rows as tuples."""
        return self.current().execute(statement)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Open a nested transaction of the session, so that its objects are rolled back too."""
        self.current().begin()
        with self._session.begin_nested():
            yield

    def current(self) -> ConnectionHandle:
        """Return the connection of the current transaction; each transaction has its own."""
        return ConnectionHandle(self._session.connection())


class _AwaitedConnection(ConnectionHandle):
    """The sync connection inside an async one; it must not block the event loop."""

    def pause(self, wait_s: float) -> None:
        """Sleep without blocking the event loop."""
        await_only(asyncio.sleep(wait_s))


class AsyncConnectionHandle(AsyncCallerConnection):
    """An `AsyncConnection`: a dialogue runs on the sync connection inside it."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._outer: AsyncConnection | AsyncSession = connection
        self.dialect: Dialect = dialect_of(connection.dialect.name)

    async def require_transaction(self) -> None:
        """Raise `NoTransaction` with isolation level AUTOCOMMIT; otherwise SQLAlchemy begins one."""
        await self._inside(lambda inner: inner.require_transaction())

    async def execute(self, statement: Statement) -> list[Row]:
        """Return the rows as tuples."""
        return await self._inside(lambda inner: inner.execute(statement))

    async def run(self, talk: Talk[T]) -> T:
        """Run the whole dialogue on the sync connection."""
        return await self._inside(lambda inner: inner.run(talk))

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Open a nested transaction."""
        await self._inside(lambda inner: inner.begin())
        async with self._outer.begin_nested():
            yield

    async def _inside(self, function: Callable[[ConnectionHandle], T]) -> T:
        def on(blocking: Connection | Session) -> T:
            connection = blocking.connection() if isinstance(blocking, Session) else blocking
            return function(_AwaitedConnection(connection))

        return await self._outer.run_sync(on)


class AsyncSessionHandle(AsyncConnectionHandle):
    """An `AsyncSession`, or the one that an `async_scoped_session` gives."""

    def __init__(self, session: AsyncSession | async_scoped_session[AsyncSession]) -> None:
        self._outer = session() if isinstance(session, async_scoped_session) else session
        self.dialect: Dialect = dialect_of(self._outer.get_bind().dialect.name)


def dialect_of(name: str) -> Dialect:
    """Return the database of SQLAlchemy's engine. Raises `TypeError` for one that semel does not support."""
    if name not in DIALECTS:
        raise TypeError(f"semel keeps records in PostgreSQL and SQLite, and this is a connection to {name}")
    return DIALECTS[name]
