"""A topic of the real broker, seen from outside by clients of its own, and by `kcat`, which is no client of ours."""

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaException, Producer, TopicPartition
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.cimpl import NewTopic

from semel.brokers.kafka.source import from_url
from semel.brokers.source import Source
from semel.testing.broker_contract import Sent
from tests.services import kafka as service
from tests.services.kcat import kcat
from tests.waiting import await_true, until

PARTITIONS = 4
LATEST = OffsetSpec.latest()  # type: ignore[no-untyped-call]


class Topic:
    """A topic with its dead letters, fresh."""

    ordered = True
    partitions = PARTITIONS

    def __init__(self) -> None:
        self.address = service.servers()
        self.name = f"t-{os.urandom(6).hex()}"
        self.admin = service.admin()
        self._topics = self.topics()
        for each in self.admin.create_topics(self._topics).values():
            each.result(30)
        assert await_true(self._is_led, 30)

    def _is_led(self) -> bool:
        """Whether every partition has its leader: a topic that was made is not yet one that answers."""
        try:
            for each in self.admin.list_offsets(dict.fromkeys(self._places(), LATEST)).values():
                each.result(30)
        except KafkaException:
            self.admin.list_topics(self.name, 30)  # the client keeps a leader that it was told too early
            return False
        return True

    def topics(self) -> list[NewTopic]:
        return [NewTopic(self.name, self.partitions, 1), NewTopic(f"{self.name}.dead", 1, 1)]

    @property
    def url(self) -> str:
        return f"kafka://{self.address}/{self.name}?group=g-{self.name}"

    async def send(self, messages: Sequence[Sent]) -> None:
        await asyncio.to_thread(self._send, messages)

    def _send(self, messages: Sequence[Sent]) -> None:
        more = {"enable.idempotence": True, "message.max.bytes": 2_000_000}  # the topic's own limit decides
        producer = Producer({"bootstrap.servers": self.address, **more})
        for each in messages:
            headers: list[Any] = [("message_id", each.key.encode())] if each.key else []
            producer.produce(self.name, each.body, each.lane or each.key, headers=headers)
        assert producer.flush(30) == 0

    def source(self, *, deadline_s: float | None = None) -> Source:
        return from_url(f"{self.url}&session_s={max(1.0, deadline_s or 2.0)}")

    async def count_unsettled(self) -> int:
        return await asyncio.to_thread(self._unsettled)

    def _places(self) -> list[TopicPartition]:
        return [TopicPartition(self.name, number) for number in range(self.partitions)]

    def _committed(self) -> dict[int, int]:
        asked = self.admin.list_consumer_group_offsets(
            [ConsumerGroupTopicPartitions(f"g-{self.name}", self._places())]
        )
        [group] = asked.values()
        return {each.partition: max(0, each.offset) for each in group.result(30).topic_partitions or ()}

    def _unsettled(self) -> int:
        ends = self.admin.list_offsets(dict.fromkeys(self._places(), LATEST))
        done = self._committed()
        return sum(future.result(30).offset - done.get(place.partition, 0) for place, future in ends.items())

    def _reader(self) -> Consumer:
        """A reader of no group: it commits nothing."""
        return Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": "look",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
            }
        )

    def consumed(self) -> list[str]:
        """The bodies of all that lies before the group's committed offsets."""
        left = {number: offset for number, offset in self._committed().items() if offset}
        reader = self._reader()
        try:
            reader.assign([TopicPartition(self.name, number, 0) for number in left])
            found = []
            while left:
                for message in reader.consume(500, 0.5):
                    number, offset = message.partition() or 0, message.offset() or 0
                    if message.error() is not None:  # the end
                        left.pop(number, None)
                        continue
                    if number in left and offset < left[number]:
                        found.append((message.value() or b"").decode())
                    if number in left and offset + 1 >= left[number]:
                        del left[number]
            return found
        finally:
            reader.close()

    def body_at(self, position: str) -> bytes:
        """The body of the record at topic, partition and offset."""
        topic, partition, offset = position.split("/")
        reader = self._reader()
        try:
            reader.assign([TopicPartition(topic, int(partition), int(offset))])
            [message] = reader.consume(1, 30.0)
            assert (message.topic(), message.offset()) == (topic, int(offset))
            return message.value() or b""
        finally:
            reader.close()

    async def dead(self) -> list[tuple[Mapping[str, str], bytes]]:
        return await asyncio.to_thread(self._dead)

    def _dead(self) -> list[tuple[Mapping[str, str], bytes]]:
        reader = self._reader()
        try:
            reader.assign([TopicPartition(f"{self.name}.dead", 0, 0)])
            found: list[tuple[Mapping[str, str], bytes]] = []
            while True:
                for message in reader.consume(10, 1.0):
                    if message.error() is not None:  # the end
                        return found
                    pairs: Any = message.headers() or ()
                    headers = {name: (value or b"").decode() for name, value in pairs}
                    found.append((headers, message.value() or b""))
        finally:
            reader.close()

    def delete_dead_letters(self) -> None:
        for each in self.admin.delete_topics([f"{self.name}.dead"]).values():
            each.result(30)

    async def close(self) -> None:
        names = [each.topic for each in self._topics]
        for each in self.admin.delete_topics(names).values():
            await asyncio.to_thread(each.result, 30)


class Pipe(Topic):
    """A topic, what is made of it, and the marks of what is committed."""

    def __init__(self, partitions: int = PARTITIONS) -> None:
        self.partitions = partitions
        super().__init__()

    def topics(self) -> list[NewTopic]:
        marks = NewTopic(self.marks, self.partitions, 1, config={"cleanup.policy": "compact"})
        return [*super().topics(), NewTopic(self.output, self.partitions, 1), marks]

    @property
    def output(self) -> str:
        return f"{self.name}.out"

    @property
    def marks(self) -> str:
        return f"{self.name}.marks"

    def outputs(self, isolation: str = "read_committed") -> Counter[str]:
        """What a reader sees at the other end, by a program of others."""
        said = kcat(
            "-C",
            "-b",
            self.address,
            "-t",
            self.output,
            "-e",
            "-f",
            "%s\\n",
            "-X",
            f"isolation.level={isolation}",
        )
        return Counter(said.splitlines())

    async def settled(self) -> None:
        """Wait until the group's committed offsets are at the end."""

        async def is_settled() -> bool:
            return not await self.count_unsettled()

        await until(is_settled)
