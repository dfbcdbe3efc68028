"""The inbox: the same business transaction with it and without it, on the same connection."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psycopg

import semel
from semel.cli.bench.measure import Job, Measurement, compare

EVENTS = 200
"""Events of one transaction."""
TRANSACTIONS = 10
ACCOUNTS = 1000
_numbers = count()
CREDIT = "UPDATE account SET cents = cents + 1 WHERE id = "


def rows(folder: Path) -> list[Measurement]:
    """All comparisons; a PostgreSQL is started in `folder`, and an SQLite file is created there."""
    from tests.services import postgres

    with postgres.own(folder) as server:
        return [*on_sqlite(folder / "inbox.db"), *on_postgres(server.url)]


class Batches:
    """Keys and accounts, new ones for every run."""

    def __init__(self) -> None:
        self._prefix = f"{next(_numbers):04}"
        self._made = 0

    def __iter__(self) -> Iterator[list[tuple[str, int]]]:
        for _ in range(TRANSACTIONS):
            yield [
                (f"{self._prefix}-{self._made + at:031}", (self._made + at) % ACCOUNTS)
                for at in range(EVENTS)
            ]
            self._made += EVENTS


def on_postgres(url: str) -> Iterator[Measurement]:
    """One statement for each event, then all of them sent at once, then awaited."""
    connection = psycopg.connect(url)
    connection.execute(
        "CREATE TABLE account (id integer PRIMARY KEY, cents bigint NOT NULL) WITH (fillfactor = 50)"
    )
    connection.execute(f"INSERT INTO account SELECT id, 0 FROM generate_series(0, {ACCOUNTS - 1}) AS id")
    connection.commit()

    def one_by_one(batch: list[tuple[str, int]]) -> None:
        for _, account in batch:
            connection.execute(CREDIT + "%s", (account,))

    def all_at_once(batch: list[tuple[str, int]]) -> None:
        with connection.cursor() as cursor:
            cursor.executemany(CREDIT + "%s", [(account,) for _, account in batch])

    def singly(batch: list[tuple[str, int]]) -> None:
        inbox = once.inbox(connection)
        for key, account in batch:
            if inbox.first(key):
                connection.execute(CREDIT + "%s", (account,))

    with semel.open(url, consumer="bench", mode="inbox") as once:
        for name, work, aim in (("loop", one_by_one, 0.7), ("executemany", all_at_once, None)):
            yield _row(f"psycopg, {name}", once, connection, work, aim)
        yield compare(
            "inbox", "psycopg, first() singly", _job(connection, singly), "without an inbox",
            _job(connection, one_by_one),
        )  # fmt: skip
        connection.close()
        yield _on_asyncpg(url)


def on_sqlite(path: Path) -> Iterator[Measurement]:
    """The same on a file, with the durable commit of its defaults."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE account (id INTEGER PRIMARY KEY, cents INTEGER NOT NULL)")
    connection.executemany("INSERT INTO account VALUES (?, 0)", [(number,) for number in range(ACCOUNTS)])
    connection.commit()

    def one_by_one(batch: list[tuple[str, int]]) -> None:
        for _, account in batch:
            connection.execute(CREDIT + "?", (account,))

    with semel.open(f"sqlite:///{path}", consumer="bench", mode="inbox") as once:
        yield _row("sqlite3, loop", once, connection, one_by_one, None)
    connection.close()


def _row(
    name: str,
    once: semel.Semel,
    connection: Any,
    work: Callable[[list[tuple[str, int]]], None],
    aim: float | None,
) -> Measurement:
    def marked(batch: list[tuple[str, int]]) -> None:
        firsts = once.inbox(connection).first_many([key for key, _ in batch])
        work([event for event, first in zip(batch, firsts, strict=True) if first])

    return compare(
        "inbox", f"{name}, {EVENTS} events", _job(connection, marked), "without an inbox",
        _job(connection, work), aim,
    )  # fmt: skip


def _job(connection: Any, work: Callable[[list[tuple[str, int]]], None]) -> Job:
    batches = Batches()

    def run() -> None:
        for batch in batches:
            work(batch)
            connection.commit()

    return Job(run, EVENTS * TRANSACTIONS)


def _on_asyncpg(url: str) -> Measurement:
    """asyncpg, one statement for each event."""
    import asyncpg  # type: ignore[import-untyped]

    with asyncio.Runner() as runner:
        connection = runner.run(asyncpg.connect(url))
        once = semel.aopen(url, consumer="bench", mode="inbox")

        def job(*, marks: bool) -> Job:
            batches = Batches()

            async def pour() -> None:
                for batch in batches:
                    async with connection.transaction():
                        firsts = [True] * len(batch)
                        if marks:
                            firsts = await once.inbox(connection).first_many([key for key, _ in batch])
                        for (_, account), first in zip(batch, firsts, strict=True):
                            if first:
                                await connection.execute(CREDIT + "$1", account)

            return Job(lambda: runner.run(pour()), EVENTS * TRANSACTIONS)

        row = compare(
            "inbox",
            f"asyncpg, loop, {EVENTS} events",
            job(marks=True),
            "without an inbox",
            job(marks=False),
            0.7,
        )
        runner.run(connection.close())
        runner.run(once.close())
    return row
