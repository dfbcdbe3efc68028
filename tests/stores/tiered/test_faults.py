"""A cache that is emptied, restarted, evicts, fails over, hangs or is gone costs speed: nothing is lost or doubled."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import semel
from semel.core.commands import Count, Forget, Granted, Known
from semel.core.ids import digest
from semel.errors import StoreRefused
from semel.stores.sqlite import SqliteStore
from semel.stores.tiered import TieredStore, tiered
from semel.stores.tiered.rules import Write
from semel.testing.proxy import Proxy
from semel.types import Done, Forgotten, Stats, Unavailable
from tests.services import redis, server
from tests.stores.tiered.tools import ByHand, claim, done, finish, kinds
from tests.waiting import await_true

KEYS = [f"evt {number}" for number in range(60)]
PATIENT = "?answer_s=20&connect_s=20"


@contextmanager
def tiers(folder: Path, cache: str, **options: str) -> Iterator[TieredStore]:
    store = tiered(cache=cache, truth=SqliteStore(folder / "truth.db", synchronous="NORMAL"), **options)  # type: ignore[arg-type]
    store.open()
    try:
        yield store
    finally:
        store.close()


class Events:
    """Events that are delivered again and again, and how often each had its effect."""

    def __init__(self, store: TieredStore) -> None:
        self.store = store
        self.effects: Counter[str] = Counter()
        self.once = semel.open(store, consumer="consumer")

    def deliver(self) -> None:
        deliveries = [semel.Delivery(key=key, body=key) for key in KEYS]
        outcomes = self.once.run_many(deliveries, self._effect)
        assert all(
            isinstance(outcome, Done) and outcome.value == key
            for key, outcome in zip(KEYS, outcomes, strict=True)
        )

    def _effect(self, key: str) -> str:
        self.effects[key] += 1
        return key

    def check(self) -> None:
        """Every event had its effect, and none had it twice."""
        assert self.effects == Counter(KEYS)

    def tiers(self) -> dict[str, float]:
        (stats,) = self.store.send([Count()])
        assert isinstance(stats, Stats)
        return stats.tiers

    def hits(self) -> int:
        """How many keys of a whole delivery the cache answers."""
        before = self.tiers()["cache_hits"]
        self.deliver()
        return round(self.tiers()["cache_hits"] - before)


def is_back(store: TieredStore) -> bool:
    """Whether the cache answers again."""
    store.breaker._until = 0.0
    store.send([claim(os.urandom(8).hex())])
    return not store.breaker.is_open


@pytest.mark.parametrize("how", ["FLUSHALL", "SCRIPT FLUSH"])
def test_a_flush(tmp_path: Path, how: str) -> None:
    with redis.own(tmp_path) as own, tiers(tmp_path, own.url + PATIENT) as store:
        events = Events(store)
        for _ in range(3):
            events.deliver()
            own.ask(*how.split())
        events.deliver()
        assert events.hits() == len(KEYS)  # refilled
        events.check()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart(tmp_path: Path, how: signal.Signals) -> None:
    with redis.own(tmp_path, appendfsync="always") as own, tiers(tmp_path, own.url + PATIENT) as store:
        events = Events(store)
        events.deliver()
        assert events.hits() == len(KEYS)
        own.stop(how)
        events.deliver()  # the truth alone
        own.start()
        assert await_true(lambda: is_back(store), 20)
        assert int(own.ask("DBSIZE")) > len(KEYS)  # the append-only file has brought the copies back,
        assert events.hits() == 0  # and none of them is believed: what was lost may be that one was forgotten
        assert events.hits() == len(KEYS)
        events.check()


def test_eviction(tmp_path: Path) -> None:
    with (
        redis.own(tmp_path, maxmemory="3mb", maxmemory_policy="allkeys-random") as own,
        tiers(tmp_path, own.url + PATIENT) as store,
    ):
        events = Events(store)
        for number in range(6):
            events.deliver()
            finish(store, *(f"filler {number} {at}" for at in range(100)), value=b"r" * 8000)
        events.deliver()
        events.check()
        assert int(own.ask("INFO", "stats")["evicted_keys"]) > 0


def test_a_cache_without_memory(tmp_path: Path) -> None:
    with redis.own(tmp_path) as own, tiers(tmp_path, own.url + PATIENT) as store:
        events = Events(store)
        events.deliver()
        own.ask("CONFIG", "SET", "maxmemory", "1")
        assert events.hits() == len(KEYS)
        finish(store, "one more")
        assert isinstance(store.send([Forget(("", "consumer", KEYS[0]))])[0], Forgotten)
        assert isinstance(store.send([claim(KEYS[0])])[0], Granted)
        assert not store.breaker.is_open


def test_a_failover_to_a_replica_that_did_not_hear_of_the_forgetting(tmp_path: Path) -> None:
    folders = [tmp_path / "master", tmp_path / "replica"]
    for folder in folders:
        folder.mkdir()
    with (
        redis.own(folders[0]) as master,
        redis.own(folders[1], replicaof=f"127.0.0.1 {master.port}") as replica,
    ):
        with tiers(tmp_path, master.url + PATIENT) as store:
            events = Events(store)
            events.deliver()
            assert events.hits() == len(KEYS)
            assert await_true(lambda: replica.ask("DBSIZE") == master.ask("DBSIZE") > len(KEYS), 20)
            replica.ask("REPLICAOF", "NO", "ONE")
            assert isinstance(store.send([Forget(("", "consumer", KEYS[0]))])[0], Forgotten)
            del events.effects[KEYS[0]]
        master.stop()
        with tiers(tmp_path, replica.url + PATIENT) as store:
            after = Events(store)
            after.effects = events.effects
            after.deliver()
            assert after.hits() == len(KEYS)
            after.check()


def test_sentinels_lead_to_the_new_master(tmp_path: Path) -> None:
    with redis.trio(tmp_path) as trio, tiers(tmp_path, trio.url + PATIENT) as store:
        events = Events(store)
        events.deliver()
        server.end(trio.pids[0], signal.SIGKILL)
        assert await_true(lambda: is_back(store), 60)
        events.deliver()
        assert events.hits() == len(KEYS)
        events.check()


def test_a_replica_is_refused_and_one_that_has_become_one_answers_nothing(tmp_path: Path) -> None:
    for name in ("cache", "master"):
        (tmp_path / name).mkdir()
    with redis.own(tmp_path / "cache") as own, redis.own(tmp_path / "master") as master:
        with tiers(tmp_path, own.url + PATIENT) as store:
            finish(store, "a")
            own.ask("REPLICAOF", "127.0.0.1", master.port)
            assert isinstance(store.send([claim("a")])[0], Known)
            (stats,) = store.send([Count()])
            assert stats.tiers["cache_errors"] > 0
            assert isinstance(store.send([Forget(("", "consumer", "a"))])[0], Unavailable)
        with pytest.raises(StoreRefused, match="replica"), tiers(tmp_path, own.url + PATIENT):
            pass


def test_a_lost_tombstone_does_not_let_a_late_copy_in(tmp_path: Path) -> None:
    with redis.own(tmp_path) as own, tiers(tmp_path, own.url + PATIENT) as store:
        finish(store.truth, "flushed", "evicted")
        late = {key: ByHand(store, claim(key)) for key in ("flushed", "evicted")}
        for each in late.values():
            each.until(Write)
        for key in late:
            assert isinstance(store.send([Forget(("", "consumer", key))])[0], Forgotten)
        for key in late:
            name = digest(("", "consumer", key))
            assert own.ask("DEL", b"semel:tier:{%d}:%b" % (name[0] & 63, name)) == 1
        late["evicted"].finish()
        assert isinstance(store.send([claim("evicted")])[0], Granted)
        own.ask("FLUSHALL")
        late["flushed"].finish()
        assert isinstance(store.send([claim("flushed")])[0], Granted)


def test_a_cache_that_hangs_is_waited_for_once(tmp_path: Path) -> None:
    with redis.own(tmp_path) as own, Proxy(own.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0?answer_s=0.3&connect_s=0.3"
        with tiers(tmp_path, url) as store:
            events = Events(store)
            events.deliver()
            proxy.mode = "blackhole"
            events.deliver()
            events.deliver()
            assert events.tiers()["cache_errors"] >= 1
            assert isinstance(store.send([Forget(("", "consumer", KEYS[0]))])[0], Unavailable)
            proxy.cut()
            proxy.mode = "pass"
            assert await_true(lambda: is_back(store), 20)
            del events.effects[KEYS[0]]
            store.send([Forget(("", "consumer", KEYS[0]))])
            events.deliver()
            events.check()


def test_counts_of_all_clients_are_added_up(tmp_path: Path) -> None:
    with redis.own(tmp_path) as own:
        for _ in range(2):
            with tiers(tmp_path, own.url + PATIENT) as store:
                events = Events(store)
                events.deliver()
        with tiers(tmp_path, own.url + PATIENT) as store:
            told = Events(store).tiers()
    assert told["truth_asked"] == len(KEYS)
    assert told["cache_hits"] == len(KEYS)
    assert told["copies"] == len(KEYS)


def test_on_a_cluster(tmp_path: Path) -> None:
    url = redis.cluster(tmp_path) + "&answer_s=20&connect_s=20"
    with tiers(tmp_path, url) as store:
        events = Events(store)
        events.deliver()
        assert events.hits() == len(KEYS)
        assert isinstance(store.send([Forget(("", "consumer", KEYS[0]))])[0], Forgotten)
        heir = claim(KEYS[0])
        (granted,) = store.send([heir])
        store.send([done(heir, granted)])
        assert kinds(store.send([claim(key) for key in KEYS])) == ["Known"] * len(KEYS)
        events.check()
