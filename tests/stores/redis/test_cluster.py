"""On a cluster of six processes: the contract, few calls for many keys, and keys that move."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as driver

from semel.core.commands import (
    Admit,
    Count,
    Granted,
    Known,
    Mark,
    Purge,
    ReadSettings,
    Scan,
    SetWindow,
    SwitchMode,
)
from semel.stores.redis import RedisStore, server_checks
from semel.testing import ManualClock, store_contract
from semel.testing.contract.harness import Scenario
from semel.testing.store_contract import Colour, Harness
from semel.types import Completed
from tests.services import redis, server
from tests.stores.redis import places
from tests.stores.redis.tools import MINUTE_US, claim, done, finish, kinds, opened, spied
from tests.stores.shells import InLoop

SCENARIOS = store_contract.scenarios(places.CAPABILITIES)
SMALL = {
    "a_batch_of_a_thousand_is_carried_out",
    "a_lease_that_is_over_is_taken_over",
    "a_mark_expires",
    "a_new_window_may_move_what_is_stored",
    "a_prefix_is_no_pattern",
    "a_scan_is_paged",
    "a_scan_shows_the_records_as_they_stand",
    "answers_come_by_position",
    "answers_survive_reopening",
    "keys_are_taken_as_they_are",
    "many_keys_are_marked_at_once",
    "marks_are_counted",
    "marks_at_once_have_one_first",
    "orphans_with_a_journal_are_found",
    "statistics_count_what_stands",
    "steps_are_given_to_the_next_attempt",
    "values_come_back_byte_for_byte",
    "watchers_are_notified_of_changes_that_end_a_wait",
}
"""What a cluster may answer differently: whatever concerns more than one key, or what lies beside it."""


def test_the_chosen_scenarios_exist() -> None:
    assert {scenario.name for scenario in SCENARIOS} >= SMALL


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize(
    "scenario", [scenario for scenario in SCENARIOS if scenario.name in SMALL], ids=lambda one: one.name
)
def test_contract(scenario: Scenario, colour: Colour, tmp_path: Path) -> None:
    clock = ManualClock()

    def connect() -> Any:
        store = places.make_on_cluster(tmp_path, clock)
        return store.twin() if colour == "async" else store

    store_contract.check(scenario, Harness(connect, clock=clock), colour)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisStore]:
    with opened(redis.cluster(tmp_path)) as one:
        yield one


def test_a_thousand_keys_need_few_calls(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = spied(store, monkeypatch)
    claims = [claim(f"key {number}") for number in range(1000)]
    answers = store.send(claims)
    store.send([done(held, answer) for held, answer in zip(claims, answers, strict=True)])
    scripts = [call for calls in sent for call in calls if call.command[0] == b"EVALSHA"]
    assert len(scripts) <= 2 * 64
    del sent[:]
    assert kinds(store.send([claim(f"key {number}") for number in range(1000)])) == ["Known"] * 1000
    assert len(sent) == 1
    assert len(sent[0]) <= 64
    nodes = [store._core.address(call) for call in sent[0]]
    assert sorted({nodes.count(node) > 10 for node in set(nodes)}) == [True]
    assert len(set(nodes)) == 3


def test_slots_are_what_the_server_says(store: RedisStore) -> None:
    port = store._core.place.addresses[0][1]
    for bucket in range(64):
        assert redis.ask(port, "CLUSTER", "KEYSLOT", f"{{{bucket}}}") == server_checks.slot_of(bucket)


class Move:
    """A slot on its way from one master to another."""

    def __init__(self, cluster: redis.OwnCluster, bucket: int) -> None:
        self.slot = server_checks.slot_of(bucket)
        self.names = cluster.names
        slots = redis.ask(cluster.ports[0], "CLUSTER", "SLOTS")
        self.source: int = next(
            master[1] for first, last, master, *_ in _ranges(slots) if first <= self.slot <= last
        )
        self.target = next(port for port in cluster.ports if port != self.source)
        self.others = [port for port in cluster.ports if port not in (self.source, self.target)]

    def begin(self) -> None:
        redis.ask(self.target, "CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.names[self.source])
        redis.ask(self.source, "CLUSTER", "SETSLOT", self.slot, "MIGRATING", self.names[self.target])

    def carry(self, count: int) -> int:
        with driver.Redis(port=self.source) as client:
            keys: Any = client.execute_command("CLUSTER", "GETKEYSINSLOT", self.slot, count)
            if keys:
                client.execute_command(
                    "MIGRATE", "127.0.0.1", self.target, "", 0, 5000, "KEYS", *keys
                )  # fmt: skip
            return len(keys)

    def end(self) -> None:
        while self.carry(100):
            pass
        for port in (self.target, self.source, *self.others):
            redis.ask(port, "CLUSTER", "SETSLOT", self.slot, "NODE", self.names[self.target])


def _ranges(slots: Any) -> list[Any]:
    """The driver makes a dict of them: (first, last) -> who has them."""
    if isinstance(slots, dict):
        return [(*span, told["primary"]) for span, told in slots.items()]
    return list(slots)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[redis.OwnCluster]:
    with redis.own_cluster(tmp_path) as mine:
        yield mine


@pytest.fixture(params=["sync", "async"])
def movable(request: pytest.FixtureRequest, cluster: redis.OwnCluster) -> Iterator[Any]:
    """A store of either colour on that cluster."""
    store: Any = RedisStore(cluster.url)
    if request.param == "async":
        store = InLoop(store.twin())
    store.open()
    yield store
    store.close()


def test_a_batch_survives_that_its_keys_move(cluster: redis.OwnCluster, movable: Any) -> None:
    store = movable
    move = Move(cluster, 7)
    mine = [key for key in _keys() if _bucket(key) == 7][:40]
    finish(store, *mine[:20])
    running = [claim(key) for key in mine[20:30]]
    granted = store.send(running)
    move.begin()
    assert kinds(store.send([claim(key) for key in mine[:20]])) == ["Known"] * 20
    move.carry(12)
    seen = store.send([claim(key) for key in mine[:20]])
    assert all(isinstance(answer, Known) for answer in seen)
    ends = store.send([done(held, one) for held, one in zip(running, granted, strict=True)])
    assert all(isinstance(answer, Completed) and not answer.recreated for answer in ends)
    fresh = store.send([claim(key) for key in mine[30:]])
    assert kinds(fresh) == ["Granted"] * 10
    (marked,) = store.send([Mark("", "consumer", mine, MINUTE_US)])
    assert marked.firsts == [True] * len(mine)
    move.end()
    assert kinds(store.send([claim(key) for key in mine[:30]])) == ["Known"] * 30
    assert kinds(store.send([claim(key) for key in mine[30:]])) == ["Busy"] * 10
    (marked,) = store.send([Mark("", "consumer", mine, MINUTE_US)])
    assert marked.firsts == [False] * len(mine)


def test_settings_and_listings_survive_that_their_keys_move(cluster: redis.OwnCluster, movable: Any) -> None:
    """Windows, modes and the names of marks' consumers lie in bucket 0."""
    keys = [key for key in _keys() if _bucket(key) == 0][:20]
    finish(movable, *keys)
    movable.send([Mark("", "marks", keys, MINUTE_US), SetWindow("", "billing", "", MINUTE_US)])

    def look() -> None:
        settings, mode, page, stats = movable.send(
            [ReadSettings(), Admit("", "billing", "lease"), Scan(consumer="consumer"), Count()]
        )
        assert settings.windows == {("", "billing", ""): MINUTE_US}
        assert mode == "lease"
        assert {record.key for record in page.records} == set(keys)
        assert (stats.states, stats.marks) == ({"done": 20}, 20)

    move = Move(cluster, 0)
    look()
    move.begin()
    look()
    move.carry(15)
    look()
    move.end()
    look()
    assert kinds(movable.send([SwitchMode("", "billing", "quarantine"), Purge()])) == ["int", "Purged"]


