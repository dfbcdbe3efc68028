"""Send single messages to Kafka, confirmed, and make the topics that they go to. Everything here blocks."""

import logging
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from semel.brokers.kafka.client import CLIENT_LOG
from semel.errors import MessageTooLarge, SourceUnavailable, UsageError

__all__ = ["CONFIRM_S", "Sender", "is_too_large", "make_topics"]

_log = logging.getLogger("semel.kafka")

BYTES_MAX = 1_000_000_000
"""The most that the client lets through: the topic's own limit decides."""
CONFIRM_S = 30.0
LOOK_S = 3.0
"""How long the brokers have to say which topics there are."""
AWAY = (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)  # noqa: SLF001 - public names


class Sender:
    """A producer that waits for each confirmation."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        more = {"enable.idempotence": True, "linger.ms": 0, "message.max.bytes": BYTES_MAX}
        self._producer = Producer({**config, **more}, logger=CLIENT_LOG)

    def send(self, topic: str, key: bytes | None, body: bytes | None, headers: list[tuple[str, Any]]) -> None:
        """Produce a message. Raises `SourceUnavailable` where it is not confirmed, `MessageTooLarge` for its size."""
        confirmed: list[KafkaError | None] = []
        self._producer.produce(
            topic, body, key, headers=headers, on_delivery=lambda error, _message: confirmed.append(error)
        )
        self._producer.flush(CONFIRM_S)
        if not confirmed:
            raise SourceUnavailable(f"no confirmation from {topic} within {CONFIRM_S:g} s")
        error = confirmed[0]
        if error is None:
            return
        if is_too_large(KafkaException(error)):
            raise MessageTooLarge(f"{topic} takes no message of this size")
        raise SourceUnavailable(f"{topic} did not take it: {error}")


def is_too_large(error: BaseException) -> bool:
    """Whether a broker refused a message for its size."""
    return (
        isinstance(error, KafkaException)
        and isinstance(error.args[0], KafkaError)
        and error.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
    )


def make_topics(config: Mapping[str, Any], wanted: Mapping[str, str]) -> None:
    """Make the topic that each existing one wants for its dead letters, where it is missing.

    Raises `UsageError` where the brokers refuse that, and `KafkaException` where they cannot be reached.
    """
    admin = AdminClient(dict(config), logger=CLIENT_LOG)
    known = admin.list_topics(timeout=LOOK_S).topics
    for topic in {dead for source, dead in wanted.items() if source in known} - known.keys():
        _make_topic(admin, topic)


def _make_topic(admin: AdminClient, topic: str) -> None:
    try:
        admin.create_topics([NewTopic(topic, 1, -1)])[topic].result(CONFIRM_S)
    except KafkaException as refused:
        error = refused.args[0]
        if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
            return
        if error.retriable() or error.code() in AWAY:
            raise
        raise UsageError(
            f"there is no topic {topic} for dead letters, and it cannot be made ({error.str()});"
            " create it, or name another with dead="
        ) from refused
    _log.info("made the topic %s for dead letters", topic)
