"""Connections of asyncpg, also from its pool."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from semel.connections.base import AsyncCallerConnection, Dialect, Row, Statement, no_transaction

__all__ = ["AsyncpgHandle"]


class AsyncpgHandle(AsyncCallerConnection):
    """An `asyncpg.Connection`. Without `transaction()` it commits every statement by itself."""

    dialect: Dialect = "postgresql"

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def require_transaction(self) -> None:
        """Raise `NoTransaction` if none is open; the driver opens none by itself."""
        if not self._connection.is_in_transaction():
            raise no_transaction("open one with connection.transaction()")

    async def execute(self, statement: Statement) -> list[Row]:
        """Return the rows as tuples."""
        return [tuple(row) for row in await self._connection.fetch(statement.text, *statement.parameters)]

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Open a nested `transaction()`."""
        await self.require_transaction()
        async with self._connection.transaction():
            yield
