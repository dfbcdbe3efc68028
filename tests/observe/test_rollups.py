"""Rollups add up: across processes, minutes, restarts and lost replies, on every store."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.core.commands import Answer, Item, Lookup
from semel.core.protocols import Store
from semel.errors import StoreUnavailable, UsageError
from semel.observe import events
from semel.observe.counters import (
    LAGS_S,
    OTHER,
    TOOK_S,
    ConsumerCounters,
    CounterHook,
    MinuteCounts,
    quantile,
)
from semel.observe.rollups import CONSUMER, SPREAD, TENANT, RollupHook, Writer, hours
from semel.observe.workers import ALIVE_US, Heartbeat, SeenWorker, workers
from semel.stores.memory.store import MemoryStore
from semel.testing import ManualClock
from semel.types import Record, Unavailable
from tests.contract.stores import KINDS, Kind

HOUR_S = 3600


class Fleet:
    """A store, its clock, and as many writers as a test wants."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.clock = ManualClock()
        self.kind, self.folder = kind, folder
        self.store = kind.make(folder, self.clock)
        self.store.open()

    @property
    def hour(self) -> int:
        return self.clock.now_us() // 10**6 // HOUR_S

    def writer(self) -> tuple[CounterHook, Writer]:
        tally = CounterHook(lambda: self.clock.now_us() / 1e6, lambda: self.clock.now_us() / 1e6)
        return tally, Writer(tally)

    def ask(self, asking: Any) -> Any:
        return ask(self.store, asking)

    def read(self, *wanted: int) -> dict[int, ConsumerCounters]:
        """All counts by minute."""
        found: dict[int, ConsumerCounters] = {}
        for parts in self.ask(hours(wanted or (self.hour,))).values():
            for part in parts:
                for _, _, counts in part.consumers:
                    found.setdefault(part.minute, ConsumerCounters()).add(counts)
        return found


def ask(store: Store, asking: Any) -> Any:
    answers: Sequence[Answer] | None = None
    try:
        while True:
            answers = store.send(asking.send(answers))
    except StopIteration as end:
        return end.value


def receive(tally: CounterHook, times: int = 1, consumer: str = "billing", tenant: str = "") -> None:
    for number in range(times):
        tally(events.Received(tenant, consumer, f"key {number}", b""))


@pytest.fixture(params=[kind for kind in KINDS if not kind.in_loop], ids=lambda kind: kind.name)
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made = Fleet(request.param, tmp_path)
    yield made
    made.store.close()


@pytest.fixture
def memory(tmp_path: Path) -> Fleet:
    return Fleet(KINDS[0], tmp_path)


def test_what_several_processes_count_adds_up(fleet: Fleet) -> None:
    one, two = fleet.writer(), fleet.writer()
    minute = fleet.clock.now_us() // 60_000_000
    receive(one[0], 3)
    receive(two[0], 4)
    assert fleet.ask(one[1].flush())
    assert fleet.ask(two[1].flush())
    receive(one[0], 5)
    assert fleet.ask(one[1].flush())
    assert fleet.read()[minute].received == 12
    fleet.clock.advance(us=60 * 10**6)
    receive(two[0])
    assert fleet.ask(two[1].flush())
    assert fleet.read()[minute].received == 12
    assert fleet.read()[minute + 1].received == 1


def test_an_hour_that_is_over_stays_and_the_next_begins(fleet: Fleet) -> None:
    tally, writer = fleet.writer()
    first = fleet.hour
    receive(tally, 2)
    fleet.ask(writer.flush())
    fleet.clock.advance(us=HOUR_S * 10**6)
    receive(tally, 3)
    fleet.ask(writer.flush())
    found = fleet.read(first, first + 1)
    assert sorted(each.received for each in found.values()) == [2, 3]
    (record,) = fleet.store.send((Lookup((TENANT, CONSUMER, _key(fleet, first))),))
    assert isinstance(record, Record)
    assert record.state == "done"


def _key(fleet: Fleet, hour: int) -> str:
    keys = [f"{hour}:{number}" for number in range(SPREAD)]
    answers = fleet.store.send([Lookup((TENANT, CONSUMER, key)) for key in keys])
    (key,) = [key for key, answer in zip(keys, answers, strict=True) if isinstance(answer, Record)]
    return key


def test_who_died_leaves_its_figures_and_its_place(memory: Fleet) -> None:
    for lease_over in (False, True):
        tally, writer = memory.writer()
        receive(tally, 2)
        memory.ask(writer.flush())
        if lease_over:
            memory.clock.advance(us=301 * 10**6)
    assert sum(each.received for each in memory.read().values()) == 4
    places = {key for _, _, key in _held(memory)}
    assert len(places) == 2
    tally, writer = memory.writer()
    receive(tally)
    for _ in range(40):  # each new process takes one of the places that are free: four at most are ever tried
        memory.ask(writer.close())
        tally, writer = memory.writer()
        receive(tally)
        memory.ask(writer.flush())
    assert sum(each.received for each in memory.read().values()) == 4 + 41
    assert len(_held(memory)) <= 2 + SPREAD


