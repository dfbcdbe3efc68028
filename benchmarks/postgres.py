"""PostgreSQL: against a loop inside the server, single rows and bare batches, on the same server and disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

import semel
from benchmarks.sqlite import THREADS, threads
from semel.cli.bench import workloads
from semel.cli.bench.measure import Measurement, compare
from semel.cli.bench.raw_postgres import RawPostgres
from semel.cli.bench.workloads import nothing

COUNT = 20_000
BATCH = 500
SINGLES = 400
ROUNDS = COUNT // BATCH
"""Batches of one timed run."""
GROWN = 1_000_000
MARK_BYTES_AIM, RECORD_BYTES_AIM = 100, 250
KIB = 1024


def rows(folder: Path) -> list[Measurement]:
    """All comparisons on PostgreSQL; a server is started in `folder`."""
    from tests.services import postgres

    with postgres.own(folder) as server, psycopg.connect(server.url, autocommit=True) as db:
        return [*Bench(server.url, db).rows()]


class Bench:
    """The comparisons on one server."""

    def __init__(self, url: str, db: "psycopg.Connection[Any]") -> None:
        self.url = url
        self.db = db
        self.raw = RawPostgres(db, "public")

    def rows(self) -> Iterator[Measurement]:
        """Each with the limit measured beside it."""
        loop, row = self.raw.loop(ROUNDS, BATCH), self.raw.autocommit(SINGLES)
        with self.client("marks", mode="mark") as marks:
            job = workloads.marking(marks, COUNT, BATCH)
            yield compare("postgres", "mark_many of 500", job, "server-side loop", loop, 0.65)
            yield compare("postgres", "mark_many of 500", job, "autocommit row", row, 30)
            yield compare(
                "postgres",
                "mark, one by one",
                workloads.marking_singly(marks, SINGLES),
                "autocommit row",
                row,
            )
        for size in (1, 10, 100, 500, 1000):
            yield self.claim_complete(size)
        with self.client("runs") as leases:
            many = workloads.running_many(leases, COUNT, BATCH)
            replays = workloads.replaying(leases, COUNT, BATCH)
            yield compare("postgres", "replay of 500", replays, "run_many of 500", many, 1.0)
            yield compare("postgres", "run_many of 500", many, "server-side loop", loop)
            yield compare(
                "postgres", "run, one by one", workloads.running(leases, SINGLES), "autocommit row", row
            )
            yield compare("postgres", f"run, {THREADS} threads", threads(leases), "autocommit row", row)
        with workloads.AsyncBenchClient(semel.aopen(f"{self.url}?schema=tasks", consumer="tasks")) as crowd:
            for tasks in (50, 500):
                yield compare(
                    "postgres", f"run, {tasks} tasks", crowd.running(tasks, tasks * 10), "autocommit row", row
                )
        yield from self.sizes()
        yield from self.growth()

    @contextmanager
    def client(self, name: str, more: str = "", **options: Any) -> Iterator[semel.Semel]:
        """Return an open client with its own schema."""
        with semel.open(f"{self.url}?schema={name}{more}", consumer=name, **options) as opened:
            opened.mark("warm") if options.get("mode") == "mark" else opened.run("warm", nothing)
            yield opened

    def claim_complete(self, size: int) -> Measurement:
        """Claims and completions in batches, against the loop inside the server."""
        count = COUNT if size >= 100 else SINGLES
        rounds = max(1, min(SINGLES, COUNT // size))
        with self.client(f"claims{size}") as leases:
            return compare(
                "postgres", f"claim + complete of {size}", workloads.claiming(leases, count, size),
                "server-side loop", self.raw.loop(rounds, size), 0.12 if size == BATCH else None,
            )  # fmt: skip

    def sizes(self) -> Iterator[Measurement]:
        """How many ids a KiB of table and indexes holds, against the aim."""
        for what, table, mode, bytes_aim in (
            ("marks per KiB", "marks", "mark", MARK_BYTES_AIM),
            ("records per KiB", "records", "lease", RECORD_BYTES_AIM),
        ):
            with self.client(f"size_{table}", "&readable_keys=false", mode=mode) as client:
                job = (
                    workloads.marking(client, COUNT, BATCH)
                    if mode == "mark"
                    else workloads.claiming(client, COUNT, BATCH)
                )
                for _ in range(2):
                    job.fresh()
                    job.run()
            row = self.db.execute(f"SELECT pg_total_relation_size('size_{table}.{table}')").fetchone()
            assert row is not None
            each = row[0] / (2 * COUNT)
            yield Measurement(
                store="postgres", what=what, rate=KIB / each,
                limit=f"{bytes_aim} B each", limit_rate=KIB / bytes_aim, aim=1.0,
            )  # fmt: skip

    def growth(self) -> Iterator[Measurement]:
        """The same work on tables of a million rows, against nearly empty ones."""
        for what, mode in (("mark_many of 500", "mark"), ("claim + complete of 500", "lease")):
            with (
                self.client(f"small_{mode}", mode=mode) as small,
                self.client(f"grown_{mode}", mode=mode) as grown,
            ):
                self.fill(f"grown_{mode}")
                make = workloads.marking if mode == "mark" else workloads.claiming
                for client in (grown, small):  # the first write to a page after a checkpoint costs extra log
                    warm = make(client, COUNT, BATCH)
                    warm.fresh()
                    warm.run()
                mine, theirs = (make(client, COUNT // 4, BATCH) for client in (grown, small))
                yield compare("postgres", f"{what}, a million held", mine, "with few held", theirs, 0.8)

    def fill(self, schema: str) -> None:
        """Insert rows that no call reads, in one statement for each table."""
        self.db.execute(
            f"INSERT INTO {schema}.records (digest, state, owner, fence, attempt, settled_at, expires_at, purge_at,"
            " consumer_id) SELECT gen_random_uuid(), 1, uuid_send(gen_random_uuid()), 1, 1, 1, 4000000000000000,"
            f" 66666667, 1 FROM generate_series(1, {GROWN})"
        )
        self.db.execute(
            f"INSERT INTO {schema}.marks (digest, expires_at, consumer_id)"
            f" SELECT gen_random_uuid(), 4000000000000000, 1 FROM generate_series(1, {GROWN})"
        )
        for table in ("records", "marks"):
            self.db.execute(f"VACUUM ANALYZE {schema}.{table}")
        self.db.execute("CHECKPOINT")
