"""Send single confirmed messages to Kafka, and create dead-letter topics. All calls block."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from semel.brokers.kafka.client import CLIENT_LOG
from semel.errors import MessageTooLarge, SourceUnavailable, UsageError

__all__ = ["CONFIRM_S", "PATTERN", "DeadTopics", "Sender", "is_too_large"]

_log = logging.getLogger("semel.kafka")

BYTES_MAX = 1_000_000_000
"""The client's own limit, at its highest, so that the topic's limit decides."""
CONFIRM_S = 30.0
UNKNOWN_S = 5.0
"""How long a topic may be unknown to the brokers: a new one is unknown for a moment."""
PATTERN = "^"
"""The prefix of a topic pattern."""
LOOK_S = 3.0
"""The timeout of a metadata request."""
AWAY = (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)


class Sender:
    """A producer that waits for each confirmation."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        more = {
            "enable.idempotence": True,
            "linger.ms": 0,
            "message.max.bytes": BYTES_MAX,
            "topic.metadata.propagation.max.ms": round(UNKNOWN_S * 1000),
        }
        self._producer = Producer({**config, **more}, logger=CLIENT_LOG)

    def send(self, topic: str, key: bytes | None, body: bytes | None, headers: list[tuple[str, Any]]) -> None:
        """Produce a message. Raises `SourceUnavailable` without a confirmation, `MessageTooLarge` for its size."""
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
            raise MessageTooLarge(f"{topic} does not accept a message of this size")
        raise SourceUnavailable(f"{topic} did not accept it: {error}")


def is_too_large(error: BaseException) -> bool:
    """Whether a broker refused a message for its size."""
    return (
        isinstance(error, KafkaException)
        and isinstance(error.args[0], KafkaError)
        and error.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
    )


class DeadTopics:
    """The dead-letter topics, one per consumed topic or one for all; creates missing ones."""

    def __init__(self, config: Mapping[str, Any], topics: Sequence[str], dead: str) -> None:
        self._config = config
        self._dead = dead
        self._patterns = [name for name in topics if name.startswith(PATTERN)]
        self._unchecked = {name for name in topics if not name.startswith(PATTERN)}
        """Consumed topics whose dead-letter topic is not yet checked."""
        self._checked: set[str] = set()

    def name_for(self, topic: str) -> str:
        """Return the dead-letter topic of a topic."""
        return self._dead or f"{topic}.dead"

    @property
    def names(self) -> str:
        """Return a regular expression of them, to exclude them from a pattern of consumed topics."""
        return f"^{re.escape(self._dead)}$" if self._dead else r"^.*\.dead$"

    def make_at_start(self) -> None:
        """Create those of the existing topics. Raises as `make_missing`."""
        self._make(at_start=True)

    def expect(self, topics: Iterable[str]) -> None:
        """Add consumed topics."""
        self._unchecked |= set(topics) - self._checked

    def suspect(self, topic: str) -> None:
        """Check a topic's dead-letter topic again after a failed write: it may have been deleted."""
        self._checked.discard(topic)
        self._unchecked.add(topic)

    def make_missing(self) -> None:
        """Create missing dead-letter topics.

        Raises `UsageError` if the brokers refuse that, and `KafkaException` if they cannot be reached.
        """
        if self._unchecked:
            self._make(at_start=False)

    def matches(self, name: str) -> bool:
        """Whether a pattern of consumed topics matches this one."""
        if re.match(self.names, name):
            return False
        # The client supports other expressions too: such a topic is checked when it is assigned.
        with suppress(re.error):
            return any(re.match(pattern, name) for pattern in self._patterns)
        return False

    def _make(self, *, at_start: bool) -> None:
        admin = AdminClient(dict(self._config), logger=CLIENT_LOG)
        try:
            known = admin.list_topics(timeout=LOOK_S).topics.keys()
            if at_start:
                self._unchecked |= {name for name in known if self.matches(name)}
            there = self._unchecked & known
            for topic in {self.name_for(each) for each in there} - known:
                _make_topic(admin, topic)
        finally:
            del admin  # an error would keep it: the garbage collector may end it inside a callback of its own, for ever
        self._checked |= there
        self._unchecked.clear()


def _make_topic(admin: AdminClient, topic: str) -> None:
    try:
        made = admin.create_topics([NewTopic(topic, 1, -1)])[topic]
        del admin
        made.result(CONFIRM_S)
    except KafkaException as refused:
        error = refused.args[0]
        if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
            return
        if error.retriable() or error.code() in AWAY:
            raise
        raise UsageError(
            f"there is no topic {topic} for dead letters, and it cannot be created ({error.str()});"
            " create it, or name another with dead="
        ) from refused
    _log.info("created the topic %s for dead letters", topic)