def _held(fleet: Fleet) -> list[Any]:
    items = [Lookup((TENANT, CONSUMER, f"{fleet.hour}:{number}")) for number in range(100)]
    return [answer.id for answer in fleet.store.send(items) if isinstance(answer, Record)]


def test_of_a_hundred_processes_none_is_overlooked(memory: Fleet) -> None:
    for _ in range(100):
        tally, writer = memory.writer()
        receive(tally)
        assert memory.ask(writer.flush())
    assert sum(each.received for each in memory.read().values()) == 100
    taken = {int(key.partition(":")[2]) for _, _, key in _held(memory)}
    assert max(taken, default=0) >= 99 - SPREAD  # or the test would not look past the first few


def test_a_reader_goes_on_past_places_that_nobody_took(
    memory: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.observe.rollups.jitter.choice", lambda free: free[-1])
    for _ in range(30):
        tally, writer = memory.writer()
        receive(tally)
        assert memory.ask(writer.flush())
    assert min(int(key.partition(":")[2]) for _, _, key in _held(memory)) == SPREAD - 1
    assert sum(each.received for each in memory.read().values()) == 30


class Flaky:
    """Carries out everything, and loses some of the replies."""

    def __init__(self, store: Store) -> None:
        self.store, self.sent = store, 0

    def send(self, items: Sequence[Item]) -> list[Answer]:
        answers = self.store.send(items)
        self.sent += 1
        return [Unavailable(StoreUnavailable("cut off"))] * len(items) if self.sent % 3 == 0 else answers


def test_a_lost_reply_counts_nothing_twice(memory: Fleet) -> None:
    tally, writer = memory.writer()
    flaky: Any = Flaky(memory.store)
    told = 0
    for number in range(1, 20):
        receive(tally, number)
        told += number
        ask(flaky, writer.flush())
        assert sum(part.consumers[0][2].received for part in writer.unwritten_counts()) >= 0
    while not ask(flaky, writer.flush()):
        pass
    assert sum(each.received for each in memory.read().values()) == told
    assert writer.unwritten_counts() == []


def test_what_cannot_be_written_is_kept(memory: Fleet) -> None:
    tally, writer = memory.writer()

    class Down:
        def send(self, items: Sequence[Item]) -> list[Answer]:
            return [Unavailable(StoreUnavailable("down"))] * len(items)

    down: Any = Down()
    receive(tally, 2)
    assert ask(down, writer.flush()) is False
    receive(tally, 3)
    assert sum(part.consumers[0][2].received for part in writer.unwritten_counts()) == 5
    assert memory.ask(writer.flush())
    assert sum(each.received for each in memory.read().values()) == 5


def test_rollups_are_gone_after_their_time(memory: Fleet) -> None:
    tally, writer = memory.writer()
    hour = memory.hour
    receive(tally)
    memory.ask(writer.flush())
    memory.ask(writer.close())
    memory.clock.advance(us=7 * 86400 * 10**6)
    assert len(memory.read(hour)) == 1
    memory.clock.advance(us=7200 * 10**6)
    assert memory.read(hour) == {}


def test_consumers_beyond_the_bound_are_counted_together(memory: Fleet) -> None:
    tally, _ = memory.writer()
    for number in range(250):
        receive(tally, consumer=f"consumer {number}")
    (part,) = tally.peek()
    assert len(part.consumers) == 201
    assert next(counts for *name, counts in part.consumers if tuple(name) == OTHER).received == 50


def test_everything_that_ends_a_delivery_is_counted() -> None:
    tally = CounterHook()
    who = ("acme", "billing", "k", b"owner")
    tally(events.ClaimedEvent(*who))
    assert tally.in_flight()[0] == 1
    for event in (
        events.Received(*who),
        events.CompletedEvent(*who),
        events.Duplicate(*who, reason="redelivery", lag_s=3.0),
        events.Duplicate(*who, reason="race"),
        events.Duplicate(*who, reason="reuse", suppressed=False),
        events.FailedEvent(*who, error="KeyError"),
        events.DeadLettered(*who, reason="failed"),
        events.EndedEvent(*who, duration_s=0.01),
        events.Released(*who, error=ValueError()),
        events.Released(*who),
        events.LateArrivalEvent(*who),
        events.StoreSent("claim", 1, 0.004),
        events.StoreFailed("claim", ValueError()),
        events.PurgedEvent(7, 0.0),
    ):
        tally(event)
    (part,) = tally.take()
    assert tally.peek() == []
    assert part.in_flight == 0
    ((tenant, consumer, counts),) = part.consumers
    assert (tenant, consumer) == ("acme", "billing")
    assert counts == ConsumerCounters(
        *(1, 1, 1, 0, 1, 1, 1, 1, 1, 1),
        lags={LAGS_S.index(4.0): 1},
        dead=1,
        took={12: 1},
        errors={"KeyError": 1, "ValueError": 1},
    )
    assert counts.duplicates == 3
    assert (part.store.errors, part.store.purged, sum(part.store.took.values())) == (1, 7, 1)


def test_quantiles_of_evenly_spread_times_are_near_the_true_ones() -> None:
    """Not the ends of their buckets, which are half as long again as their starts."""
    tally = CounterHook()
    for number in range(1000):
        tally(events.StoreSent("claim", 1, 0.020 + 0.060 * number / 1000))
    took = tally.peek()[0].store.took
    assert quantile(took, TOOK_S, 0.5) == pytest.approx(0.050, rel=0.05)
    assert quantile(took, TOOK_S, 0.95) == pytest.approx(0.077, rel=0.2)


def test_a_quantile_is_within_the_bucket_of_the_true_one() -> None:
    tally = CounterHook()
    for number in range(100):
        tally(events.StoreSent("claim", 1, 0.001 if number < 98 else 1.0))
    took = tally.peek()[0].store.took
    half, most = quantile(took, TOOK_S, 0.5), quantile(took, TOOK_S, 0.99)
    assert half is not None
    assert 0.001 / 1.5 <= half <= 0.0015
    assert most is not None
    assert 1.0 / 1.5 <= most <= 1.5
    assert quantile({}, TOOK_S, 0.5) is None


def test_a_worker_without_a_server_writes_its_own(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/events.db"
    hook = RollupHook(url)
    with semel.open(url, consumer="billing", hooks=[hook]) as once:
        for key in ("a", "b", "a", "a"):
            once.run(key, int)
        hook.close()
        hook.close()
        parts = _written(url)
    (counts,) = [counts for part in parts for _, _, counts in part.consumers]
    assert (counts.received, counts.processed, counts.redelivery) == (4, 2, 2)
    assert sum(sum(part.store.took.values()) for part in parts) > 0


def _written(url: str) -> list[MinuteCounts]:
    from semel.stores.registry import store_for

    store: Any = store_for(url)
    store.open()
    try:
        now = store.send((semel.core.commands.Count(),))[0].now_us // 10**6 // HOUR_S
        return [part for parts in ask(store, hours((now - 1, now))).values() for part in parts]
    finally:
        store.close()


def test_a_worker_without_a_server_names_its_sources() -> None:
    """The dashboard finds their dead letters by them; `semel consume` does the same."""
    hook = RollupHook(MemoryStore(), sources=["amqp://user:secret@broker/?queue=orders", "x" * 501])
    assert hook.tally.source_urls == ("amqp://user:***@broker/?queue=orders",)


def test_a_hook_says_what_it_cannot_do() -> None:
    with pytest.raises(UsageError, match="between 1 and 600"):
        RollupHook(MemoryStore(), interval_s=0.1)


# --- workers ---


def test_workers_are_seen_while_they_live_and_share_no_number(fleet: Fleet) -> None:
    tallies = [fleet.writer()[0] for _ in range(20)]
    beats = [Heartbeat(tally) for tally in tallies]
    receive(tallies[0], tenant="acme")
    tallies[0](events.ClaimedEvent("acme", "billing", "k", b"owner"))
    if fleet.kind.name == "http":
        assert not fleet.ask(beats[0].beat()), (
            "a service takes no claims without an owner, and counts callers itself"
        )
        return
    for _ in range(2):
        assert all(fleet.ask(beat.beat()) for beat in beats)
    seen: list[SeenWorker] = fleet.ask(workers())
    assert len(seen) == 20
    (busy,) = (each for each in seen if each.consumers)
    assert (busy.pid, busy.consumers, busy.in_flight) == (os.getpid(), (("acme", "billing"),), 1)
    assert abs(busy.seen_us - fleet.clock.now_us()) < 60_000_000
    assert fleet.ask(beats[0].beat(stopped=True))
    assert len(fleet.ask(workers())) == 19
    assert fleet.ask(Heartbeat(fleet.writer()[0]).beat()), "it takes the number of the one that stopped"
    assert len(fleet.ask(workers())) == 20


def test_a_worker_that_died_is_listed_for_an_hour_and_its_number_is_taken_again(memory: Fleet) -> None:
    assert memory.ask(Heartbeat(memory.writer()[0]).beat())
    memory.clock.advance(us=ALIVE_US + 1000)
    (dead,) = memory.ask(workers())
    assert dead.seen_us < memory.clock.now_us() - ALIVE_US
    assert memory.ask(Heartbeat(memory.writer()[0]).beat())
    (alive,) = memory.ask(workers())
    assert alive.seen_us > dead.seen_us
    memory.clock.advance(us=3601 * 10**6)
    assert memory.ask(workers()) == []
