"""`consume`, `listen` and `relay` are seen: metrics, figures for the dashboard, hooks by name, logs as JSON."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import threading
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from websockets.sync.server import ServerConnection, serve

import semel as library
from semel.core.commands import Count
from semel.core.protocols import Store
from semel.observe import rollups
from semel.observe.counters import ConsumerCounters
from semel.observe.workers import SeenWorker, workers
from semel.outbox import Message
from semel.runtime.generators import drive
from semel.stores.registry import store_for
from semel.stores.sqlite import SqliteStore
from tests.cli.processes import WITHIN_S, semel, start, warm
from tests.services import redis as redis_service
from tests.waiting import await_true

__all__ = ["warm"]

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.slow]

APP = """
from pathlib import Path
from semel import GiveUp

async def charge(message):
    what = message.body.decode()
    if what == "dead":
        raise GiveUp("no such account")
    if what == "bad" and not Path("bad").exists():
        Path("bad").touch()
        raise ValueError("not yet")

def heard(event):
    with open("heard", "a") as file:
        file.write(event.name + "\\n")
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "semel.toml").write_text('hooks = ["app:heard"]\n')
    return tmp_path


@pytest.fixture
def stream() -> str:
    name = f"t-{os.urandom(6).hex()}"
    url = redis_service.place("streams").partition("?")[0]
    with redis.Redis.from_url(url) as client:
        for key in ("one", "one", "two", "bad", "dead"):
            client.xadd(name, {"message_id": key, "ce_type": "order.paid", "data": key})
    return f"{url}?stream={name}&group=g"


