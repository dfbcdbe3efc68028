"""Marks inside the caller's own transaction: mark and effect commit together, or neither does."""

from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any

from semel.client.items import ItemBuilder
from semel.connections import AsyncCallerConnection, CallerConnection
from semel.connections.base import Dialect
from semel.core.protocols import AsyncStore, Store
from semel.inbox.base import InboxStatements, Tell, Windows, aretry, is_undone, retry
from semel.inbox.inbox import Inbox
from semel.inbox.inbox_async import AsyncInbox

__all__ = ["AsyncInbox", "Inbox", "ainbox_for", "aretry", "inbox_for", "is_undone", "retry"]


def inbox_for(
    handle: CallerConnection,
    store: Any,
    plan: ItemBuilder,
    connect: Callable[[], Windows],
    tell: Tell | None = None,
    connect_behind: Callable[[], bool] | None = None,
) -> Inbox:
    """Return the inbox on a blocking connection. Raises `TypeError` if connection and store are of different kinds.

    `connect_behind`: starts to connect in the background; returns whether the client is connected already.
    """
    return Inbox(handle, _words(handle, store, plan), plan, connect, tell, connect_behind)


def ainbox_for(
    handle: AsyncCallerConnection,
    store: Any,
    plan: ItemBuilder,
    connect: Callable[[], Awaitable[Windows]],
    tell: Tell | None = None,
    connect_behind: Callable[[], bool] | None = None,
) -> AsyncInbox:
    """Return the inbox on an async connection."""
    return AsyncInbox(handle, _words(handle, store, plan), plan, connect, tell, connect_behind)


def _words(
    handle: CallerConnection | AsyncCallerConnection, store: Store | AsyncStore, plan: ItemBuilder
) -> InboxStatements:
    table = plan.policy.inbox_table
    if table is not None:
        from semel.inbox.adopted import AdoptedTableStatements

        return AdoptedTableStatements(table, handle.dialect, plan)
    kind: Any = type(store)
    statements = _statements_for(handle.dialect, kind)
    if statements is not None:
        return statements(store, plan)
    database, scheme = ("SQLite", "sqlite") if handle.dialect == "sqlite" else ("PostgreSQL", "postgresql")
    raise TypeError(f"a connection to {database} needs a {scheme}: store, and this one is {store.name}")


@lru_cache(maxsize=64)  # an inbox with one event per transaction comes here for each event
def _statements_for(
    dialect: Dialect, store: type[object]
) -> Callable[[Any, ItemBuilder], InboxStatements] | None:
    """Return the statements for marks in a store of this class; `None`: the connection is not to such a store."""
    if dialect == "sqlite":
        from semel.inbox.sqlite import SqliteInboxStatements
        from semel.stores.sqlite import SqliteStore

        return SqliteInboxStatements if issubclass(store, SqliteStore) else None
    from semel.inbox.postgres import statements_for
    from semel.stores.postgres.store import PostgresStore
    from semel.stores.postgres.store_async import AsyncPostgresStore

    return statements_for if issubclass(store, PostgresStore | AsyncPostgresStore) else None
