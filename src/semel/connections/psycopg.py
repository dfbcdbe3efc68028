"""Connections of psycopg 3, blocking and async."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from semel.connections.base import (
    Address,
    AsyncCallerConnection,
    CallerConnection,
    Dialect,
    Row,
    Statement,
    no_transaction,
)
from semel.errors import UsageError

__all__ = ["AsyncPsycopgHandle", "PsycopgHandle"]


def _require_transaction(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    if connection.pgconn.pipeline_status != PipelineStatus.OFF:
        raise UsageError(
            "the connection is in pipeline mode, where answers come late; leave the pipeline first"
        )
    if connection.autocommit and _is_idle(connection):
        raise no_transaction("the connection is in autocommit mode: open one with connection.transaction()")


def _is_idle(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    return connection.pgconn.transaction_status == TransactionStatus.IDLE


def _has_rows(cursor: psycopg.RawCursor[Any] | psycopg.AsyncRawCursor[Any]) -> bool:
    """Whether the statement answers with rows, without the description of its columns, which takes longer."""
    return cursor.pgresult is not None and cursor.pgresult.nfields > 0


def _address(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> Address:
    info = connection.info
    return (info.host, info.port, info.dbname)


class PsycopgHandle(CallerConnection):
    """A `psycopg.Connection`."""

    dialect: Dialect = "postgresql"

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    @property
    def address(self) -> Address:
        """The server, as the driver was told it."""
        return _address(self._connection)

    def require_transaction(self) -> None:
        """Raise `NoTransaction` in autocommit mode; otherwise the driver opens a transaction."""
        _require_transaction(self._connection)

    def execute(self, statement: Statement) -> list[Row]:
        """Return the rows, through a cursor of our own kind."""
        cursor = psycopg.RawCursor(self._connection, row_factory=tuple_row)
        cursor.execute(statement.text, statement.parameters or None)  # type: ignore[arg-type,unused-ignore]
        return cursor.fetchall() if _has_rows(cursor) else []

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Open a nested `transaction()`; without an outer one it would commit."""
        self.require_transaction()
        if _is_idle(self._connection):
            self.execute(Statement("SELECT 1"))
        with self._connection.transaction():
            yield


class AsyncPsycopgHandle(AsyncCallerConnection):
    """A `psycopg.AsyncConnection`."""

    dialect: Dialect = "postgresql"

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    @property
    def address(self) -> Address:
        """The server, as the driver was told it."""
        return _address(self._connection)

    async def require_transaction(self) -> None:
        """Raise `NoTransaction` in autocommit mode; otherwise the driver opens a transaction."""
        _require_transaction(self._connection)

    async def execute(self, statement: Statement) -> list[Row]:
        """Return the rows, through a cursor of our own kind."""
        cursor = psycopg.AsyncRawCursor(self._connection, row_factory=tuple_row)
        await cursor.execute(statement.text, statement.parameters or None)  # type: ignore[arg-type,unused-ignore]
        return await cursor.fetchall() if _has_rows(cursor) else []

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Open a nested `transaction()`; without an outer one it would commit."""
        await self.require_transaction()
        if _is_idle(self._connection):
            await self.execute(Statement("SELECT 1"))
        async with self._connection.transaction():
            yield
