"""NATS JetStream under the contract, looked at with a connection of its own."""

import asyncio
import os
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import nats
import pytest
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy
from nats.js.errors import NotFoundError

import semel
from semel.brokers import Arrival, Runner
from semel.brokers.nats import from_url
from semel.brokers.probes import look_at
from semel.brokers.source import Source
from semel.errors import UsageError
from semel.observe.probes import SourceFacts
from semel.testing import broker_contract
from semel.testing.broker_contract import Sent
from tests.brokers.cut_off import CutOff
from tests.brokers.storm import Storm
from tests.services import nats as service
from tests.services.server import NOBODY
from tests.waiting import until


class Stream:
    ordered = False
    retention = RetentionPolicy.LIMITS

    def __init__(self) -> None:
        self.name = f"t{os.urandom(6).hex()}"
        self.server = service.url()
        self.nats: Any = None
        self.jetstream: Any = None

    async def connect(self) -> "Stream":
        self.nats = await nats.connect(self.server)
        self.jetstream = self.nats.jetstream()
        await self.jetstream.add_stream(
            name=self.name, subjects=[f"{self.name}.>"], duplicate_window=0.1, retention=self.retention
        )
        return self

    def url(self, deadline_s: float = 2.0) -> str:
        return f"{self.server}?stream={self.name}&durable=d&deadline_s={deadline_s}"

    async def send(self, messages: Sequence[Sent]) -> None:
        for each in messages:
            headers = {"message_id": each.key} if each.key else None
            await self.jetstream.publish(f"{self.name}.paid", each.body, headers=headers)

    def source(self, *, deadline_s: float | None = None) -> Source:
        return from_url(self.url(deadline_s or 2.0))

    async def count_unsettled(self) -> int:
        try:
            consumer = await self.jetstream.consumer_info(self.name, "d")
        except NotFoundError:
            return int((await self.jetstream.stream_info(self.name)).state.messages)
        return int(consumer.num_pending) + int(consumer.num_ack_pending)

    async def dead(self) -> list[tuple[Mapping[str, str], bytes]]:
        found: list[tuple[Mapping[str, str], bytes]] = []
        for number in range(1, (await self.jetstream.stream_info(f"{self.name}-dead")).state.messages + 1):
            message = await self.jetstream.get_msg(f"{self.name}-dead", number)
            found.append((message.headers or {}, message.data))
        return found

    async def close(self) -> None:
        for name in (self.name, f"{self.name}-dead"):
            try:
                await self.jetstream.delete_stream(name)
            except NotFoundError:
                continue
        await self.nats.close()


class WorkQueue(Stream):
    """A stream that removes a message with its ack."""

    retention = RetentionPolicy.WORK_QUEUE


@pytest.mark.slow
class TestNats(broker_contract.BrokerSuite):
    not_applicable: ClassVar = {
        "a_member_that_is_replaced_ends_with_the_reason": "members of a consumer have no names",
        "a_message_without_a_body_is_passed_as_none_or_skipped": "a body may be empty, but not missing",
    }

    async def broker(self) -> Stream:
        return await Stream().connect()

    async def cut_off_broker(self) -> CutOff:
        broker = await self.broker()
        return CutOff(broker, broker.url(), from_url)

    def away(self) -> Source:
        return from_url(f"nats://127.0.0.1:{NOBODY}?stream=S&durable=d")

    def with_wrong_credentials(self) -> list[Source]:
        return [from_url(url) for url in self._refused()]

    def _refused(self) -> list[str]:
        host = service.secured().removeprefix("nats://")
        users = ("semel:wrong@", "wrong-token@", "")
        return [f"nats://{user}{host}?stream=S&durable=d" for user in users]

    def probes_with_wrong_credentials(self) -> list[Awaitable[SourceFacts]]:
        return [look_at(url) for url in self._refused()]

    def at_missing_places(self) -> list[Source]:
        return [from_url(f"{service.url()}?stream=missing&durable=d")]

    async def without_dead_letter_place(self) -> Stream:
        return await self.broker()

    async def remove_dead_letter_place(self, broker: Any) -> None:
        await broker.jetstream.delete_stream(f"{broker.name}-dead")

    def bytes_near_limit(self) -> int:
        return 1_048_300

    async def body_at(self, broker: Any, position: str) -> bytes:
        stream, _, sequence = position.partition("/")
        return (await broker.jetstream.get_msg(stream, int(sequence))).data or b""

    async def probe(self, broker: Any) -> SourceFacts:
        return await look_at(broker.url())

    async def probe_of_hasty_broker(self) -> SourceFacts:
        broker = await self.broker()
        hasty = ConsumerConfig(durable_name="d", ack_policy=AckPolicy.EXPLICIT, ack_wait=5, max_deliver=4)
        await broker.jetstream.add_consumer(broker.name, hasty)
        try:
            return await look_at(broker.url())
        finally:
            await broker.close()


@pytest.mark.service
def test_no_dead_letters_are_an_empty_list() -> None:
    async def scene() -> None:
        stream = await Stream().connect()
        source = from_url(stream.url())
        try:
            await source.open()  # creates the dead-letter stream, into which nothing was ever written
            assert await source.look(10) == []
        finally:
            await source.close()
            await stream.close()

    asyncio.run(scene())


@pytest.mark.service
def test_dead_letters_are_refused_where_they_would_be_consumed_again() -> None:
    async def scene() -> None:
        stream = await Stream().connect()
        source = from_url(f"{stream.url()}&dead={stream.name}.dead")
        with pytest.raises(UsageError, match=r"consumed again.*dead="):
            await source.open()
        await source.close()
        await stream.close()

    asyncio.run(scene())


@pytest.mark.slow
def test_a_body_that_cannot_be_compressed_stays_in_its_work_queue(caplog: pytest.LogCaptureFixture) -> None:
    """Its ack would remove the only copy."""
    body = os.urandom(1_048_300)

    async def fail(_message: Arrival) -> None:
        raise ValueError("never")

    async def scene() -> None:
        stream = await WorkQueue().connect()
        await stream.send([Sent("a", body)])
        policy = semel.Policy(permanent=(ValueError,), retry_delay_s=0.05)
        async with semel.aopen("memory:", consumer="c", policy=policy) as once:
            runner = Runner(stream.source(), fail, once=once)
            running = asyncio.create_task(runner.run())
            await until(lambda: runner.counts.stuck)
            runner.stop()
            await running
        assert (runner.counts.stuck, runner.counts.acked, await stream.dead()) == (1, 0, [])
        assert (await stream.jetstream.get_msg(stream.name, 1)).data == body
        await stream.close()

    asyncio.run(scene())
    [said] = [line for line in caplog.messages if "cannot be written" in line]
    assert "raise its max_payload" in said


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_workers_killed_with_9_lose_nothing_and_repeat_nothing(seed: int, tmp_path: Path) -> None:
    async def scene() -> None:
        stream = await Stream().connect()
        await Storm(stream.url(), tmp_path, seed).run(stream, 10_000 if "SEMEL_SOAK" in os.environ else 1000)
        await stream.close()

    asyncio.run(scene())
