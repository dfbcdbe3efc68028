"""Where the processor time of an event goes: in the store's own code, in the client above it, in the server.

The profile behind the aims that are not reached. It runs on few events, so that a busy computer disturbs it less:
each figure is the lower quartile of blocks, by hand and semel in turns.
"""

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import contender
from benchmarks.growth import progress
from semel.stores.memory.store import MemoryStore
from semel.stores.postgres.store import PostgresStore
from semel.stores.redis.store import RedisStore
from semel.stores.sqlite.store import SqliteStore

__all__ = ["Layer", "layers"]

SINGLE, BATCHES, INBOX = "one by one", "batches of 500", "inbox, one event"
BLOCKS = 12
EVENTS = 100
"""Events of one block, called one by one."""
BATCH = 500
STORES: dict[str, type] = {
    "memory": MemoryStore, "sqlite": SqliteStore, "redis": RedisStore, "postgresql": PostgresStore,
}  # fmt: skip


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """Processor time of one part of a call, in microseconds per event."""

    store: str
    called: str
    contender: str
    phase: str
    client_us: float
    """The caller's process, above the store."""
    store_us: float
    """The caller's process, in the store's own code and its driver."""
    server_us: float
    written_bytes: float = 0.0
    """What the caller's process wrote to files."""

    @property
    def total_us(self) -> float:
        """All of it."""
        return self.client_us + self.store_us + self.server_us


class Spent:
    """Counts the processor time inside `send` of a store's class."""

    def __init__(self) -> None:
        self.ns = 0

    @contextlib.contextmanager
    def counted(self, kind: Any) -> Iterator[None]:
        """Count in this block."""
        send = kind.send

        def counting(store: Any, items: Any, /) -> Any:
            start = time.process_time_ns()
            try:
                return send(store, items)
            finally:
                self.ns += time.process_time_ns() - start

        kind.send = counting
        try:
            yield
        finally:
            kind.send = send


def layers(folder: Path, note_load: Callable[[], None]) -> list[Layer]:
    """Measure every store. `note_load` is called after each."""
    from tests.services import postgres, redis

    found: list[Layer] = []
    folder = folder / "layers"
    folder.mkdir(mode=0o755)
    with redis.own(folder) as server:
        found += _measure("redis", server.url, server.pid)
    note_load()
    with postgres.own(folder) as database:
        found += _measure("postgresql", database.url, database.state["pids"][0])
        postgres.execute(database.url, "CREATE DATABASE inbox")  # a consumer has one mode
        inbox = database.url.rpartition("/")[0] + "/inbox"
        found += _measure_inbox(inbox, database.state["pids"][0])
    note_load()
    found += _measure("sqlite", f"sqlite:///{folder}/layers.db", 0)
    found += _measure("memory", "memory:", 0)
    note_load()
    return found


def _measure(store: str, url: str, pid: int) -> Iterator[Layer]:
    spent = Spent()
    with contextlib.ExitStack() as stack:
        calls: dict[tuple[str, str], Callable[[list[str]], object]] = {}
        by_hand = contender.CONTENDERS["by hand"].get(store)
        if by_hand is not None:
            calls[SINGLE, "by hand"] = _each(stack.enter_context(by_hand(url)))
        stack.enter_context(spent.counted(STORES[store]))
        calls[SINGLE, "semel"] = _each(stack.enter_context(contender.semel_single(url)))
        calls[BATCHES, "semel"] = stack.enter_context(contender.semel_batches(url))
        yield from _turns(store, calls, pid, spent)


def _measure_inbox(url: str, pid: int) -> Iterator[Layer]:
    import psycopg

    with contextlib.ExitStack() as stack:
        by_hand = stack.enter_context(contender.transaction_postgres(url))
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("DROP TABLE effects")  # the inbox creates it as well
        inbox = stack.enter_context(contender.semel_inbox(url))
        calls = {(INBOX, "by hand"): _each(by_hand), (INBOX, "semel"): _each(inbox)}
        yield from _turns("postgresql", calls, pid, Spent())


def _each(call: contender.Call) -> Callable[[list[str]], object]:
    return lambda keys: [call(key) for key in keys]


def _turns(
    store: str, calls: dict[tuple[str, str], Callable[[list[str]], object]], pid: int, spent: Spent
) -> Iterator[Layer]:
    """Call each in turns, first and replay, and yield the lower quartiles."""
    figures: dict[tuple[str, str, str], list[tuple[float, ...]]] = defaultdict(list)
    for block in range(BLOCKS + 1):
        progress(f"layers: {store}, block {block + 1} of {BLOCKS + 1}")
        for (called, who), call in calls.items():
            count = BATCH if called == BATCHES else EVENTS
            keys = [f"{called}-{block:04}-{at:08d}-0000-0000" for at in range(count)]
            for phase in ("first", "replay"):
                spent.ns, written = 0, _written_bytes()
                server, client = contender.server_cpu_s(pid), time.process_time()
                call(keys)
                client = time.process_time() - client
                server = contender.server_cpu_s(pid) - server
                written, inside = _written_bytes() - written, spent.ns / 1e9
                if block:  # the first block warms up
                    each = (client - inside, inside, server)
                    figures[called, who, phase].append(
                        (*(part * 1e6 / count for part in each), written / count)
                    )
    for (called, who, phase), blocks in figures.items():
        client_us, store_us, server_us, bytes_ = (_quartile(part) for part in zip(*blocks, strict=True))
        yield Layer(
            store=store, called=called, contender=who, phase=phase, client_us=client_us, store_us=store_us,
            server_us=server_us, written_bytes=round(bytes_),
        )  # fmt: skip


def _quartile(values: tuple[float, ...]) -> float:
    return round(statistics.quantiles(values)[0], 1)


def _written_bytes() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("wchar"))
