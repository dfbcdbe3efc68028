"""`python -m benchmarks.single_sqlite`: the cost of one call on SQLite, against a careful version by hand.

Semel and the version by hand take turns, on their own files on the same disk, with the same durability (WAL,
synchronous=FULL). Processor time is that of the whole process, system calls included: a busy computer disturbs it
far less than rates, which are shown, too.
"""

import argparse
import asyncio
import json
import os
import platform
import sqlite3
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

import semel
from semel.types import Delivery

COUNT = 2_000
CALLERS = 50
BATCH = 500
REPEATS = 3
Keys = list[str]
Work = Callable[[Keys], object]


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """One row: medians of the rounds."""

    what: str
    cpu_us: float
    """Processor time of the process per event."""
    rate: float
    """Events per second."""
    ratio: float | None = None
    """Processor time as a multiple of the version by hand in the same rounds."""
    aim: float | None = None


class ByHand:
    """A careful version by hand: claim by INSERT, record the value by UPDATE, return it to duplicates."""

    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(path, isolation_level=None)
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("PRAGMA synchronous = FULL")
        self.db.execute(
            "CREATE TABLE events (key TEXT PRIMARY KEY, done INTEGER NOT NULL, value TEXT, created_at REAL)"
        )

    def run(self, key: str, handler: Callable[[], Any]) -> Any:
        """Return the handler's value: of this call, or of the first one."""
        claimed = self.db.execute(
            "INSERT INTO events VALUES (?, 0, NULL, ?) ON CONFLICT (key) DO NOTHING", (key, time.time())
        ).rowcount
        if claimed:
            value = handler()
            self.db.execute("UPDATE events SET done = 1, value = ? WHERE key = ?", (json.dumps(value), key))
            return value
        done, text = self.db.execute("SELECT done, value FROM events WHERE key = ?", (key,)).fetchone()
        if not done:
            raise RuntimeError(f"{key} is running")
        return json.loads(text)


def charge(_body: object = None) -> dict[str, Any]:
    """A handler that only returns a value."""
    return {"charge": "ch_1", "amount": 1200}


async def acharge() -> dict[str, Any]:
    """The same for an event loop."""
    return charge()


class Bench:
    """The comparisons in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hand = ByHand(folder / "hand.db")
        self.single = self._open("single")
        self.threads = self._open("threads")
        self.batches = self._open("batches")

    def _open(self, name: str) -> semel.Semel:
        client = semel.open(f"sqlite:///{self.folder / name}.db", consumer="bench")
        client.run("warm", charge)
        return client

    def works(self) -> Iterator[tuple[str, Work]]:
        """Yield the operations; each is measured with new keys and then, as a replay, with the same keys."""
        yield "by hand", lambda keys: [self.hand.run(key, charge) for key in keys]
        yield "run", lambda keys: [self.single.run(key, charge) for key in keys]
        yield f"run, {CALLERS} threads", self.in_threads
        yield f"run, {CALLERS} tasks", self.in_tasks
        yield f"run_many of {BATCH}", self.in_batches

    def in_threads(self, keys: Keys) -> None:
        """Many threads that call `run` one by one."""

        def work(at: int) -> None:
            for key in keys[at::CALLERS]:
                self.threads.run(key, charge)

        workers = [threading.Thread(target=work, args=(at,)) for at in range(CALLERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def in_tasks(self, keys: Keys) -> None:
        """Many tasks that call `run` one by one."""

        async def pour() -> None:
            async with semel.aopen(f"sqlite:///{self.folder / 'tasks'}.db", consumer="bench") as client:

                async def work(at: int) -> None:
                    for key in keys[at::CALLERS]:
                        await client.run(key, acharge)

                await asyncio.gather(*(work(at) for at in range(CALLERS)))

        asyncio.run(pour())

    def in_batches(self, keys: Keys) -> None:
        """`run_many`."""
        for start in range(0, len(keys), BATCH):
            self.batches.run_many(
                [Delivery(key=key, body=None) for key in keys[start : start + BATCH]], charge
            )


BY_HAND = {"run, first": "by hand, first", "run, replay": "by hand, replay"}
AIMS = {"run, first": 1.9, "run, replay": 1.7}


def costs(folder: Path, count: int, repeats: int) -> list[Cost]:
    """Measure all operations in turns, each round with new keys."""
    works = list(Bench(folder).works())
    spent: dict[str, list[tuple[float, float]]] = {}
    for _ in range(repeats):
        for what, work in works:
            keys = [str(uuid.uuid4()) for _ in range(count)]
            for turn in ("first", "replay"):
                cpu, wall = time.process_time(), time.perf_counter()
                work(keys)
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                spent.setdefault(f"{what}, {turn}", []).append((cpu * 1e6 / count, count / wall))
    cpus = {what: median(cpu for cpu, _ in rounds) for what, rounds in spent.items()}
    return [
        Cost(
            what=what,
            cpu_us=round(cpus[what], 1),
            rate=round(median(rate for _, rate in rounds)),
            ratio=round(cpus[what] / cpus[BY_HAND[what]], 2) if what in BY_HAND else None,
            aim=AIMS.get(what),
        )
        for what, rounds in spent.items()
    ]


@contextmanager
def scratch(disk: Path | None) -> Iterator[Path]:
    """Yield a folder that is removed at the end."""
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        yield Path(folder)


def main() -> int:
    """Measure and print; with `--out`, write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.single_sqlite")
    parser.add_argument("--out", type=Path, help="folder for single-sqlite.json")
    parser.add_argument("--disk", type=Path, help="folder for the database files (default: temporary)")
    parser.add_argument("--count", type=int, default=COUNT, help="events of each round")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="rounds")
    options = parser.parse_args()
    with scratch(options.disk) as folder:
        rows = costs(folder, options.count, options.repeats)
    load = os.getloadavg()[0]
    print(f"{f'load {load:.1f}':34}{'us each':>9}{'per second':>12}{'x by hand':>11}{'aim':>6}")
    for row in rows:
        ratio, aim = ("" if each is None else f"{each:.2f}" for each in (row.ratio, row.aim))
        print(f"{row.what:34}{row.cpu_us:9.1f}{row.rate:12,.0f}{ratio:>11}{aim:>6}")
    if options.out is not None:
        report = {
            "versions": {
                "semel": semel.__version__, "python": sys.version.split()[0],
                "sqlite": sqlite3.sqlite_version, "machine": platform.machine(),
            },
            "load": round(load, 1),
            "rows": rows,
        }  # fmt: skip
        text = msgspec.json.format(msgspec.json.encode(report)) + b"\n"
        (options.out / "single-sqlite.json").write_bytes(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
