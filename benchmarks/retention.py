"""`python -m benchmarks.retention`: the plain table against partitions, and claims while old records are removed.

A tenth of the old records is removed from a quiet store, to measure the cost of removal; the others while claims run
as fast as they can, to measure the effect on claims. The designs share a server and take turns.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from msgspec import Struct

import semel
from semel.cli.bench.measure import Job, rate
from semel.core.commands import Admit, Claim, Granted, Purge, Settle
from semel.stores.postgres import PostgresStore
from tests.services import postgres

BATCH = 500
SAMPLE = 20_000
"""How many events are claimed, completed and claimed again, batch by batch, for the rates."""
ROUNDS = 3
"""How often the designs take turns; medians count."""
QUIET_S = 4.0
SINGLES = 2
"""Callers that claim one by one and whose latency is measured; one more claims batches, as load."""
DAY_S = 86_400
DAY_US = DAY_S * 1_000_000
MINUTE_US = 60 * 1_000_000
GRACE_S = 11


class Line(Struct):
    """A line of the table."""

    design: str
    events_s: float = 0.0
    duplicates_s: float = 0.0
    wal_bytes: float = 0.0
    purged: int = 0
    purge_s: float = 0.0
    purge_wal_mb: float = 0.0
    before_mb: float = 0.0
    after_mb: float = 0.0
    loaded: int = 0
    loaded_s: float = 0.0
    quiet_ms: tuple[float, float, float] = (0, 0, 0)
    loaded_ms: tuple[float, float, float] = (0, 0, 0)
    claims_s: tuple[float, float] = (0, 0)


class Bench:
    """One design on a server of its own."""

    def __init__(self, url: str, ids: str, *, timed: bool, rows: int) -> None:
        self.url, self.rows, self.timed = url, rows, timed
        self.schema = f"b_{ids}_{'timed' if timed else 'plain'}"
        self.kind = "uuid7" if timed else ""
        self.mint = semel.keys.uuid7 if ids == "uuid7" else semel.keys.uuid4
        self.quiet = rows // 10
        self.rates: list[tuple[float, float, float]] = []
        self.line = Line(f"{'partitions' if timed else 'plain table'}, {ids}")
        self.store = self.open_store("12d" if timed else None)

    def open_store(self, live: str | None) -> PostgresStore:
        store = PostgresStore(self.url, schema=self.schema, pool_max=8, partition_live=live, wait_s=600)
        store.open()
        store.send([Admit("", "events", "lease", self.kind)])
        return store

    def removal(self) -> Line:
        """Remove old records: first without load, then under load."""
        line = self.line
        line.events_s, line.duplicates_s, line.wal_bytes = (
            median(each) for each in zip(*self.rates, strict=True)
        )
        line.before_mb = self.size_mb()
        line.purged, line.purge_s, line.purge_wal_mb = self.purge_quietly()
        with self.load() as quiet:
            time.sleep(QUIET_S)
        line.quiet_ms, claims = latencies(quiet), len(quiet) / QUIET_S
        with self.load() as felt:
            line.loaded, line.loaded_s, whole_s = self.purge_rest()
        line.loaded_ms, line.claims_s = latencies(felt), (claims, len(felt) / whole_s)
        postgres.execute(self.url, f"VACUUM {self.schema}.records")
        line.after_mb = self.size_mb()
        self.store.close()
        return line

    def fill(self) -> None:
        """Insert old records by a statement on the server: two halves, expired on different days."""
        now_us = time.time_ns() // 1000
        owner = "\\x11223344556677881122334455667788"
        number = postgres.execute(
            self.url, f"SELECT id FROM {self.schema}.consumers WHERE consumer = 'events'"
        )[0][0]
        indexes = [] if self.timed else self.indexes()
        for name, _ in indexes:
            postgres.execute(self.url, f"DROP INDEX {self.schema}.{name}")
        for days, count in ((11, self.quiet), (9, self.rows)):
            at = now_us - days * DAY_US
            table, more, values = (
                ("timed_records", ", id_time", f", {at} + n % 1000") if self.timed else ("records", "", "")
            )
            postgres.execute(
                self.url,
                f"INSERT INTO {self.schema}.{table} (digest, state, owner, fence, attempt, settled_at, expires_at,"
                f" purge_at, consumer_id{more}) SELECT gen_random_uuid(), 1, '{owner}', {at}, 1,"
                f" {at}, {at} + 86400000000 + n, ({at} + 86400000000 + n) / 60000000 + 1, {number}{values}"
                f" FROM generate_series(1, {count}) AS n",
            )
        for _, made in indexes:  # faster than row by row
            postgres.execute(self.url, made)
        postgres.execute(
            self.url, f"VACUUM ANALYZE {self.schema}.{'timed_records' if self.timed else 'records'}"
        )
        postgres.execute(self.url, "CHECKPOINT")

    def indexes(self) -> list[tuple[str, str]]:
        """Return the names and definitions of the plain table's indexes."""
        return [
            (name, made)
            for name, made in postgres.execute(
                self.url,
                "SELECT indexname, indexdef FROM pg_indexes"
                f" WHERE schemaname = '{self.schema}' AND tablename = 'records'",
            )
        ]

    def claims(self, count: int) -> list[Claim]:
        return [
            Claim(("", "events", self.mint("b")), os.urandom(16), MINUTE_US, DAY_US) for _ in range(count)
        ]

    def measure(self) -> None:
        """Measure one more round: events and duplicates per second in batches, and the log bytes of an event."""
        batches = [self.claims(BATCH) for _ in range(SAMPLE // BATCH)]

        def fresh() -> None:
            for batch in batches:
                answers = self.store.send(batch)
                self.store.send(
                    [
                        Settle(item.id, item.owner, answer.fence, "done", None, DAY_US)
                        for item, answer in zip(batch, answers, strict=True)
                    ]
                )

        def again() -> None:
            for batch in batches:
                self.store.send(batch)

        before = self.wal()
        events_s = rate(Job(fresh, SAMPLE))
        wal_bytes = (self.wal() - before) / SAMPLE
        self.rates.append((events_s, rate(Job(again, SAMPLE)), wal_bytes))

    def purge_quietly(self) -> tuple[int, float, float]:
        """Remove the first part without load. Returns the count, the seconds and the megabytes of log."""
        if self.timed:
            self.store.close()
            self.store = self.open_store("10d")
            self.store.send([Purge()])
            time.sleep(GRACE_S)  # the low-water mark must be in force for a while
        before, began, removed = self.wal(), time.perf_counter(), 0
        while removed < self.quiet:
            (purged,) = self.store.send([Purge()])
            removed += self.quiet if purged.partitions else purged.count
        return removed, time.perf_counter() - began, (self.wal() - before) / 1e6

    def purge_rest(self) -> tuple[int, float, float]:
        """Remove the rest under load. Returns the count, the seconds of work and the seconds in all."""
        started = time.perf_counter()
        if self.timed:
            store = self.open_store("8d")
            store.send([Purge()])
            store.close()
            time.sleep(GRACE_S)
        began, removed = time.perf_counter(), 0
        while removed < self.rows:
            (purged,) = self.store.send([Purge()])
            removed += self.rows if purged.partitions else purged.count
        ended = time.perf_counter()
        time.sleep(max(0.0, QUIET_S - (ended - started)))
        return removed, ended - began, time.perf_counter() - started

    @contextmanager
    def load(self) -> Iterator[list[float]]:
        """Claim as fast as possible, some one by one; yield the seconds that each of those took."""
        stop = threading.Event()
        took: list[float] = []

        def singles() -> None:
            while not stop.is_set():
                (item,) = self.claims(1)
                began = time.perf_counter()
                (answer,) = self.store.send([item])
                took.append(time.perf_counter() - began)
                assert isinstance(answer, Granted)

        def batches() -> None:
            while not stop.is_set():
                self.store.send(self.claims(BATCH))

        threads = [threading.Thread(target=singles) for _ in range(SINGLES)] + [
            threading.Thread(target=batches)
        ]
        for thread in threads:
            thread.start()
        try:
            yield took
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def wal(self) -> int:
        return int(postgres.execute(self.url, "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint")[0][0])

    def size_mb(self) -> float:
        (stats,) = postgres.execute(
            self.url,
            "SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class"
            f" WHERE relnamespace = '{self.schema}'::regnamespace AND relkind = 'r'",
        )
        return float(stats[0]) / 1e6


def latencies(took: list[float]) -> tuple[float, float, float]:
    """Median, 99th percentile and maximum in milliseconds."""
    ordered = sorted(took)
    return (
        ordered[len(ordered) // 2] * 1e3,
        ordered[len(ordered) * 99 // 100] * 1e3,
        ordered[-1] * 1e3,
    )


def main() -> int:
    """Measure the designs on one server, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retention", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="old records to remove under load")
    parser.add_argument("--disk", type=Path, help="folder for the servers (default: temporary)")
    parser.add_argument(
        "--only", choices=["plain-uuid4", "plain-uuid7", "timed-uuid7"], help="measure one design"
    )
    options = parser.parse_args()
    print(
        f"{'design':24}{'events/s':>10}{'dupl./s':>10}{'WAL B/ev.':>10}{'purge s':>9}{'WAL MB':>9}{'MB before':>11}"
        f"{'after':>7}{'loaded s':>10}{'claim ms quiet p50/p99/max':>30}{'while purging':>24}{'singles/s':>14}"
    )
    names = [options.only] if options.only else ["plain-uuid4", "plain-uuid7", "timed-uuid7"]
    with tempfile.TemporaryDirectory(dir=options.disk) as folder, postgres.own(Path(folder)) as own:
        own.stop()
        own.start(shared_buffers="512MB", max_wal_size="4GB", maintenance_work_mem="512MB")
        designs = [
            Bench(own.url, ids, timed=kind == "timed", rows=options.rows)
            for kind, _, ids in (name.partition("-") for name in names)
        ]
        for design in designs:
            design.fill()
        for _ in range(ROUNDS):
            for design in designs:
                design.measure()
        for design in designs:
            show(design.removal())
    return 0


def show(line: Line) -> None:
    """Print one line."""
    quiet, felt = ("/".join(f"{each:.1f}" for each in times) for times in (line.quiet_ms, line.loaded_ms))
    print(
        f"{line.design:24}{line.events_s:10,.0f}{line.duplicates_s:10,.0f}{line.wal_bytes:10.0f}{line.purge_s:9.2f}"
        f"{line.purge_wal_mb:9.1f}{line.before_mb:11,.0f}{line.after_mb:7,.0f}{line.loaded_s:10.2f}{quiet:>30}{felt:>24}"
        f"{line.claims_s[0]:8.0f}/{line.claims_s[1]:.0f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
