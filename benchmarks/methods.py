"""The methods that introductions to deduplication compare, measured, each with semel's own beside it.

Throughput in ids per second, one process; memory for a million ids; what survives. All ids are new.
"""

import gc
import os
import sqlite3
import time
import tracemalloc
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import semel
from benchmarks.bloom import CAPACITY, ERROR_RATE, PlainBloom
from benchmarks.contender import server_cpu_s
from benchmarks.growth import progress
from benchmarks.stored_bytes import stored_bytes
from semel.core.ids import digest
from semel.stores.bloom import Bloom

__all__ = ["Method", "methods"]

BATCH = 500
MILLION = 1_000_000


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """One way to find duplicates."""

    name: str
    called: str
    rate: float
    cpu_us: float
    """Processor time of client and server per id."""
    megabytes_per_million: float
    survives: str


def methods(folder: Path, count: int) -> list[Method]:
    """Measure all with `count` ids each; single calls to servers with a tenth of them."""
    from tests.services import postgres, redis

    (folder / "methods-redis").mkdir(mode=0o755)
    (folder / "methods-postgres").mkdir(mode=0o755)
    found = [*_in_memory(count), *_bloom(count)]
    with redis.own(folder / "methods-redis") as server:
        found += _redis(server, count)
    with postgres.own(folder / "methods-postgres") as server:
        found += _postgres(server, count)
    return [*found, *_sqlite(folder, count)]


def _time(name: str, called: str, survives: str, calls: list[Any], call: Callable[[Any], Any], *, each: int = 1,
          pid: int = 0, held: Callable[[], int] | None = None) -> Method:  # fmt: skip
    """Measure one method. `each`: ids per call. `held`: the bytes of its data; else memory of this process."""
    progress(f"methods: {name}, {called}")
    gc.collect()
    stored = 0.0
    if held is None:
        tracemalloc.start()
        half = len(calls) // 2
        for one in calls[:half]:
            call(_copy(one))  # a new text, which counts if the method keeps it
        stored = tracemalloc.get_traced_memory()[0] / (half * each)
        tracemalloc.stop()
        calls = calls[half:]
        before = 0
    else:
        before = held()
    server, cpu, wall = server_cpu_s(pid), time.process_time(), time.perf_counter()
    for one in calls:
        call(one)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu + server_cpu_s(pid) - server
    count = len(calls) * each
    if held is not None:
        stored = (held() - before) / count
    return Method(
        name=name, called=called, rate=round(count / wall), cpu_us=round(cpu * 1e6 / count, 2),
        megabytes_per_million=round(stored, 1), survives=survives,
    )  # fmt: skip


def _ids(count: int) -> list[str]:
    return [str(uuid.uuid4()) for _ in range(count)]


def _copy(one: Any) -> Any:
    return one.encode().decode() if isinstance(one, str) else [_copy(each) for each in one]


