"""The consumers of the runner's benchmark, each in its own process: handlers of `semel consume`, and other loops.

`python -m benchmarks.consumers bare`; the environment contains the addresses. Each consumer writes the times of the
first tenth of its effects and of the last one: the rate between the two does not include starting and stopping.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psycopg
import redis.asyncio
from confluent_kafka import Consumer

import semel
from semel.brokers import Arrival

BATCH = 200
AT_ONCE = 10
GROUP = "bench"
INSERT = "INSERT INTO ledger VALUES (%s)"
JOB = "BENCH_JOB"


class Job(msgspec.Struct, frozen=True):
    """The addresses and settings of a consumer."""

    broker: str
    servers: str
    stream: str
    redis: str
    database: str
    messages: int
    times: str
    """The file to which times are written."""


class Meter:
    """Counts effects, and writes the times of two of them."""

    def __init__(self) -> None:
        self.job: Job = msgspec.json.decode(os.environ[JOB], type=Job)
        self.done = 0
        self.finished = asyncio.Event()
        self._sink: Any = None

    def one(self) -> None:
        self.done += 1
        if self.done in (self.job.messages // 10, self.job.messages):
            with Path(self.job.times).open("a") as file:
                file.write(f"{time.monotonic()}\n")
        if self.done == self.job.messages:
            self.finished.set()

    async def effect(self) -> None:
        """One round trip to another system."""
        if self._sink is None:
            self._sink = redis.asyncio.Redis.from_url(self.job.redis)
        await self._sink.incr("effects")
        self.one()

    @property
    def left(self) -> bool:
        return self.done < self.job.messages


meter = Meter() if JOB in os.environ else None


def get_meter() -> Meter:
    assert meter is not None, f"{JOB} is not set"
    return meter


# --- handlers for `semel consume` ---


async def charge(_message: Arrival) -> None:
    await get_meter().effect()


async def credit(connection: Any, _message: Arrival) -> None:
    await connection.execute(INSERT, (semel.current().key,))
    get_meter().one()


# --- loops by hand on the brokers' own clients ---

Entry = tuple[str, Any]
"""A message's id, and the object with which its client acknowledges it."""


class Client(Protocol):
    async def receive(self) -> Sequence[Entry]: ...

    async def ack(self, entries: Sequence[Entry], /) -> None: ...


class Redis:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._client: Any = redis.asyncio.Redis.from_url(job.servers)

    async def receive(self) -> list[Entry]:
        found = await self._client.xreadgroup(GROUP, "c", {self._job.stream: ">"}, count=BATCH)
        return [(fields[b"message_id"].decode(), id_) for _, entries in found for id_, fields in entries]

    async def ack(self, entries: Sequence[Entry]) -> None:
        await self._client.xack(self._job.stream, GROUP, *(id_ for _, id_ in entries))


