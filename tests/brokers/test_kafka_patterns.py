"""A Kafka source whose topic is a pattern: dead letters have a topic for each that matches, now and later."""

import asyncio
import logging
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.cimpl import NewTopic

import semel
from semel.brokers import Arrival, Runner
from semel.brokers.kafka import sending
from semel.brokers.kafka.source import KafkaSource, from_url
from semel.errors import UsageError
from tests.brokers.topics import Topic
from tests.waiting import until

pytestmark = pytest.mark.slow


class Family(Topic):
    """Topics whose names begin alike; they are made one by one, without topics for their dead letters."""

    def topics(self) -> list[NewTopic]:
        return [NewTopic(self.name, self.partitions, 1)]

    def source(self, *, deadline_s: float | None = None) -> KafkaSource:
        return from_url(
            f"kafka://{self.address}/^{self.name}.*?group=g-{self.name}&session_s={deadline_s or 2.0}&refresh_s=0.5"
        )

    def make(self, suffix: str) -> str:
        name = f"{self.name}{suffix}"
        self.admin.create_topics([NewTopic(name, 1, 1)])[name].result(30)
        self._topics.append(NewTopic(name, 1, 1))
        return name

    def produce(self, topic: str, key: str) -> None:
        producer = Producer({"bootstrap.servers": self.address})
        producer.produce(topic, b"{}", headers=[("message_id", key.encode())])
        assert producer.flush(30) == 0

    async def family(self) -> set[str]:
        """The topics that there are, without the beginning of their names."""
        known = (await asyncio.to_thread(self.admin.list_topics, timeout=10)).topics
        return {name.removeprefix(self.name) for name in known if name.startswith(self.name)}

    async def has(self, suffix: str) -> bool:
        return suffix in await self.family()

    async def remove(self) -> None:
        names = [self.name + each for each in await self.family()]
        for each in self.admin.delete_topics(names).values():
            await asyncio.to_thread(each.result, 30)


async def is_removed(family: Family) -> bool:
    return not await family.has(".dead")


async def refuse(_message: Arrival) -> None:
    raise ValueError("never")


def on_family(scene: Any, handler: Any = refuse) -> None:
    async def play() -> None:
        family = await asyncio.to_thread(Family)
        policy = semel.Policy(permanent=(ValueError,), retry_delay_s=0.05)
        async with semel.aopen("memory:", consumer="c", policy=policy) as once:
            runner = Runner(family.source(), handler, once=once)
            await scene(family, runner)
        await family.remove()

    asyncio.run(play())


def test_dead_letters_have_a_topic_for_each_that_matches_now_and_later() -> None:
    async def scene(family: Family, runner: Runner) -> None:
        await asyncio.to_thread(family.make, ".eu")
        running = asyncio.create_task(runner.run())
        await until(lambda: family.has(".dead"))
        await until(lambda: family.has(".eu.dead"))
        assert runner.counts.received == 0, "made at the start, before any message"
        later = await asyncio.to_thread(family.make, ".us")
        await until(lambda: family.has(".us.dead"))
        await asyncio.to_thread(family.produce, later, "a")
        await until(lambda: runner.counts.dead_lettered == 1)
        await asyncio.to_thread(family.produce, family.name, "b")
        await until(lambda: runner.counts.dead_lettered == 2)
        runner.stop()
        await running
        assert runner.counts.received == 2, "the dead letters are not consumed"
        assert await family.family() == {"", ".dead", ".eu", ".eu.dead", ".us", ".us.dead"}

    on_family(scene)


def test_a_topic_of_dead_letters_that_may_not_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a topic that comes later."""

    def refused(_admin: Any, topic: str) -> None:
        raise UsageError(f"there is no topic {topic} for dead letters, and it cannot be made")

    async def scene(family: Family, runner: Runner) -> None:
        running = asyncio.create_task(runner.run())
        await until(lambda: family.has(".dead"))
        monkeypatch.setattr(sending, "_make_topic", refused)
        await asyncio.to_thread(family.make, ".eu")
        with pytest.raises(UsageError, match=r"\.eu\.dead"):
            async with asyncio.timeout(60):
                await running

    on_family(scene)


def test_a_topic_of_dead_letters_that_was_removed_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(family: Family, runner: Runner) -> None:
        running = asyncio.create_task(runner.run())
        await until(lambda: family.has(".dead"))
        await asyncio.to_thread(family.produce, family.name, "a")
        await until(lambda: runner.counts.dead_lettered == 1)
        dead = f"{family.name}.dead"
        await asyncio.to_thread(family.admin.delete_topics([dead])[dead].result, 30)
        await until(lambda: is_removed(family))
        await asyncio.to_thread(family.produce, family.name, "b")
        await until(lambda: runner.counts.dead_lettered == 2)
        assert await family.has(".dead")
        runner.stop()
        await running

    with caplog.at_level(logging.ERROR, "semel.runner"):
        on_family(scene)
    assert "a dead letter cannot be written" in caplog.text


def test_the_dead_letters_of_a_pattern_are_looked_at_topic_by_topic() -> None:
    async def scene() -> None:
        source = from_url("kafka://localhost/^orders.*?group=g")
        await source.visit()
        with pytest.raises(UsageError, match="is a pattern"):
            await source.look(1)
        await source.close()

    asyncio.run(scene())
