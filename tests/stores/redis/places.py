"""Redis stores for tests: each folder has keys of its own, and time may be the test's."""

from pathlib import Path
from typing import Any

from semel.clock import Clock
from semel.core.protocols import Capabilities
from semel.stores.redis import RedisStore
from semel.testing import ManualClock
from tests.services import redis
from tests.stores.shells import InLoop, ticking

CAPABILITIES = Capabilities(durable=True, shared=True, notifies=True, endless=True, refreshes=True)


def clocked(url: str, clock: Clock | None, **options: Any) -> RedisStore:
    """A store at this URL. A manual clock is used; any other leaves the time to the server."""
    if isinstance(clock, ManualClock):
        return RedisStore(url, clock=ticking(clock), **options)
    return RedisStore(url, **options)


def make(folder: Path, clock: Clock | None = None) -> RedisStore:
    """A store for this folder on the shared server."""
    return clocked(redis.place(folder), clock)


def make_in_loop(folder: Path, clock: Clock | None = None) -> InLoop:
    """The async twin, for callers that block."""
    return InLoop(make(folder, clock).twin())


def make_on_cluster(folder: Path, clock: Clock | None = None) -> RedisStore:
    """A store for this folder on the shared cluster."""
    return clocked(redis.cluster(folder), clock)