class Nats:
    """Acks are sent and not confirmed, as is usual; semel's are confirmed."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pull: Any = None

    async def receive(self) -> list[Entry]:
        if self._pull is None:
            import nats

            stream = (await nats.connect(self._job.servers)).jetstream()
            self._pull = await stream.pull_subscribe(self._job.stream, GROUP, stream=self._job.stream)
        return [(each.headers["message_id"], each) for each in await self._pull.fetch(BATCH, timeout=5)]

    async def ack(self, entries: Sequence[Entry]) -> None:
        await asyncio.gather(*(message.ack() for _, message in entries))


class Kafka:
    def __init__(self, job: Job) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": job.servers,
                "group.id": job.stream,  # its own group: a shared group may wait long for the last run's member
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
            }
        )
        self._consumer.subscribe([job.stream])

    async def receive(self) -> list[Entry]:
        found = await asyncio.to_thread(self._consumer.consume, BATCH, 0.1)
        return [(_id(each), each) for each in found if not each.error()]

    async def ack(self, _entries: Sequence[Entry]) -> None:
        await asyncio.to_thread(self._consumer.commit, asynchronous=False)


def _id(message: Any) -> str:
    found: bytes = dict(message.headers())["message_id"]
    return found.decode()


CLIENTS: dict[str, Callable[[Job], Client]] = {"redis": Redis, "nats": Nats, "kafka": Kafka}


async def bare() -> None:
    """A careful loop by hand, without deduplication: effects ten at a time, one ack for the batch."""
    client = CLIENTS[get_meter().job.broker](get_meter().job)
    while get_meter().left:
        entries = await client.receive()
        for at in range(0, len(entries), AT_ONCE):
            await asyncio.gather(*(get_meter().effect() for _ in entries[at : at + AT_ONCE]))
        if entries:
            await client.ack(entries)


async def transactions() -> None:
    """The same with an insert as the effect, and one commit for a batch."""
    client = CLIENTS[get_meter().job.broker](get_meter().job)
    async with await psycopg.AsyncConnection.connect(get_meter().job.database, autocommit=True) as connection:
        while get_meter().left:
            entries = await client.receive()
            async with connection.transaction():
                for id_, _ in entries:
                    await connection.execute(INSERT, (id_,))
                    get_meter().one()
            if entries:
                await client.ack(entries)


async def idemkit() -> None:
    """The bare loop with idemkit around the effect."""
    from idemkit import ConsumerAction, IdempotentConsumer, QueueConfig, RedisBackend

    consumer = IdempotentConsumer(
        backend=RedisBackend.from_url(get_meter().job.redis),
        config=QueueConfig(dedup_id=lambda entry: entry[0], visibility_timeout_seconds=30),
    )

    @consumer.handle  # type: ignore[untyped-decorator]
    async def process(_entry: Any) -> None:
        await get_meter().effect()

    client = CLIENTS[get_meter().job.broker](get_meter().job)
    while get_meter().left:
        entries = await client.receive()
        acks: list[Entry] = []
        for at in range(0, len(entries), AT_ONCE):
            some = entries[at : at + AT_ONCE]
            results = await asyncio.gather(*(consumer.dispatch(each) for each in some))
            acks += [
                each
                for each, result in zip(some, results, strict=True)
                if result.action is ConsumerAction.ACK
            ]
        if acks:
            await client.ack(acks)


async def faststream() -> None:
    """FastStream's own subscriber, without deduplication; its subscriber of Kafka commits before the effect."""
    job = get_meter().job
    broker, subscriber = FASTSTREAM[job.broker](job)

    async def process(_message: bytes) -> None:
        await get_meter().effect()

    subscriber(process)
    async with broker:
        await broker.start()
        await get_meter().finished.wait()


def _by_redis(job: Job) -> tuple[Any, Any]:
    from faststream.redis import RedisBroker, StreamSub

    broker = RedisBroker(job.servers, logger=None)  # type: ignore[arg-type]  # FastStream's constant for: none
    stream = StreamSub(job.stream, group=GROUP, consumer="c", max_records=BATCH)
    return broker, broker.subscriber(stream=stream, max_workers=AT_ONCE)


def _by_nats(job: Job) -> tuple[Any, Any]:
    from faststream.nats import JStream, NatsBroker, PullSub

    broker = NatsBroker(job.servers, logger=None)
    return broker, broker.subscriber(
        job.stream,
        stream=JStream(job.stream, declare=False),
        durable=GROUP,
        pull_sub=PullSub(batch_size=BATCH),
        max_workers=AT_ONCE,
    )


def _by_kafka(job: Job) -> tuple[Any, Any]:
    from faststream.confluent import KafkaBroker

    broker = KafkaBroker(job.servers, logger=None)
    return broker, broker.subscriber(
        job.stream, group_id=job.stream, auto_offset_reset="earliest", max_workers=AT_ONCE
    )


FASTSTREAM: dict[str, Callable[[Job], tuple[Any, Any]]] = {
    "redis": _by_redis,
    "nats": _by_nats,
    "kafka": _by_kafka,
}
LOOPS: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
    "bare": bare,
    "transactions": transactions,
    "idemkit": idemkit,
    "faststream": faststream,
}

if __name__ == "__main__":
    asyncio.run(LOOPS[sys.argv[1]]())
