"""Outbox: the cost of a message inside a transaction, and a relay's share of its broker client's own rate."""

import asyncio
import io
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import redis.asyncio
from msgspec.structs import replace

import semel
from semel import Message
from semel.cli.bench.measure import Job, Measurement, compare
from semel.core.relay_flow import OutboxRow as Taken
from semel.outbox.relay import Relay
from semel.outbox.sinks import kafka, nats, rabbitmq
from semel.outbox.sinks.redis import fields_of
from semel.outbox.sinks.stdout import StdoutSink
from semel.outbox.tables import rows_for

MESSAGES = 20_000
TRANSACTIONS = 500
BATCH = 500
AGGREGATES = 100


def rows(folder: Path) -> list[Measurement]:
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
            bench.publishing(10, together=True),
            bench.relaying_to_redis(),
            *(bench.relaying_to(name) for name in BROKERS),
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

    def publishing(self, messages: int, *, together: bool = False) -> Measurement:
        """A business transaction with messages, against the same one without."""
        message = Message("order.taken", {"number": 1}, aggregate=("order", "1"))

        def pour(*, announced: bool) -> None:
            for number in range(TRANSACTIONS):
                with self.connection.transaction():
                    self.connection.execute("INSERT INTO orders VALUES (%s, %s)", (number, "x"))
                    if announced:
                        outbox = self.once.outbox(self.connection)
                        if together:
                            outbox.publish_many([message] * messages)
                        else:
                            for _ in range(messages):
                                outbox.publish(message)

        return compare(
            "outbox",
            f"transaction + {messages} message{'s' if messages > 1 else ''}{' together' * together}",
            Job(lambda: pour(announced=True), TRANSACTIONS),
            "the same without",
            Job(lambda: pour(announced=False), TRANSACTIONS),
        )

    def fill(self) -> None:
        """Fill the outbox with exactly the messages to relay."""
        self.connection.execute("TRUNCATE semel.outbox")
        with self.connection.transaction():
            self.once.outbox(self.connection).publish_many(
                [
                    Message("order.taken", {"number": number}, aggregate=("order", str(number % AGGREGATES)))
                    for number in range(MESSAGES)
                ]
            )
        self.connection.commit()

    def relaying_to_redis(self) -> Measurement:
        """PostgreSQL to a stream, against the same entries by redis-py's own pipeline."""
        self.fill()
        taken = asyncio.run(self._take_rows())
        entries: list[dict[Any, Any]] = [
            dict(zip(fields[::2], fields[1::2], strict=True)) for fields in map(fields_of, taken)
        ]

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

    def relaying_to(self, name: str) -> Measurement:
        """PostgreSQL to another broker, against its client alone."""
        from tests.outbox.brokers import BROKERS as PLACES

        place = PLACES[name]()
        asyncio.run(place.prepare())
        self.fill()
        taken = asyncio.run(self._take_rows())
        option = {"kafka": "topic", "nats": "subject", "rabbitmq": "routing_key"}[name]

        def alone() -> None:
            rows = [replace(row, id=str(uuid4())) for row in taken]  # a stream drops ids that it has seen
            if name == "kafka":
                kafka_alone(place.servers, place.where, rows)
            else:
                send = nats_alone if name == "nats" else rabbitmq_alone
                asyncio.run(send(place.url, place.where, rows))

        return compare(
            "outbox",
            f"relay to {name}",
            Job(lambda: self.relay(f"{place.url}?{option}={place.where}"), MESSAGES, self.fill),
            BROKERS[name],
            Job(alone, MESSAGES),
        )

    def relaying_to_nobody(self) -> Measurement:
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
        """Relay every message in the outbox."""
        totals = Relay(self.url, sink).run(until_empty=True)
        assert totals.published == MESSAGES, totals

    async def _take_rows(self) -> list[Taken]:
        found = rows_for(self.url)
        await found.open()
        await found.share()
        taken = await found.take(MESSAGES, 10**9)
        await found.close()
        return taken


# --- each broker's client by itself, with the same confirmations ----------------------------------


def kafka_alone(servers: str, topic: str, rows: list[Taken]) -> None:
    """An idempotent producer, flushed after each batch."""
    from confluent_kafka import Producer

    producer = Producer(
        {"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 0, "log_level": 0}
    )
    for at in range(0, len(rows), BATCH):
        for row in rows[at : at + BATCH]:
            key = None if row.aggregate is None else row.aggregate[1]
            producer.produce(topic, row.payload, key=key, headers=kafka.headers_of(row))
        producer.flush()


async def nats_alone(url: str, subject: str, rows: list[Taken]) -> None:
    """A batch of publications at once."""
    import nats as driver

    client = await driver.connect(url)
    stream = client.jetstream()
    for at in range(0, len(rows), BATCH):
        await asyncio.gather(
            *(
                stream.publish(subject, row.payload, headers=nats.headers_of(row))
                for row in rows[at : at + BATCH]
            )
        )
    await client.close()


async def rabbitmq_alone(url: str, queue: str, rows: list[Taken]) -> None:
    """A batch of confirmed publications at once."""
    import aio_pika

    async with await aio_pika.connect(url) as connection:
        exchange = (await connection.channel(publisher_confirms=True)).default_exchange
        for at in range(0, len(rows), BATCH):
            await asyncio.gather(
                *(
                    exchange.publish(rabbitmq.message_of(row), queue, mandatory=True)
                    for row in rows[at : at + BATCH]
                )
            )


BROKERS: dict[str, str] = {
    "kafka": "idempotent producer, flushed each 500",
    "nats": "500 JetStream publications at once",
    "rabbitmq": "500 confirmed publications at once",
}
