"""`python -m benchmarks.mark_partitions`: what marks in partitions cost, by processor time, against the plain table.

Every layout holds the same number of marks for each day of its window. Layouts share a server and take turns. The days
are those of a clock that the benchmark moves; old marks are inserted by a statement on the server.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from msgspec import Struct

import semel
from benchmarks.contender import server_cpu_s
from semel.core.commands import Admit, Mark, Marked, Purge
from semel.stores.postgres import PostgresStore
from semel.testing import ManualClock
from tests.services import postgres

BATCH = 500
BATCHES = 20
ROUNDS = 5
DAY_US = 86_400 * 1_000_000
KEPT = Path(__file__).parent / "results" / "mark-partitions.json"


class LayoutCost(Struct, kw_only=True):
    """A line of the table. Times are microseconds of processor time for each key."""

    layout: str
    window_days: int
    new_us: float
    known_us: float
    client_us: float
    bytes_each: float
    removal_ms: float
    """Processor time to remove the marks of two days."""
    removal_log_mb: float


class Layout:
    """One way to keep marks, with a window."""

    def __init__(self, url: str, pid: int, ids: str, days: int, rows: int) -> None:
        self.url, self.pid, self.ids, self.days, self.rows = url, pid, ids, days, rows
        self.schema = f"b_{ids or 'plain'}_{days}"
        self.clock = ManualClock(time.time_ns() // 1000)
        self.store = PostgresStore(
            url, schema=self.schema, clock=self.clock, partition_live="30d", wait_s=600
        )
        self.store.open()
        self.store.send([Admit("", "events", "mark", ids)])
        self.figures: list[tuple[float, float, float]] = []

    def key(self) -> str:
        """Mint a key at the layout's time."""
        if self.ids != "uuid7":
            return semel.keys.uuid4("b")
        bits = self.clock.now_us() // 1000 << 80 | 7 << 76 | 2 << 62 | int.from_bytes(os.urandom(7))
        text = f"{bits:032x}"
        return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    def mark(self, keys: list[str]) -> list[bool]:
        (answer,) = self.store.send([Mark("", "events", keys, self.days * DAY_US)])
        assert isinstance(answer, Marked), answer
        return answer.firsts

    def fill(self) -> None:
        """Hold marks for every day of the window, and for the day before it."""
        table, more, value = ("timed_marks", ", slot", ", value::bigint") if self.ids else ("marks", "", "")
        for _ in range(self.days + 1):
            assert self.mark([self.key()]) == [True]
            until = self.clock.now_us() + self.days * DAY_US
            postgres.execute(
                self.url,
                f"INSERT INTO {self.schema}.{table} (digest, expires_at, consumer_id{more})"
                f" SELECT gen_random_uuid(), {until}, c.id{value} FROM generate_series(1, {self.rows}),"
                f" {self.schema}.consumers AS c LEFT JOIN {self.schema}.meta AS m ON m.name = 'slot'"
                " WHERE c.consumer = 'events'",
            )
            self.clock.advance(us=DAY_US)
        postgres.execute(self.url, f"VACUUM ANALYZE {self.schema}.{table}")

    def measure(self) -> None:
        """Measure one more round: new keys, then the same keys again."""
        batches = [[self.key() for _ in range(BATCH)] for _ in range(BATCHES)]
        count = BATCH * BATCHES
        spent: list[float] = []
        for first in (True, False):
            server, client = server_cpu_s(self.pid), time.process_time()
            for batch in batches:
                assert self.mark(batch) == [first] * BATCH
            client = time.process_time() - client
            spent += [(server_cpu_s(self.pid) - server) * 1e6 / count, client * 1e6 / count]
        self.figures.append((spent[0], spent[2], spent[1]))

    def removal(self) -> LayoutCost:
        """Remove the marks of two days, which are over by now, and put the figures together."""
        held = self.rows * (self.days + 1) + BATCH * BATCHES * ROUNDS
        size = self.number(
            "SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class WHERE relkind = 'r'"
            f" AND relnamespace = '{self.schema}'::regnamespace AND relname LIKE '%mark%'"
        )
        self.clock.advance(us=DAY_US)
        self.mark([self.key()])
        log, server = self.number("SELECT pg_current_wal_lsn() - '0/0'"), server_cpu_s(self.pid)
        left, removed = True, 0
        while left:
            (purged,) = self.store.send([Purge()])
            left, removed = purged.more, removed + (purged.partitions if self.ids else purged.count)
        assert removed == 2 if self.ids else removed >= 2 * self.rows, removed
        new, known, client = (median(each) for each in zip(*self.figures, strict=True))
        cost = LayoutCost(
            layout=f"partitions, {self.ids}" if self.ids else "plain table", window_days=self.days,
            new_us=round(new, 1), known_us=round(known, 1), client_us=round(client, 1),
            bytes_each=round(size / held), removal_ms=round((server_cpu_s(self.pid) - server) * 1e3),
            removal_log_mb=round((self.number("SELECT pg_current_wal_lsn() - '0/0'") - log) / 1e6, 1),
        )  # fmt: skip
        self.store.close()
        return cost

    def number(self, statement: str) -> float:
        return float(postgres.execute(self.url, statement)[0][0])


class TakesTurns(Protocol):
    """A layout that is measured in turns with others."""

    def fill(self) -> None: ...
    def measure(self) -> None: ...
    def removal(self) -> Any: ...


def take_turns(
    about: str | None, kept_in: Path, unit: str, layouts_of: Callable[[str, int, int], Sequence[TakesTurns]]
) -> int:
    """Measure all layouts in turns on one server, print the table and keep it.

    `layouts_of` gets the server's URL, its process and the number of rows for each day. `unit`: the name of a row.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--rows", type=int, default=100_000, help=f"{unit} for each day")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with postgres.own() as own:
        own.stop()
        own.start(shared_buffers="512MB", max_wal_size="4GB", autovacuum="off")
        layouts = layouts_of(own.url, own.state["pids"][0], options.rows)
        for layout in layouts:
            layout.fill()
        for _ in range(ROUNDS):
            for layout in layouts:
                layout.measure()
        costs = [layout.removal() for layout in layouts]
    kept: dict[str, Any] = {
        "taken": datetime.now(UTC).strftime("%Y-%m-%d"), "rows_per_day": options.rows, "cores": os.cpu_count(),
        "loads": [round(load, 1), round(os.getloadavg()[0], 1)],
        "layouts": [{name: getattr(cost, name) for name in cost.__struct_fields__} for cost in costs],
    }  # fmt: skip
    kept_in.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(kept, indent=1))
    return 0


def layouts_of(url: str, pid: int, rows: int) -> list[Layout]:
    chosen = [("", 1), ("", 7), ("opaque", 1), ("opaque", 3), ("opaque", 7), ("uuid7", 7)]
    return [Layout(url, pid, ids, days, rows) for ids, days in chosen]


if __name__ == "__main__":
    sys.exit(take_turns(__doc__, KEPT, "marks", layouts_of))
