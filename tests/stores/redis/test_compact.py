"""Compact marks: few bytes each, remembered for at least their window and at most twice as long."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as driver

from semel.core.commands import Count, Forget, Lookup, Mark, Marked
from semel.errors import PolicyInvalid, StoreFull
from semel.stores.redis import RedisStore, from_url
from semel.stores.redis.marks import bins_for
from semel.testing import ManualClock, store_contract
from semel.testing.contract.harness import Scenario
from semel.testing.store_contract import Colour, Harness
from semel.types import Absent, Forgotten, Record, Unavailable
from tests.services import redis
from tests.stores.redis.places import CAPABILITIES, clocked
from tests.stores.redis.tools import MINUTE_US, S, opened

SCENARIOS = [
    scenario
    for scenario in store_contract.scenarios(CAPABILITIES)
    if scenario.flow.__module__.endswith(".marks") and scenario.name != "marks_are_counted"
]
"""All but the one that counts a mark as gone when its window is over: these may last twice as long."""
BYTES_PER_MARK_MAX = 11.0
MANY = 200_000
KEPT = 100


@pytest.fixture
def at(tmp_path: Path) -> str:
    return redis.place(tmp_path) + "&marks=compact"


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.name)
def test_contract(scenario: Scenario, colour: Colour, at: str) -> None:
    clock = ManualClock()

    def connect() -> Any:
        store = clocked(at, clock)
        return store.twin() if colour == "async" else store

    store_contract.check(scenario, Harness(connect, clock=clock), colour)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(at: str, clock: ManualClock) -> Iterator[RedisStore]:
    one = clocked(at, clock)
    one.open()
    yield one
    one.close()


def mark(store: RedisStore, key: str, window_us: int = MINUTE_US) -> bool:
    (answer,) = store.send([Mark("", "marks", [key], window_us)])
    assert isinstance(answer, Marked), answer
    return answer.firsts[0]


def test_a_mark_lasts_from_one_to_two_windows(store: RedisStore, clock: ManualClock) -> None:
    for _ in range(10):
        key = os.urandom(4).hex()
        assert mark(store, key)
        clock.advance(us=MINUTE_US - S)
        assert not mark(store, key)
        clock.advance(us=MINUTE_US + S)
        assert mark(store, key)
        clock.advance(us=7 * S)


def test_a_changed_window_forgets_nothing(store: RedisStore, clock: ManualClock) -> None:
    assert mark(store, "a", 10 * MINUTE_US)
    assert mark(store, "b", MINUTE_US)
    clock.advance(us=30 * S)
    for window_us in (MINUTE_US, 5 * MINUTE_US, 10 * MINUTE_US, 0):
        assert not mark(store, "a", window_us)
        assert not mark(store, "b", window_us)
    clock.advance(us=3 * MINUTE_US)
    assert not mark(store, "a", MINUTE_US)
    assert mark(store, "b", MINUTE_US)


def test_windows_without_end_are_refused(store: RedisStore) -> None:
    answers = [store.send([Mark("", "marks", ["a"], number * S)])[0] for number in range(1, 18)]
    assert all(isinstance(answer, Marked) for answer in answers[:16])
    assert isinstance(answers[16], Unavailable)
    assert isinstance(answers[16].error, PolicyInvalid)
    assert not mark(store, "a", S)


def test_clients_that_expect_differently_agree(at: str, clock: ManualClock, store: RedisStore) -> None:
    keys = [f"key {number}" for number in range(500)]
    assert store.send([Mark("", "marks", keys, MINUTE_US)]) == [Marked([True] * 500)]
    other = clocked(at + "&marks_expected=10", clock)
    other.open()
    assert other.send([Mark("", "marks", keys, MINUTE_US)]) == [Marked([False] * 500)]
    assert isinstance(other.send([Lookup(("", "marks", "key 7"))])[0], Record)
    other.close()


def test_a_mark_may_be_looked_up_counted_and_forgotten(store: RedisStore) -> None:
    assert mark(store, "a")
    assert mark(store, "b")
    name = ("", "marks", "a")
    stats, found, missing = store.send([Count(), Lookup(name), Lookup(("", "marks", "c"))])
    assert (stats.marks, stats.consumers) == (2, {"marks": 2})
    assert isinstance(found, Record)
    assert found.state == "done"
    assert isinstance(missing, Absent)
    assert [type(answer) for answer in store.send([Forget(name)])] == [Forgotten]
    assert [type(answer) for answer in store.send([Forget(name)])] == [Absent]
    assert mark(store, "a")
    assert not mark(store, "b")


def test_every_set_ends(tmp_path: Path) -> None:
    with (
        redis.own(tmp_path) as server,
        opened(f"{server.url}?marks=compact&marks_expected=1024") as store,  # four sets
    ):
        raw: Any = driver.Redis(port=server.port)

        def ends(count: int) -> bool:
            sets = raw.keys("semel:{0}c*")
            return len(sets) == count and all(0 < raw.pttl(key) <= 121_000 for key in sets)

        assert mark(store, "alone")
        assert ends(1)
        assert isinstance(store.send([Forget(("", "marks", "alone"))])[0], Forgotten)
        assert ends(0)
        assert mark(store, "alone")  # the set is made anew
        assert ends(1)
        many = [f"k{at}" for at in range(100)]
        store.send([Mark("", "marks", many, MINUTE_US)])  # some of their sets are there, the others not
        assert ends(4)
        store.send([Mark("", "marks", [*many, "new"], MINUTE_US)])  # all are there
        assert ends(4)


def test_a_mark_takes_few_bytes(tmp_path: Path) -> None:
    with (
        redis.own(tmp_path, appendonly="no") as own,
        opened(f"{own.url}?marks=compact&marks_expected={MANY}") as store,
        driver.Redis(port=own.port) as raw,
    ):
        for start in range(0, MANY, 1000):
            keys = [f"key {number}" for number in range(start, start + 1000)]
            store.send([Mark("", "marks", keys, 3600 * S)])
        found: Any = raw.keys("semel:{0}c*")
        # Of the keys themselves: what the server as a whole uses moves with its buffers and its rehashing.
        assert sum(raw.memory_usage(key, samples=0) for key in found) / MANY <= BYTES_PER_MARK_MAX
        assert len(found) == bins_for(MANY)
        assert all(0 < raw.pttl(key) <= 2 * 3600 * 1000 + 1000 for key in found[:KEPT])
        assert raw.object("encoding", found[0]) == b"intset"


def test_ten_times_the_expected_marks_stay_compact(tmp_path: Path, clock: ManualClock) -> None:
    """The number of sets grows. Earlier marks are still known, to other clients too, for their time and no longer."""
    expected = 1024
    keys = [f"key {number}" for number in range(10 * expected)]
    halves = keys[: 5 * expected], keys[5 * expected :]
    with redis.own(tmp_path, appendonly="no") as own, driver.Redis(port=own.port) as raw:
        url = f"{own.url}?marks=compact&marks_expected={expected}"
        store, other = clocked(url, clock), clocked(url, clock)
        store.open()
        other.open()
        assert mark(other, "of the other client")
        for half in halves:
            for start in range(0, len(half), 128):
                some = half[start : start + 128]
                assert store.send([Mark("", "marks", some, MINUTE_US)]) == [Marked([True] * len(some))]
        found: Any = raw.keys("semel:{0}c*")
        assert {raw.object("encoding", key) for key in found} == {b"intset"}
        assert sum(raw.memory_usage(key, samples=0) for key in found) / len(keys) <= BYTES_PER_MARK_MAX
        assert not mark(other, "of the other client")
        for one in (store, other):
            assert one.send([Mark("", "marks", keys[::10], MINUTE_US)]) == [Marked([False] * expected)]
        assert isinstance(other.send([Lookup(("", "marks", keys[0]))])[0], Record)
        assert isinstance(other.send([Forget(("", "marks", keys[0]))])[0], Forgotten)
        assert other.send([Count()])[0].marks == len(keys)
        assert mark(store, keys[0])
        clock.advance(us=MINUTE_US)
        assert not mark(store, keys[1])
        clock.advance(us=2 * MINUTE_US)
        assert mark(store, keys[1])
        store.close()
        other.close()


def test_no_memory_means_no_mark(tmp_path: Path) -> None:
    with redis.own(tmp_path) as own, opened(f"{own.url}?marks=compact") as store:
        assert mark(store, "a")
        own.ask("CONFIG", "SET", "maxmemory", "1")
        (answer,) = store.send([Mark("", "marks", ["b"], MINUTE_US)])
        assert isinstance(answer.error, StoreFull)
        assert not mark(store, "a")
        own.ask("CONFIG", "SET", "maxmemory", "0")
        assert mark(store, "b")


def test_a_cluster_has_no_compact_marks() -> None:
    with pytest.raises(PolicyInvalid, match="single server"):
        from_url("redis+cluster://localhost?marks=compact")
