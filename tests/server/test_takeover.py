"""Real instances on one store, killed amid their handlers: one effect for each event, none lost."""

import json
import signal
import sqlite3
import subprocess
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from websockets.sync.client import connect

from tests.server.stores import KINDS, store_url
from tests.server.tools import Running, process
from tests.waiting import await_true

pytestmark = pytest.mark.slow

INSTANCES = 5
EVENTS = 60
HANDLER = """
import asyncio, os, semel
async def handle(event):
    attempt = semel.current().attempt
    with open("ledger", "a") as file:
        file.write(f"{event.id} {os.getpid()} {attempt}\\n")
    if event.type == "hangs" and attempt == 1:
        await asyncio.Event().wait()
    await asyncio.sleep(0.02)
"""


def ledger(folder: Path) -> list[tuple[str, int, int]]:
    """(event, process, attempt), in the order in which handlers began."""
    path = folder / "ledger"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(name, int(pid), int(attempt)) for name, pid, attempt in map(str.split, lines)]


def rows(folder: Path) -> Counter[str]:
    """Events in the table."""
    if not (folder / "rows.db").exists():
        return Counter()
    with closing(sqlite3.connect(folder / "rows.db", timeout=30)) as file:
        try:
            return Counter(name for (name,) in file.execute("SELECT event_id FROM events"))
        except sqlite3.OperationalError:
            return Counter()


def fleet(stack: ExitStack, folder: Path, kind: str) -> dict[int, tuple[subprocess.Popen[bytes], str]]:
    """Instances by their process ids."""
    (folder / "work.py").write_text(HANDLER)
    options = ("--store", store_url(kind, folder), "--handler", "work:handle", "--persist", "sqlite:///rows.db",
               "--events-lease", "3s", "--rate", "0")  # fmt: skip
    made = [stack.enter_context(process(folder, *options)) for _ in range(INSTANCES)]
    return {server.pid: (server, address) for server, address in made}


def post(address: str, events: list[dict[str, Any]]) -> None:
    """Each in a request of its own, until it is taken or the instance is gone."""
    running = Running(address)
    try:
        for event in events:
            while running.post("/v1/events", event).status_code != 200:
                pass
    except httpx2.TransportError:
        pass  # killed: the others have it too
    finally:
        running.client.close()


def say(address: str, events: list[dict[str, Any]]) -> None:
    """All over one socket."""
    with connect(address.replace("http", "ws") + "/v1/events") as socket:
        for event in events:
            socket.send(json.dumps(event))
            assert json.loads(socket.recv(60))["status"] in ("accepted", "duplicate")


@pytest.mark.parametrize("kind", KINDS)
def test_another_instance_takes_over_from_one_that_was_killed(tmp_path: Path, kind: str) -> None:
    hanging = [{"id": f"h{at}", "type": "hangs"} for at in range(3)]
    plain = [{"id": f"e{at}", "n": at} for at in range(EVENTS)]
    names = {each["id"] for each in hanging + plain}
    with ExitStack() as stack:
        running = fleet(stack, tmp_path, kind)
        first = next(iter(running.values()))[1]
        post(first, hanging)
        assert await_true(lambda: len(ledger(tmp_path)) == len(hanging))
        victim = ledger(tmp_path)[0][1]
        assert {pid for _, pid, _ in ledger(tmp_path)} == {victim}
        with ThreadPoolExecutor(INSTANCES) as pool:
            sending = [
                pool.submit(post if server.pid == victim or at % 2 else say, address, plain)
                for at, (server, address) in enumerate(running.values())
            ]
            assert await_true(lambda: len(rows(tmp_path)) >= EVENTS // 6)
            running[victim][0].kill()
            for each in sending:
                each.result(60)
        assert await_true(lambda: set(rows(tmp_path)) == names)  # nobody sends anything again
        code = running[victim][0].wait(30)
    assert code == -signal.SIGKILL
    assert rows(tmp_path) == Counter(names)
    begun = ledger(tmp_path)
    for name in (each["id"] for each in hanging):
        attempts = [(pid != victim, attempt) for event, pid, attempt in begun if event == name]
        assert attempts == [(False, 1), (True, 2)]
    for name, count in Counter(name for name, _, _ in begun).items():
        of_victim = sum(pid == victim for event, pid, _ in begun if event == name)
        assert count - of_victim <= 1, f"{name} was handled twice by instances that live"


@pytest.mark.parametrize("kind", KINDS)
def test_five_instances_grant_each_key_once(tmp_path: Path, kind: str) -> None:
    with ExitStack() as stack:
        options = ("--store", store_url(kind, tmp_path), "--rate", "0")
        addresses = [stack.enter_context(process(tmp_path, *options))[1] for _ in range(INSTANCES)]
        barrier = threading.Barrier(2 * INSTANCES)

        def attack(number: int) -> list[tuple[str, str]]:
            running = Running(addresses[number % INSTANCES])
            barrier.wait(30)
            outcomes = []
            for at in range(40):
                found = running.claim(f"k{at}")
                if found["outcome"] == "claimed":  # completed through another instance than it was granted by
                    other = Running(addresses[(number + 1) % INSTANCES])
                    assert other.end("complete", found["claim"], value=at) == {"outcome": "completed"}
                    other.client.close()
                outcomes.append((f"k{at}", found["outcome"]))
            running.client.close()
            return outcomes

        with ThreadPoolExecutor(2 * INSTANCES) as pool:
            found = Counter(each for outcomes in pool.map(attack, range(2 * INSTANCES)) for each in outcomes)
        last = Running(addresses[0])
        assert [last.claim(f"k{at}")["value"] for at in range(40)] == list(range(40))
        last.client.close()
    assert [found[f"k{at}", "claimed"] for at in range(40)] == [1] * 40
    assert {outcome for _, outcome in found} <= {"claimed", "busy", "done"}
