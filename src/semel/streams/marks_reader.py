"""Read the marks topic: its ends, and the marks that an index lacks. All calls block."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from semel.brokers.kafka.client import CLIENT_LOG, error_of
from semel.errors import RecordCorrupt, SourceUnavailable
from semel.streams.mark_format import unpack_marks

__all__ = ["MarksChunk", "MarksReader"]

ASK_S = 5.0


class MarksChunk(msgspec.Struct):
    """Marks of one partition, and the offset up to which they were read."""

    partition: int
    marks: dict[bytes, bytes]
    """Packed, by digest."""
    offset: int
    done: bool = False
    """Whether the end is reached that was the high watermark when the reading began."""


class MarksReader:
    """Reads partitions of the marks topic side by side, each from an offset to an end."""

    def __init__(self, client: Mapping[str, Any], topic: str) -> None:
        self.topic: str = topic
        self._ends: dict[int, int] = {}
        # The end must include what is not committed yet: markers of one transaction reach the topics one by one.
        self._looker: Any = self._consumer(client, "read_uncommitted")
        self._reader: Any = self._consumer(client, "read_committed")

    def _consumer(self, client: Mapping[str, Any], isolation: str) -> Any:
        config = {
            **client,
            "group.id": f"{self.topic}.reader",  # required by the client; no group is joined
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "isolation.level": isolation,
        }
        return Consumer(config, logger=CLIENT_LOG)

    def bounds(self, partition: int) -> tuple[int, int]:
        """Return the first offset and the end of a partition as they are now. Raises `SourceUnavailable`."""
        try:
            found = self._looker.get_watermark_offsets(TopicPartition(self.topic, partition), timeout=ASK_S)
        except KafkaException as error:
            # The client asks the leader that it knows, for as long as a quarter of an hour after its death.
            with suppress(KafkaException):
                self._looker.list_topics(self.topic, timeout=ASK_S)
            raise error_of(self.topic, error.args[0]) from error
        if found is None:
            raise SourceUnavailable(f"{self.topic} did not tell its end within {ASK_S:g} s")
        low, high = found
        return low, high

    def begin(self, partition: int, offset: int, end: int) -> None:
        """Begin to read a partition from an offset up to an end."""
        self.drop(partition)
        self._ends[partition] = end
        self._reader.incremental_assign([TopicPartition(self.topic, partition, offset)])

    def drop(self, partition: int) -> None:
        """Stop reading a partition."""
        if self._ends.pop(partition, None) is not None:
            with suppress(KafkaException):
                self._reader.incremental_unassign([TopicPartition(self.topic, partition)])

    @property
    def reads(self) -> bool:
        """Whether a partition is being read."""
        return bool(self._ends)

    def read(self, most: int, wait_s: float) -> Iterator[MarksChunk]:
        """Yield the marks that came, by partition. Waits for the first at most `wait_s`."""
        found = self._reader.consume(1, wait_s)
        if found and most > 1:
            found += self._reader.consume(most - 1, 0.0)
        chunks: dict[int, MarksChunk] = {}
        for record in found:
            number, error = record.partition(), record.error()
            end = self._ends.get(number)
            if end is None:  # dropped meanwhile
                continue
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                if (
                    error.code() in (KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART)
                    or error.fatal()
                ):
                    raise error_of(self.topic, error)
                continue
            offset = record.offset()
            chunk = chunks.setdefault(number, MarksChunk(number, {}, offset))
            if error is not None:  # the last stable offset: earlier than the end while a transaction is open
                chunk.offset = max(chunk.offset, offset)
                chunk.done = chunk.done or offset >= end
                continue
            chunk.offset = offset + 1
            if record.value() is not None:
                chunk.marks |= self._marks_of(record)
        for chunk in chunks.values():
            if chunk.done:
                self.drop(chunk.partition)
            yield chunk

    def _marks_of(self, record: Any) -> dict[bytes, bytes]:
        try:
            return unpack_marks(record.key(), record.value())
        except ValueError as error:
            raise self._foreign(record) from error

    def _foreign(self, record: Any) -> RecordCorrupt:
        return RecordCorrupt(
            f"{self.topic}, partition {record.partition()}, offset {record.offset()}: this is no mark; the topic is"
            " written by something else: use another with --marks"
        )

    def close(self) -> None:
        """Close both clients."""
        self._ends.clear()
        self._reader.close()
        self._looker.close()
