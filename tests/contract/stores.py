"""The one table of stores: what the contract, the model and the races are run on."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from semel.clock import Clock
from semel.core.protocols import AnyStore, Capabilities, HasAsyncTwin, Store
from semel.stores.memory.store import MemoryStore
from semel.stores.sqlite import SqliteStore
from semel.testing import ManualClock
from semel.testing.contract.harness import SCENARIOS
from semel.testing.store_contract import Colour, Harness
from tests.contract.dict_store import DictStore
from tests.server import places as servers
from tests.stores.migrating import places as moves
from tests.stores.postgres import places
from tests.stores.redis import places as redis_places
from tests.stores.tiered import places as tiers


class Kind(NamedTuple):
    """A kind of store, and how to make one in an empty folder."""

    name: str
    capabilities: Capabilities
    make: Callable[[Path, Clock], Store]
    lasts: bool = False
    """Another object on the same folder has the same records, in this process or another."""
    in_loop: bool = False
    """The native twin of another kind, for callers that block: where both colours are tested it adds nothing."""
    without: frozenset[str] = frozenset()
    """Scenarios about what is refused there."""
    two_clocks: bool = False
    """Two stores answer, each by a clock of its own, so that the model cannot know the time of an answer."""
    needs_service: bool = False
    """It needs a server, so that `make check` leaves it out."""

    def harness(self, folder: Path, colour: Colour = "sync") -> Harness:
        """A place with a manual clock; in an event loop it is the store's native twin, where it has one."""
        clock = ManualClock()
        if self.lasts:
            return Harness(lambda: _in_colour(self.make(folder, clock), colour), clock=clock)
        store = self.make(folder, clock)
        return Harness(lambda: store, clock=clock)


def _in_colour(store: Store, colour: Colour) -> AnyStore:
    return store.twin() if colour == "async" and isinstance(store, HasAsyncTwin) else store


def sqlite(folder: Path, clock: Clock) -> Store:
    """A file in the folder. Nothing here pulls the plug, so the log need not reach the disk."""
    return SqliteStore(folder / "semel.db", clock=clock, synchronous="NORMAL")


TIMED = frozenset(
    {
        "orphans_with_a_journal_are_found",
        "resolve_to_absent_keeps_a_journal_for_the_sweep",
        "resolve_to_claimed_goes_on_with_the_next_attempt",
        *(name for name, scenario in SCENARIOS.items() if "endless" in scenario.needs),
    }
)
"""Partitions hold no journaled claims and no records without end: their store refuses them, and its tests say so."""

SLOTS = frozenset(
    {
        "a_mark_may_start_its_window_again",
        "a_mark_is_never_shortened",
        "a_purge_leaves_what_was_seen_again_alone",
        "refreshed_marks_are_counted_once",
        "refreshed_marks_at_once_have_one_first",
    }
)
"""Marks in partitions keep their windows: their store refuses to start one again, and its tests say so."""

NOT_MARKS = frozenset(name for name in SCENARIOS if "mark" not in name)
"""With ids that hold no time, only marks are in partitions; the rest is as in `postgres`."""

KINDS = [
    Kind("memory", MemoryStore.capabilities, lambda _folder, clock: MemoryStore(clock=clock)),
    Kind("compact", MemoryStore.capabilities, lambda _folder, clock: MemoryStore(compact=True, clock=clock)),
    Kind("sqlite", SqliteStore.capabilities, sqlite, lasts=True),
    Kind("dict", DictStore.capabilities, lambda _folder, clock: DictStore(clock)),
    Kind("postgres", places.CAPABILITIES, places.make, lasts=True, needs_service=True),
    Kind(
        "postgres-async",
        places.CAPABILITIES,
        places.make_in_loop,
        lasts=True,
        in_loop=True,
        needs_service=True,
    ),
    Kind(
        "postgres-timed",
        places.CAPABILITIES,
        places.make_timed,
        lasts=True,
        without=TIMED | SLOTS,
        needs_service=True,
    ),
    Kind(
        "postgres-opaque",
        places.CAPABILITIES,
        places.make_opaque,
        lasts=True,
        without=SLOTS | NOT_MARKS,
        needs_service=True,
    ),
    Kind("redis", redis_places.CAPABILITIES, redis_places.make, lasts=True, needs_service=True),
    Kind(
        "redis-async",
        redis_places.CAPABILITIES,
        redis_places.make_in_loop,
        lasts=True,
        in_loop=True,
        needs_service=True,
    ),
    Kind("http", servers.CAPABILITIES, servers.make, lasts=True, without=servers.NAMES, needs_service=True),
    Kind(
        "redis-over-postgres", tiers.CAPABILITIES, tiers.redis_over_postgres, lasts=True, needs_service=True
    ),
    Kind("redis-over-sqlite", tiers.CAPABILITIES, tiers.redis_over_sqlite, lasts=True, needs_service=True),
    Kind("memory-over-sqlite", tiers.CAPABILITIES, tiers.memory_over_sqlite, lasts=True),
    Kind("sqlite-to-sqlite", moves.SQLITE, moves.sqlite_to_sqlite, lasts=True, two_clocks=True),
    Kind(
        "redis-to-postgres",
        moves.SERVERS,
        moves.redis_to_postgres,
        lasts=True,
        two_clocks=True,
        needs_service=True,
    ),
]
"""Add a store here, and everything in this folder is run on it."""
