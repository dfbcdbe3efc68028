"""`python -m benchmarks.redis_cpu`: the processor time of client and server for each operation.

Rates say little on a shared computer: a client that waits for each batch loses more by every delay than fifty
connections that do not wait. Other work disturbs processor time far less. All operations take turns.
"""

import argparse
import asyncio
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import redis
import redis.asyncio

import semel

BATCH = 500
COUNT = 50_000
SINGLES = 10_000
REPEATS = 5
DAY_S = 86_400
Work = Callable[[list[str]], object]


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds per id; the least of several rounds."""

    what: str
    client_us: float
    server_us: float


class Bench:
    """The comparisons on one server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"redis://127.0.0.1:{port}/0"
        self.raw = redis.Redis(port=port)

    def works(self) -> Iterator[tuple[str, Work, int]]:
        """Yield the compared operations and their numbers of ids."""
        marks = semel.open(self.url, consumer="marks", mode="mark")
        compact = semel.open(f"{self.url}?marks=compact", consumer="compact", mode="mark")
        leases = semel.open(self.url, consumer="leases")
        if shutil.which("redis-benchmark"):
            yield "redis-benchmark -c 50 -P 500", self.limit, COUNT
        yield "redis-py pipeline of 500", self.pipeline, COUNT
        yield "mark_many of 500", in_batches(marks.mark_many), COUNT
        yield "compact mark_many of 500", in_batches(compact.mark_many), COUNT
        yield "claim_many of 500", in_batches(leases.claim_many), COUNT
        both = in_batches(lambda keys: leases.complete_many(leases.claim_many(keys)))  # type: ignore[arg-type]
        yield "claim + complete of 500", both, COUNT
        yield "redis.asyncio, 50 tasks", self.peers, SINGLES
        for tasks in (50, 200):
            yield f"mark, {tasks} tasks", self.tasks(tasks), COUNT

    def costs(self) -> list[Cost]:
        """Measure all operations in turns, each time with new ids; return the least of all rounds."""
        works = list(self.works())
        spent: dict[str, list[tuple[float, float]]] = {what: [] for what, _, _ in works}
        for _ in range(REPEATS):
            for what, work, count in works:
                keys = [str(uuid.uuid4()) for _ in range(count)]
                server, client = self.server_cpu_s(), time.process_time()
                work(keys)
                client = time.process_time() - client
                spent[what].append((client * 1e6 / count, (self.server_cpu_s() - server) * 1e6 / count))
        return [
            Cost(
                what=what,
                client_us=round(min(client for client, _ in rounds), 2),
                server_us=round(min(server for _, server in rounds), 2),
            )
            for what, rounds in spent.items()
        ]

    def server_cpu_s(self) -> float:
        """Seconds of processor time of the server's main thread."""
        told: Any = self.raw.info("cpu")
        return float(told["used_cpu_user_main_thread"]) + float(told["used_cpu_sys_main_thread"])

    def limit(self, keys: list[str]) -> None:
        """SET NX EX of fresh keys by redis-benchmark; the time of that client is not measured."""
        subprocess.run(
            ["redis-benchmark", "-p", str(self.port), "-c", "50", "-P", str(BATCH), "-n", str(len(keys)), "-r",
             "1000000000", "-q", "SET", f"{os.urandom(4).hex()}__rand_int__", "1", "NX", "EX", str(DAY_S)],
            capture_output=True, check=True,
        )  # fmt: skip

    def pipeline(self, keys: list[str]) -> None:
        """A pipeline of redis-py."""
        for start in range(0, len(keys), BATCH):
            with self.raw.pipeline(transaction=False) as pipeline:
                for key in keys[start : start + BATCH]:
                    pipeline.set(f"dedup:pipe:{key}", 1, nx=True, ex=DAY_S)
                pipeline.execute()

    def peers(self, keys: list[str]) -> None:
        """Concurrent tasks on redis.asyncio."""

        async def pour() -> None:
            async with redis.asyncio.Redis(port=self.port) as client:
                await spread(50, keys, lambda key: client.set(f"dedup:task:{key}", 1, nx=True, ex=DAY_S))

        asyncio.run(pour())

    def tasks(self, tasks: int) -> Work:
        """Single callers at once in an event loop."""

        async def pour(keys: list[str]) -> None:
            async with semel.aopen(self.url, consumer="tasks", mode="mark") as marks:
                await spread(tasks, keys, marks.mark)

        return lambda keys: asyncio.run(pour(keys))


def in_batches(call: Callable[[list[str]], object]) -> Work:
    """Return a function that makes the call for one batch of keys at a time."""

    def work(keys: list[str]) -> None:
        for start in range(0, len(keys), BATCH):
            call(keys[start : start + BATCH])

    return work


async def spread(tasks: int, keys: list[str], call: Callable[[str], Any]) -> None:
    """Make the call for each key, in this many tasks."""

    async def work(at: int) -> None:
        for key in keys[at::tasks]:
            await call(key)

    await asyncio.gather(*(work(at) for at in range(tasks)))


def main() -> int:
    """Measure and print; with `--out`, write the figures."""
    from tests.services import redis as service

    parser = argparse.ArgumentParser(prog="python -m benchmarks.redis_cpu")
    parser.add_argument("--out", type=Path, help="folder for redis-cpu.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, service.own(Path(folder)) as server:
        costs = Bench(server.port).costs()
        print(f"{'microseconds per id':34}{'client':>8}{'server':>8}")
        for cost in costs:
            print(f"{cost.what:34}{cost.client_us:8.2f}{cost.server_us:8.2f}")
        version = server.ask("INFO", "server")["redis_version"]
    if options.out is not None:
        report = {
            "versions": {
                "semel": semel.__version__, "python": sys.version.split()[0], "redis": version,
                "redis-py": redis.__version__, "machine": platform.machine(),
            },
            "rows": costs,
        }  # fmt: skip
        text = msgspec.json.format(msgspec.json.encode(report)) + b"\n"
        (options.out / "redis-cpu.json").write_bytes(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
