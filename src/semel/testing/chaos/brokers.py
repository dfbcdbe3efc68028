"""The topic or stream of a broker that a chaos run publishes into."""

from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from semel.errors import PolicyInvalid, SourceUnavailable, UsageError
from semel.runtime.extras import install_command

__all__ = ["BrokerTopic", "chaos_source", "topic_for"]

ANSWER_S = 10.0
KAFKA_SESSION_S = 6.0
"""The least session timeout that a broker takes by default: a dead worker's partitions move after it."""


class BrokerTopic(Protocol):
    """One topic or stream."""

    name: str

    def count(self) -> int:
        """Return how many messages it holds."""
        ...

    def publish(self, messages: Sequence[tuple[str, str]]) -> None:
        """Publish messages, key and body of each; returns when the broker has confirmed them."""
        ...

    def remove(self) -> None:
        """Remove the messages that were published here, if nothing else was in it."""
        ...

    def close(self) -> None:
        """Disconnect."""
        ...


def chaos_source(url: str, lease_s: float) -> str:
    """Return the URL for workers: with short deadlines, unless it has its own, so that killed workers matter soon."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    if parts.scheme == "kafka":
        options.setdefault("session_s", f"{KAFKA_SESSION_S:g}")
    else:
        options.setdefault("deadline_s", f"{max(1.0, lease_s / 2):g}")
    return urlunsplit((parts.scheme, parts.netloc, parts.path, urlencode(options), parts.fragment))


def topic_for(url: str) -> BrokerTopic:
    """Return the topic of a source's URL, connected. Raises `UsageError` and `SourceUnavailable`."""
    scheme = url.partition(":")[0]
    try:
        if scheme == "kafka":
            return KafkaTopic(url)
        if scheme in ("redis", "rediss", "valkey", "valkeys"):
            return StreamTopic(url)
    except ModuleNotFoundError as error:
        extra = "kafka" if scheme == "kafka" else "redis"
        raise UsageError(f"{scheme}: needs {error.name}; install it: {install_command(extra)}") from error
    raise UsageError(
        f"chaos publishes to kafka: and redis: only, not to {scheme}:; leave --from away for a queue"
    )


def refuse_full(topic: BrokerTopic) -> None:
    """Raise `PolicyInvalid` if there are messages."""
    held = topic.count()
    if held:
        raise PolicyInvalid(
            f"{topic.name} holds {held} messages, which the handler would get too; name an empty one, or use --force"
            " (force=True)"
        )


class StreamTopic:
    """A Redis stream."""

    def __init__(self, url: str) -> None:
        import redis
        from redis.exceptions import RedisError

        from semel.brokers.redis_streams import BODY, place_of

        server, options = place_of(url)
        self.name: str = f"the stream {options.stream}"
        self._body = BODY
        self._stream = options.stream
        self._errors = (RedisError, OSError)
        self._redis = redis.Redis.from_url(server, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S)
        self._ids: list[Any] = []

    def count(self) -> int:
        """Return how many messages it holds."""
        try:
            return int(self._redis.xlen(self._stream))
        except self._errors as error:
            raise SourceUnavailable(f"{self.name} does not answer: {error}") from error

    def publish(self, messages: Sequence[tuple[str, str]]) -> None:
        """Add messages."""
        try:
            for key, body in messages:
                self._ids.append(self._redis.xadd(self._stream, {"message_id": key, self._body: body}))
        except self._errors as error:
            raise SourceUnavailable(f"{self.name} does not answer: {error}") from error

    def remove(self) -> None:
        """Delete the messages that were added."""
        if self._ids:
            self._redis.xdel(self._stream, *self._ids)

    def close(self) -> None:
        """Disconnect."""
        self._redis.close()


class KafkaTopic:
    """A Kafka topic."""

    def __init__(self, url: str) -> None:
        from confluent_kafka import Consumer, KafkaException, Producer

        from semel.brokers.kafka.client import CLIENT_LOG
        from semel.brokers.kafka.options import KafkaOptions, place_of

        servers, options = place_of(url, KafkaOptions)
        if "," in options.topic or options.topic.startswith("^"):
            raise UsageError("name one topic; chaos publishes into it")
        self.name: str = f"the topic {options.topic}"
        self._topic = options.topic
        self._client = options.client(servers)
        self._log = CLIENT_LOG
        self._error = KafkaException
        settings = {**self._client, "group.id": f"{options.group}-chaos", "enable.auto.commit": False}
        self._consumer = Consumer(settings, logger=CLIENT_LOG)
        self._producer = Producer({**self._client, "enable.idempotence": True}, logger=CLIENT_LOG)

    def _ends(self) -> dict[int, tuple[int, int]]:
        """Return the first and the next offset of each partition."""
        from confluent_kafka import TopicPartition

        try:
            known = self._consumer.list_topics(self._topic, timeout=ANSWER_S).topics[self._topic]
            return {
                number: self._consumer.get_watermark_offsets(
                    TopicPartition(self._topic, number), timeout=ANSWER_S
                )
                for number in known.partitions
            }
        except self._error as error:
            raise SourceUnavailable(f"{self.name} does not answer: {error}") from error

    def count(self) -> int:
        """Return how many messages it holds."""
        return sum(high - low for low, high in self._ends().values())

    def publish(self, messages: Sequence[tuple[str, str]]) -> None:
        """Produce messages, without a key: copies of an event go to any partition."""
        failed: list[str] = []

        def on_delivery(error: Any, _message: Any) -> None:
            if error is not None:
                failed.append(str(error))

        for key, body in messages:
            headers: list[tuple[str, str | bytes | None]] = [("message_id", key.encode())]
            self._producer.produce(self._topic, body.encode(), headers=headers, on_delivery=on_delivery)
        if self._producer.flush(ANSWER_S) or failed:
            raise SourceUnavailable(f"{self.name} takes no messages: {'; '.join(failed[:1]) or 'no answer'}")

    def remove(self) -> None:
        """Delete all records of the topic."""
        from confluent_kafka import TopicPartition
        from confluent_kafka.admin import AdminClient

        ends = [TopicPartition(self._topic, number, high) for number, (_, high) in self._ends().items()]
        admin = AdminClient(self._client, logger=self._log)
        for removed in admin.delete_records(ends).values():
            removed.result(ANSWER_S)

    def close(self) -> None:
        """Disconnect."""
        self._consumer.close()
