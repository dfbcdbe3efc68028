"""Kinds of connections as protocols for type checkers; no driver is imported."""

from collections.abc import Awaitable
from typing import Protocol

__all__ = ["AsyncpgConnection", "AwaitedConnection", "BlockingConnection"]


class BlockingConnection(Protocol):
    """A connection or session that blocks: sqlite3, psycopg, SQLAlchemy, Django."""

    def commit(self) -> None:
        """End the transaction."""


class AwaitedConnection(Protocol):
    """A connection or session for an event loop: aiosqlite, psycopg, SQLAlchemy."""

    def commit(self) -> Awaitable[None]:
        """End the transaction."""


class AsyncpgConnection(Protocol):
    """A connection of asyncpg, whose transactions are blocks."""

    def is_in_transaction(self) -> bool:
        """Tell whether a transaction is open."""
