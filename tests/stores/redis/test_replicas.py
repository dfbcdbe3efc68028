"""What replicas and disks have, and what a failover forgets: each record that is lost was reported before."""

import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.core.commands import Item
from semel.errors import PolicyInvalid, StoreRefused
from semel.stores.redis import RedisStore, from_url
from semel.testing.proxy import Proxy
from semel.types import Completed
from tests.services import redis
from tests.stores.redis.tools import claim, done, kinds, opened
from tests.stores.shells import InLoop
from tests.waiting import await_true

COUNT = 40


class Pair:
    """A master, and a replica that follows it through a proxy; clients come through another one."""

    def __init__(self, master: redis.Own, replica: redis.Own, link: Proxy, front: Proxy) -> None:
        self.master, self.replica, self.link, self.front = master, replica, link, front
        self.url = f"{master.scheme}://127.0.0.1:{front.port}/0"

    def fail_over(self) -> None:
        """The master is killed, and the replica takes its place with what it has."""
        self.master.stop(signal.SIGKILL)
        self.replica.ask("REPLICAOF", "NO", "ONE")
        self.front.lead_to(self.replica.port)


@pytest.fixture
def binary() -> str:
    """Which server: the packaged one."""
    return ""


@pytest.fixture
def pair(tmp_path: Path, binary: str) -> Iterator[Pair]:
    with (
        redis.own(tmp_path, binary=binary) as master,
        Proxy(master.port) as link,
        redis.own(tmp_path, binary=binary, replicaof=f"127.0.0.1 {link.port}") as replica,
        Proxy(master.port) as front,
    ):
        assert await_true(lambda: replica.ask("INFO", "replication")["master_link_status"] == "up", 20)
        yield Pair(master, replica, link, front)


def opened_as(colour: str, url: str, **options: Any) -> Any:
    store: Any = RedisStore(url, **options)
    store = store if colour == "sync" else InLoop(store.twin())
    store.open()
    return store


def complete(store: Any, name: str) -> list[str]:
    """Claim and complete some keys in one batch each; all are answered as completed."""
    claims = [claim(f"{name} {number}") for number in range(COUNT)]
    granted = store.send(claims)
    settles: list[Item] = [done(held, one) for held, one in zip(claims, granted, strict=True)]
    assert all(isinstance(end, Completed) for end in store.send(settles))
    return [held.id[2] for held in claims]


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_what_a_failover_forgets_was_reported(
    pair: Pair, colour: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened_as(colour, pair.url, wait_replicas=1, wait_replicas_s=0.2)
    inner = getattr(store, "inner", store)
    try:
        kept = complete(store, "kept")
        if inner.unreplicated:  # a slow computer: then nothing is promised of these
            kept = []
        before = inner.unreplicated
        pair.link.mode = "swallow"  # what the master sends does not arrive
        with caplog.at_level(logging.WARNING, "semel"):
            lost = complete(store, "lost")
        assert inner.unreplicated - before == COUNT
        assert f"{COUNT} settled records did not reach 1 replicas" in caplog.text
        pair.fail_over()
        assert kinds(store.send([claim(key) for key in kept])) == ["Known"] * len(kept)
        again = store.send([claim(key) for key in lost])
        assert set(kinds(again)) == {"Granted"}
    finally:
        store.close()


def test_a_batch_waits_once(pair: Pair) -> None:
    """Its pieces are sent without waiting for replicas in between."""
    pair.link.mode = "swallow"
    with opened(pair.url, wait_replicas=1, wait_replicas_s=0.05) as store:

        def waits(count: int) -> int:
            claims = [claim(f"{count}: {number}") for number in range(count)]
            granted = store.send(claims)
            before = calls()
            store.send([done(held, one) for held, one in zip(claims, granted, strict=True)])
            return calls() - before

        def calls() -> int:
            told = pair.master.ask("INFO", "commandstats")
            return int(told.get("cmdstat_wait", {"calls": 0})["calls"])

        waits(1)  # from here on the server knows the scripts
        assert waits(1000) == 1


# --- disks --------------------------------------------------------------------------------------


def test_a_server_that_cannot_wait_for_its_disk_is_refused(tmp_path: Path) -> None:
    with redis.own(tmp_path, redis.OwnOld) as own:
        for options in ({"wait_disk": True}, {"wait_replica_disks": 1}):
            with pytest.raises(StoreRefused, match=r"cannot wait for a disk .* 7\.2; it is 6\.2"):
                RedisStore(own.url, **options).open()


def test_the_store_works_on_an_old_server(tmp_path: Path) -> None:
    """Its scripts have no first line that names their flags: Redis 6.2 does not know it."""
    with redis.own(tmp_path, redis.OwnOld) as own, opened(own.url) as store:
        assert store.facts().version.startswith("6.2.")
        keys = complete(store, "key")
        assert kinds(store.send([claim(key) for key in keys])) == ["Known"] * COUNT


class TestDisks:
    """On a Valkey: Debian 12's Redis has no WAITAOF."""

    @pytest.fixture
    def binary(self) -> str:
        return redis.valkey()

    @pytest.mark.parametrize("colour", ["sync", "async"])
    def test_what_is_on_disk_is_awaited(
        self, pair: Pair, colour: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        for port in (pair.master.port, pair.replica.port):
            redis.ask(port, "CONFIG", "SET", "appendfsync", "always")
        url = pair.url.replace("redis:", "valkey:")
        store = opened_as(colour, url, wait_disk=True, wait_replica_disks=1, wait_disk_s=5.0)
        inner = getattr(store, "inner", store)
        try:
            kept = complete(store, "kept")
            assert (inner.unsynced, inner.unreplicated) == (0, 0)
            assert pair.master.ask("INFO", "commandstats")["cmdstat_waitaof"]["calls"] >= 1
            pair.fail_over()
            assert kinds(store.send([claim(key) for key in kept])) == ["Known"] * COUNT
        finally:
            store.close()

    def test_what_is_not_on_disk_in_time_is_counted(
        self, pair: Pair, caplog: pytest.LogCaptureFixture
    ) -> None:
        with opened(pair.url, wait_disk=True, wait_replica_disks=1, wait_disk_s=0.1) as store:
            pair.link.mode = "swallow"
            complete(store, "late")
            assert (store.unsynced, store.unreplicated) == (COUNT, 0)
        assert f"{COUNT} settled records did not reach the disk and the disks of 1 replicas" in caplog.text

    def test_without_an_append_only_file_there_is_nothing_to_wait_for(
        self, tmp_path: Path, binary: str
    ) -> None:
        with (
            redis.own(tmp_path, binary=binary, appendonly="no") as own,
            pytest.raises(StoreRefused, match="without such a file"),
        ):
            RedisStore(own.url, wait_disk=True).open()

    def test_the_store_works_on_valkey(self, tmp_path: Path, binary: str) -> None:
        with redis.own(tmp_path, binary=binary) as own, opened(own.url.replace("redis:", "valkey:")) as store:
            assert store.name.startswith("valkey://")
            complete(store, "key")
            assert store.facts().persistence == "aof"
            own.ask("CONFIG", "SET", "maxmemory", "1")
            held = claim("new")
            assert kinds(store.send([held, claim("key 1")])) == ["Unavailable", "Known"]


def test_waiting_must_be_shorter_than_the_answer() -> None:
    with pytest.raises(PolicyInvalid, match="answer_s is 1; it must exceed the 2 s"):
        from_url("redis://localhost/0?wait_disk=true&answer_s=1")
    from_url("redis://localhost/0?answer_s=1")
