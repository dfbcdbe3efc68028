"""What the processes of one storm share: where the store is, which events there are, and the ledger of effects."""

import contextlib
import os
import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import aiosqlite
import asyncpg  # type: ignore[import-untyped]
import msgspec
import psycopg

__all__ = [
    "DRIVERS",
    "LEASE_S",
    "SCENE",
    "Driver",
    "Entry",
    "Kind",
    "Ledger",
    "Scene",
    "UserDatabase",
    "pause",
]

SCENE = "SEMEL_TEST_SCENE"
"""The variable that carries the scene to handlers."""
LEASE_S = 4.0
EVENTS_PER_S = 8

Kind: TypeAlias = Literal["sqlite", "redis", "postgres"]
Driver: TypeAlias = Literal["aiosqlite", "asyncpg", "psycopg"]
DRIVERS: dict[Kind, tuple[Driver, ...]] = {"sqlite": ("aiosqlite",), "postgres": ("asyncpg", "psycopg")}
"""What a user awaits on the database that also holds the store."""


class Entry(NamedTuple):
    """One line of the ledger."""

    what: str
    """`effect`, `end` (of a run, with its outcome), `accepted` (by a service), `broken` or `error`."""
    flow: str
    """Which way the event came: `run`, `charge`, `serve`, ..."""
    event: str
    group: int
    """The process group: a worker and its forks, which are hit together."""
    at_ns: int
    run: str
    """Which call of a client it was; empty for handlers of services."""
    detail: str
    """Of an effect its idempotency key, of an end the outcome."""


class Ledger:
    """A file that semel does not know. Lines are appended whole, and stay when the writer is killed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, what: str, flow: str, event: str, run: str = "", detail: str = "") -> None:
        """Append one line."""
        words = (what, flow, event, str(os.getpgrp()), str(time.monotonic_ns()), run, detail)
        line = "\t".join(word.replace("\t", " ").replace("\n", " ") for word in words)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)

    def read(self) -> list[Entry]:
        """All lines that are whole: who reads may see the beginning of one that is being written."""
        found = self._path.read_bytes() if self._path.exists() else b""
        rows = (line.decode().split("\t") for line in found.split(b"\n")[:-1])
        return [Entry(a, b, c, int(d), int(e), f, g) for a, b, c, d, e, f, g in rows]


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """One storm."""

    kind: Kind
    store: str
    """The store's URL."""
    broker: str
    """A Redis for streams: `redis://host:port/db`."""
    mark: str
    """A name of its own, for streams and tables on shared servers."""
    folder: str
    seed: int
    seconds: float
    port: int
    """Of `semel serve`."""
    feed_port: int
    """Of the WebSocket source."""
    began_ns: int = 0

    @classmethod
    def current(cls) -> "Scene":
        """The one that this process was started for."""
        return msgspec.json.decode(os.environ[SCENE], type=cls)

    def enter(self) -> None:
        """Make it the current one, also for children."""
        os.environ[SCENE] = msgspec.json.encode(self).decode()

    @property
    def ledger(self) -> Ledger:
        """Where effects are noted."""
        return Ledger(Path(self.folder) / "ledger.tsv")

    @property
    def events(self) -> list[str]:
        """Every event of each flow."""
        return [f"e{number}" for number in range(max(10, int(self.seconds * EVENTS_PER_S)))]

    @property
    def is_sql(self) -> bool:
        """Whether the store can hold an inbox and an outbox."""
        return self.kind != "redis"

    @property
    def file(self) -> Path:
        """The SQLite file."""
        return Path(self.folder) / "shop.db"

    def source(self, stream: str) -> str:
        """The URL of a stream to consume."""
        return f"{self.broker}?stream={self.mark}.{stream}&group=g&deadline_s=3"

    def current_event(self, chance: random.Random) -> str:
        """An event that others work on now, too."""
        elapsed_s = (time.monotonic_ns() - self.began_ns) / 1e9
        near = int(elapsed_s * EVENTS_PER_S) + chance.randint(-6, 6)
        return self.events[max(0, min(near, len(self.events) - 1))]


class UserDatabase:
    """The user's own tables, in the database that also holds the store."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.table: str = f"effects_{scene.mark}"
        self._place = "?" if scene.kind == "sqlite" else "%s"

    def connect(self) -> Any:
        """A connection of the user's."""
        if self._scene.kind == "sqlite":
            return sqlite3.connect(self._scene.file, timeout=30)
        return psycopg.connect(self._server)

    @property
    def _server(self) -> str:
        """The URL of the server's database, without options of semel."""
        parts = urlsplit(self._scene.store)
        return urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))

    @contextlib.contextmanager
    def connected(self) -> Iterator[Any]:
        """A connection that is closed at the end."""
        connection = self.connect()
        try:
            yield connection
        finally:
            connection.close()

    @contextlib.asynccontextmanager
    async def aconnected(self, driver: Driver) -> AsyncIterator[Any]:
        """The same to be awaited."""
        connection: Any
        if driver == "aiosqlite":
            connection = await aiosqlite.connect(self._scene.file, timeout=30)
        elif driver == "asyncpg":
            connection = await asyncpg.connect(self._server)
        else:
            connection = await psycopg.AsyncConnection.connect(self._server)
        try:
            yield connection
        finally:
            await connection.close()

    async def ainsert(self, connection: Any, driver: Driver, flow: str, event: str) -> None:
        """As `insert`."""
        places = {"aiosqlite": "?, ?", "asyncpg": "$1, $2", "psycopg": "%s, %s"}[driver]
        values = (flow, event)
        statement = f"INSERT INTO {self.table} VALUES ({places})"
        await connection.execute(statement, *(values if driver == "asyncpg" else (values,)))

    def prepare(self) -> None:
        """Make the table, which has nothing that keeps an event from being there twice."""
        with self.connected() as connection:
            connection.execute(f"CREATE TABLE {self.table} (flow TEXT, event TEXT)")
            connection.commit()

    def insert(self, connection: Any, flow: str, event: str) -> None:
        """One effect, in the transaction of whoever calls."""
        connection.execute(f"INSERT INTO {self.table} VALUES ({self._place}, {self._place})", (flow, event))

    def counts(self) -> Counter[tuple[str, str]]:
        """How often each effect is there."""
        if not self._scene.is_sql:
            return Counter()
        with self.connected() as connection:
            rows = connection.execute(
                f"SELECT flow, event, count(*) FROM {self.table} GROUP BY 1, 2"
            ).fetchall()
        return Counter({(flow, event): count for flow, event, count in rows})


def pause(seconds: float) -> None:
    """Work that takes a while, or the time between two looks."""
    threading.Event().wait(seconds)
