"""Handlers that chaos runs, and what counts their effects. The file of effects is named by the environment."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from semel.core.commands import Answer, Claim, Forget, Item, Lookup
from semel.core.protocols import Store, StoreWrapper
from semel.stores.sqlite import SqliteStore
from semel.types import Id, Record

EFFECTS = "SEMEL_TEST_CHAOS_EFFECTS"
FILE = "SEMEL_TEST_CHAOS_FILE"


def charge(order: dict[str, Any]) -> str:
    amount = order["number"] * 100
    receipt = f"receipt for {amount}"
    note_effect(order["id"])  # the effect
    return receipt


async def acharge(order: dict[str, Any]) -> None:
    note_effect(order["id"])


def slow_charge(order: dict[str, Any]) -> None:
    threading.Event().wait(0.3)
    note_effect(order["id"])


def credit(connection: Any, order: dict[str, Any]) -> None:
    connection.execute(f"INSERT INTO credits VALUES ('{order['id']}')")


async def acredit(connection: Any, order: dict[str, Any]) -> None:
    await connection.execute(f"INSERT INTO credits VALUES ('{order['id']}')")


def take_whole_message(order) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Has no annotation, so it gets the message, not its body."""
    note_effect(order["id"])


def leave(order: dict[str, Any]) -> None:
    os._exit(3)


not_callable = 7


def note_effect(event: str) -> None:
    file = os.open(os.environ[EFFECTS], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, f"{event}\n".encode())
    finally:
        os.close(file)


def count(keys: list[str]) -> list[str]:
    """One key per effect."""
    return Path(os.environ[EFFECTS]).read_text().split()


def lost_count() -> dict[str, int]:
    """A check that finds no effect."""
    return {}


def sample(key: str, number: int) -> dict[str, Any]:
    return {"id": key, "number": number, "more": [1, 2]}


class RacyStore(StoreWrapper):
    """Claims by looking first and writing then: what another worker runs at this time runs again.

    A process takes each key away from another only once: two of them would else do so to each other without end.
    """

    name = "racy"

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._taken: set[Id] = set()

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        for item in items:
            if isinstance(item, Claim) and item.id not in self._taken:
                [found] = self._store.send([Lookup(item.id)])
                if isinstance(found, Record) and found.state == "claimed" and found.owner != item.owner:
                    self._store.send([Forget(item.id, force=True)])
                    self._taken.add(item.id)
        return self._store.send(items)


def racy_store() -> RacyStore:
    return RacyStore(SqliteStore(os.environ[FILE]))
