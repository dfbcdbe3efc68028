"""Servers for tests: one loop in a thread that serves many applications, each under a path of its own."""

import asyncio
import atexit
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from semel.clock import Clock
from semel.core.commands import Answer, Count, Item
from semel.core.protocols import Capabilities, Store
from semel.server.app import create_app
from semel.server.settings import Limits, ServeSettings
from semel.stores.http.store import HttpStore
from semel.stores.sqlite import SqliteStore

CAPABILITIES = Capabilities(durable=True, shared=True, notifies=True, endless=True, refreshes=True)
NAMES = frozenset(
    {
        "keys_are_taken_as_they_are",
        "names_that_read_alike_are_apart",
        "odd_keys_are_marked_apart",
        "statistics_leave_out_records_of_semel_itself",
    }
)
"""The server refuses some of their names: control characters (`test_keys` has the rest of them), semel's own."""
WIDE = Limits(
    value_bytes_max=2**20,
    lease_min_us=1,
    lease_max_us=12 * 3600 * 10**6,
    rate_per_s=0,
    items_per_s=0,
    bytes_per_s=0,
    store_share=0,
    scan_share=0,
    live_claims_max=1_000_000,
)
"""What the contract asks for goes beyond what a caller from outside may."""


class Host:
    """The applications of this process, on one port."""

    def __init__(self) -> None:
        self.apps: dict[str, FastAPI] = {}
        self._socket = socket.socket()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._server = uvicorn.Server(uvicorn.Config(self, lifespan="off", log_level="error"))
        self._loop: asyncio.AbstractEventLoop | None = None
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(30)
        atexit.register(self.close)

    def _serve(self, started: threading.Event) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(started.set)
            await self._server.serve(sockets=[self._socket])

        asyncio.run(serve())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, _, rest = scope["path"].removeprefix("/").partition("/")
        await self.apps[name]({**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode()}, receive, send)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run it in the server's loop."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def add(self, app: FastAPI) -> str:
        """Serve an application; returns its address."""
        self.do(app.state.service.open())
        name = f"app{len(self.apps)}"
        self.apps[name] = app
        return f"http://127.0.0.1:{self.port}/{name}"

    def close(self) -> None:
        """End all of it."""
        for app in self.apps.values():
            self.do(app.state.service.close())
        self.apps.clear()
        self._server.should_exit = True
        self._thread.join(30)


_host: Host | None = None
_places: dict[Path, str] = {}


def host() -> Host:
    """The one of this process."""
    global _host  # noqa: PLW0603 - it ends with the process
    if _host is None:
        _host = Host()
    return _host


class TimedSqlite(SqliteStore):
    """Remembers its time of the last batch with an item of each kind."""

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(path, clock=clock, synchronous="NORMAL")
        self.times_us: dict[type[Item], int] = {}

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """One batch has one time, and a count tells it."""
        *answers, stats = super().send([*items, Count()])
        self.times_us.update((type(item), stats.now_us) for item in items)
        return answers


def address(folder: Path, clock: Clock, kind: Callable[..., SqliteStore] = SqliteStore) -> str:
    """Where the records of this folder are served; those of the folder before are let go."""
    if folder not in _places:
        for app in host().apps.values():
            host().do(app.state.service.close())
        _places.clear()
        store = kind(folder / "semel.db", clock=clock)
        app = create_app(ServeSettings(auth="none", limits=WIDE), store=store)
        _places[folder] = host().add(app)
    return _places[folder]


def make(folder: Path, clock: Clock) -> Store:
    """A store behind a server."""
    return HttpStore(address(folder, clock, partial(SqliteStore, synchronous="NORMAL")))


def make_timed(folder: Path, clock: Clock) -> Store:
    """The same, with a store that says when it carried out an item."""
    return HttpStore(address(folder, clock, TimedSqlite))


def time_of(item: Item) -> int:
    """When the store behind the last server carried out the last item of this kind."""
    *_, app = host().apps.values()
    store: TimedSqlite = app.state.service.runtime.store
    return store.times_us[type(item)]
