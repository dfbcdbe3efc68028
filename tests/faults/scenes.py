"""One event, one store, workers that die: deliver it until somebody acknowledges, and count what happened."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from semel.core import flows
from semel.core.commands import Claim, Flow, Granted, Lookup, Mark, Renew, Scan
from semel.core.ids import idempotency_key
from semel.core.protocols import Store
from semel.core.settlement import Task
from semel.policy import Policy
from semel.stores.memory.store import MemoryStore
from semel.stores.sqlite import SqliteStore
from semel.stores.sqlite.marks import LEVELS
from semel.testing import ManualClock
from semel.testing.faults import Died, Driver, Strike
from semel.types import DidNotHappen, Done, Failed, Happened, Inquiry, Late, Mismatch, Record, Unknown
from tests.faults.table import Cell

ID = ("", "faults", "evt_1")
LEASE_S = 30.0
LEASE_US, WINDOW_US = 30_000_000, 86_400_000_000
DELIVERIES_MAX = 12

STORES: dict[str, Callable[[Path, ManualClock], Store]] = {
    "memory": lambda _folder, clock: MemoryStore(clock=clock),
    "sqlite": lambda folder, clock: SqliteStore(folder / "events.db", synchronous="NORMAL", clock=clock),
}

SINK_OF: dict[str, str] = {
    "lease, keyed sink": "keyed",
    "lease, fenced sink": "fenced",
    "lease, plain sink": "plain",
    "lease, probe": "plain",
    "quarantine": "plain",
    "quarantine, probe": "plain",
    "mark": "plain",
    "observe": "plain",
}


def acknowledges(outcome: Any) -> bool:
    """What a runner acknowledges; the last three after a copy to the dead letter."""
    if isinstance(outcome, Done):
        return outcome.recorded
    return isinstance(outcome, Failed | Unknown | Mismatch | Late)


class Sink:
    """Counts effects; a keyed one by idempotency key, a fenced one refuses what is older than it has seen."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.effects = 0
        self._keys: set[str] = set()
        self._fence = 0
        self._closed = 0

    def probe(self, fence: int, *, final: bool) -> Happened[str] | DidNotHappen:
        """Whether there is an effect. A final "no" closes the door to attempts up to this fence."""
        if self.effects:
            return Happened("done")
        if final:
            self._closed = fence
        return DidNotHappen()

    def apply(self, granted: Granted | None) -> str:
        if granted is not None and granted.fence <= self._closed:
            raise ConnectionError("the sink was told that this attempt is over")
        if self.kind == "keyed":
            key = idempotency_key(ID)
            if key in self._keys:
                return "done"
            self._keys.add(key)
        elif self.kind == "fenced" and granted is not None:
            if granted.fence < self._fence:
                raise ConnectionError("the sink knows a newer fence")
            self._fence = granted.fence
        self.effects += 1
        return "done"


class Scene:
    """An event for a consumer in one mode."""

    def __init__(self, mode: str, store: Store, clock: ManualClock, *, journal: bytes | None = None) -> None:
        self.mode = mode
        self.store = store
        self.clock = clock
        self.sink = Sink(SINK_OF[mode])
        self.journal = journal
        self.duplicates = 0
        self.probes = mode.endswith("probe")
        self.final = True
        """Whether what the probe calls "did not happen" cannot happen any more."""
        self.asked = 0
        self.body: Callable[[Driver, bytes], Any] = lambda driver, _owner: self.sink.apply(driver.granted)

    def flow(self, driver: Driver, *, wait_s: float = 0.0) -> Flow[Any]:
        task = self.task(driver, wait_s)
        if self.mode == "mark":
            return flows.mark_then_run(Mark(ID[0], ID[1], [ID[2]], WINDOW_US), task)
        if self.mode == "observe":
            return flows.run_observed(task, self._count)
        return flows.once(task)

    def task(self, driver: Driver, wait_s: float = 0.0) -> Task:
        owner = os.urandom(16)
        claim = Claim(
            ID, owner, LEASE_US, WINDOW_US, journal=self.journal, quarantine="quarantine" in self.mode
        )
        probe = self._probe if self.probes else None
        policy = Policy(lease_s=LEASE_S, wait_s=wait_s, probe=probe)
        return Task(claim, lambda: self.body(driver, owner), policy)

    def _probe(self, inquiry: Inquiry) -> Happened[str] | DidNotHappen:
        """Ask the sink about all attempts but the one that is yet to run: in lease the one that asks."""
        assert inquiry.idempotency_key == idempotency_key(ID)
        self.asked += 1
        yet_to_run = 0 if "quarantine" in self.mode else 1
        return self.sink.probe(self.record().fence - yet_to_run, final=self.final)

    def sweep(self, driver: Driver) -> Flow[Any]:
        return flows.sweep(Scan(orphaned=True), lambda _record: self.task(driver))

    def _count(self, _answer: Any) -> None:
        self.duplicates += 1

    def redeliver(self) -> None:
        """What a source does: again and again, until it is acknowledged. Whoever held the claim is past its lease."""
        for _ in range(DELIVERIES_MAX):
            self.pass_lease()
            driver = Driver(self.store, self.clock)
            if acknowledges(driver.run(self.flow(driver))):
                return
        raise AssertionError("never acknowledged")

    def resweep(self) -> None:
        """What a listener does whose source never sends again: look for orphans."""
        for _ in range(3):
            self.pass_lease()
            driver = Driver(self.store, self.clock)
            driver.run(self.sweep(driver))

    def pass_lease(self) -> None:
        self.clock.advance(LEASE_S * 2)

    def record(self) -> Any:
        return self.store.send([Lookup(ID)])[0]

    def measured(self) -> Cell:
        record = self.record()
        return Cell(self.sink.effects, flagged=isinstance(record, Record) and record.state == "unknown")


def strike(
    scene: Scene,
    struck: Strike,
    *,
    flow: Callable[[Driver], Flow[Any]],
    again: Callable[[], None],
    lands_first: bool,
) -> list[str]:
    """One delivery with a fault, then redelivery until all is settled. Returns the commands of the first."""
    driver = Driver(scene.store, scene.clock, struck, meanwhile=again)
    try:
        settled = acknowledges(driver.run(flow(driver)))
    except Died:
        settled = False
    if lands_first:
        driver.land()
    if not settled:
        again()
    driver.land()
    return driver.commands


def lose(store: Store) -> None:
    """What a flush or an empty node does."""
    if isinstance(store, MemoryStore):
        store._records.clear()
        store._marks.clear()
        return
    assert isinstance(store, SqliteStore)
    with closing(sqlite3.connect(store.path)) as connection, connection:
        connection.execute("DELETE FROM semel_records")
        for level in LEVELS:
            connection.execute(f"DELETE FROM {level}")


def with_step(scene: Scene) -> None:
    """Let the handler make its effect inside a step, as `semel.step` does."""

    def body(driver: Driver, owner: bytes) -> Any:
        granted = driver.granted
        assert granted is not None
        if "mail" in dict(granted.steps):
            return "noted"

        def renew(value: bytes | None) -> Renew:
            return Renew(ID, owner, granted.fence, LEASE_US, ("mail", value))

        ran, _noted = driver.run(
            flows.step(renew, lambda: scene.sink.apply(granted), lambda _value: b"jnull")
        )
        if hasattr(ran, "error"):
            raise ran.error
        return "sent"

    scene.body = body
