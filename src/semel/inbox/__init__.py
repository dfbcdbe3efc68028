"""Marks inside the caller's own transaction: mark and effect commit together, or neither does."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from semel.core.ports import Store
from semel.types import Done

__all__ = ["Inbox", "inbox_for"]


class Inbox(Protocol):
    """What every kind of handle offers. It never commits, and remembers nothing between calls."""

    def first(self, key: str, *, event_type: str = "") -> bool:
        """Mark the event; `False`: it was marked before. Raises `StillRunning` while another may be at it."""
        ...

    def first_many(self, keys: Sequence[str], *, event_type: str = "") -> list[bool]:
        """Mark many at once, all or none; a later copy of a key is `False`."""
        ...

    def store(self, key: str, value: Any) -> None:
        """Keep a value with the mark, for `replay`."""
        ...

    def replay(self, key: str) -> Done[Any] | None:
        """What was kept with the mark; `None`: the event is not done."""
        ...


def inbox_for(
    handle: Any, store: Store, tenant: str, consumer: str, window_us: Callable[[str], int]
) -> Inbox:
    """The inbox for this kind of handle, which must be a connection to the store's own database.

    `window_us`: the window of an event type. Raises `TypeError` for a handle or store it does not know.
    """
    sqlite3 = sys.modules.get("sqlite3")  # whoever holds its connection has imported it
    if sqlite3 is not None and isinstance(handle, sqlite3.Connection):
        from semel.inbox.sqlite import SqliteInbox
        from semel.stores.sqlite import SqliteStore

        if not isinstance(store, SqliteStore):
            raise TypeError(f"a sqlite3 connection needs a sqlite: store, and this one is {store.name}")
        return SqliteInbox(handle, store, tenant, consumer, window_us)
    kind = type(handle)
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} cannot hold an inbox; give the connection whose transaction"
        " the mark shall join: a sqlite3.Connection"
    )
