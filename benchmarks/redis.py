"""Redis: against redis-benchmark at the same depth and redis-py's own calls, on one server and its durability."""

import asyncio
import csv
import io
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import redis
import redis.asyncio

import semel
from semel.cli.bench import workloads
from semel.cli.bench.measure import REPEATS, Fresh, Job, Measurement, compare, rate
from semel.cli.bench.workloads import nothing, spread

COUNT = 20_000
BATCH = 500
REQUESTS = 200_000
SINGLES = 5_000
PEERS = 50
DAY_S = 86_400
MARK_BYTES_AIM, RECORD_BYTES_AIM = 11, 180
KIB = 1024


def rows(folder: Path) -> list[Measurement]:
    """All comparisons on Redis; a server is started in `folder`."""
    from tests.services import redis as service

    with service.own(folder) as server:
        return [*Bench(server.port).rows()]


class Bench:
    """The comparisons on one server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"redis://127.0.0.1:{port}/0"
        self.raw = redis.Redis(port=port)

    def rows(self) -> Iterator[Measurement]:
        """Each with the limit measured beside it."""
        marks = self.client("marks", mode="mark")
        compact = self.client("compact", "?marks=compact&marks_expected=100000", mode="mark")
        if shutil.which("redis-benchmark"):
            yield self.against_server("mark_many of 500", self.marking(marks), 50, 0.8)
            yield self.against_server("compact mark_many of 500", self.marking(compact), 50, 0.65)
            for size in (1, 10, 100, BATCH, 1000):
                aim = 0.4 if size == BATCH else None
                yield self.against_server(f"claim + complete of {size}", self.claiming(size), 1, aim, size)
        yield self.against_pipeline(self.marking(marks))
        yield self.replay()
        for tasks in (50, 200):
            yield self.tasks(tasks)
        yield from self.sizes()

    def client(self, name: str, options: str = "", **more: Any) -> semel.Semel:
        """Return an open client on the server."""
        client = semel.open(self.url + options, consumer=name, **more)
        client.mark("warm") if more.get("mode") == "mark" else client.run("warm", nothing)
        return client

    # --- subjects ---

    def marking(self, marks: semel.Semel) -> Job:
        """Marks of 500."""
        return workloads.marking(marks, COUNT, BATCH)

    def claiming(self, size: int) -> Job:
        """Claims and completions in batches."""
        return workloads.claiming(self.client(f"claims{size}"), COUNT if size >= 100 else 2_000, size)

    # --- limits ---

    def server_rate(self, connections: int, depth: int) -> float:
        """Return the rate of SET NX EX of fresh keys by redis-benchmark."""
        command = [
            "redis-benchmark", "-p", str(self.port), "-c", str(connections), "-P", str(depth), "-n",
            str(REQUESTS if depth >= 100 else REQUESTS // 10), "-r", "1000000000", "--csv",
            "SET", f"{os.urandom(2).hex()}__rand_int__", "1", "NX", "EX", str(DAY_S),
        ]  # fmt: skip
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        (row,) = csv.DictReader(io.StringIO(answer.stdout))
        return float(row["rps"])

    def against_server(
        self, what: str, subject: Job, connections: int, aim: float | None, depth: int = BATCH
    ) -> Measurement:
        """Compare a job with redis-benchmark, in turns."""
        pairs = [(self.server_rate(connections, depth), rate(subject)) for _ in range(REPEATS)]
        return Measurement(
            store="redis",
            what=what,
            rate=median(mine for _, mine in pairs),
            limit=f"server -c {connections} -P {depth}",
            limit_rate=median(theirs for theirs, _ in pairs),
            aim=aim,
        )

    def against_pipeline(self, subject: Job) -> Measurement:
        """Marks of 500, against redis-py's own pipeline of 500."""
        fresh = Fresh(COUNT)

        def run() -> None:
            for batch in fresh.batches(BATCH):
                with self.raw.pipeline(transaction=False) as pipeline:
                    for key in batch:
                        pipeline.set(f"dedup:pipe:{key}", 1, nx=True, ex=DAY_S)
                    pipeline.execute()

        return compare(
            "redis", "mark_many of 500", subject, "redis-py pipeline of 500", Job(run, COUNT, fresh), 5
        )

    # --- the rest ---

    def replay(self) -> Measurement:
        """Duplicates in batches of 500, against new events in batches of 500."""
        leases = self.client("replays")
        return compare(
            "redis", "replay of 500", workloads.replaying(leases, COUNT, BATCH),
            "run_many of 500", workloads.running_many(leases, COUNT, BATCH), 1.0,
        )  # fmt: skip

    def tasks(self, tasks: int) -> Measurement:
        """Single callers at once in an event loop, against redis.asyncio with fifty tasks."""
        theirs = Fresh(SINGLES)

        async def peer() -> None:
            async with redis.asyncio.Redis(port=self.port) as client:

                async def one(key: str) -> Any:
                    return await client.set(f"dedup:task:{key}", 1, nx=True, ex=DAY_S)

                await spread(PEERS, theirs.keys, one)

        with workloads.AsyncBenchClient(semel.aopen(self.url, consumer="tasks", mode="mark")) as crowd:
            return compare(
                "redis", f"mark, {tasks} tasks", crowd.marking(tasks, COUNT),
                f"redis.asyncio, {PEERS} tasks", Job(lambda: asyncio.run(peer()), SINGLES, theirs), 10,
            )  # fmt: skip

    def sizes(self) -> Iterator[Measurement]:
        """How many ids a KiB of the server's memory holds, against the aim."""
        expected = COUNT * 5
        compact = self.client("size1", f"?marks=compact&marks_expected={expected}&prefix=size1", mode="mark")
        leases = self.client("size2", "?readable_keys=false&prefix=size2")

        def mark() -> None:
            compact.mark_many(fresh.keys)

        def settle() -> None:
            for batch in fresh.batches(BATCH):
                leases.complete_many(leases.claim_many(batch))  # type: ignore[arg-type]

        fresh = Fresh(COUNT)
        for what, work, bytes_aim in (
            ("compact marks per KiB", mark, MARK_BYTES_AIM),
            ("records per KiB", settle, RECORD_BYTES_AIM),
        ):
            before = self.memory_bytes()
            for _ in range(5):
                fresh()
                work()
            each = (self.memory_bytes() - before) / expected
            yield Measurement(
                store="redis", what=what, rate=KIB / each,
                limit=f"{bytes_aim} B each", limit_rate=KIB / bytes_aim, aim=1.0,
            )  # fmt: skip

    def memory_bytes(self) -> int:
        """Return the server's own count of its memory."""
        told: Any = self.raw.info("memory")
        return int(told["used_memory"])
