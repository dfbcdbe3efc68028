"""Whoever waits is woken: by the server's notice with polling off, by polling with notices off."""

import asyncio
import threading
from pathlib import Path

import pytest

import semel
from tests.services import redis
from tests.stores.redis.tools import claim, done, kinds, opened
from tests.waiting import await_true, until

LEASE = "60s"


@pytest.fixture(params=["notice", "polling"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def switch(client: semel.Semel | semel.AsyncSemel, how: str) -> None:
    watches = client._runtime.watches
    watches.polling = how == "polling"
    watches.notifications = how == "notice"


def test_a_thread_that_waits_is_woken(tmp_path: Path, how: str) -> None:
    at = redis.place(tmp_path)
    with (
        semel.open(at, consumer="c", lease=LEASE) as owner,
        semel.open(at, consumer="c", lease=LEASE, policy=semel.Policy(wait_s=30)) as waiter,
    ):
        switch(waiter, how)
        claimed = owner.claim("key")
        assert isinstance(claimed, semel.Claimed)
        found: list[object] = []
        waiting = threading.Thread(target=lambda: found.append(waiter.run("key", lambda: "ran again")))
        waiting.start()
        assert await_true(lambda: bool(waiter._runtime.watches._rooms), 10)
        owner.complete(claimed, "the value")
        waiting.join(10)
        assert found == [semel.Done("the value", replayed=True)]


def test_a_task_that_waits_is_woken(tmp_path: Path, how: str) -> None:
    at = redis.place(tmp_path)

    async def ran_again() -> str:
        return "ran again"

    async def scene() -> object:
        async with (
            semel.aopen(at, consumer="c", lease=LEASE) as owner,
            semel.aopen(at, consumer="c", lease=LEASE, policy=semel.Policy(wait_s=30)) as waiter,
        ):
            switch(waiter, how)
            claimed = await owner.claim("key")
            assert isinstance(claimed, semel.Claimed)
            waiting = asyncio.create_task(waiter.run("key", ran_again))
            await until(lambda: any(room.futures for room in waiter._runtime.watches._rooms.values()))
            await owner.complete(claimed, "the value")
            return await asyncio.wait_for(waiting, 10)

    assert asyncio.run(scene()) == semel.Done("the value", replayed=True)


def test_a_release_hands_over(tmp_path: Path) -> None:
    at = redis.place(tmp_path)
    with (
        semel.open(at, consumer="c", lease=LEASE) as owner,
        semel.open(at, consumer="c", lease=LEASE, policy=semel.Policy(wait_s=30)) as waiter,
    ):
        switch(waiter, "notice")
        claimed = owner.claim("key")
        assert isinstance(claimed, semel.Claimed)
        found: list[object] = []
        waiting = threading.Thread(target=lambda: found.append(waiter.run("key", lambda: "took over")))
        waiting.start()
        assert await_true(lambda: bool(waiter._runtime.watches._rooms), 10)
        owner.release(claimed)
        waiting.join(10)
        assert found == [semel.Done("took over")]


def test_a_listener_that_was_cut_off_listens_again(tmp_path: Path) -> None:
    from semel.testing.proxy import Proxy

    at = redis.place(tmp_path)
    port = int(at.split(":")[2].split("/")[0])
    with Proxy(port) as proxy:
        through = at.replace(str(port), str(proxy.port))
        with (
            semel.open(at, consumer="c", lease=LEASE) as owner,
            semel.open(through, consumer="c", lease=LEASE, policy=semel.Policy(wait_s=30)) as waiter,
        ):
            switch(waiter, "notice")
            claimed = owner.claim("key")
            assert isinstance(claimed, semel.Claimed)
            found: list[object] = []
            waiting = threading.Thread(target=lambda: found.append(waiter.run("key", lambda: "ran again")))
            waiting.start()
            assert await_true(lambda: bool(waiter._runtime.watches._rooms), 10)
            before = proxy.connections
            proxy.cut()
            owner.complete(claimed, "the value")
            waiting.join(10)
            assert found == [semel.Done("the value", replayed=True)]
            assert proxy.connections > before


def test_a_listener_that_is_slow_to_be_heard_misses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that did not wait for it to the end is told to look again."""
    monkeypatch.setattr("semel.stores.redis.listener.SUBSCRIBE_S", 0.01)
    at = redis.place(tmp_path)
    may_connect = threading.Event()
    with opened(at) as owner, opened(at) as waiter:
        listener = waiter._pools.current().listener
        connect = listener._new_connection
        monkeypatch.setattr(
            listener, "_new_connection", lambda *which: connect(*which) if may_connect.wait(30) else None
        )
        held = claim("key")
        (granted,) = owner.send([held])
        heard: list[object] = []
        stop = waiter.watch(heard.append)
        assert kinds(waiter.send([claim("key")])) == ["Busy"]
        owner.send([done(held, granted)])
        assert heard == []
        may_connect.set()
        assert await_true(lambda: held.id in heard, 30)
        stop()
