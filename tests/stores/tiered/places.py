"""Tiered stores for tests: each folder has records and copies of its own, and time may be the test's."""

from pathlib import Path

from semel.clock import Clock
from semel.core.protocols import Capabilities, Store
from semel.stores.sqlite import SqliteStore
from semel.stores.tiered import MemoryCache, TieredStore, tiered
from semel.stores.tiered.redis_cache import RedisCache
from semel.testing import ManualClock
from tests.services import redis
from tests.stores.postgres import places as postgres_places
from tests.stores.shells import ticking

CAPABILITIES = Capabilities(durable=True, shared=True, notifies=True, endless=True, refreshes=True)
HOUR_US = 3600 * 10**6
PATIENT = "&answer_s=20&connect_s=20"
"""A busy computer is no slow cache."""

_memories: dict[tuple[Path, int], MemoryCache] = {}
"""One cache for all stores of a folder: they stand for the threads of one process."""


def over_sqlite(folder: Path, clock: Clock | None) -> SqliteStore:
    return SqliteStore(folder / "semel.db", clock=clock, synchronous="NORMAL")


def redis_cache(folder: Path, clock: Clock | None = None, window_us: int = HOUR_US) -> RedisCache:
    shared = ticking(clock) if isinstance(clock, ManualClock) else None
    return RedisCache(redis.place(folder) + PATIENT, cache_window_us=window_us, clock=shared)


def redis_over_postgres(folder: Path, clock: Clock | None = None) -> TieredStore:
    return tiered(cache=redis_cache(folder, clock), truth=postgres_places.make(folder, clock))


def redis_over_sqlite(folder: Path, clock: Clock | None = None) -> Store:
    return tiered(cache=redis_cache(folder, clock), truth=over_sqlite(folder, clock))


def memory_over_sqlite(folder: Path, clock: Clock | None = None) -> Store:
    name = (folder, id(clock))
    if name not in _memories:
        # A process's own steady clock never goes back; one that a test turns by hand does, so it is made steady.
        steady = ticking(clock) if isinstance(clock, ManualClock) else clock
        _memories[name] = MemoryCache() if steady is None else MemoryCache(now_us=steady.now_us)
    return tiered(cache=_memories[name], truth=over_sqlite(folder, clock))
