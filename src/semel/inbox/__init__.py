"""Marks inside the caller's own transaction: mark and effect commit together, or neither does."""

from collections.abc import Awaitable, Callable
from typing import Any

from semel.client.items import ItemBuilder
from semel.connections import AsyncCallerConnection, CallerConnection
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
) -> Inbox:
    """Return the inbox on a blocking connection. Raises `TypeError` if connection and store are of different kinds."""
    return Inbox(handle, _words(handle, store, plan), plan, connect, tell)


def ainbox_for(
    handle: AsyncCallerConnection,
    store: Any,
    plan: ItemBuilder,
    connect: Callable[[], Awaitable[Windows]],
    tell: Tell | None = None,
) -> AsyncInbox:
    """Return the inbox on an async connection."""
    return AsyncInbox(handle, _words(handle, store, plan), plan, connect, tell)


def _words(
    handle: CallerConnection | AsyncCallerConnection, store: Store | AsyncStore, plan: ItemBuilder
) -> InboxStatements:
    table = plan.policy.inbox_table
    if table is not None:
        from semel.inbox.adopted import AdoptedTableStatements

        return AdoptedTableStatements(table, handle.dialect, plan)
    if handle.dialect == "sqlite":
        from semel.inbox.sqlite import SqliteInboxStatements
        from semel.stores.sqlite import SqliteStore

        if isinstance(store, SqliteStore):
            return SqliteInboxStatements(store, plan)
        raise TypeError(f"a connection to SQLite needs a sqlite: store, and this one is {store.name}")
    from semel.inbox.postgres import PostgresInboxStatements
    from semel.stores.postgres.store import PostgresStore
    from semel.stores.postgres.store_async import AsyncPostgresStore

    if isinstance(store, PostgresStore | AsyncPostgresStore):
        return PostgresInboxStatements(store, plan)
    raise TypeError(f"a connection to PostgreSQL needs a postgresql: store, and this one is {store.name}")
