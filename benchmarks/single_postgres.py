"""`python -m benchmarks.single_postgres`: one call at a time on PostgreSQL, beside the same written by hand.

By hand: INSERT ON CONFLICT DO NOTHING, the handler, UPDATE; a duplicate reads the value with a SELECT. The inbox is
compared with a transaction of one INSERT ON CONFLICT DO NOTHING and the effect. All take turns with new keys; medians
of three. Processor time is that of this process and of its sessions in the server: other work on the computer
disturbs it far less than rates.
"""

import argparse
import asyncio
import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import psycopg

import semel
from semel.cli.bench.measure import Fresh

COUNT = 1000
REPEATS = 3
WARM = 50
ACCOUNTS = 1000
Work = Callable[[list[str]], object]


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one call; `ratio` is its processor time divided by that of `beside`."""

    what: str
    client_us: float
    server_us: float
    rate: float
    beside: str = ""
    ratio: float | None = None
    rate_ratio: float | None = None
    aim: str = ""


class Sample(msgspec.Struct, frozen=True):
    """One timed round, per call."""

    client_us: float
    server_us: float
    seconds: float


AIMS: dict[str, tuple[str, str]] = {
    "run, first": ("by hand, first", "<= 1.25"),
    "run, replay": ("by hand, replay", "<= 0.8"),
    "async run, first": ("run, first", "<= 1.3"),
    "async run, replay": ("run, replay", "<= 1.3"),
    "inbox, one event": ("inbox by hand, one event", ">= 0.85 of the rate"),
}
"""For each row: the row it is compared with, and the aim."""


def charge() -> dict[str, int]:
    """The handler: its value is stored and replayed to duplicates."""
    return {"cents": 1250}


async def acharge() -> dict[str, int]:
    """The same, awaited."""
    return charge()


class ByHand:
    """The same protocol without a library: the first caller inserts a row, runs, and updates it with the value."""

    def __init__(self, url: str) -> None:
        self._db = psycopg.connect(url, autocommit=True)
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS by_hand (key text PRIMARY KEY, done boolean NOT NULL, value text)"
            " WITH (fillfactor = 50)"
        )

    def run(self, key: str, handler: Callable[[], Any]) -> Any:
        """Return the handler's value, or the stored one."""
        made = self._db.execute(
            "INSERT INTO by_hand (key, done) VALUES (%s, false) ON CONFLICT (key) DO NOTHING", (key,)
        )
        if made.rowcount:
            value = handler()
            self._db.execute(
                "UPDATE by_hand SET done = true, value = %s WHERE key = %s AND NOT done",
                (json.dumps(value), key),
            )
            return value
        row = self._db.execute("SELECT done, value FROM by_hand WHERE key = %s", (key,)).fetchone()
        assert row is not None
        assert row[0]
        return json.loads(row[1])

    def close(self) -> None:
        """Close the connection."""
        self._db.close()


