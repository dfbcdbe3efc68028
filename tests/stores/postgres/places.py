"""PostgreSQL stores for tests: each folder has a schema of its own, and time may be the test's."""

from pathlib import Path
from typing import Any

from semel.clock import Clock
from semel.core.ports import Capabilities
from semel.stores.postgres import PostgresStore
from semel.stores.postgres.urls import from_url
from semel.testing import ManualClock
from tests.services import postgres
from tests.stores.shells import InLoop, ticking

CAPABILITIES = Capabilities(durable=True, transactional=True, shared=True, notifies=True)


def make(folder: Path, clock: Clock | None = None, **options: Any) -> PostgresStore:
    """A store for this folder. A manual clock is used; any other leaves the time to the server."""
    store = from_url(postgres.place(folder))
    if isinstance(clock, ManualClock):
        store.clock = ticking(clock)
    return store


def make_in_loop(folder: Path, clock: Clock | None = None) -> InLoop:
    """The async twin, for callers that block."""
    return InLoop(make(folder, clock).twin())
