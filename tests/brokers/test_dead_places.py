"""The places of dead letters on real brokers: made at the start, refused bodies left out."""

import asyncio
from typing import Any

import pytest
from confluent_kafka import Producer

import semel
from semel.brokers import Arrival, Route, Runner, source_for
from semel.brokers.dead_letters import letter_of
from semel.testing.broker_contract import Sent
from tests.brokers import test_sqs
from tests.brokers.places import Made, kafka, nats, rabbitmq, sqs
from tests.brokers.topics import Topic
from tests.waiting import until

POLICY = semel.Policy(permanent=(ValueError,), retry_delay_s=0.05)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


async def refuse(_message: Arrival) -> None:
    raise ValueError("never")


async def work_off(broker: Any, url: str, handler: Any = refuse) -> Runner:
    async with semel.aopen("memory://", consumer="c", policy=POLICY) as once:
        runner = Runner(source_for(url), [Route(handler, once=once)])
        running = asyncio.create_task(runner.run())

        async def is_settled() -> bool:
            return running.done() or not await broker.count_unsettled()

        await until(is_settled)
        runner.stop()
        await running
    return runner


class Bare(Topic):
    """A topic without one for its dead letters."""

    def topics(self) -> list[Any]:
        return super().topics()[:1]

    def named(self) -> list[str]:
        return [self.name, f"{self.name}.dead"]


async def bare_kafka() -> tuple[Any, str]:
    broker = await asyncio.to_thread(Bare)
    return broker, f"{broker.url}&session_s=1.5"


async def bare_sqs() -> tuple[Any, str]:
    broker = await asyncio.to_thread(test_sqs.Queue, fifo=False)
    await asyncio.to_thread(broker.sqs.delete_queue, QueueUrl=broker.urls[1])
    return broker, broker.url()


async def bare_fifo() -> tuple[Any, str]:
    broker = await asyncio.to_thread(test_sqs.Queue, fifo=True)
    await asyncio.to_thread(broker.sqs.delete_queue, QueueUrl=broker.urls[1])
    return broker, broker.url()


@pytest.mark.parametrize("made", [bare_kafka, bare_sqs, bare_fifo, nats, rabbitmq])
def test_a_missing_place_for_dead_letters_is_made_at_the_start(made: Made) -> None:
    async def scene() -> None:
        broker, url = await made()
        await broker.send([Sent("a", b"a")])
        await work_off(broker, url)
        assert [body for _, body in await broker.dead()] == [b"a"]
        await broker.close()

    asyncio.run(scene())


@pytest.mark.parametrize(("made", "size"), [(kafka, 1_048_450), (nats, 1_048_300), (sqs, 262_100)])
def test_a_body_near_the_limit_is_left_out_of_its_dead_letter(made: Made, size: int) -> None:
    async def scene() -> None:
        broker, url = await made()
        body = b"x" * size
        if isinstance(broker, Topic):
            await asyncio.to_thread(produce, broker, "a", body)
        else:
            await broker.send([Sent("a", body)])
        await work_off(broker, url)
        [(headers, found)] = await broker.dead()
        letter = letter_of(headers)
        assert letter is not None
        assert (letter.key, len(found or b"") < 20) == ("a", True)
        assert letter.body_at.startswith(broker.name)
        await broker.close()

    asyncio.run(scene())


def produce(topic: Topic, key: str, body: bytes | None) -> None:
    """Without the client's own limit."""
    producer = Producer({"bootstrap.servers": topic.address, "message.max.bytes": 2_000_000})
    producer.produce(topic.name, body, headers=[("message_id", key.encode())])
    assert producer.flush(30) == 0


@pytest.mark.parametrize("policy", ["pass", "skip"])
def test_a_record_without_a_value_is_none_or_skipped(policy: str) -> None:
    seen: list[Any] = []

    async def handler(body: bytes | None) -> None:
        seen.append(body)

    async def scene() -> None:
        broker, url = await kafka()
        for key, body in (("a", b"{}"), ("gone", None), ("empty", b"")):
            await asyncio.to_thread(produce, broker, key, body)
        await work_off(broker, f"{url}&tombstones={policy}", handler)
        assert await broker.dead() == []
        await broker.close()

    asyncio.run(scene())
    assert sorted(seen, key=str) == ([None, b"", b"{}"] if policy == "pass" else [b"", b"{}"])
