"""PostgreSQL: against a loop inside the server, single rows and bare batches, on the same server and disk."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

import semel
from benchmarks.measure import Job, Row, compare
from benchmarks.memory import COUNT, Fresh, nothing

BATCH = 500
SINGLES = 400
THREADS = 50
TASKS = 500
ROUNDS = 40
"""Batches of one timed run."""

LOOP = """
DO $$
BEGIN
    FOR round IN 1..{rounds} LOOP
        INSERT INTO seen (digest, expires_at) SELECT gen_random_uuid(), 1 FROM generate_series(1, {batch})
        ON CONFLICT (digest) DO NOTHING;
        COMMIT;
    END LOOP;
END $$
"""


def rows(folder: Path) -> list[Row]:
    """All comparisons on PostgreSQL; a server is started in `folder`."""
    from tests.services import postgres

    with postgres.own(folder) as server:
        return [*Bench(server.url).rows()]


class Bench:
    """The comparisons on one server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.db = psycopg.connect(url, autocommit=True)
        self.db.execute(
            "CREATE TABLE IF NOT EXISTS seen (digest uuid PRIMARY KEY, expires_at bigint NOT NULL)"
        )

    def rows(self) -> Iterator[Row]:
        """Each with the limit measured beside it."""
        yield self.mark_many()
        yield self.marks_against_rows()
        for size in (1, 10, 100, 500, 1000):
            yield self.claim_complete(size)
        yield self.replay()
        yield self.run_many()
        yield self.threads()
        yield self.tasks(50)
        yield self.tasks(TASKS)

    # --- limits ---

    def loop(self, rounds: int = ROUNDS, batch: int = BATCH) -> Job:
        """New digests inserted by the server itself, one commit per batch."""
        text = LOOP.format(rounds=rounds, batch=batch)
        return Job(lambda: self.db.execute(text), rounds * batch)

    def autocommit(self) -> Job:
        """One row, one round trip, one commit."""

        def run() -> None:
            for _ in range(SINGLES):
                self.db.execute("INSERT INTO seen VALUES (gen_random_uuid(), 1) ON CONFLICT DO NOTHING")

        return Job(run, SINGLES)

    # --- subjects ---

    @contextmanager
    def client(self, name: str, **options: Any) -> Iterator[semel.Semel]:
        """A client with a schema of its own."""
        self.db.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')
        with semel.open(f"{self.url}?schema={name}", consumer=name, **options) as opened:
            yield opened

    def mark_many(self) -> Row:
        """Marks of 500, against the loop inside the server."""
        mine = Fresh()
        with self.client("marks", mode="mark") as marks:
            return compare(
                "postgres", "mark_many of 500", Job(_marking(marks, mine), COUNT, mine),
                "server-side loop", self.loop(), 0.65,
            )  # fmt: skip

    def marks_against_rows(self) -> Row:
        """Marks of 500, against a row each."""
        mine = Fresh()
        with self.client("marks2", mode="mark") as marks:
            return compare(
                "postgres", "mark_many of 500", Job(_marking(marks, mine), COUNT, mine),
                "autocommit row", self.autocommit(), 30,
            )  # fmt: skip

    def claim_complete(self, size: int) -> Row:
        """Claims and completions in batches, against the loop inside the server."""
        count = COUNT if size >= 100 else SINGLES
        mine = Fresh()

        def fresh() -> None:
            mine()
            del mine.keys[count:]

        with self.client(f"claims{size}") as leases:

            def subject() -> None:
                for batch in mine.batches(size):
                    leases.complete_many(leases.claim_many(batch))  # type: ignore[arg-type]

            rounds = max(1, min(SINGLES, ROUNDS * BATCH // size))
            return compare(
                "postgres", f"claim + complete of {size}", Job(subject, count, fresh),
                "server-side loop", self.loop(rounds, size), 0.12 if size == BATCH else None,
            )  # fmt: skip

    def replay(self) -> Row:
        """Duplicates in batches of 500, against new events in batches of 500."""
        mine, theirs = Fresh(), Fresh()
        with self.client("replays") as leases:

            def fresh() -> None:
                mine()
                _run_all(leases, mine)()

            return compare(
                "postgres", "replay of 500", Job(_run_all(leases, mine), COUNT, fresh),
                "run_many of 500", Job(_run_all(leases, theirs), COUNT, theirs), 1.0,
            )  # fmt: skip

    def run_many(self) -> Row:
        """Whole events through handlers in batches of 500, against the loop inside the server."""
        mine = Fresh()
        with self.client("runs") as leases:
            return compare(
                "postgres", "run_many of 500", Job(_run_all(leases, mine), COUNT, mine),
                "server-side loop", self.loop(),
            )  # fmt: skip

    def threads(self) -> Row:
        """Fifty threads calling `run`, against single rows. Each run is two durable writes."""
        mine = Fresh()
        each = 40
        with self.client("threads") as leases:

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
                "postgres", f"run, {THREADS} threads", Job(subject, THREADS * each, mine),
                "autocommit row", self.autocommit(),
            )  # fmt: skip

    def tasks(self, count: int) -> Row:
        """Many tasks calling `run`, against single rows."""
        mine = Fresh()
        each = 10
        with self.client(f"tasks{count}"):
            pass

        async def pour() -> None:
            async def handler() -> None:
                pass

            async def work(at: int) -> None:
                for key in mine.keys[at * each : (at + 1) * each]:
                    await leases.run(key, handler)

            async with semel.aopen(f"{self.url}?schema=tasks{count}", consumer="tasks") as leases:
                await asyncio.gather(*(work(at) for at in range(count)))

        return compare(
            "postgres", f"run, {count} tasks", Job(lambda: asyncio.run(pour()), count * each, mine),
            "autocommit row", self.autocommit(),
        )  # fmt: skip


def _marking(marks: semel.Semel, fresh: Fresh) -> Callable[[], None]:
    def run() -> None:
        for batch in fresh.batches(BATCH):
            marks.mark_many(batch)

    return run


def _run_all(leases: semel.Semel, fresh: Fresh) -> Callable[[], None]:
    def run() -> None:
        for batch in fresh.batches(BATCH):
            leases.run_many([semel.Delivery(key=key, body=None) for key in batch], nothing)

    return run
