"""The processes of a storm: what each of them does, in a process that was just forked."""

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from websockets.asyncio.server import ServerConnection, broadcast, serve

import semel
from semel.cli.main import main
from semel.observe.doctor import examine
from semel.stores.sqlite import SqliteStore
from semel.stores.sqlite.locks import holds_shared_lock
from tests.whole.scene import LEASE_S, Scene, pause
from tests.whole.worker import Worker

__all__ = ["COMMANDS", "ROLES", "Role"]

Role = Callable[[Scene, str, float], None]
"""Takes the scene, a seed of its own, and how long it lives at most."""

PAGES = (
    "/ui/", "/ui/events", "/ui/events?state=done", "/ui/flight", "/ui/windows", "/ui/outbox", "/ui/streams",
    "/ui/stores", "/ui/observe", "/ui/check", "/ui/parts/doctor", "/ui/audit", "/metrics", "/readyz",
)  # fmt: skip
LEASE = f"{LEASE_S:g}s"
LOOK_S = 0.02
FEED_S, FED_MAX = 0.1, 10
EXPECTED = (0, 75)
"""Exit codes: done; the store was busy for too long, try again."""
COMMANDS: dict[str, tuple[str, ...]] = {
    "list": (),
    "stats": ("--json",),
    "purge": (),
    "doctor": (),
    "bench": ("--seconds", "1"),
    "explain": (),
    "migrate": (),
}


def worker(scene: Scene, seed: str, life_s: float) -> None:
    """Clients of the library."""
    Worker(scene, seed, time.monotonic() + life_s).live()


def drain(scene: Scene, seed: str, life_s: float) -> None:
    """Clients of the library that finish what is left."""
    Worker(scene, seed, time.monotonic() + life_s).drain()


def command(*arguments: str) -> Role:
    """A command of semel."""

    def run(scene: Scene, seed: str, life_s: float) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        values = {"store": scene.store, "broker": scene.broker, "port": str(scene.port), "mark": scene.mark}
        values |= {name: scene.source(name) for name in ("orders", "transfers", "chain")}
        sys.argv = ["semel", *(each.format(**values, feed=scene.feed_port) for each in arguments)]
        code = main()
        sys.stdout.flush()
        if code not in EXPECTED:
            scene.ledger.write("error", arguments[0], "", detail=f"ended with exit code {code}; see its log")
        os._exit(code)

    return run


def _consume(handler: str, stream: str, *more: str) -> Role:
    return command(
        "consume", f"tests.whole.handlers:{handler}", "--from", "{" + stream + "}", "--store", "{store}",
        "--consumer", stream, "--lease", LEASE, "--max-attempts", "1000", "--retry-delay", "50ms", "--batch", "10",
        *more,
    )  # fmt: skip


def anchor(scene: Scene, seed: str, life_s: float) -> None:
    """A client that stays open. Whatever else its process opens and closes, its locks are held, and the log stays."""
    chance = random.Random(seed)
    deadline = time.monotonic() + life_s
    with semel.open(scene.store, consumer="anchor") as once:
        once.run("anchor", lambda: 1)
        watch = Watch(scene)
        while time.monotonic() < deadline:
            watch.look()
            pause(LOOK_S)
            if chance.random() < 0.1:
                with semel.open(scene.store, consumer="anchor") as second:
                    second.run(f"a{chance.randint(0, 100)}", lambda: 1)
            elif scene.kind == "sqlite" and chance.random() < 0.05:
                list(examine(SqliteStore(scene.file)))


