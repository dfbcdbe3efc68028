"""The caller's own connections: find the driver, check for a transaction, execute statements."""

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

from semel.connections.base import (
    Address,
    AsyncCallerConnection,
    CallerConnection,
    PauseStep,
    Row,
    Statement,
    Talk,
    code_of,
)

__all__ = [
    "Address",
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
"""Package and name of a connection's class, and its wrapper. The caller has imported the driver:
nothing else is imported here."""
NAMES = (
    "a connection of sqlite3, aiosqlite, psycopg, asyncpg or Django, or a Connection, Session, AsyncConnection or"
    " AsyncSession of SQLAlchemy"
)


def handle_for(given: Any) -> CallerConnection | AsyncCallerConnection:
    """Wrap the caller's connection. Raises `TypeError` for other objects."""
    wrapper = _wrapper_for(type(given))  # type: ignore[arg-type,unused-ignore]  # a class can be hashed
    if wrapper is not None:
        return wrapper(given)
    kind = type(given)
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} is not a supported connection; give the one whose transaction semel"
        f" shall join: {NAMES}"
    )


@lru_cache(maxsize=64)  # an inbox with one event per transaction comes here for each event
def _wrapper_for(given: type) -> Callable[[Any], CallerConnection | AsyncCallerConnection] | None:
    """Return the class that wraps connections of this class; `None`: there is none."""
    for kind in given.__mro__:
        found = KINDS.get((kind.__module__.partition(".")[0], kind.__qualname__))
        if found is not None:
            module, name = found
            wrapper: Callable[[Any], CallerConnection | AsyncCallerConnection] = getattr(
                import_module(f"semel.connections.{module}"), name
            )
            return wrapper
    return None
