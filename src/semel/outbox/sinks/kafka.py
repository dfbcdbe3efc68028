"""A sink on Kafka: an idempotent producer, acknowledged by all replicas in sync."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, Producer

from semel.brokers.kafka.client import ClientErrors
from semel.core.relay_flow import NotPublished, OutboxRow, Published, PublishRefused, Sent
from semel.errors import PolicyInvalid
from semel.outbox.message import attributes
from semel.outbox.sinks import BEGIN_MAX_S, HELD, LATER, destination_of, refusal, stretches, unavailable
from semel.runtime.tasks import DaemonThread
from semel.runtime.urls import parse_url, read_options

__all__ = ["KafkaSink", "from_url"]

T = TypeVar("T")
WAIT_S = 10.0
DELIVERY_MAX_S = 30.0
BATCH_BYTES_MAX, BATCH_BYTES_MIN = 1_000_000, 16_000
"""The producer's batch size: the default, and the least for topics that take less."""
_QUIET = logging.getLogger("semel.kafka")
_QUIET.addHandler(logging.NullHandler())
_QUIET.propagate = False
_OF_MESSAGE = frozenset((KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG, KafkaError.INVALID_MSG_SIZE))
_OF_DESTINATION = frozenset(
    (
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,  # the driver's own number for the same
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.POLICY_VIOLATION,
    )
)


