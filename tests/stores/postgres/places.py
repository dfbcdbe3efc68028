"""PostgreSQL stores for tests: each folder has a schema of its own, and time may be the test's."""

import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from semel.clock import Clock
from semel.core import ids
from semel.core.commands import Admit, RecordItem
from semel.core.protocols import Capabilities
from semel.stores.postgres import AsyncPostgresStore, PostgresStore, from_url
from semel.stores.postgres.batch import PostgresBatch
from semel.testing import START_US, ManualClock
from tests.services import postgres
from tests.stores.shells import InLoop, ticking

CAPABILITIES = Capabilities(
    durable=True, transactional=True, shared=True, notifies=True, endless=True, refreshes=True
)


def make(folder: Path, clock: Clock | None = None, **options: Any) -> PostgresStore:
    """A store for this folder. A manual clock is used; any other leaves the time to the server."""
    store = from_url(postgres.place(folder))
    if isinstance(clock, ManualClock):
        store.clock = ticking(clock)
    return store


DAY_US = 86_400 * 1_000_000
ANY_IDS = {"any-manual": START_US, "any-real": time.time_ns() // 1000}
"""Kinds of ids for tests: every text is one. Its time lies one to three days back, in one of several partitions."""


def _any_reader(base_us: int) -> Callable[[str], int]:
    return lambda key: base_us - DAY_US - zlib.crc32(key.encode("utf-8", "replace")) * DAY_US // 2**31


cast("dict[str, Any]", ids.KINDS).update({kind: _any_reader(base) for kind, base in ANY_IDS.items()})


def make_timed(folder: Path, clock: Clock | None = None) -> PostgresStore:
    """A store in which every consumer has ids with a time, so that all records and marks are in partitions."""
    return _lenient(_with_ids(folder, clock, "any-manual" if isinstance(clock, ManualClock) else "any-real"))


def make_opaque(folder: Path, clock: Clock | None = None) -> PostgresStore:
    """A store in which every consumer has ids without a time, so that all marks are in partitions by arrival."""
    return _with_ids(folder, clock, ids.OPAQUE)


def _with_ids(folder: Path, clock: Clock | None, kind: str) -> PostgresStore:
    store = make(folder, clock)
    store.open()
    store.send([Admit("", "", "lease", kind), Admit("", "marked", "mark", kind)])
    postgres.execute(
        postgres.place(folder),
        f"ALTER TABLE {store.place.schema}.consumers ALTER COLUMN ids SET DEFAULT '{kind}'",
    )
    store.close()
    return store


class Lenient(PostgresBatch):
    """Lets partitions hold what must not go with them, so that every statement is seen to work there too."""

    @staticmethod
    def must_stay(item: RecordItem) -> bool:
        return False


def _lenient(store: PostgresStore) -> PostgresStore:
    def twin() -> AsyncPostgresStore:
        made = PostgresStore.twin(store)
        made.batch_type = Lenient
        return made

    store.batch_type = Lenient
    store.twin = twin  # type: ignore[method-assign]
    return store


def make_in_loop(folder: Path, clock: Clock | None = None) -> InLoop:
    """The async twin, for callers that block."""
    return InLoop(make(folder, clock).twin())
