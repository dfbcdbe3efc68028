"""Publishing without an outbox, on every real broker: confirmed, and under one id however often it is tried."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import semel
from semel import Message
from semel.core.relay_flow import NotPublished, OutboxRow, Published, PublishRefused
from semel.errors import SinkUnavailable, UsageError
from semel.keys.identity import Identity
from semel.keys.message import Envelope
from tests.outbox.test_brokers import NOWHERE, broker, credentials
from tests.services import server

__all__ = ["broker", "credentials"]  # fixtures


class Flaky:
    """A sink that answers as it is told to, and notes what it was given."""

    name = "flaky:"
    ordered = True
    batch_max = 2

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.seen: list[list[str]] = []

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def publish(self, rows: Sequence[OutboxRow], /) -> list[Any]:
        self.seen.append([row.id for row in rows])
        answer = self.answers.pop(0) if self.answers else Published()
        if isinstance(answer, Exception):
            raise answer
        return [answer] * len(rows)


@pytest.mark.anyio
async def test_what_is_confirmed_arrives_under_its_id(broker: Any) -> None:
    async with semel.aproducer(broker.url, source="shop") as producer:
        sent = await producer.send(
            Message("order.paid", {"order": 7}, destination=broker.where, aggregate=("order", "7"))
        )
    [arrived] = await broker.read(1)
    assert arrived.key == sent
    headers = {**arrived.headers, "message_id": arrived.key}
    assert sent in Identity()(Envelope(headers=headers, body=arrived.payload))
    assert arrived.payload == b'{"order":7}'


def test_one_that_blocks_does_the_same_from_many_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    flaky = Flaky()
    with semel.producer(flaky) as producer, ThreadPoolExecutor(4) as threads:
        ids = list(threads.map(lambda n: producer.send(Message("t", n)), range(20)))
    assert len(set(ids)) == 20
    assert sorted(each for some in flaky.seen for each in some) == sorted(ids)
    producer.close()


@pytest.mark.anyio
async def test_a_repeat_has_the_same_id() -> None:
    flaky = Flaky(SinkUnavailable("no answer"), NotPublished("busy"))
    ids = await semel.aproducer(flaky).send_many([Message("t", n) for n in range(3)])
    assert flaky.seen == [ids[:2], ids[:2], ids[:2], ids[2:]]


@pytest.mark.anyio
async def test_no_confirmation_in_time_says_which_id_to_use_again() -> None:
    flaky = Flaky(*[NotPublished("busy")] * 100)
    producer = semel.aproducer(flaky, wait_s=0.2)
    with pytest.raises(SinkUnavailable, match=r"mine-1.*same message_id"):
        await producer.send(Message("t"), message_id="mine-1")
    flaky.answers.clear()
    assert await producer.send(Message("t"), message_id="mine-1") == "mine-1"


@pytest.mark.anyio
async def test_what_the_broker_refuses_is_not_repeated() -> None:
    flaky = Flaky(PublishRefused("too large"))
    with pytest.raises(UsageError, match="too large"):
        await semel.aproducer(flaky).send(Message("t"))
    assert len(flaky.seen) == 1


@pytest.mark.parametrize("name", ["redis", "nats"])
def test_a_broker_that_is_not_there_is_reported_in_time(name: str) -> None:
    async def scene() -> None:
        async with semel.aproducer(NOWHERE[name].format(port=server.free_port()), wait_s=0.3) as producer:
            with pytest.raises(SinkUnavailable):
                await producer.send(Message("t", destination="d"))

    asyncio.run(scene())
