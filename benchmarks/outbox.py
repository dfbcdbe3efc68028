"""Outbox: what a message costs inside a transaction, and what a relay reaches of its broker client's own rate."""

import asyncio
import io
from pathlib import Path
from typing import Any

import psycopg
import redis.asyncio

import semel
from semel import Message
from semel.cli.gauge.measure import Job, Row, compare
from semel.outbox.relay import Relay
from semel.outbox.rows import rows_for
from semel.outbox.sinks.redis import fields_of
from semel.outbox.sinks.stdout import StdoutSink

MESSAGES = 5_000
TRANSACTIONS = 500
BATCH = 500
AGGREGATES = 100


def rows(folder: Path) -> list[Row]:
    """All comparisons; a PostgreSQL and a Redis are started in `folder`."""
    from tests.services import postgres
    from tests.services import redis as redis_service

    beside = folder / "broker"
    beside.mkdir()
    with postgres.own(folder) as database, redis_service.own(beside) as broker:
        bench = Bench(database.url, broker.url)
        return [
            bench.publishing(1),
            bench.publishing(10),
            bench.relaying_to_redis(),
            bench.relaying_to_nobody(),
        ]


class Bench:
    """The comparisons on one pair of servers."""

    def __init__(self, url: str, broker: str) -> None:
        self.url = url
        self.broker = broker
        self.once = semel.open(url, consumer="bench")
        self.once.store.open()  # type: ignore[union-attr]
        self.connection = psycopg.connect(url)
        self.connection.execute("CREATE TABLE orders (number int, note text)")
        self.connection.commit()

    def publishing(self, messages: int) -> Row:
        """A business transaction with messages, against the same one without."""
        message = Message("order.taken", {"number": 1}, aggregate=("order", "1"))

        def pour(*, announced: bool) -> None:
            for number in range(TRANSACTIONS):
                with self.connection.transaction():
                    self.connection.execute("INSERT INTO orders VALUES (%s, %s)", (number, "x"))
                    if announced:
                        outbox = self.once.outbox(self.connection)
                        for _ in range(messages):
                            outbox.publish(message)

        return compare(
            "outbox",
            f"transaction + {messages} message{'s' if messages > 1 else ''}",
            Job(lambda: pour(announced=True), TRANSACTIONS),
            "the same without",
            Job(lambda: pour(announced=False), TRANSACTIONS),
        )

    def fill(self) -> None:
        """As many messages as are to be relayed, and nothing else."""
        self.connection.execute("TRUNCATE semel.outbox")
        with self.connection.transaction():
            outbox = self.once.outbox(self.connection)
            for number in range(MESSAGES):
                outbox.publish(
                    Message("order.taken", {"number": number}, aggregate=("order", str(number % AGGREGATES)))
                )
        self.connection.commit()

    def relaying_to_redis(self) -> Row:
        """PostgreSQL to a stream, against the same entries by redis-py's own pipeline."""
        self.fill()
        entries = asyncio.run(self._entries())

        async def pipe() -> None:
            async with redis.asyncio.Redis.from_url(self.broker) as client:
                for at in range(0, len(entries), BATCH):
                    async with client.pipeline(transaction=False) as pipeline:
                        for entry in entries[at : at + BATCH]:
                            pipeline.xadd("limit", entry)
                        await pipeline.execute()

        return compare(
            "outbox",
            "relay to a Redis stream",
            Job(lambda: self.relay(f"{self.broker}?stream=relayed"), MESSAGES, self.fill),
            "redis-py pipeline of 500",
            Job(lambda: asyncio.run(pipe()), MESSAGES),
        )

    def relaying_to_nobody(self) -> Row:
        """The relay alone, against reading and marking the same rows by hand."""

        def by_hand() -> None:
            for _ in range(MESSAGES // BATCH):
                found = self.connection.execute(
                    "SELECT id, payload FROM semel.outbox WHERE settled_at IS NULL ORDER BY seq LIMIT %s",
                    (BATCH,),
                ).fetchall()
                self.connection.execute(
                    "UPDATE semel.outbox SET state = 1, settled_at = 1, gone_at = 1 WHERE id = ANY(%s)",
                    ([each for each, _ in found],),
                )
                self.connection.commit()

        return compare(
            "outbox",
            "relay to nobody",
            Job(lambda: self.relay(StdoutSink(io.BytesIO())), MESSAGES, self.fill),
            "select and update of 500",
            Job(by_hand, MESSAGES, self.fill),
        )

    def relay(self, sink: Any) -> None:
        """All that lies in the outbox."""
        totals = Relay(self.url, sink).run(until_empty=True)
        assert totals.published == MESSAGES, totals

    async def _entries(self) -> list[dict[Any, Any]]:
        found = rows_for(self.url)
        await found.open()
        await found.share()
        taken = await found.take(MESSAGES, 10**9)
        await found.close()
        return [dict(zip(fields[::2], fields[1::2], strict=True)) for fields in map(fields_of, taken)]
