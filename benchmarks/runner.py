"""Messages per second through `semel consume`, against the bare client's loop with the same effect and no dedup.

Each contestant is its own process and drains a stream that was filled before; they take turns in one run.
"""

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import redis

from benchmarks.consumers import AT_ONCE, BATCH, GROUP, JOB, Job
from semel.cli.bench.measure import Measurement

MESSAGES = 4_000
ROUNDS = 3
WITHIN_S = 300
LEASE = ("lease", "faststream", "idemkit")
"""The effect is one round trip, ten at once; compared with `bare`."""
INBOX = ("inbox",)
"""The effect is an insert, one commit for a batch; compared with `transactions`."""
LIMITS = {"bare": "bare client", "transactions": "bare client, psycopg"}
WHAT = {
    "lease": "semel consume, lease on Redis",
    "faststream": "FastStream, without deduplication",
    "idemkit": "bare loop with idemkit on Redis",
    "inbox": "semel consume, inbox on PostgreSQL",
}
AIMS = {"lease": 0.5, "inbox": 0.5}
_numbers = itertools.count()


# --- streams full of messages ---


def ids(number: int) -> Iterator[str]:
    return (f"{number}-{n:06}" for n in range(MESSAGES))


BODY = b'{"cents": 1}'


def fill_redis(servers: str, stream: str, number: int) -> None:
    with redis.Redis.from_url(servers) as client, client.pipeline(transaction=False) as pipe:
        pipe.xgroup_create(stream, GROUP, id="0", mkstream=True)
        for id_ in ids(number):
            pipe.xadd(stream, {"message_id": id_, "data": BODY})
        pipe.execute()


def fill_nats(servers: str, stream: str, number: int) -> None:
    async def fill() -> None:
        import nats

        client = await nats.connect(servers)
        jetstream = client.jetstream()
        await jetstream.add_stream(name=stream, subjects=[stream])
        every = list(ids(number))
        for at in range(0, len(every), BATCH):
            publications = [
                jetstream.publish(stream, BODY, headers={"message_id": id_}) for id_ in every[at : at + BATCH]
            ]
            await asyncio.gather(*publications)
        await client.close()

    asyncio.run(fill())


def fill_kafka(servers: str, stream: str, number: int) -> None:
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    admin = AdminClient({"bootstrap.servers": servers})
    for made in admin.create_topics([NewTopic(stream, 4, 1)]).values():
        made.result(30)
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True})
    for id_ in ids(number):
        producer.produce(stream, BODY, id_, headers={"message_id": id_.encode()})
    assert producer.flush(60) == 0


FILL: dict[str, Callable[[str, str, int], None]] = {
    "redis": fill_redis,
    "nats": fill_nats,
    "kafka": fill_kafka,
}


# --- contestants ---


class Contest:
    """One broker, and the contestants that drain its streams."""

    def __init__(self, broker: str, servers: str, redis_url: str, database: str, folder: Path) -> None:
        self._broker = broker
        self._servers = servers
        self._redis = redis_url
        self._database = database
        self._folder = folder

    def rows(self) -> list[Measurement]:
        """Run all contestants in turns."""
        rounds = [
            {name: self._rate(name) for name in ("bare", *LEASE, "transactions", *INBOX)}
            for _ in range(ROUNDS)
        ]
        return [row(self._broker, name, rounds) for name in (*LEASE, *INBOX)]

    def _rate(self, name: str) -> float:
        number = next(_numbers)
        stream, times = f"orders{number}", self._folder / f"times-{number}"
        FILL[self._broker](self._servers, stream, number)
        job = Job(self._broker, self._servers, stream, self._redis, self._database, MESSAGES, str(times))
        command = self._consume(name, stream) if name in AIMS else ["-m", "benchmarks.consumers", name]
        subprocess.run(
            [sys.executable, *command],
            env={**os.environ, JOB: msgspec.json.encode(job).decode()},
            check=True, timeout=WITHIN_S,
        )  # fmt: skip
        begun, ended = map(float, times.read_text().split())
        return MESSAGES * 9 / 10 / (ended - begun)

    def _consume(self, name: str, stream: str) -> list[str]:
        source = {
            "redis": f"{self._servers}?stream={stream}&group={GROUP}",
            "nats": f"{self._servers}?stream={stream}&durable={GROUP}",
            "kafka": f"kafka://{self._servers}/{stream}?group={stream}",
        }[self._broker]
        ways = {
            "lease": ["benchmarks.consumers:charge", "--store", self._redis, "--concurrency", str(AT_ONCE)],
            "inbox": [
                "benchmarks.consumers:credit", "--store", self._database, "--mode", "inbox", "--concurrency", "1",
            ],
        }  # fmt: skip
        common = ["--from", source, "--consumer", name, "--batch", str(BATCH), "--until-idle"]
        return ["-m", "semel", "consume", *ways[name], *common]


def row(broker: str, name: str, rounds: list[dict[str, float]]) -> Measurement:
    """Return the round with the median ratio: other load on the computer changes from round to round."""
    limit = "bare" if name in LEASE else "transactions"
    middle = sorted(rounds, key=lambda rates: rates[name] / rates[limit])[len(rounds) // 2]
    return Measurement(
        store=broker,
        what=WHAT[name],
        rate=middle[name],
        limit=LIMITS[limit],
        limit_rate=middle[limit],
        aim=AIMS.get(name),
    )


def rows(folder: Path) -> list[Measurement]:
    """All comparisons; Redis and PostgreSQL are started in `folder`, NATS and Kafka beside it."""
    from tests.services import kafka, nats, postgres, server
    from tests.services import redis as redis_service

    try:
        with redis_service.own(folder) as store, postgres.own(folder) as database:
            with psycopg.connect(database.url, autocommit=True) as connection:
                connection.execute("CREATE TABLE ledger (key text)")
            places: dict[str, Callable[[], Any]] = {
                "redis": lambda: store.url,
                "nats": nats.url,
                "kafka": kafka.servers,
            }
            return [
                row
                for broker, servers in places.items()
                for row in Contest(broker, servers(), store.url, database.url, folder).rows()
            ]
    finally:
        server.leave()
