"""The same few questions to every real broker: a place to publish to, and what arrived there."""

import asyncio
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from semel.core.relay_flow import OutboxRow

WAIT_S = 20.0
SIZE_MAX = 200_000
"""Of a message, where a test can tell the broker."""


class Arrived(msgspec.Struct, frozen=True):
    """A message as a consumer sees it."""

    key: str
    """What the broker's own field for it says."""
    headers: dict[str, str]
    payload: bytes


class Redis:
    """Redis Streams."""

    def __init__(self) -> None:
        from tests.services import redis as service

        self.url = service.place(uuid4()).partition("?")[0]
        self.where = f"s-{uuid4().hex}"

    async def prepare(self) -> None:
        import redis.asyncio

        async with redis.asyncio.Redis.from_url(self.url) as client:
            await client.set("no-stream", "something else")

    def poison(self, row: OutboxRow) -> OutboxRow:
        """As the row is, but of a kind that the broker refuses."""
        return replace(row, destination="no-stream")

    async def read(self, count: int) -> list[Arrived]:
        import redis.asyncio

        async with redis.asyncio.Redis.from_url(self.url) as client:
            entries: Any = await client.xrange(self.where)
        told = [{name.decode(): value for name, value in fields.items()} for _, fields in entries]
        return [
            Arrived(
                fields["message_id"].decode(),
                {name: value.decode() for name, value in fields.items() if name != "data"},
                fields["data"],
            )
            for fields in told
        ]


class Nats:
    """NATS JetStream."""

    def __init__(self) -> None:
        from tests.services import nats as service

        self.url = service.url()
        self.where = f"s-{uuid4().hex}"

    async def prepare(self) -> None:
        client = await self.connect()
        await client.jetstream().add_stream(name=self.where, subjects=[self.where], max_msg_size=SIZE_MAX)
        await client.close()

    def poison(self, row: OutboxRow) -> OutboxRow:
        return replace(row, payload=b"x" * SIZE_MAX)

    async def connect(self) -> Any:
        import nats

        return await nats.connect(self.url)

    async def read(self, count: int) -> list[Arrived]:
        client = await self.connect()
        stream = client.jetstream()
        total = (await stream.stream_info(self.where)).state.messages
        found = []
        for number in range(1, total + 1):
            message = await stream.get_msg(self.where, number)
            headers = dict(message.headers or {})
            found.append(Arrived(headers["Nats-Msg-Id"], headers, message.data or b""))
        await client.close()
        return found


class Rabbitmq:
    """RabbitMQ, a queue by its name."""

    def __init__(self) -> None:
        from tests.services import rabbitmq as service

        self.url = service.url()
        self.where = f"s-{uuid4().hex}"

    async def prepare(self) -> None:
        async with await self.connect() as connection:
            await (await connection.channel()).declare_queue(self.where, durable=True)

    def poison(self, row: OutboxRow) -> OutboxRow:
        return replace(row, destination="no-queue")

    async def connect(self) -> Any:
        import aio_pika

        return await aio_pika.connect(self.url)

    async def read(self, count: int) -> list[Arrived]:
        found = []
        async with await self.connect() as connection:
            queue = await (await connection.channel()).get_queue(self.where)
            while (message := await queue.get(fail=False, no_ack=True)) is not None:
                headers = {name: str(value) for name, value in message.headers.items()}
                headers["content-type"] = str(message.content_type)
                found.append(Arrived(str(message.message_id), headers, message.body))
        return found


class Kafka:
    """Kafka, a topic with three partitions."""

    def __init__(self) -> None:
        from tests.services import kafka as service

        self.servers = service.servers()
        self.url = f"kafka://{self.servers}"
        self.where = f"s-{uuid4().hex}"

    async def prepare(self) -> None:
        from confluent_kafka.cimpl import NewTopic

        from tests.services import kafka as service

        admin = service.admin()
        await asyncio.to_thread(
            admin.create_topics([NewTopic(self.where, 3, 1, config={"max.message.bytes": str(SIZE_MAX)})])[
                self.where
            ].result,
            WAIT_S,
        )

    def poison(self, row: OutboxRow) -> OutboxRow:
        return replace(row, payload=b"x" * SIZE_MAX)

    async def read(self, count: int) -> list[Arrived]:
        return await asyncio.to_thread(self._read, count)

    def _read(self, count: int) -> list[Arrived]:
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer(
            {"bootstrap.servers": self.servers, "group.id": uuid4().hex, "enable.auto.commit": False}
        )
        consumer.assign([TopicPartition(self.where, partition, 0) for partition in range(3)])
        found: list[Arrived] = []
        give_up_at = time.monotonic() + WAIT_S
        while len(found) < count and time.monotonic() < give_up_at:
            for message in consumer.consume(100, 0.5):
                assert message.error() is None, message.error()
                given: Any = message.headers() or ()
                headers = {name: (value or b"").decode() for name, value in given}
                found.append(Arrived(headers["message_id"], headers, message.value() or b""))
        consumer.close()
        return found


class Sqs:
    """SQS, a FIFO queue."""

    def __init__(self) -> None:
        from tests.services import sqs as service

        self.endpoint = service.url()
        self.url = f"sqs://eu-west-1?endpoint={self.endpoint}"
        self.where = f"s-{uuid4().hex}.fifo"

    async def prepare(self) -> None:
        async with self.client() as client:
            await client.create_queue(QueueName=self.where, Attributes={"FifoQueue": "true"})

    def poison(self, row: OutboxRow) -> OutboxRow:
        return replace(row, payload=b"\x01")

    def client(self) -> Any:
        from aiobotocore.session import get_session

        return get_session().create_client("sqs", region_name="elasticmq", endpoint_url=self.endpoint)

    async def read(self, count: int) -> list[Arrived]:
        found: list[Arrived] = []
        async with self.client() as client:
            queue = (await client.get_queue_url(QueueName=self.where))["QueueUrl"]
            while True:
                told = await client.receive_message(
                    QueueUrl=queue,
                    MaxNumberOfMessages=10,
                    MessageAttributeNames=["All"],
                    AttributeNames=["All"],
                )
                if not told.get("Messages"):
                    return found
                for message in told["Messages"]:
                    headers = {
                        name: value["StringValue"] for name, value in message["MessageAttributes"].items()
                    }
                    key = message["Attributes"].get("MessageDeduplicationId", headers["message_id"])
                    found.append(Arrived(key, headers, message["Body"].encode()))
                    await client.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])


class StandardSqs(Sqs):
    """SQS, a standard queue: neither order nor dropped repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.where = self.where.removesuffix(".fifo")

    async def prepare(self) -> None:
        async with self.client() as client:
            await client.create_queue(QueueName=self.where)


BROKERS: dict[str, Callable[[], Any]] = {
    "redis": Redis,
    "nats": Nats,
    "rabbitmq": Rabbitmq,
    "kafka": Kafka,
    "sqs": Sqs,
}


def rows(count: int, where: str, aggregates: int = 3) -> list[OutboxRow]:
    """Rows as they would be taken."""
    return [
        OutboxRow(
            seq=number,
            id=str(uuid4()),
            created_at=1_800_000_000_000_000 + number,
            attempts=0,
            aggregate=("order", str(number % aggregates)),
            event_type="order.moved",
            source="/shop",
            subject=None,
            destination=where,
            content_type="application/json",
            traceparent=None,
            headers={"tenant": "acme"},
            payload=b'{"n": %d}' % number,
        )
        for number in range(count)
    ]
