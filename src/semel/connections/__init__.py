"""The caller's own connections: which driver it is, whether a transaction is open, one statement on it."""

from importlib import import_module
from typing import Any

from semel.connections.base import (
    AsyncCallerConnection,
    CallerConnection,
    PauseStep,
    Row,
    Statement,
    Talk,
    code_of,
)

__all__ = [
    "AsyncCallerConnection",
    "CallerConnection",
    "PauseStep",
    "Row",
    "Statement",
    "Talk",
    "code_of",
    "handle_for",
]

KINDS: dict[tuple[str, str], tuple[str, str]] = {
    ("sqlite3", "Connection"): ("sqlite", "SqliteHandle"),
    ("aiosqlite", "Connection"): ("sqlite", "AiosqliteHandle"),
    ("psycopg", "Connection"): ("psycopg", "PsycopgHandle"),
    ("psycopg", "AsyncConnection"): ("psycopg", "AsyncPsycopgHandle"),
    ("asyncpg", "Connection"): ("asyncpg", "AsyncpgHandle"),
    ("asyncpg", "PoolConnectionProxy"): ("asyncpg", "AsyncpgHandle"),
    ("sqlalchemy", "Connection"): ("sqlalchemy", "ConnectionHandle"),
    ("sqlalchemy", "Session"): ("sqlalchemy", "SessionHandle"),
    ("sqlalchemy", "scoped_session"): ("sqlalchemy", "SessionHandle"),
    ("sqlalchemy", "AsyncConnection"): ("sqlalchemy", "AsyncConnectionHandle"),
    ("sqlalchemy", "AsyncSession"): ("sqlalchemy", "AsyncSessionHandle"),
    ("sqlalchemy", "async_scoped_session"): ("sqlalchemy", "AsyncSessionHandle"),
    ("django", "BaseDatabaseWrapper"): ("django", "DjangoHandle"),
    ("django", "ConnectionProxy"): ("django", "DjangoHandle"),
}
"""Package and name of a connection's class, and what wraps it. Whoever holds one has imported its driver:
nothing is imported here that the caller did not import."""
NAMES = (
    "a connection of sqlite3, aiosqlite, psycopg, asyncpg or Django, or a Connection, Session, AsyncConnection or"
    " AsyncSession of SQLAlchemy"
)


def handle_for(given: Any) -> CallerConnection | AsyncCallerConnection:
    """What semel needs of the caller's connection. Raises `TypeError` for something else."""
    for kind in type(given).__mro__:
        found = KINDS.get((kind.__module__.partition(".")[0], kind.__qualname__))
        if found is not None:
            module, name = found
            made: CallerConnection | AsyncCallerConnection = getattr(
                import_module(f"semel.connections.{module}"), name
            )(given)
            return made
    kind = type(given)
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} is no handle on a transaction; give the one whose transaction semel"
        f" shall join: {NAMES}"
    )
