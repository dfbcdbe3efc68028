"""Stores and brokers that go away and come back: nothing is lost, and nobody asks them without a pause."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import nats
import pika
import pytest
import redis.asyncio

import semel
from semel.brokers import Arrival, Runner, RunnerLimits, source_for
from semel.brokers.outages import outage_pause_s
from semel.testing.queue import Queue
from tests.brokers.test_runner import working
from tests.services import nats as nats_service
from tests.services import rabbitmq as rabbitmq_service
from tests.services import redis as redis_service
from tests.waiting import until

KEYS = [f"k{n:03}" for n in range(400)]
AWAY_S = 1.5
"""How long what was killed stays away: time that has to pass, as nothing happens in it."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Effects:
    """Slow enough that a break comes in the middle; counts, so that a repeat shows."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()

    async def __call__(self, message: Arrival) -> None:
        await asyncio.sleep(0.005)
        self.ran[semel.current().key] += 1


def handler(effects: Effects) -> Any:
    async def charge(message: Arrival) -> None:
        await effects(message)

    return charge


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.parametrize(("lease", "repeats_max"), [("10s", 0), ("1s", 40)])
async def test_a_store_that_goes_away_pauses_the_loop(
    tmp_path: Path, lease: str, repeats_max: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A lease that outlasts the outage repeats nothing; else what was claimed when it came may run again."""
    queue, effects = Queue(deadline_s=10), Effects()
    for key in KEYS:
        queue.send(b"{}", {"message_id": key})

    def events() -> list[str]:
        return [getattr(line, "event", "") for line in caplog.records]

    with redis_service.own(tmp_path, appendfsync="always") as server:
        policy = semel.Policy(retry_delay_s=0.02)
        async with semel.aopen(server.url, consumer="billing", lease=lease, policy=policy) as once:
            runner = Runner(
                queue.source(), handler(effects), once=once, pace=RunnerLimits(batch=20, concurrency=4)
            )

            async def scene() -> None:
                await until(lambda: len(effects.ran) > 40)
                await asyncio.to_thread(server.stop, signal.SIGKILL)
                received = runner.counts.received
                await until(lambda: "store_outage" in events())  # the store bridges a short outage by itself
                assert runner.counts.received - received <= 60, "a runner that cannot claim receives no more"
                assert len(queue) > 0
                await asyncio.to_thread(server.start)
                await until(lambda: len(queue) == 0)

            await working(runner, scene)
    assert set(effects.ran) == set(KEYS), "none lost"
    assert effects.ran.total() - len(KEYS) <= repeats_max, "repeated only where a completion was not stored"
    assert runner.counts.parked <= 60 * 8, "what waits for the store waits longer each time"
    # Two, if an answer from before the outage is handled after its first sign.
    assert events().count("store_outage") == events().count("store_outage_end") <= 2, (
        "one line for one outage"
    )
    assert not runner.counts.errors


async def broken(
    url: str,
    send: Callable[[Sequence[str]], Awaitable[None]],
    unsettled: Callable[[], Awaitable[int]],
    break_it: Callable[[], Awaitable[None]],
) -> Runner:
    """Run through a break of the broker; everything ran, once for each key, and the broker holds nothing."""
    effects = Effects()
    await send(KEYS)
    once = semel.aopen("memory:", consumer="billing", policy=semel.Policy(retry_delay_s=0.02))
    source = source_for(url)
    asked = 0
    receive = source.receive

    async def counted(limit: int, wait_s: float) -> Any:
        nonlocal asked
        asked += 1
        return await receive(limit, wait_s)

    source.receive = counted  # type: ignore[method-assign]
    runner = Runner(
        source, handler(effects), once=once, pace=RunnerLimits(batch=20, concurrency=4, in_hand=40)
    )

    async def settled() -> bool:
        return not await unsettled()

    async def scene() -> None:
        await until(lambda: len(effects.ran) > 40)
        await break_it()
        await until(settled)

    await working(runner, scene)
    assert effects.ran == Counter(KEYS), "none lost, none twice"
    assert asked < 20 * len(KEYS), "no busy loop"
    return runner


@pytest.mark.slow
def test_redis_streams_killed_and_started_again(tmp_path: Path) -> None:
    with redis_service.own(tmp_path, appendfsync="always") as server:

        async def send(keys: Sequence[str]) -> None:
            async with redis.asyncio.Redis.from_url(server.url) as client:
                for key in keys:
                    await client.xadd("orders", {"message_id": key, "data": b"{}"})

        async def unsettled() -> int:
            async with redis.asyncio.Redis.from_url(server.url) as client:
                [group] = await client.xinfo_groups("orders")
                new: Any = await client.xrange("orders", f"({group['last-delivered-id'].decode()}", "+")
                return int(group["pending"]) + len(new)

        async def break_it() -> None:
            await asyncio.to_thread(server.stop, signal.SIGKILL)
            await asyncio.sleep(AWAY_S)
            await asyncio.to_thread(server.start)

        url = f"{server.url}?stream=orders&group=g&deadline_s=2"
        asyncio.run(_scene(url, send, unsettled, break_it))


async def _scene(*parts: Any) -> None:
    await broken(*parts)


@pytest.mark.slow
def test_nats_killed_and_started_again(tmp_path: Path) -> None:
    server = nats_service.Own(tmp_path)

    async def scene() -> None:
        client = await nats.connect(server.url, max_reconnect_attempts=-1)
        jetstream = client.jetstream()
        await jetstream.add_stream(name="ORDERS", subjects=["orders"])

        async def send(keys: Sequence[str]) -> None:
            for key in keys:
                await jetstream.publish("orders", b"{}", headers={"Nats-Msg-Id": key})

        async def unsettled() -> int:
            try:
                info = await jetstream.consumer_info("ORDERS", "d")
            except (nats.errors.Error, TimeoutError):
                return 1
            return int(info.num_pending or 0) + int(info.num_ack_pending or 0)

        async def break_it() -> None:
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(AWAY_S)
            await asyncio.to_thread(server.start)

        await broken(f"{server.url}?stream=ORDERS&durable=d&deadline_s=2", send, unsettled, break_it)
        await client.close()

    try:
        asyncio.run(scene())
    finally:
        server.kill()


@pytest.mark.slow
def test_rabbitmq_closes_the_connection() -> None:
    url, name = rabbitmq_service.url(), f"t-{os.urandom(6).hex()}"

    def publish(keys: Sequence[str]) -> None:
        connection = pika.BlockingConnection(pika.URLParameters(url))
        channel = connection.channel()
        channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
        channel.confirm_delivery()
        for key in keys:
            properties = pika.BasicProperties(message_id=key, delivery_mode=2)
            channel.basic_publish("", name, b"{}", properties, mandatory=True)
        connection.close()

    async def send(keys: Sequence[str]) -> None:
        await asyncio.to_thread(publish, keys)

    async def unsettled() -> int:
        return await asyncio.to_thread(rabbitmq_service.messages, [name, f"{name}.retry.1s"])

    async def break_it() -> None:
        await asyncio.to_thread(rabbitmq_service.close_connections, name)

    asyncio.run(_scene(f"{url}?queue={name}", send, unsettled, break_it))


def test_an_outage_of_days_is_waited_for_as_long_as_one_of_minutes() -> None:
    assert outage_pause_s(0) < outage_pause_s(1) < outage_pause_s(20) == outage_pause_s(1_000_000)
