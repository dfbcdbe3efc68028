"""A topic that was made a moment ago, and one that was never made."""

import asyncio
import os

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from semel.brokers import Arrival, Source
from semel.brokers.kafka import from_url
from semel.errors import UsageError
from semel.testing.broker_contract import Sent
from tests.brokers.topics import Topic
from tests.services import kafka as service

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Announced(Topic):
    """A topic that is used before it is there."""

    def __init__(self) -> None:
        self.address = service.servers()
        self.name = f"t-{os.urandom(6).hex()}"
        self.admin = AdminClient({"bootstrap.servers": self.address})
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


async def test_a_topic_that_appears_within_seconds_is_waited_for() -> None:
    topic = await asyncio.to_thread(Announced)
    source = from_url(f"{topic.url}&session_s=1.5")
    await source.open()
    receiving = asyncio.create_task(source.receive(10, 5.0))
    await asyncio.sleep(1.0)
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
