"""Code that all Kafka clients share: a limited log, error classification, and offsets to commit."""

import logging
from collections import OrderedDict
from time import monotonic

from confluent_kafka import KafkaError, KafkaException

from semel.errors import Fenced, SemelError, SourceRefused, SourceUnavailable, UsageError

__all__ = ["CLIENT_LOG", "ClientErrors", "Offsets", "error_of", "refuse_credentials"]

REPEAT_S = 60.0
"""The interval between log lines of one kind: while brokers are unreachable the client writes 17 a second."""
KINDS_MAX = 100
OUTAGES = ("FAIL", "ERROR")
"""Kinds of lines about connections, logged as details: the runner reports an outage itself."""

CLIENT_LOG = logging.getLogger("semel.kafka.client")
"""The log of the client library, limited to one line of each kind a minute."""

_REFUSALS = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.INVALID_GROUP_ID,
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
    }
)
_FENCED = frozenset({KafkaError.FENCED_INSTANCE_ID, KafkaError._FENCED})


class _OncePerMinute(logging.Filter):
    """Passes one line of each kind per minute, with the number of lines left out."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is logged. Called as `log(level, "%s [%s] %s", kind, client, text)`."""
        kind = str(record.args[0]) if isinstance(record.args, tuple) and record.args else str(record.msg)
        if kind in OUTAGES:
            record.levelno, record.levelname = logging.INFO, "INFO"
            if not CLIENT_LOG.isEnabledFor(logging.INFO):  # filtered before, with the client's own level
                return False
        now = monotonic()
        passed_at, left_out = self._passed.get(kind, (-REPEAT_S, 0))
        if now - passed_at < REPEAT_S:
            self._passed[kind] = (passed_at, left_out + 1)
            return False
        if len(self._passed) >= KINDS_MAX:
            self._passed.clear()
        self._passed[kind] = (now, 0)
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out:,} more like it before)", ()
        return True


CLIENT_LOG.addFilter(_OncePerMinute())


class ClientErrors:
    """The `error_cb` of a client: remembers why it has no connection."""

    def __init__(self) -> None:
        self.brokers_down: bool = False
        """Whether no broker could be reached at the last try; to be confirmed by a call."""
        self._reason = ""
        self.final: KafkaError | None = None
        """An error that a retry cannot fix."""

    def __call__(self, error: KafkaError) -> None:
        """Note an error; the client calls this while it is polled."""
        if error.fatal() or error.code() in _REFUSALS | _FENCED:
            self.final = error
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self.brokers_down = True
        else:
            self._reason = error.str()

    def check(self, name: str) -> None:
        """Raise an error that a retry cannot fix."""
        if self.final is not None:
            raise error_of(name, self.final)

    def unavailable(self, error: KafkaException) -> SourceUnavailable:
        """Return the error for a call without an answer, with the client's last reason."""
        return SourceUnavailable(self._reason or str(error))


def refuse_credentials(servers: str) -> None:
    """Raise `UsageError` for credentials before the address, which would be taken for a part of a broker's name."""
    if "@" in servers:
        raise UsageError(
            "credentials of Kafka are options, not a part of the address:"
            " kafka://localhost:9092/orders?group=billing&security=SASL_SSL&mechanism=PLAIN&username=...&password=..."
        )


def error_of(name: str, error: KafkaError) -> SemelError:
    """Translate a client error: `SourceUnavailable` if a retry may help."""
    if error.code() in _FENCED or "fenced" in error.str().lower():
        return Fenced(
            f"{name}: another process joined the group with the same instance id; give each its own"
            f" (instance= in the URL): {error.str()}"
        )
    if error.fatal() or error.code() in _REFUSALS:
        return SourceRefused(f"{name}: {error.str()}; check credentials, rights and settings")
    return SourceUnavailable(error.str())


class Offsets:
    """The unfinished deliveries of one partition, in order. O(1) per call."""

    __slots__ = ("_in_hand",)

    def __init__(self) -> None:
        self._in_hand: OrderedDict[int, bool] = OrderedDict()

    def add(self, offset: int) -> None:
        """Add a delivery. After a rewind it may be there already."""
        self._in_hand.setdefault(offset, False)

    def complete(self, offset: int) -> int | None:
        """Mark a delivery as done; returns the offset to commit, if it has changed.

        The committed offset is the next one to read. Compacted topics and transactions leave gaps: only offsets that
        were delivered count.
        """
        if offset not in self._in_hand:
            return None
        self._in_hand[offset] = True
        position = None
        while self._in_hand:
            first, finished = next(iter(self._in_hand.items()))
            if not finished:
                break
            self._in_hand.popitem(last=False)
            position = first + 1
        return position

    def __len__(self) -> int:
        return len(self._in_hand)
