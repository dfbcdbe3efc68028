"""Count the effects of each event: by the user's check, by SQL, or by the runs of the handler."""

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from semel.core.protocols import Store
from semel.errors import PolicyInvalid, UsageError
from semel.runtime.process import load_object
from semel.testing.chaos.ledger import ChaosLedger
from semel.testing.chaos.settings import ChaosSettings
from semel.testing.chaos.worker import EFFECTS_TABLE

__all__ = ["check_effects", "count_effects", "create_table", "drop_table", "effects_text"]

SQL = "sql:"


def effects_text(settings: ChaosSettings) -> str:
    """Return how effects are counted."""
    if settings.effects:
        return settings.effects
    if settings.mode == "inbox":
        return f"rows of {EFFECTS_TABLE}, written in the handler's transaction"
    return "runs of the handler that came to their end"


def check_effects(settings: ChaosSettings, store: Store) -> None:
    """Raise `UsageError` or `PolicyInvalid` before anything runs if effects cannot be counted."""
    if settings.effects.startswith(SQL):
        with _database(store):
            return
    if settings.effects and not callable(load_object(settings.effects)):
        raise PolicyInvalid(f"{settings.effects} is no function; it returns the effects by key")


def count_effects(
    settings: ChaosSettings, store: Store, keys: Sequence[str], ledger: ChaosLedger
) -> dict[str, int]:
    """Return how often the effect of each event happened."""
    if settings.effects.startswith(SQL):
        counted = _count_rows(_query(store, settings.effects.removeprefix(SQL)))
    elif settings.effects:
        counted = _count_rows(_call(load_object(settings.effects), keys))
    elif settings.mode == "inbox":
        counted = _count_rows(_query(store, f"SELECT event FROM {EFFECTS_TABLE}"))  # noqa: S608 - a constant
    else:
        counted = Counter({key: sum(call.returned for call in calls) for key, calls in ledger.calls.items()})
    return {key: counted[key] for key in keys}


def _call(check: Any, keys: Sequence[str]) -> Any:
    """Call the user's check with the keys, if it takes an argument. It may be `async def`."""
    found = check(list(keys)) if inspect.signature(check).parameters else check()
    if inspect.isawaitable(found):
        import asyncio

        async def wait() -> Any:
            return await found

        found = asyncio.run(wait())
    return found


def _count_rows(found: Any) -> Counter[str]:
    """Count effects in a mapping of key to count, in pairs of them, or in one key per effect."""
    counted: Counter[str] = Counter()
    if isinstance(found, Mapping):
        found = found.items()
    if not isinstance(found, Iterable) or isinstance(found, str | bytes):
        raise UsageError(f"--effects gave {found!r}; it must give the count by key, or one key per effect")
    for row in found:
        cells = (row,) if isinstance(row, str) else tuple(row)
        if len(cells) not in (1, 2):
            raise UsageError(
                f"--effects gave a row of {len(cells)} columns; it must have the key, or key and count"
            )
        counted[str(cells[0])] += int(cells[1]) if len(cells) > 1 else 1
    return counted


def create_table(store: Store) -> None:
    """Create the table that notes runs in the handler's transaction."""
    _execute(store, f"DROP TABLE IF EXISTS {EFFECTS_TABLE}")
    _execute(store, f"CREATE TABLE {EFFECTS_TABLE} (event TEXT NOT NULL)")


def drop_table(store: Store) -> None:
    """Remove that table."""
    _execute(store, f"DROP TABLE IF EXISTS {EFFECTS_TABLE}")


def _query(store: Store, statement: str) -> list[Any]:
    with _database(store) as connection:
        return list(connection.execute(statement).fetchall())


def _execute(store: Store, statement: str) -> None:
    with _database(store) as connection:
        connection.execute(statement)
        connection.commit()


@contextmanager
def _database(store: Any) -> Iterator[Any]:
    """Connect to the store's database, without a proxy."""
    if getattr(store, "path", None) is not None:
        import sqlite3

        connection: Any = sqlite3.connect(store.path, timeout=30.0)
    elif getattr(store, "place", None) is not None and store.name.startswith("postgresql"):
        import psycopg

        connection = psycopg.connect(**store.place.conninfo)
    else:
        raise UsageError(f"{store.name} takes no SQL; name a function with --effects module:function")
    try:
        yield connection
    finally:
        connection.close()