def _batches(count: int) -> list[list[str]]:
    return [_ids(BATCH) for _ in range(count // BATCH)]


def _in_memory(count: int) -> list[Method]:
    def fresh(seen: set[str]) -> Callable[[str], bool]:
        def call(key: str) -> bool:
            if key in seen:
                return False
            seen.add(key)
            return True

        return call

    found = [_time("set of ids in memory", "one by one", "nothing", _ids(count), fresh(set()))]
    for options, label in (("", "semel, memory:"), ("?compact=true", "semel, memory:?compact=true")):
        with semel.open(f"memory:{options}", consumer="m", mode="mark") as once:
            found.append(_time(label, "one by one", "nothing", _ids(count), once.mark))
        with semel.open(f"memory:{options}", consumer="m", mode="mark") as once:
            found.append(
                _time(label, "batches of 500", "nothing", _batches(count), once.mark_many, each=BATCH)
            )
    return found


def _bloom(count: int) -> list[Method]:
    plain, mine = (
        PlainBloom(CAPACITY, ERROR_RATE),
        Bloom(capacity=CAPACITY, error_rate=ERROR_RATE, window="1d"),
    )

    def by_hand(key: str) -> None:
        if not plain.maybe(key):
            plain.add(key)

    def batch(keys: list[str]) -> None:
        digests = [digest(("", "m", key)) for key in keys]
        mine.maybe_many(digests)
        mine.add_many(digests)

    survives = "nothing; may take a new id for a known one"
    plainly = _time("Bloom filter in Python", "one by one", survives, _ids(count // 5), by_hand)
    ours = _time(
        "semel, Bloom filter before an exact store", "batches of 500", "what the exact store keeps",
        _batches(count), batch, each=BATCH,
    )  # fmt: skip
    full = mine.fullness().bytes_used / mine.layout.generation_capacity
    return [
        msgspec.structs.replace(method, megabytes_per_million=round(each, 1))
        for method, each in ((plainly, len(plain.room) / CAPACITY), (ours, full))
    ]


def _redis(server: Any, count: int) -> list[Method]:
    import redis

    survives = "restarts, except for the last second"

    def held() -> int:
        return stored_bytes(server.url)

    with redis.Redis.from_url(server.url) as client:

        def set_nx(key: str) -> Any:
            return client.set(f"dedup:{key}", "1", nx=True, ex=86_400)

        found = [
            _time(
                "Redis SET NX", "one by one", survives, _ids(count // 10), set_nx, pid=server.pid, held=held
            )
        ]
    for options, label in (("", "semel, redis:"), ("?marks=compact", "semel, redis:?marks=compact")):
        with semel.open(server.url + options, consumer=f"m{options}", mode="mark") as once:
            once.mark("warm")
            singles = _time(
                label, "one by one", survives, _ids(count // 10), once.mark, pid=server.pid, held=held
            )
            batches = _time(label, "batches of 500", survives, _batches(count), once.mark_many, each=BATCH,
                            pid=server.pid, held=held)  # fmt: skip
            found += [
                msgspec.structs.replace(singles, megabytes_per_million=batches.megabytes_per_million),
                batches,
            ]
    return found


def _postgres(server: Any, count: int) -> list[Method]:
    import psycopg

    pid, survives = server.state["pids"][0], "everything that was answered"

    def held() -> int:
        return stored_bytes(server.url)

    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE seen (id text PRIMARY KEY, at timestamptz NOT NULL DEFAULT now())")

        def insert(key: str) -> Any:
            return connection.execute(
                "INSERT INTO seen (id) VALUES (%s) ON CONFLICT DO NOTHING", (key,)
            ).rowcount

        found = [
            _time(
                "PostgreSQL unique constraint",
                "one by one",
                survives,
                _ids(count // 20),
                insert,
                pid=pid,
                held=held,
            )
        ]
    with semel.open(server.url, consumer="m", mode="mark") as once:
        once.mark("warm")
        singles = _time(
            "semel, postgresql:", "one by one", survives, _ids(count // 20), once.mark, pid=pid, held=held
        )
        batches = _time("semel, postgresql:", "batches of 500", survives, _batches(count), once.mark_many, each=BATCH,
                        pid=pid, held=held)  # fmt: skip
    return [
        *found,
        msgspec.structs.replace(singles, megabytes_per_million=batches.megabytes_per_million),
        batches,
    ]


def _sqlite(folder: Path, count: int) -> list[Method]:
    path, survives = folder / "methods.db", "everything that was answered"

    def held() -> int:
        with sqlite3.connect(path) as file:
            return int(file.execute("PRAGMA page_count").fetchone()[0]) * 4096

    with semel.open(f"sqlite:///{os.fspath(path)}", consumer="m", mode="mark") as once:
        once.mark("warm")
        return [
            _time("semel, sqlite:", "one by one", survives, _ids(count // 20), once.mark, held=held),
            _time(
                "semel, sqlite:",
                "batches of 500",
                survives,
                _batches(count),
                once.mark_many,
                each=BATCH,
                held=held,
            ),
        ]
