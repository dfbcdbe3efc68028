"""Mode inbox on every broker while workers are killed with -9: a plain ledger, without any key, is exact."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.brokers import test_nats, test_rabbitmq, test_redis_streams, test_sqs
from tests.brokers.storm import InboxStorm
from tests.brokers.topics import Topic
from tests.services import postgres

EVENTS = 500
SOAK_EVENTS = 10_000


async def redis() -> tuple[Any, str]:
    broker = test_redis_streams.Stream()
    return broker, f"{broker.url}?stream={broker.name}&group=g&deadline_s=2"


async def nats() -> tuple[Any, str]:
    broker = await test_nats.Stream().connect()
    return broker, broker.url()


async def kafka() -> tuple[Any, str]:
    broker = await asyncio.to_thread(Topic)
    return broker, f"{broker.url}&session_s=1.5"


async def rabbitmq() -> tuple[Any, str]:
    broker = await test_rabbitmq.Queue().connect()
    return broker, broker.url


async def sqs() -> tuple[Any, str]:
    broker = await asyncio.to_thread(test_sqs.Queue, fifo=False)
    return broker, broker.url()


@pytest.mark.slow
@pytest.mark.parametrize("made", [redis, nats, kafka, rabbitmq, sqs])
def test_workers_killed_with_9_lose_nothing_and_repeat_nothing(
    made: Callable[[], Awaitable[tuple[Any, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")

    async def scene() -> None:
        broker, source = await made()
        storm = InboxStorm(source, postgres.url(), postgres.place(broker.name), 1)
        await storm.run(broker, SOAK_EVENTS if "SEMEL_SOAK" in os.environ else EVENTS)
        await broker.close()

    asyncio.run(scene())
