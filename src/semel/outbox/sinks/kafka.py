"""A sink on Kafka: an idempotent producer, acknowledged by all replicas in sync."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException, Producer

from semel.core.relaying import Published, Refused, Row, Sent, Unsent
from semel.errors import PolicyInvalid
from semel.outbox.message import attributes
from semel.outbox.sinks import destination_of, options_of, unavailable

__all__ = ["KafkaSink", "from_url"]

T = TypeVar("T")
WAIT_S = 10.0
DELIVERY_MAX_S = 30.0
_OF_MESSAGE = frozenset((KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG, KafkaError.INVALID_MSG_SIZE))
_OF_DESTINATION = frozenset(
    (
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001 - the driver's own number for the same
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.POLICY_VIOLATION,
    )
)


class KafkaSink:
    """Topics of one cluster. The key is the aggregate's id, so that an aggregate keeps to one partition."""

    ordered: bool = False
    batch_max: int = 500

    def __init__(self, servers: str, *, topic: str = "", settings: dict[str, str] | None = None) -> None:
        self.name: str = f"kafka://{servers}"
        self._topic = topic
        self._settings = {
            "bootstrap.servers": servers,
            "client.id": "semel-relay",
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 0,
            "delivery.timeout.ms": round(DELIVERY_MAX_S * 1000),
            "topic.metadata.propagation.max.ms": round(WAIT_S * 500),
            "log_level": 2,
            **(settings or {}),
        }
        self._producer: Producer | None = None
        self._thread: ThreadPoolExecutor | None = None

    async def open(self) -> None:
        """See that a broker answers."""
        self._thread = ThreadPoolExecutor(1, "semel-kafka")

        def connect() -> Producer:
            producer = Producer(self._settings, logger=None)
            producer.list_topics(timeout=WAIT_S)
            return producer

        try:
            self._producer = await self._in_thread(connect)
        except KafkaException as error:
            raise unavailable(self.name, error) from error

    async def close(self) -> None:
        """Forget what is queued: it was not confirmed, and will be published again."""
        producer, self._producer = self._producer, None
        thread, self._thread = self._thread, None
        if producer is not None:
            producer.purge()
        if thread is not None:
            thread.shutdown(wait=False)

    async def publish(self, rows: Sequence[Row]) -> list[Sent]:
        """In the producer's thread, until each row is delivered or has failed."""
        return await self._in_thread(lambda: self._send(rows))

    def _send(self, rows: Sequence[Row]) -> list[Sent]:
        producer = self._producer
        assert producer is not None
        answers: list[Sent] = [Unsent("no answer in time")] * len(rows)
        left = len(rows)

        def told(at: int, error: KafkaError | None) -> None:
            nonlocal left
            left -= 1
            answers[at] = Published() if error is None else _refusal(error)

        for at, row in enumerate(rows):
            try:
                producer.produce(
                    destination_of(row, self._topic),
                    row.payload,
                    key=None if row.aggregate is None else row.aggregate[1].encode(),
                    headers=headers_of(row),
                    timestamp=row.created_at // 1000,
                    on_delivery=lambda error, _message, at=at: told(at, error),  # type: ignore[misc]
                )
            except KafkaException as error:
                told(at, error.args[0])
            except BufferError:
                told(at, KafkaError(KafkaError._QUEUE_FULL))  # noqa: SLF001
        give_up_at = time.monotonic() + DELIVERY_MAX_S + WAIT_S
        while left and time.monotonic() < give_up_at:
            producer.poll(0.1)
        return answers

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _refusal(error: KafkaError) -> Sent:
    code, said = error.code(), error.str()
    if code in _OF_MESSAGE:
        return Refused(said, of_message=True)
    return Refused(said) if code in _OF_DESTINATION else Unsent(said)


def headers_of(row: Row) -> list[tuple[str, str | bytes | None]]:
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
    parts, options = options_of(url, ("topic",))
    if not parts.netloc or "@" in parts.netloc:
        raise PolicyInvalid("write kafka://host:9092?topic=...; credentials go into KafkaSink(settings=...)")
    return KafkaSink(parts.netloc, topic=options.get("topic", ""))
