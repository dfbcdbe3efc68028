"""A fresh place on each broker, and the URL by which semel consumes from it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.brokers import test_nats, test_rabbitmq, test_redis_streams, test_sqs
from tests.brokers.topics import Topic

__all__ = ["Made", "fifo", "kafka", "nats", "rabbitmq", "redis", "sqs", "work_queue"]


async def redis() -> tuple[Any, str]:
    broker = test_redis_streams.Stream()
    return broker, f"{broker.url}?stream={broker.name}&group=g&deadline_s=2"


async def nats() -> tuple[Any, str]:
    broker = await test_nats.Stream().connect()
    return broker, broker.url()


async def work_queue() -> tuple[Any, str]:
    """A stream of NATS that removes a message with its ack."""
    broker = await test_nats.WorkQueue().connect()
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


async def fifo() -> tuple[Any, str]:
    broker = await asyncio.to_thread(test_sqs.Queue, fifo=True)
    return broker, broker.url()


Made = Callable[[], Awaitable[tuple[Any, str]]]