class Watch:
    """Looks at the locks of this process, and at the log."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._log = Path(f"{scene.file}-wal")
        self._is_wal = scene.kind == "sqlite" and self._log.exists()
        self._inode = self._log.stat().st_ino if self._is_wal else 0

    def look(self) -> None:
        """Note what is wrong."""
        if not self._is_wal:
            return
        if not holds_shared_lock(self._scene.file.stat().st_ino):
            self._scene.ledger.write("broken", "locks", "", detail="the lock of an open store is gone")
        try:
            found = self._log.stat().st_ino
        except FileNotFoundError:
            found = 0
        if found != self._inode:
            self._scene.ledger.write("broken", "locks", "", detail="the log of an open store was removed")
            self._inode = found


def visitor(scene: Scene, seed: str, life_s: float) -> None:
    """Looks at pages, sends events to the service and messages to the streams, each several times."""
    chance = random.Random(seed)
    streams: Any = redis.Redis.from_url(scene.broker)
    deadline = time.monotonic() + life_s
    while time.monotonic() < deadline:
        pause(0.05)
        _get(scene, chance.choice(PAGES))
        _post(scene, [scene.current_event(chance) for _ in range(3)])
        for stream in ("orders", "transfers"):
            _add(scene, streams, stream, scene.current_event(chance))


def repeat(scene: Scene, seed: str, life_s: float) -> None:
    """Sends every event again, until the service has all."""
    streams: Any = redis.Redis.from_url(scene.broker)
    for event in scene.events:
        for stream in ("orders", "transfers"):
            _add(scene, streams, stream, event)
    left = list(scene.events)
    while left:
        _post(scene, left[:50])
        taken = {entry.event for entry in scene.ledger.read() if entry.what == "accepted"}
        left = [event for event in left if event not in taken]
        pause(0.05)


def _add(scene: Scene, streams: Any, stream: str, event: str) -> None:
    streams.xadd(f"{scene.mark}.{stream}", {"message_id": event, "data": json.dumps({"event": event})})


def _get(scene: Scene, page: str) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        _ask(scene, "GET", page)


def _post(scene: Scene, events: list[str]) -> None:
    """Only what the service has answered for counts as accepted."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        answer = _ask(scene, "POST", "/v1/events", json.dumps([{"id": event} for event in events]))
        if answer is not None:
            for event, told in zip(events, json.loads(answer)["events"], strict=True):
                if told["status"] in ("accepted", "duplicate"):
                    scene.ledger.write("accepted", "serve", event)


def _ask(scene: Scene, method: str, path: str, body: str | None = None) -> bytes | None:
    connection = http.client.HTTPConnection("127.0.0.1", scene.port, timeout=10)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status >= 500 and answer.status != 503:
            scene.ledger.write("error", path, "", detail=f"{answer.status} {text[:300]!r}")
        return text if answer.status == 200 else None
    finally:
        connection.close()


def feed(scene: Scene, seed: str, life_s: float) -> None:
    """A WebSocket source that sends what is current, and after the storm what nobody has processed."""
    asyncio.run(_feed(scene, random.Random(seed)))


async def _feed(scene: Scene, chance: random.Random) -> None:
    connections: set[ServerConnection] = set()

    async def join(connection: ServerConnection) -> None:
        connections.add(connection)
        try:
            await connection.wait_closed()
        finally:
            connections.discard(connection)

    async with serve(join, "127.0.0.1", scene.feed_port):
        while True:
            elapsed_s = (time.monotonic_ns() - scene.began_ns) / 1e9
            events = [scene.current_event(chance) for _ in range(3)]
            if elapsed_s > scene.seconds:
                heard = {entry.event for entry in scene.ledger.read() if entry.flow == "listen"}
                events = [event for event in scene.events if event not in heard][:FED_MAX]
            for event in events:
                broadcast(connections, json.dumps({"event_id": event}))
            await asyncio.sleep(FEED_S)


ROLES: dict[str, Role] = {
    "worker": worker,
    "drain": drain,
    "anchor": anchor,
    "visitor": visitor,
    "repeat": repeat,
    "feed": feed,
    "serve": command(
        "serve", "--store", "{store}", "--port", "{port}", "--handler", "tests.whole.handlers:on_served",
        "--events-lease", LEASE, "--rate", "0", "--auth", "none",
    ),
    "consume": _consume("on_message", "orders"),
    "consume-inbox": _consume("transfer", "transfers", "--mode", "inbox"),
    "consume-chain": _consume("transfer_chain", "chain", "--mode", "inbox"),
    "relay": command("relay", "--from", "{store}", "--to", "{broker}?stream={mark}.chain"),
    "listen": command(
        "listen", "ws://127.0.0.1:{feed}/", "tests.whole.handlers:on_feed", "--store", "{store}",
        "--consumer", "feed", "--lease", LEASE, "--key", "event_id", "--max-attempts", "1000",
    ),
    **{name: command(name, "--store", "{store}", *options) for name, options in COMMANDS.items()},
}  # fmt: skip
