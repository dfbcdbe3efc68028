"""SQLite: against bare multi-row statements and autocommit rows on the same disk, with the same durability."""

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import semel
from benchmarks.measure import Job, Row, compare
from benchmarks.memory import COUNT, Fresh, nothing
from semel.digests import digest

BATCH = 500
SINGLES = 400
THREADS = 50
TASKS = 500


def rows(folder: Path) -> list[Row]:
    """All comparisons on SQLite, in `folder`."""
    sizes = (1, 10, 100, 500, 1000)
    return [
        batch_mark(folder, Raw(folder / "raw1.db")),
        marks_against_rows(folder, Raw(folder / "raw2.db")),
        *[claim_complete(folder, Raw(folder / f"raw3-{size}.db"), size) for size in sizes],
        replay(folder),
        run_many(folder, Raw(folder / "raw4.db")),
        threads(folder, Raw(folder / "raw5.db")),
        tasks(folder, Raw(folder / "raw6.db")),
    ]


class Raw:
    """What SQLite itself can do: 16-byte keys, WITHOUT ROWID, WAL, synchronous FULL."""

    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(path, isolation_level=None)
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("PRAGMA synchronous = FULL")
        self.db.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY, expires_at INTEGER) WITHOUT ROWID")

    def batches(self, fresh: Fresh, size: int = BATCH) -> Callable[[], None]:
        """Insert in multi-row statements, one commit each, asking which were new."""

        def run() -> None:
            for batch in fresh.batches(size):
                parameters: list[object] = []
                for key in batch:
                    parameters += (digest(("", "raw", key)), 1)
                places = ",".join(["(?,?)"] * len(batch))
                self.db.execute("BEGIN IMMEDIATE")
                self.db.execute(
                    f"INSERT INTO seen VALUES {places} ON CONFLICT DO NOTHING RETURNING digest", parameters
                ).fetchall()
                self.db.execute("COMMIT")

        return run

    def autocommit(self) -> None:
        """One row, one commit."""
        for _ in range(SINGLES):
            self.db.execute("INSERT INTO seen VALUES (?, 1)", (os.urandom(16),))


def client(folder: Path, name: str, **options: object) -> semel.Semel:
    """A client on a file of its own."""
    return semel.open(f"sqlite:///{folder / name}.db", consumer=name, **options)  # type: ignore[arg-type]


def batch_mark(folder: Path, raw: Raw) -> Row:
    """Marks of 500, against the bare multi-row insert."""
    mine, theirs = Fresh(), Fresh()
    marks = client(folder, "marks", mode="mark")
    marks.mark("warm")

    def subject() -> None:
        for batch in mine.batches(BATCH):
            marks.mark_many(batch)

    return compare(
        "sqlite",
        "mark_many of 500",
        Job(subject, COUNT, mine),
        "bare insert of 500",
        Job(raw.batches(theirs), COUNT, theirs),
        0.9,
    )


def marks_against_rows(folder: Path, raw: Raw) -> Row:
    """Marks of 500, against an autocommit row each."""
    mine = Fresh()
    marks = client(folder, "marks2", mode="mark")
    marks.mark("warm")

    def subject() -> None:
        for batch in mine.batches(BATCH):
            marks.mark_many(batch)

    return compare(
        "sqlite",
        "mark_many of 500",
        Job(subject, COUNT, mine),
        "autocommit row",
        Job(raw.autocommit, SINGLES),
        18,
    )


def claim_complete(folder: Path, raw: Raw, size: int) -> Row:
    """Claims and completions in batches, against the bare insert of the same batches."""
    count = COUNT if size >= 100 else SINGLES  # small batches commit often
    mine, theirs = Fresh(), Fresh()
    leases = client(folder, f"claims{size}")
    leases.run("warm", nothing)

    def few(fresh: Fresh) -> Callable[[], None]:
        def make() -> None:
            fresh()
            del fresh.keys[count:]

        return make

    def subject() -> None:
        for batch in mine.batches(size):
            leases.complete_many(leases.claim_many(batch))  # type: ignore[arg-type]

    return compare(
        "sqlite",
        f"claim + complete of {size}",
        Job(subject, count, few(mine)),
        f"bare insert of {size}",
        Job(raw.batches(theirs, size), count, few(theirs)),
        0.35 if size == BATCH else None,
    )


def replay(folder: Path) -> Row:
    """Duplicates in batches of 500, against new events in batches of 500."""
    mine, theirs = Fresh(), Fresh()
    leases = client(folder, "replays")

    def pour(fresh: Fresh) -> None:
        for batch in fresh.batches(BATCH):
            leases.run_many([semel.Delivery(key=key, body=None) for key in batch], nothing)

    def fresh() -> None:
        mine()
        pour(mine)

    return compare(
        "sqlite",
        "replay of 500",
        Job(lambda: pour(mine), COUNT, fresh),
        "run_many of 500",
        Job(lambda: pour(theirs), COUNT, theirs),
        1.0,
    )


def run_many(folder: Path, raw: Raw) -> Row:
    """Whole events through handlers in batches of 500, against the bare insert."""
    mine, theirs = Fresh(), Fresh()
    leases = client(folder, "runs")

    def subject() -> None:
        for batch in mine.batches(BATCH):
            leases.run_many([semel.Delivery(key=key, body=None) for key in batch], nothing)

    return compare(
        "sqlite",
        "run_many of 500",
        Job(subject, COUNT, mine),
        "bare insert of 500",
        Job(raw.batches(theirs), COUNT, theirs),
    )


def threads(folder: Path, raw: Raw) -> Row:
    """Fifty threads calling `run`, against autocommit rows. Each run is two durable writes."""
    leases = client(folder, "threads")
    leases.run("warm", nothing)
    mine = Fresh()
    each = 40

    def work(at: int) -> None:
        for key in mine.keys[at * each : (at + 1) * each]:
            leases.run(key, nothing)

    def subject() -> None:
        workers = [threading.Thread(target=work, args=(at,)) for at in range(THREADS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return compare(
        "sqlite",
        f"run, {THREADS} threads",
        Job(subject, THREADS * each, mine),
        "autocommit row",
        Job(raw.autocommit, SINGLES),
        1.5,
    )


def tasks(folder: Path, raw: Raw) -> Row:
    """Five hundred tasks calling `run`, against autocommit rows."""
    mine = Fresh()
    each = 10
    url = f"sqlite:///{folder / 'tasks'}.db"

    async def pour() -> None:
        async def handler() -> None:
            pass

        async def work(at: int) -> None:
            for key in mine.keys[at * each : (at + 1) * each]:
                await leases.run(key, handler)

        async with semel.aopen(url, consumer="tasks") as leases:
            await asyncio.gather(*(work(at) for at in range(TASKS)))

    return compare(
        "sqlite",
        f"run, {TASKS} tasks",
        Job(lambda: asyncio.run(pour()), TASKS * each, mine),
        "autocommit row",
        Job(raw.autocommit, SINGLES),
        5,
    )