def scrape(port: int, kinds: str = "events|dead") -> dict[str, float]:
    """The counters of deliveries, by name and labels."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=WITHIN_S) as answer:
        text = answer.read().decode()
    found = re.findall(rf"^semel_((?:{kinds})\w+)_total(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    return {f"{name} {labels}": float(value) for name, labels, value in found}


def port_of(process: subprocess.Popen[bytes], said: list[str]) -> int:
    assert process.stderr is not None
    for line in process.stderr:
        said.append(line.decode())
        if found := re.match(r"Metrics at port (\d+)", said[-1]):
            return int(found[1])
    raise AssertionError(said)


def figures(store: str) -> dict[str, ConsumerCounters]:
    """What the dashboard reads: the rollups of this hour and of the last, by consumer."""
    found = store_for(store)
    assert isinstance(found, Store)
    found.open()
    try:
        (now_us,) = (answer.now_us for answer in found.send([Count()]))
        hour = now_us // 3_600_000_000
        parts = drive(rollups.hours([hour - 1, hour]), found.send)
    finally:
        found.close()
    summed: dict[str, ConsumerCounters] = {}
    for part in (each for hour_parts in parts.values() for each in hour_parts):
        for _, consumer, counts in part.consumers:
            summed.setdefault(consumer, ConsumerCounters()).add(counts)
    return summed


def seen_at(place: Path) -> list[SeenWorker]:
    """The workers that the store knows."""
    store = SqliteStore(place / "e.db")
    store.open()
    try:
        found: list[SeenWorker] = drive(workers(), store.send)
    finally:
        store.close()
    return found


def test_consume_serves_metrics_writes_figures_calls_hooks_and_logs_json(place: Path, stream: str) -> None:
    said: list[str] = []
    arguments = ("app:charge", "--from", stream, "--store", "sqlite:///e.db", "--consumer", "billing")
    more = ("--metrics", ":0", "--log-format", "json", "--retry-delay", "10ms")
    with start("consume", *arguments, *more, cwd=place) as process:
        try:
            port = port_of(process, said)
            source = stream.partition("stream=")[2].partition("&")[0]
            who = {
                'consumer="billing"',
                'event_type="order.paid"',
                'handler="app.charge"',
                f'source="{source}"',
            }
            found: dict[str, Any] = {}

            def done() -> bool:
                found.update(scrape(port))
                processed = sum(value for key, value in found.items() if key.startswith("events_processed"))
                return (
                    bool(processed == 3)
                    and bool(seen_at(place))
                    and any(key.startswith("dead_letters ") for key in found)
                )

            assert await_true(done, WITHIN_S), found
            (seen,) = seen_at(place)
            process.send_signal(signal.SIGTERM)
            _, rest = process.communicate(timeout=WITHIN_S)
        finally:
            process.kill()
    assert process.returncode == 0
    assert all(who <= set(key.partition(" ")[2].split(",")) for key in found), found
    counted = {key.partition(" ")[0]: value for key, value in found.items() if "failed" not in key}
    assert counted == {"events_received": 6, "events_duplicate": 1, "events_processed": 3} | {
        key: value for key, value in counted.items() if key.startswith("dead")
    }
    assert sum(value for key, value in found.items() if key.startswith("events_failed")) == 2
    assert sum(value for key, value in found.items() if key.startswith("dead_letters ")) == 1
    counts = figures(f"sqlite:///{place / 'e.db'}")["billing"]
    assert (counts.received, counts.processed, counts.duplicates, counts.dead) == (6, 3, 1, 1)
    assert counts.errors == {"ValueError": 1, "GiveUp": 1}
    assert seen.pid == process.pid
    assert (place / "heard").read_text().split().count("received") == 6
    logged = [json.loads(line) for line in rest.decode().splitlines() if line.startswith("{")]
    logged += [json.loads(line) for line in said if line.startswith("{")]
    (failure,) = (line for line in logged if line.get("event") == "failed")
    assert (failure["key"], failure["attempt"], failure["error"]) == ("bad", 1, "ValueError: not yet")
    assert failure["next"].startswith("again in")
    (letter,) = (line for line in logged if line.get("event") == "dead_letter")
    assert (letter["key"], letter["reason"], letter["attempt"]) == ("dead", "failed", 1)
    assert "semel dlq replay" in letter["next"]


def test_relay_writes_figures(place: Path) -> None:
    with library.open(f"sqlite:///{place / 'app.db'}", consumer="shop", mode="inbox") as once:
        connection = sqlite3.connect(place / "app.db", isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        once.outbox(connection).publish(Message("order.paid", {"id": 1}))
        connection.execute("COMMIT")
        connection.close()
    done = semel("relay", "--from", "sqlite:///app.db", "--until-empty", cwd=place)
    assert done.returncode == 0, done.stderr
    counts = figures(f"sqlite:///{place / 'app.db'}")["relay"]
    assert (counts.received, counts.processed) == (1, 1)


def await_figures(port: int, wanted: dict[str, float]) -> None:
    """Scrape until the sums of these counters are as wanted."""
    found: dict[str, float] = {}

    def is_so() -> bool:
        found.clear()
        for key, value in scrape(port, "events|outbox").items():
            name = key.partition(" ")[0]
            found[name] = found.get(name, 0) + value
        return wanted.items() <= found.items()

    assert await_true(is_so, WITHIN_S), found


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(WITHIN_S) == 0


def test_listen_serves_metrics(place: Path) -> None:
    over = threading.Event()

    def feed(connection: ServerConnection) -> None:
        for key in ("one", "one", "two"):
            connection.send(json.dumps({"id": key, "type": "order.paid"}))
        over.wait(WITHIN_S)

    (place / "heard_app.py").write_text("async def handle(event):\n    pass\n")
    with serve(feed, "127.0.0.1", 0) as source:
        thread = threading.Thread(target=source.serve_forever)
        thread.start()
        port = source.socket.getsockname()[1]
        arguments = (f"ws://127.0.0.1:{port}", "heard_app:handle", "--store", "sqlite:///e.db")
        with start("listen", *arguments, "--metrics", ":0", cwd=place) as process:
            try:
                wanted = {"events_received": 3.0, "events_processed": 2.0, "events_duplicate": 1.0}
                await_figures(port_of(process, []), wanted)
                end(process)
            finally:
                process.kill()
                over.set()
        source.shutdown()
        thread.join(WITHIN_S)
    assert figures(f"sqlite:///{place / 'e.db'}")["listen"].processed == 2


def test_relay_serves_metrics(place: Path) -> None:
    with (
        library.open(f"sqlite:///{place / 'app.db'}", consumer="shop", mode="inbox") as once,
        closing(sqlite3.connect(place / "app.db", isolation_level=None)) as connection,
    ):
        connection.execute("BEGIN IMMEDIATE")
        for number in range(3):
            once.outbox(connection).publish(Message("order.paid", {"id": number}))
        connection.execute("COMMIT")
    with start("relay", "--from", "sqlite:///app.db", "--metrics", ":0", cwd=place) as process:
        try:
            port = port_of(process, [])
            await_figures(port, {"events_received": 3.0, "events_processed": 3.0, "outbox_published": 3.0})
            end(process)
        finally:
            process.kill()


def test_figures_can_be_switched_off_and_a_wrong_hook_is_refused(place: Path, stream: str) -> None:
    arguments = ("app:charge", "--from", stream, "--store", "sqlite:///e.db", "--until-idle")
    done = semel("consume", *arguments, cwd=place, SEMEL_ROLLUPS="off")
    assert done.returncode in (0, 75), done.stderr
    assert figures(f"sqlite:///{place / 'e.db'}") == {}
    done = semel("consume", *arguments, cwd=place, SEMEL_HOOKS="app:nothing")
    assert done.returncode == 78
    assert b"app" in done.stderr