class Bench:
    """The comparisons on one server."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self.url = url
        self.watcher = stack.enter_context(psycopg.connect(url, autocommit=True))
        self.hand = ByHand(url)
        stack.callback(self.hand.close)
        self.once = stack.enter_context(semel.open(f"{url}?schema=single", consumer="single"))
        self.runner = stack.enter_context(asyncio.Runner())
        self.tasks = semel.aopen(f"{url}?schema=single", consumer="tasks")
        self.runner.run(self.tasks.__aenter__())
        stack.callback(lambda: self.runner.run(self.tasks.close()))
        self.db = stack.enter_context(psycopg.connect(url))
        self.db.execute(
            "CREATE TABLE account (id integer PRIMARY KEY, cents bigint NOT NULL) WITH (fillfactor = 50)"
        )
        self.db.execute(f"INSERT INTO account SELECT id, 0 FROM generate_series(0, {ACCOUNTS - 1}) AS id")
        self.db.execute("CREATE TABLE seen (key text PRIMARY KEY)")
        self.db.commit()
        self.inbox = stack.enter_context(semel.open(f"{url}?schema=single", consumer="inbox", mode="inbox"))

    def works(self) -> Iterator[tuple[str, Work]]:
        """Yield the compared operations; a replay follows the first run of the same keys."""
        yield "by hand, first", self.by_hand
        yield "by hand, replay", self.by_hand
        yield "run, first", self.run
        yield "run, replay", self.run
        yield "async run, first", self.arun
        yield "async run, replay", self.arun
        yield "inbox by hand, one event", self.inbox_by_hand
        yield "inbox, one event", self.inbox_first

    def by_hand(self, keys: list[str]) -> None:
        """By hand."""
        run = self.hand.run
        for key in keys:
            assert run(key, charge) == {"cents": 1250}

    def run(self, keys: list[str]) -> None:
        """`run`, one after the other."""
        run = self.once.run
        for key in keys:
            outcome = run(key, charge)
            assert isinstance(outcome, semel.Done)
            assert outcome.value == {"cents": 1250}

    def arun(self, keys: list[str]) -> None:
        """The same in one task."""

        async def pour() -> None:
            run = self.tasks.run
            for key in keys:
                outcome = await run(key, acharge)
                assert isinstance(outcome, semel.Done)
                assert outcome.value == {"cents": 1250}

        self.runner.run(pour())

    def inbox_by_hand(self, keys: list[str]) -> None:
        """A row in a table of keys, and the effect."""
        db = self.db
        for at, key in enumerate(keys):
            made = db.execute("INSERT INTO seen (key) VALUES (%s) ON CONFLICT (key) DO NOTHING", (key,))
            if made.rowcount:
                db.execute("UPDATE account SET cents = cents + 1 WHERE id = %s", (at % ACCOUNTS,))
            db.commit()

    def inbox_first(self, keys: list[str]) -> None:
        """The same with an inbox."""
        db = self.db
        for at, key in enumerate(keys):
            if self.inbox.inbox(db).first(key):
                db.execute("UPDATE account SET cents = cents + 1 WHERE id = %s", (at % ACCOUNTS,))
            db.commit()

    def spent_us(self) -> float:
        """Return the processor time, in microseconds, of all sessions in the server except this one."""
        rows = self.watcher.execute(
            "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        ).fetchall()
        return (
            sum(int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) for (pid,) in rows)
            / 1e3
        )

    @contextmanager
    def measure(self, count: int, samples: list[Sample]) -> Iterator[None]:
        """Append the cost of the block to `samples`."""
        gc.collect()
        gc.disable()
        server, client, began = self.spent_us(), time.process_time(), time.perf_counter()
        try:
            yield
        finally:
            ended, mine = time.perf_counter(), time.process_time()
            gc.enable()
        samples.append(
            Sample((mine - client) * 1e6 / count, (self.spent_us() - server) / count, (ended - began) / count)
        )

    def costs(self, count: int, only: str = "") -> list[Cost]:
        """Measure all operations in turns; return medians."""
        chosen = [(what, work) for what, work in self.works() if only in what]
        samples: dict[str, list[Sample]] = {what: [] for what, _ in chosen}
        for turn in range(REPEATS + 1):
            fresh = Fresh(count if turn else WARM)
            for what, work in chosen:
                if "replay" not in what:
                    fresh()
                with self.measure(fresh.count, samples[what] if turn else []):
                    work(fresh.keys)
        return compare({what: middle(rounds) for what, rounds in samples.items()})


def middle(rounds: list[Sample]) -> Sample:
    """Return the medians."""
    return Sample(
        median(each.client_us for each in rounds),
        median(each.server_us for each in rounds),
        median(each.seconds for each in rounds),
    )


def compare(found: dict[str, Sample]) -> list[Cost]:
    """Return each cost with its ratio to the row it is compared with."""
    costs: list[Cost] = []
    for what, mine in found.items():
        beside, aim = AIMS.get(what, ("", ""))
        theirs = found.get(beside)
        cost = Cost(
            what=what, client_us=round(mine.client_us, 1), server_us=round(mine.server_us, 1),
            rate=round(1 / mine.seconds),
        )  # fmt: skip
        if theirs is not None:
            cost = msgspec.structs.replace(
                cost, beside=beside, aim=aim,
                ratio=round((mine.client_us + mine.server_us) / (theirs.client_us + theirs.server_us), 2),
                rate_ratio=round(theirs.seconds / mine.seconds, 2),
            )  # fmt: skip
        costs.append(cost)
    return costs


def show(costs: list[Cost]) -> None:
    """Print the table."""
    print(
        f"{'microseconds of processor time':34}{'client':>8}{'server':>8}{'per s':>8}{'ratio':>7}{'rate':>6}  aim"
    )
    for cost in costs:
        ratios = (
            ""
            if cost.ratio is None
            else f"{cost.ratio:7.2f}{cost.rate_ratio:6.2f}  {cost.aim} ({cost.beside})"
        )
        print(f"{cost.what:34}{cost.client_us:8.1f}{cost.server_us:8.1f}{cost.rate:8.0f}{ratios}")


def main() -> int:
    """Measure and print; with `--out`, write the figures."""
    from tests.services import postgres

    parser = argparse.ArgumentParser(prog="python -m benchmarks.single_postgres")
    parser.add_argument("--out", type=Path, help="folder for single-postgres.json")
    parser.add_argument("--count", type=int, default=COUNT, help="keys of one round")
    parser.add_argument("--only", default="", help="measure only operations whose name contains this text")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # the server refuses to run as root and runs as another user
        with postgres.own(Path(folder)) as server, ExitStack() as stack:
            bench = Bench(server.url, stack)
            costs = bench.costs(options.count, options.only)
            row = bench.watcher.execute("SHOW server_version").fetchone()
    show(costs)
    if options.out is not None:
        report = {
            "versions": {
                "semel": semel.__version__, "python": sys.version.split()[0], "postgres": row and row[0],
                "psycopg": psycopg.__version__, "machine": platform.machine(),
            },
            "rows": costs,
        }  # fmt: skip
        text = msgspec.json.format(msgspec.json.encode(report)) + b"\n"
        (options.out / "single-postgres.json").write_bytes(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
