"""`python -m benchmarks.inbox_partitions`: an inbox in partitions, by processor time, beside the plain table.

Events come one by one, each in a transaction of its own, or in batches of 500, on one connection of the caller's.
Layouts share a server and take turns; they differ in the number of partitions. Old records are inserted by a statement
on the server, the same number for each day of a week, and removed by one purge at the end.
"""

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import psycopg
from msgspec import Struct

import semel
from benchmarks.contender import server_cpu_s
from benchmarks.mark_partitions import BATCH, DAY_US, ROUNDS, take_turns
from semel.core.commands import Purge
from semel.stores.postgres import PostgresStore
from semel.testing import ManualClock
from tests.services import postgres

BATCHES = 6
SINGLES = 600
DAYS = 7
KEPT = Path(__file__).parent / "results" / "inbox-partitions.json"
COLUMNS = "digest, state, owner, fence, settled_at, attempt, expires_at, purge_at, consumer_id, key"


class InboxCost(Struct, kw_only=True):
    """A line of the table. Times are microseconds of the server's processor time for each event."""

    layout: str
    partitions: int
    one_new_us: float
    """An event in a transaction of its own: begin, mark, commit."""
    one_known_us: float
    many_new_us: float
    many_known_us: float
    locked: int
    """Partitions that an open transaction with one mark has locked."""
    bytes_each: float
    removal_ms: float
    """Processor time to remove the records of a week."""
    removal_log_mb: float


class Layout:
    """One way to keep the records of an inbox."""

    def __init__(self, url: str, pid: int, step: str, rows: int) -> None:
        self.url, self.pid, self.step, self.rows = url, pid, step, rows
        self.schema = "b_" + (step.replace(" ", "_") or "plain")
        self.clock = ManualClock(time.time_ns() // 1000)
        options: dict[str, Any] = {"partition_step": step, "partition_live": "9d"} if step else {}
        self.store = PostgresStore(url, schema=self.schema, clock=self.clock, wait_s=600, **options)
        self.once = semel.open(
            self.store,
            consumer="events",
            mode="inbox",
            window="24h",
            ids="uuid7" if step else None,
            policy=semel.Policy(late="hold"),
        )
        self.once.records.stats()
        self.connection = psycopg.connect(url)
        self.figures: list[list[float]] = []
        self.partitions = int(self.number(f"SELECT count(*) FROM {self.schema}.partitions"))

    def fill(self) -> None:
        """Hold records for every day of the last week."""
        now = self.clock.now_us()
        table, more, value = ("timed_records", ", id_time", f", {now} - n * {DAY_US} / {self.rows}")
        if not self.step:
            table, more, value = "records", "", ""
        postgres.execute(
            self.url,
            f"INSERT INTO {self.schema}.{table} ({COLUMNS}{more})"
            f" SELECT gen_random_uuid(), 1, 'o', {now}, {now}, 1, {now + DAY_US}, {(now + DAY_US) // 60_000_000}, c.id,"
            f" gen_random_uuid()::text{value} FROM generate_series(1::bigint, {self.rows * DAYS}) AS n,"
            f" {self.schema}.consumers AS c WHERE c.consumer = 'events'",
        )
        postgres.execute(self.url, f"VACUUM ANALYZE {self.schema}.{table}")

    def mark(self, keys: list[str]) -> list[bool]:
        firsts = self.once.inbox(self.connection).first_many(keys)
        self.connection.commit()
        return firsts

    def measure(self) -> None:
        """Measure one more round: new keys, then the same keys again, one by one and in batches."""
        singles = [[semel.keys.uuid7("b")] for _ in range(SINGLES)]
        batches = [[semel.keys.uuid7("b") for _ in range(BATCH)] for _ in range(BATCHES)]
        spent: list[float] = []
        for calls in (singles, batches):
            for first in (True, False):
                server = server_cpu_s(self.pid)
                for keys in calls:
                    assert self.mark(keys) == [first] * len(keys)
                count = len(calls) * len(calls[0])
                spent.append((server_cpu_s(self.pid) - server) * 1e6 / count)
        self.figures.append(spent)

    def removal(self) -> InboxCost:
        """Remove the records of the week, which are over by now, and put the figures together."""
        assert self.once.inbox(self.connection).first(semel.keys.uuid7("b"))
        locked = self.number(
            "SELECT count(DISTINCT c.oid) FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation"
            f" WHERE l.pid = {self.connection.info.backend_pid} AND c.relkind = 'r' AND c.relname ~ '^timed_[0-9]'"
        )
        self.connection.rollback()
        size = self.number(
            "SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class WHERE relkind = 'r'"
            f" AND relnamespace = '{self.schema}'::regnamespace AND relname ~ '^records$|^timed_[0-9]'"
        )
        held = self.rows * DAYS + (SINGLES + BATCH * BATCHES) * ROUNDS
        self.clock.advance(us=11 * DAY_US)
        log, server = self.number("SELECT pg_current_wal_lsn() - '0/0'"), server_cpu_s(self.pid)
        removed = 0
        for _ in range(3):
            left = True
            while left:
                (purged,) = self.store.send([Purge()])
                left, removed = purged.more, removed + (purged.partitions if self.step else purged.count)
            self.clock.advance(us=60_000_000)
        assert removed, self.schema
        figures = [round(median(each), 1) for each in zip(*self.figures, strict=True)]
        cost = InboxCost(
            layout=f"partitions of {self.step}" if self.step else "plain table", partitions=self.partitions,
            one_new_us=figures[0], one_known_us=figures[1], many_new_us=figures[2], many_known_us=figures[3],
            locked=int(locked), bytes_each=round(size / held),
            removal_ms=round((server_cpu_s(self.pid) - server) * 1e3),
            removal_log_mb=round((self.number("SELECT pg_current_wal_lsn() - '0/0'") - log) / 1e6, 1),
        )  # fmt: skip
        self.connection.close()
        self.once.close()
        self.store.close()
        return cost

    def number(self, statement: str) -> float:
        return float(postgres.execute(self.url, statement)[0][0])


def layouts_of(url: str, pid: int, rows: int) -> list[Layout]:
    return [Layout(url, pid, step, rows) for step in ("", "1 week", "1 day", "1 hour")]


if __name__ == "__main__":
    sys.exit(take_turns(__doc__, KEPT, "records", layouts_of))
