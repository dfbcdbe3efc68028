"""Messages per second through a runner, against the bare client's loop with the same effect and no deduplication.

Each job drains a stream of its own that was filled beforehand; jobs take turns in one run.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psycopg
import redis.asyncio

import semel
from semel.brokers import Arrival, Pace, Route, Runner, source_for
from semel.cli.gauge.measure import Job, Row, compare

MESSAGES = 10_000
BATCH = 200
AT_ONCE = 10
_numbers = itertools.count()
Loop = Callable[["Place"], Coroutine[Any, Any, None]]


class Place:
    """A stream with messages, and what was done with them."""

    def __init__(self, server: str, database: str) -> None:
        self.server = server
        self.database = database
        self.stream = ""
        self.done = 0
        self.sink: Any = None

    def fresh(self) -> None:
        asyncio.run(self._fill())

    async def _fill(self) -> None:
        number = next(_numbers)
        self.stream, self.done = f"orders-{number}", 0
        async with redis.asyncio.Redis.from_url(self.server) as client:
            await client.xgroup_create(self.stream, "g", id="0", mkstream=True)
            async with client.pipeline(transaction=False) as pipe:
                for n in range(MESSAGES):
                    pipe.xadd(self.stream, {"message_id": f"{number}-{n:06}", "data": b'{"cents": 1}'})
                await pipe.execute()

    @property
    def url(self) -> str:
        return f"{self.server}?stream={self.stream}&group=g"

    def job(self, loop: Loop) -> Job:
        async def drain() -> None:
            async with redis.asyncio.Redis.from_url(self.server) as self.sink:
                await loop(self)

        def run() -> None:
            asyncio.run(drain())
            assert self.done == MESSAGES, self.done

        return Job(run, MESSAGES, self.fresh)


async def effect(place: Place) -> None:
    """One round trip to another system."""
    await place.sink.incr("effects")
    place.done += 1


async def bare(place: Place) -> None:
    """What a careful person writes by hand: batches, effects ten at a time, one ack for the batch."""
    async with redis.asyncio.Redis.from_url(place.server) as client:
        while place.done < MESSAGES:
            found: Any = await client.xreadgroup("g", "c", {place.stream: ">"}, count=BATCH)
            for _, entries in found:
                for at in range(0, len(entries), AT_ONCE):
                    await asyncio.gather(*(effect(place) for _ in entries[at : at + AT_ONCE]))
                await client.xack(place.stream, "g", *(id_ for id_, _ in entries))


async def by_runner(place: Place) -> None:
    async def handler(_message: Arrival) -> None:
        await effect(place)

    async with semel.aopen(place.server, consumer="bench") as once:
        runner = Runner(
            source_for(place.url), handler, once=once, pace=Pace(batch=BATCH, concurrency=AT_ONCE)
        )
        runner.stop_when_idle()
        await runner.run()


async def by_idemkit(place: Place) -> None:
    """The same loop by hand, with idemkit around the handler and as many at once as the runner has."""
    from idemkit import ConsumerAction, IdempotentConsumer, QueueConfig, RedisBackend

    backend = RedisBackend.from_url(place.server)
    consumer = IdempotentConsumer(
        backend=backend,
        config=QueueConfig(
            dedup_id=lambda entry: entry[1][b"message_id"].decode(), visibility_timeout_seconds=30
        ),
    )

    @consumer.handle  # type: ignore[untyped-decorator]
    async def process(_entry: Any) -> None:
        await effect(place)

    async with redis.asyncio.Redis.from_url(place.server) as client:
        while place.done < MESSAGES:
            found: Any = await client.xreadgroup("g", "c", {place.stream: ">"}, count=BATCH)
            for _, entries in found:
                for at in range(0, len(entries), AT_ONCE):
                    some = entries[at : at + AT_ONCE]
                    results = await asyncio.gather(*(consumer.dispatch(each) for each in some))
                    acks = [
                        id_
                        for (id_, _), result in zip(some, results, strict=True)
                        if result.action is ConsumerAction.ACK
                    ]
                    await client.xack(place.stream, "g", *acks)


async def by_faststream(place: Place) -> None:
    """FastStream's own subscriber, which deduplicates nothing."""
    from faststream.redis import RedisBroker, StreamSub

    broker = RedisBroker(place.server, logger=None)  # type: ignore[arg-type]  # its own way to say: none
    finished = asyncio.Event()

    @broker.subscriber(
        stream=StreamSub(place.stream, group="g", consumer="c", max_records=BATCH), max_workers=AT_ONCE
    )
    async def process(_message: Any) -> None:
        await effect(place)
        if place.done == MESSAGES:
            finished.set()

    async with broker:
        await broker.start()
        await finished.wait()


INSERT = "INSERT INTO ledger VALUES (%s)"


async def bare_transactions(place: Place) -> None:
    connection = await psycopg.AsyncConnection.connect(place.database, autocommit=True)
    async with redis.asyncio.Redis.from_url(place.server) as client, connection:
        while place.done < MESSAGES:
            found: Any = await client.xreadgroup("g", "c", {place.stream: ">"}, count=BATCH)
            for _, entries in found:
                async with connection.transaction():
                    for _, fields in entries:
                        await connection.execute(INSERT, (fields[b"message_id"].decode(),))
                        place.done += 1
                await client.xack(place.stream, "g", *(id_ for id_, _ in entries))


async def by_inbox(place: Place) -> None:
    async def handler(connection: Any, _message: Arrival) -> None:
        await connection.execute(INSERT, (semel.current().key,))
        place.done += 1

    async with semel.aopen(place.database, consumer="bench", mode="inbox") as once:
        pace = Pace(batch=BATCH, concurrency=1)
        runner = Runner(source_for(place.url), [Route(handler, once=once)], pace=pace)
        runner.stop_when_idle()
        await runner.run()


def rows(folder: Path) -> list[Row]:
    """All comparisons; a Redis and a PostgreSQL are started in `folder`."""
    from tests.services import postgres
    from tests.services import redis as redis_service

    with redis_service.own(folder) as server, postgres.own(folder) as database:
        with psycopg.connect(database.url, autocommit=True) as connection:
            connection.execute("CREATE TABLE ledger (key text)")
        return list(_rows(Place(server.url, database.url)))


def _rows(place: Place) -> Iterator[Row]:
    limit = ("bare redis.asyncio", place.job(bare))
    yield compare("runner", "lease on Redis", place.job(by_runner), *limit, aim=0.5)
    yield compare("runner", "FastStream, without deduplication", place.job(by_faststream), *limit)
    yield compare("runner", "idemkit on Redis, ten at once", place.job(by_idemkit), *limit)
    limit = ("bare psycopg", place.job(bare_transactions))
    yield compare("runner", "inbox on PostgreSQL", place.job(by_inbox), *limit, aim=0.5)
