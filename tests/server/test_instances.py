"""Several instances on one store, their end by signal, and a client whose server goes away."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

import semel
from semel.core.commands import Claim, Granted, Mark, Marked
from semel.errors import StoreUnavailable, StoreUncertain
from semel.stores.http.store import HttpStore
from semel.stores.http.store_async import AsyncHttpStore
from semel.testing.proxy import Proxy
from semel.types import Busy, Unavailable
from tests.server.tools import Running, process
from tests.waiting import await_true


def claim(key: str, owner: bytes | None = None) -> Claim:
    return Claim(("", "billing", key), owner or os.urandom(16), 60 * 10**6, 60 * 10**6)


def _listens(address: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 5).close()
    except OSError:
        return False
    return True


HANDLER = (
    """
import pathlib, time
def slow(event):
    pathlib.Path("started").touch()
    while not pathlib.Path("go").exists():
        time.sl"""
    """eep(0.01)
    pathlib.Path("finished").touch()
"""
)


def test_sigterm_finishes_what_was_accepted(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(HANDLER)
    with process(tmp_path, "--handler", "work:slow") as (server, address):
        running = Running(address)
        answer = running.post("/v1/events", {"id": "e1"})
        assert answer.json() == {"events": [{"status": "accepted", "key": "e1"}]}
        assert await_true((tmp_path / "started").exists)
        running.client.close()
        server.send_signal(signal.SIGTERM)
        assert await_true(lambda: not _listens(address))
        assert not (tmp_path / "finished").exists()
        (tmp_path / "go").touch()
        assert server.wait(30) == 0
    assert (tmp_path / "finished").exists()
    with semel.open(f"sqlite:///{tmp_path}/semel.db", consumer="events") as once:
        record = once.records.lookup("e1")
    assert record is not None
    assert (record.state, record.attempt) == ("done", 1)


def test_sigterm_says_not_ready_first(tmp_path: Path) -> None:
    with process(tmp_path, "--unready", "1h") as (server, address):
        running = Running(address)
        assert running.client.get("/readyz").status_code == 200
        server.send_signal(signal.SIGTERM)
        assert await_true(lambda: running.client.get("/readyz").status_code == 503)
        assert running.claim("still served")["outcome"] == "claimed"
        running.client.close()
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


def test_a_client_outlives_a_restart_of_its_server(tmp_path: Path) -> None:
    with process(tmp_path) as (server, address):
        port = address.rpartition(":")[2]
        store = HttpStore(address)
        first = claim("k")
        (granted,) = store.send([first])
        server.kill()
        server.wait(30)
        (gone,) = store.send([first])
        assert isinstance(gone, Unavailable)
        assert isinstance(gone.error, StoreUnavailable)
        with process(tmp_path, "--port", port):
            (again,) = store.send([first])
            assert again.fence == granted.fence
        store.close()


def test_a_lost_reply_of_a_claim_is_asked_for_again_and_a_mark_is_not(tmp_path: Path) -> None:
    with process(tmp_path) as (_, address), Proxy(int(address.rpartition(":")[2])) as proxy:
        store = HttpStore(f"http://127.0.0.1:{proxy.port}", answer_s=5)
        store.open()
        proxy.cut_replies(1)
        (granted,) = store.send([claim("k")])
        assert isinstance(granted, Granted)
        proxy.cut_replies(1)
        (marked,) = store.send([Mark("", "m", ["a"], 10**9)])
        assert isinstance(marked, Unavailable)
        (second,) = store.send([Mark("", "m", ["a"], 10**9)])
        assert second == Marked([False])  # it was written; nobody may guess that
        store.close()
        with semel.open(f"http://127.0.0.1:{proxy.port}", consumer="m2", mode="mark") as marks:
            marks.mark("first")
            proxy.cut_replies(1)
            with pytest.raises(StoreUncertain):
                marks.mark("second")


def test_the_async_client_runs_in_one_loop_after_the_other(tmp_path: Path) -> None:
    with process(tmp_path) as (_, address):
        store = AsyncHttpStore(address)

        async def once(key: str) -> object:
            await store.aopen()
            try:
                return (await store.asend([claim(key)]))[0]
            finally:
                await store.aclose()

        assert isinstance(asyncio.run(once("a")), Granted)
        assert isinstance(asyncio.run(once("a")), Busy)
