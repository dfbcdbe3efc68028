"""Kafka under the contract, looked at with a client of its own."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.cimpl import NewTopic

from semel.brokers.kafka import from_url
from semel.brokers.offsets import Offsets
from semel.brokers.source import Source
from semel.testing import broker_contract
from semel.testing.broker_contract import Sent
from tests.brokers.storm import Storm
from tests.services import kafka as service

PARTITIONS = 4
LATEST = OffsetSpec.latest()  # type: ignore[no-untyped-call]


class Topic:
    ordered = True

    def __init__(self) -> None:
        self.address = service.servers()
        self.name = f"t-{os.urandom(6).hex()}"
        self.admin = AdminClient({"bootstrap.servers": self.address})
        made = self.admin.create_topics(
            [NewTopic(self.name, PARTITIONS, 1), NewTopic(f"{self.name}.dead", 1, 1)]
        )
        for each in made.values():
            each.result(30)

    @property
    def url(self) -> str:
        return f"kafka://{self.address}/{self.name}?group=g-{self.name}"

    async def send(self, messages: Sequence[Sent]) -> None:
        await asyncio.to_thread(self._send, messages)

    def _send(self, messages: Sequence[Sent]) -> None:
        producer = Producer({"bootstrap.servers": self.address, "enable.idempotence": True})
        for each in messages:
            headers: list[Any] = [("message_id", each.key.encode())] if each.key else []
            producer.produce(self.name, each.body, each.lane or each.key, headers=headers)
        assert producer.flush(30) == 0

    def source(self, *, deadline_s: float | None = None) -> Source:
        return from_url(f"{self.url}&session_s={max(1.0, deadline_s or 2.0)}")

    async def unsettled(self) -> int:
        return await asyncio.to_thread(self._unsettled)

    def _unsettled(self) -> int:
        places = [TopicPartition(self.name, number) for number in range(PARTITIONS)]
        ends = self.admin.list_offsets(dict.fromkeys(places, LATEST))
        asked = self.admin.list_consumer_group_offsets(
            [ConsumerGroupTopicPartitions(f"g-{self.name}", places)]
        )
        [group] = asked.values()
        done = {each.partition: max(0, each.offset) for each in group.result(30).topic_partitions or ()}
        return sum(future.result(30).offset - done.get(place.partition, 0) for place, future in ends.items())

    async def dead(self) -> list[tuple[Mapping[str, str], bytes]]:
        return await asyncio.to_thread(self._dead)

    def _dead(self) -> list[tuple[Mapping[str, str], bytes]]:
        reader = Consumer(
            {"bootstrap.servers": self.address, "group.id": "look", "auto.offset.reset": "earliest"}
        )
        try:
            place = TopicPartition(f"{self.name}.dead", 0, 0)
            _, high = reader.get_watermark_offsets(place, timeout=30)
            reader.assign([place])
            found: list[tuple[Mapping[str, str], bytes]] = []
            while len(found) < high:
                for message in reader.consume(10, 1.0):
                    pairs: Any = message.headers() or ()
                    headers = {name: (value or b"").decode() for name, value in pairs}
                    found.append((headers, message.value() or b""))
            return found
        finally:
            reader.close()

    async def close(self) -> None:
        for each in self.admin.delete_topics([self.name, f"{self.name}.dead"]).values():
            await asyncio.to_thread(each.result, 30)


@pytest.mark.slow
class TestKafka(broker_contract.Suite):
    ordered = True

    async def broker(self) -> Topic:
        return await asyncio.to_thread(Topic)


def test_an_offset_never_passes_one_that_is_not_done() -> None:
    offsets = Offsets()
    for offset in (3, 4, 7, 8):
        offsets.received(offset)
    assert [offsets.done(offset) for offset in (4, 8, 3, 3, 7)] == [None, None, 5, None, 9]
    assert len(offsets) == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_workers_killed_with_9_lose_nothing_and_repeat_nothing(seed: int, tmp_path: Path) -> None:
    async def scene() -> None:
        topic = await asyncio.to_thread(Topic)
        events = 10_000 if "SEMEL_SOAK" in os.environ else 1000
        await Storm(f"{topic.url}&session_s=1.5", tmp_path, seed).run(topic, events)
        await topic.close()

    asyncio.run(scene())
