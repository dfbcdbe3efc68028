"""SQLite: against bare multi-row statements and autocommit rows on the same disk, with the same durability."""

import threading
from collections.abc import Iterator
from pathlib import Path

import semel
from semel.cli.bench import workloads
from semel.cli.bench.measure import Fresh, Job, Measurement, compare
from semel.cli.bench.raw_sqlite import RawSqlite
from semel.cli.bench.workloads import nothing

COUNT = 20_000
BATCH = 500
SINGLES = 400
THREADS = 50
TASKS = 500


def rows(folder: Path) -> list[Measurement]:
    """All comparisons on SQLite, in `folder`."""
    return [*Bench(folder).rows()]


class Bench:
    """The comparisons in one folder; each on files of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self) -> Iterator[Measurement]:
        """Each with the limit measured beside it."""
        marks = self.client("marks", mode="mark")
        yield compare(
            "sqlite", "mark_many of 500", workloads.marking(marks, COUNT, BATCH),
            "bare insert of 500", self.raw("marks").batches(COUNT, BATCH), 0.9,
        )  # fmt: skip
        marks = self.client("marks2", mode="mark")
        yield compare(
            "sqlite", "mark_many of 500", workloads.marking(marks, COUNT, BATCH),
            "autocommit row", self.raw("rows").autocommit(SINGLES), 18,
        )  # fmt: skip
        for size in (1, 10, 100, 500, 1000):
            count = COUNT if size >= 100 else SINGLES  # small batches commit often
            yield compare(
                "sqlite", f"claim + complete of {size}",
                workloads.claiming(self.client(f"claims{size}"), count, size),
                f"bare insert of {size}", self.raw(f"claims{size}").batches(count, size),
                0.35 if size == BATCH else None,
            )  # fmt: skip
        leases = self.client("replays")
        yield compare(
            "sqlite", "replay of 500", workloads.replaying(leases, COUNT, BATCH),
            "run_many of 500", workloads.running_many(leases, COUNT, BATCH), 1.0,
        )  # fmt: skip
        yield compare(
            "sqlite", "run_many of 500", workloads.running_many(self.client("runs"), COUNT, BATCH),
            "bare insert of 500", self.raw("runs").batches(COUNT, BATCH),
        )  # fmt: skip
        yield compare(
            "sqlite", f"run, {THREADS} threads", threads(self.client("threads")),
            "autocommit row", self.raw("threads").autocommit(SINGLES), 1.5,
        )  # fmt: skip
        with workloads.AsyncBenchClient(semel.aopen(self.url("tasks"), consumer="tasks")) as crowd:
            yield compare(
                "sqlite", f"run, {TASKS} tasks", crowd.running(TASKS, TASKS * 10),
                "autocommit row", self.raw("tasks").autocommit(SINGLES), 5,
            )  # fmt: skip

    def raw(self, name: str) -> RawSqlite:
        """Return the raw limit on a file of its own."""
        return RawSqlite(self.folder / f"raw-{name}.db")

    def url(self, name: str) -> str:
        """Return the URL of a new file."""
        return f"sqlite:///{self.folder / name}.db"

    def client(self, name: str, **options: object) -> semel.Semel:
        """Return an open client on its own file."""
        made = semel.open(self.url(name), consumer=name, **options)  # type: ignore[arg-type]
        made.mark("warm") if options.get("mode") == "mark" else made.run("warm", nothing)
        return made


def threads(leases: semel.Semel, each: int = 40) -> Job:
    """Fifty threads calling `run`. Each run is two durable writes."""
    fresh = Fresh(THREADS * each)

    def work(at: int) -> None:
        for key in fresh.keys[at * each : (at + 1) * each]:
            leases.run(key, nothing)

    def run() -> None:
        workers = [threading.Thread(target=work, args=(at,)) for at in range(THREADS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return Job(run, THREADS * each, fresh)