def test_a_master_that_does_not_answer_hides_no_record(cluster: redis.OwnCluster, movable: Any) -> None:
    """A listing that skipped what it could not read would let a mode be changed under running claims."""
    running = [claim(f"key {number}") for number in range(60)]
    assert set(kinds(movable.send(running))) == {"Granted"}
    (number,) = movable.send([SwitchMode("", "consumer", "quarantine")])
    assert number == 60
    server.end(cluster.pids.pop(), signal.SIGKILL)
    assert (
        kinds(movable.send([SwitchMode("", "consumer", "quarantine"), Scan(), Count()]))
        == ["Unavailable"] * 3
    )


def nothing() -> Iterator[None]:
    """Find no new master."""
    yield from ()


def _keys() -> list[str]:
    return [f"key {number}" for number in range(5000)]


def _bucket(key: str) -> int:
    from semel.core.ids import digest

    return digest(("", "consumer", key))[0] & 63


def test_a_batch_goes_on_where_a_node_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One master out of reach: its items are unavailable, the others' are not."""
    with opened(redis.cluster(tmp_path), connect_s=0.5) as store:
        finish(store, "warm")
        assert store._core.map is not None
        lost = store._core.map.masters[0]
        here = tuple(("127.0.0.1", 1) if node == lost else node for node in store._core.map.buckets)
        whole = store._core.map
        store._core.map = server_checks.ClusterMap(whole.masters, here)
        monkeypatch.setattr(store._core, "locate_steps", nothing)
        claims = [claim(f"key {number}") for number in range(200)]
        answers = store.send(claims)
        assert set(kinds(answers)) == {"Granted", "Unavailable"}
        store._core.map = whole
        again = store.send(claims)
        assert kinds(again) == ["Granted"] * 200
        assert all(isinstance(answer, Granted) and answer.attempt == 1 for answer in again)
