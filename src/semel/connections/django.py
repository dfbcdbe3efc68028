"""Connections of Django: `django.db.connection`, or one of `connections`, on PostgreSQL and SQLite.

Statements go through Django's own cursors, so that its logging and error wrapping apply.
"""

import re
from contextlib import AbstractContextManager
from typing import Any

from semel.connections.base import CallerConnection, Dialect, Row, Statement, no_transaction

__all__ = ["DjangoHandle"]

_PLACE = re.compile(r"\$\d+|\?")
VENDORS: dict[str, Dialect] = {"postgresql": "postgresql", "sqlite": "sqlite"}


class DjangoHandle(CallerConnection):
    """A connection inside `transaction.atomic()`. It is `Any` to the types, because Django has none."""

    def __init__(self, connection: Any) -> None:
        if connection.vendor not in VENDORS:
            raise TypeError(
                f"semel keeps records in PostgreSQL and SQLite, and this is a connection to {connection.vendor}"
            )
        self._connection = connection
        self.dialect: Dialect = VENDORS[connection.vendor]

    def require_transaction(self) -> None:
        """Raise `NoTransaction` outside a transaction: with autocommit, the default, Django opens none."""
        connection = self._connection
        if not connection.in_atomic_block and connection.get_autocommit():
            raise no_transaction("open one with transaction.atomic()")

    def execute(self, statement: Statement) -> list[Row]:
        """Return the rows as tuples."""
        with self._connection.cursor() as cursor:
            if statement.parameters:
                cursor.execute(_PLACE.sub("%s", statement.text), statement.parameters)
            else:
                cursor.execute(statement.text)
            return list(cursor.fetchall()) if cursor.description else []

    def savepoint(self) -> AbstractContextManager[Any]:
        """Open a nested `atomic()`."""
        from django.db import transaction  # type: ignore[import-untyped]

        self.require_transaction()
        nested: AbstractContextManager[Any] = transaction.atomic(using=self._connection.alias)
        return nested
