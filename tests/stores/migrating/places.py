"""Migrating stores for tests: each folder has an old and a new store of its own, and time may be the test's."""

from pathlib import Path

from semel.clock import Clock
from semel.core.protocols import Capabilities, Store
from semel.stores.migrating import migrating
from semel.stores.sqlite import SqliteStore
from tests.stores.postgres import places as postgres_places
from tests.stores.redis import places as redis_places

SQLITE = Capabilities(durable=True, shared=True, single_writer=True, notifies=True, endless=True)
SERVERS = Capabilities(durable=True, shared=True, notifies=True, endless=True)


def sqlite_to_sqlite(folder: Path, clock: Clock | None = None) -> Store:
    old = SqliteStore(folder / "old.db", clock=clock, synchronous="NORMAL")
    return migrating(old=old, new=SqliteStore(folder / "new.db", clock=clock, synchronous="NORMAL"))


def redis_to_postgres(folder: Path, clock: Clock | None = None) -> Store:
    return migrating(old=redis_places.make(folder, clock), new=postgres_places.make(folder, clock))
