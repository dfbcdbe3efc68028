"""Send single messages to Kafka, confirmed, and make the topics of dead letters. Everything here blocks."""

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
"""The most that the client lets through: the topic's own limit decides."""
CONFIRM_S = 30.0
UNKNOWN_S = 5.0
"""How long a topic may be unknown to the brokers before they are believed: one that is new is, for a moment."""
PATTERN = "^"
"""How a topic's name begins that stands for all that match; there may be none yet."""
LOOK_S = 3.0
"""How long the brokers have to say which topics there are."""
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


class DeadTopics:
    """The topics of dead letters, one for each topic that is consumed or one for all; made where they are missing."""

    def __init__(self, config: Mapping[str, Any], topics: Sequence[str], dead: str) -> None:
        self._config = config
        self._dead = dead
        self._patterns = [name for name in topics if name.startswith(PATTERN)]
        self._unchecked = {name for name in topics if not name.startswith(PATTERN)}
        """Topics that are consumed, of which it is not known whether they have one."""
        self._checked: set[str] = set()

    def name_for(self, topic: str) -> str:
        """Where the dead letters of a topic go."""
        return self._dead or f"{topic}.dead"

    @property
    def names(self) -> str:
        """A regular expression for them: a pattern of topics must not match them, or dead letters are consumed."""
        return f"^{re.escape(self._dead)}$" if self._dead else r"^.*\.dead$"

    def make_at_start(self) -> None:
        """Make those of the topics that there are now. Raises as `make_missing`."""
        self._make(at_start=True)

    def expect(self, topics: Iterable[str]) -> None:
        """Note that these topics are consumed from now on."""
        self._unchecked |= set(topics) - self._checked

    def suspect(self, topic: str) -> None:
        """Note that a dead letter of this topic could not be written: somebody may have removed its topic."""
        self._checked.discard(topic)
        self._unchecked.add(topic)

    def make_missing(self) -> None:
        """Make those that are expected and missing.

        Raises `UsageError` where the brokers refuse that, and `KafkaException` where they cannot be reached.
        """
        if self._unchecked:
            self._make(at_start=False)

    def _matches(self, name: str) -> bool:
        if re.match(self.names, name):
            return False
        # The client knows other expressions too: such a topic is looked at when it is assigned.
        with suppress(re.error):
            return any(re.match(pattern, name) for pattern in self._patterns)
        return False

    def _make(self, *, at_start: bool) -> None:
        admin = AdminClient(dict(self._config), logger=CLIENT_LOG)
        known = admin.list_topics(timeout=LOOK_S).topics.keys()
        if at_start:
            self._unchecked |= {name for name in known if self._matches(name)}
        there = self._unchecked & known
        for topic in {self.name_for(each) for each in there} - known:
            _make_topic(admin, topic)
        self._checked |= there
        self._unchecked.clear()


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