class KafkaSink:
    """Topics of one cluster. The key is the aggregate's id, so that an aggregate keeps to one partition.

    Rows of an aggregate are sent together. The brokers accept an idempotent producer's batches in order
    or not at all, and the producer stops at the first refusal, so later rows do not overtake it. The producer
    is then replaced.
    """

    ordered: bool = True
    batch_max: int = 500

    def __init__(self, servers: str, *, topic: str = "", settings: dict[str, str] | None = None) -> None:
        self.name: str = f"kafka://{servers}"
        self._topic = topic
        self._settings: dict[str, Any] = {
            "bootstrap.servers": servers,
            "client.id": "semel-relay",
            "enable.idempotence": True,
            "enable.gapless.guarantee": True,
            "acks": "all",
            "linger.ms": 0,
            "delivery.timeout.ms": 0,  # a retry of single messages would leave gaps; all fail together
            "topic.metadata.propagation.max.ms": round(WAIT_S * 500),
            **(settings or {}),
        }
        self._producer: Producer | None = None
        self._thread: DaemonThread | None = None

    async def open(self) -> None:
        """Check that a broker answers."""
        self._thread = DaemonThread("semel-kafka")
        try:
            await self._in_thread(self._connect)
        except KafkaException as error:
            raise unavailable(self.name, error) from error

    def _connect(self) -> None:
        errors = ClientErrors()
        self._producer = Producer({**self._settings, "error_cb": errors}, logger=_QUIET)
        try:
            self._producer.list_topics(timeout=WAIT_S)
        except KafkaException:
            self._producer.poll(0)  # the callback has the reason
            if errors.final is not None:
                raise refusal(self.name, errors.final.str()) from None
            raise

    async def close(self) -> None:
        """Drop queued rows: they are not confirmed, and will be published again."""
        producer, self._producer = self._producer, None
        thread, self._thread = self._thread, None
        if producer is not None:
            producer.purge()
        if thread is not None:
            thread.shutdown(wait=False)

    async def publish(self, rows: Sequence[OutboxRow]) -> list[Sent]:
        """Publish in the producer's thread, until each row is delivered or has failed."""
        try:
            return await self._in_thread(lambda: self._publish(rows))
        except KafkaException as error:
            raise unavailable(self.name, error) from error

    def _publish(self, rows: Sequence[OutboxRow]) -> list[Sent]:
        """Publish all rows together; if a broker refuses some because of one row, send the rest one by one.

        Brokers refuse a producer's batch as a whole, without naming the row.
        """
        answers: list[Sent] = [LATER] * len(rows)
        for some in stretches(rows):
            vague = self._send(rows, some, answers)
            if vague:
                self._send_singly(rows, some, answers)
                if not any(
                    isinstance(answers[at], PublishRefused) for at in some
                ):  # their total size was too large
                    size = int(self._settings.get("batch.size", BATCH_BYTES_MAX)) // 2
                    self._settings["batch.size"] = max(size, BATCH_BYTES_MIN)
                    self._drop()
        return answers

    def _send_singly(self, rows: Sequence[OutboxRow], places: Sequence[int], answers: list[Sent]) -> None:
        give_up_at = time.monotonic() + BEGIN_MAX_S
        left = [at for at in places if not isinstance(answers[at], Published)]
        for at in left:
            answers[at] = LATER
        for at in left:
            self._send(rows, [at], answers)
            if time.monotonic() >= give_up_at:
                return

    def _send(self, rows: Sequence[OutboxRow], places: Sequence[int], answers: list[Sent]) -> bool:
        """Send rows and wait for all. Returns whether some may have been refused because of another row."""
        chosen = set(places)
        stopped: dict[tuple[str, str], int] = {}
        """The position at which each aggregate is blocked."""
        for at, row in enumerate(rows):
            if row.aggregate is not None and at not in chosen and not isinstance(answers[at], Published):
                stopped.setdefault(row.aggregate, at)
        batch = _Batch(self._open_producer(), answers)
        for at in places:
            row = rows[at]
            if row.aggregate is not None and stopped.get(row.aggregate, at) < at:
                answers[at] = HELD
            elif not batch.hand_over(at, row, destination_of(row, self._topic)) and row.aggregate is not None:
                stopped[row.aggregate] = at
        batch.wait()
        if batch.failed:
            self._drop()
        return batch.vague and len(places) > 1

    def _open_producer(self) -> Producer:
        if self._producer is None:
            self._connect()
        assert self._producer is not None
        return self._producer

    def _drop(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class _Batch:
    """Rows sent to a producer, and their results."""

    def __init__(self, producer: Producer, answers: list[Sent]) -> None:
        self._producer = producer
        self._answers = answers
        self._left = 0
        self.failed = False
        """A row was not delivered: the producer must be replaced."""
        self.vague = False
        """The brokers have refused a row, perhaps because of another."""

    def hand_over(self, at: int, row: OutboxRow, topic: str) -> bool:
        """Queue a row. Returns `False` if the producer refuses it."""
        try:
            self._producer.produce(
                topic,
                row.payload,
                key=None if row.aggregate is None else row.aggregate[1].encode(),
                headers=headers_of(row),
                timestamp=row.created_at // 1000,
                on_delivery=lambda error, _message: self._on_delivery(at, topic, error),
            )
        except KafkaException as error:
            self._answers[at] = _refusal(topic, error.args[0])
            return False
        except BufferError:
            self._answers[at] = NotPublished("the producer's queue is full")
            return False
        self._answers[at] = NotPublished("no answer in time")
        self._left += 1
        return True

    def _on_delivery(self, at: int, topic: str, error: KafkaError | None) -> None:
        self._left -= 1
        self._answers[at] = Published() if error is None else _refusal(topic, error)
        if error is not None:
            self.failed = True
            self.vague = self.vague or error.code() in _OF_MESSAGE

    def wait(self) -> None:
        """Wait until each row is delivered or has failed, or the time is over."""
        give_up_at = time.monotonic() + DELIVERY_MAX_S
        while self._left and time.monotonic() < give_up_at:
            try:
                self._producer.poll(0.1)
            except KafkaException:  # it has stopped, and reports the result of each row
                self.failed = self.vague = True
        self.failed = self.failed or self._left > 0


def _refusal(topic: str, error: KafkaError) -> Sent:
    code, said = error.code(), f"{topic}: {error.str()}"
    if code in _OF_MESSAGE:
        return PublishRefused(said, of_message=True)
    return PublishRefused(said) if code in _OF_DESTINATION else NotPublished(said)


def headers_of(row: OutboxRow) -> list[tuple[str, str | bytes | None]]:
    """Return the record's headers."""
    headers: list[tuple[str, str | bytes | None]] = [
        ("message_id", row.id),
        ("content-type", row.content_type),
    ]
    headers += [(f"ce_{name}", value) for name, value in attributes(row).items()]
    if row.traceparent is not None:
        headers.append(("traceparent", row.traceparent))
    return [*headers, *row.headers.items()]


def from_url(url: str) -> KafkaSink:
    """`kafka://host:9092,other:9092?topic=orders`."""
    parts, options = parse_url(url), read_options(url, {"topic": str})
    if not parts.netloc or "@" in parts.netloc:
        raise PolicyInvalid("write kafka://host:9092?topic=...; credentials go into KafkaSink(settings=...)")
    return KafkaSink(parts.netloc, **options)
