"""A sink on Kafka: an idempotent producer, acknowledged by all replicas in sync."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from confluent_kafka import KafkaError, KafkaException, Producer

from semel.brokers.kafka.client import ClientErrors, DaemonThread
from semel.core.relay_flow import NotPublished, OutboxRow, Published, PublishRefused, Sent
from semel.errors import PolicyInvalid
from semel.outbox.message import attributes
from semel.outbox.sinks import BEGIN_MAX_S, HELD, LATER, destination_of, refusal, stretches, unavailable
from semel.runtime.urls import read_options

__all__ = ["KafkaSink", "from_url"]

T = TypeVar("T")
WAIT_S = 10.0
DELIVERY_MAX_S = 30.0
BATCH_BYTES_MAX, BATCH_BYTES_MIN = 1_000_000, 16_000
"""Of a batch of the producer: its own default, and how far it is lowered for topics that take less."""
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

    Rows of an aggregate are handed over in one go. The brokers take an idempotent producer's batches in their order
    or not at all, and without gaps the producer stops at the first that was refused: what is behind it does not
    pass. It is then replaced.
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
            "delivery.timeout.ms": 0,  # of single messages, which would leave gaps; all are given up together
            "topic.metadata.propagation.max.ms": round(WAIT_S * 500),
            **(settings or {}),
        }
        self._producer: Producer | None = None
        self._thread: DaemonThread | None = None

    async def open(self) -> None:
        """See that a broker answers."""
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
            self._producer.poll(0)  # the reason is told there
            if errors.final is not None:
                raise refusal(self.name, errors.final.str()) from None
            raise

    async def close(self) -> None:
        """Forget what is queued: it was not confirmed, and will be published again."""
        producer, self._producer = self._producer, None
        thread, self._thread = self._thread, None
        if producer is not None:
            producer.purge()
        if thread is not None:
            thread.shutdown(wait=False)

    async def publish(self, rows: Sequence[OutboxRow]) -> list[Sent]:
        """In the producer's thread, until each row is delivered or has failed."""
        try:
            return await self._in_thread(lambda: self._publish(rows))
        except KafkaException as error:
            raise unavailable(self.name, error) from error

    def _publish(self, rows: Sequence[OutboxRow]) -> list[Sent]:
        """All in one go; then one by one what is left, where a broker has refused some for a row among them.

        Brokers refuse a batch of the producer as a whole, so that nobody knows which row it was about.
        """
        answers: list[Sent] = [LATER] * len(rows)
        for some in stretches(rows):
            vague = self._send(rows, some, answers)
            if vague:
                self._send_singly(rows, some, answers)
                if not any(isinstance(answers[at], PublishRefused) for at in some):  # it was about their sum
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
        """Hand over rows and wait for all of them; whether some may have been refused for the sake of another."""
        chosen = set(places)
        stopped: dict[tuple[str, str], int] = {}
        """Where in each aggregate it ends, before or among the rows to be sent."""
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
    """Rows handed to a producer, and what becomes of them."""

    def __init__(self, producer: Producer, answers: list[Sent]) -> None:
        self._producer = producer
        self._answers = answers
        self._left = 0
        self.failed = False
        """Something was not delivered: the producer is not to be used again."""
        self.vague = False
        """The brokers have refused a row, perhaps for the sake of another."""

    def hand_over(self, at: int, row: OutboxRow, topic: str) -> bool:
        """Queue a row; `False`: it is not even taken."""
        try:
            self._producer.produce(
                topic,
                row.payload,
                key=None if row.aggregate is None else row.aggregate[1].encode(),
                headers=headers_of(row),
                timestamp=row.created_at // 1000,
                on_delivery=lambda error, _message: self._on_delivery(at, error),
            )
        except KafkaException as error:
            self._answers[at] = _refusal(error.args[0])
            return False
        except BufferError:
            self._answers[at] = NotPublished("the producer's queue is full")
            return False
        self._answers[at] = NotPublished("no answer in time")
        self._left += 1
        return True

    def _on_delivery(self, at: int, error: KafkaError | None) -> None:
        self._left -= 1
        self._answers[at] = Published() if error is None else _refusal(error)
        if error is not None:
            self.failed = True
            self.vague = self.vague or error.code() in _OF_MESSAGE

    def wait(self) -> None:
        """Until each row is delivered or has failed, or the time is over."""
        give_up_at = time.monotonic() + DELIVERY_MAX_S
        while self._left and time.monotonic() < give_up_at:
            try:
                self._producer.poll(0.1)
            except KafkaException:  # it has stopped, and now tells what became of each row
                self.failed = self.vague = True
        self.failed = self.failed or self._left > 0


def _refusal(error: KafkaError) -> Sent:
    code, said = error.code(), error.str()
    if code in _OF_MESSAGE:
        return PublishRefused(said, of_message=True)
    return PublishRefused(said) if code in _OF_DESTINATION else NotPublished(said)


def headers_of(row: OutboxRow) -> list[tuple[str, str | bytes | None]]:
    """The record's headers."""
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
    parts, options = urlsplit(url), read_options(url, {"topic": str})
    if not parts.netloc or "@" in parts.netloc:
        raise PolicyInvalid("write kafka://host:9092?topic=...; credentials go into KafkaSink(settings=...)")
    return KafkaSink(parts.netloc, **options)
