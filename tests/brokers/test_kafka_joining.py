"""The beginning: a topic that was made a moment ago, one that was never made, and a group that takes its time."""

import asyncio
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
from confluent_kafka.cimpl import NewTopic

import semel
from semel.brokers import Arrival, Runner, Source
from semel.brokers.kafka import source as kafka_source
from semel.brokers.kafka.source import from_url
from semel.errors import UsageError
from semel.testing.broker_contract import Sent
from tests.brokers.topics import Topic
from tests.services import kafka as service
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Announced(Topic):
    """A topic that is used before it is there."""

    def __init__(self) -> None:
        self.address = service.servers()
        self.name = f"t-{os.urandom(6).hex()}"
        self.admin = service.admin()
        self._topics: list[NewTopic] = []

    def make(self) -> None:
        self._topics = self.topics()
        for each in self.admin.create_topics(self._topics).values():
            each.result(30)


async def anything(source: Source) -> list[Arrival]:
    async with asyncio.timeout(20):
        while not (found := list(await source.receive(10, 0.5))):
            continue
    return found


async def test_a_topic_that_appears_within_seconds_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, looked = threading.Event(), kafka_source.topics_of

    def topics_of(*arguments: Any) -> Any:
        asked.set()
        return looked(*arguments)

    monkeypatch.setattr("semel.brokers.kafka.source.topics_of", topics_of)
    topic = await asyncio.to_thread(Announced)
    source = from_url(f"{topic.url}&session_s=1.5")
    await source.open()
    receiving = asyncio.create_task(source.receive(10, 5.0))
    await until(asked.is_set)
    await asyncio.to_thread(topic.make)
    await topic.send([Sent("a", b"{}")])
    found = list(await receiving) or await anything(source)
    assert [each.body for each in found] == [b"{}"]
    await source.ack(found)
    await source.close()
    await topic.close()


async def test_a_topic_that_is_not_there_is_an_error_of_the_user() -> None:
    topic = await asyncio.to_thread(Announced)
    source = from_url(f"{topic.url}&session_s=1.5")
    await source.open()
    with pytest.raises(UsageError, match=f"no topic {topic.name}"):
        await anything(source)
    await source.close()


MEMBER = """
import sys
import threading
from typing import Any
from confluent_kafka import Consumer
servers, group, topic = sys.argv[1:]
member = Consumer({"bootstrap.servers": servers, "group.id": group, "session.timeout.ms": 3000,
                   "partition.assignment.strategy": "cooperative-sticky"})
member.subscribe([topic], on_assign=lambda *_: print("joined", flush=True))
while True:
    member.poll(0.1)
"""


async def test_a_runner_until_idle_does_not_take_joining_for_idleness() -> None:
    topic = await asyncio.to_thread(Topic)
    await topic.send([Sent(f"k{n}", b"{}") for n in range(100)])
    dead = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MEMBER, topic.address, f"g-{topic.name}", topic.name, stdout=subprocess.PIPE
    )
    assert dead.stdout is not None
    assert await dead.stdout.readline()
    dead.kill()  # the group waits for it as long as its session lasts
    await dead.wait()
    ran: list[str] = []

    async def handler(_message: Arrival) -> None:
        ran.append(semel.current().key)

    async with semel.aopen("memory:", consumer="c") as once:
        runner = Runner(topic.source(), handler, once=once)
        runner.stop_when_idle()
        async with asyncio.timeout(40):
            await runner.run()
    assert sorted(ran) == sorted(f"k{n}" for n in range(100))
    await topic.close()
