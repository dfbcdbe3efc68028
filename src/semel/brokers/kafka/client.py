"""What every Kafka client here shares: a log that cannot flood, errors sorted by what helps, and a thread."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from time import monotonic
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from semel.errors import Fenced, SemelError, SourceRefused, SourceUnavailable

__all__ = ["CLIENT_LOG", "ClientErrors", "DaemonThread", "error_of"]

REPEAT_S = 60.0
"""Lines of one kind are logged this often: while brokers are away the client writes 17 a second."""
KINDS_MAX = 100
OUTAGES = ("FAIL", "ERROR")
"""Kinds of lines about connections: the runner reports an outage itself, so these are for those who want details."""

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
    """Lets one line of each kind pass per minute, and says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is logged. Called as `log(level, "%s [%s] %s", kind, client, text)`."""
        kind = str(record.args[0]) if isinstance(record.args, tuple) and record.args else str(record.msg)
        if kind in OUTAGES:
            record.levelno, record.levelname = logging.INFO, "INFO"
            if not CLIENT_LOG.isEnabledFor(logging.INFO):  # it was asked before, with the client's own level
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
        """What no time heals."""

    def __call__(self, error: KafkaError) -> None:
        """Note an error; the client calls this while it is polled."""
        if error.fatal() or error.code() in _REFUSALS | _FENCED:
            self.final = error
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self.brokers_down = True
        else:
            self._reason = error.str()

    def check(self, name: str) -> None:
        """Raise what no time heals."""
        if self.final is not None:
            raise error_of(name, self.final)

    def unavailable(self, error: KafkaException) -> SourceUnavailable:
        """The error for a call without an answer, with the reason that the client gave before."""
        return SourceUnavailable(self._reason or str(error))


def error_of(name: str, error: KafkaError) -> SemelError:
    """The error to raise for one of the client's: what time may heal is `SourceUnavailable`."""
    if error.code() in _FENCED or "fenced" in error.str().lower():
        return Fenced(
            f"{name}: another process joined the group with the same instance id; give each its own"
            f" (instance= in the URL): {error.str()}"
        )
    if error.fatal() or error.code() in _REFUSALS:
        return SourceRefused(f"{name}: {error.str()}; check credentials, rights and settings")
    return SourceUnavailable(error.str())


class DaemonThread(Executor):
    """One thread for calls that block. A call without an answer does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, fn = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(fn())
            except BaseException as error:  # noqa: BLE001 - the caller's
                future.set_exception(error)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have it called after those before it."""
        future: Future[Any] = Future()
        self._calls.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - the base's
        """End the thread after the calls that wait; with `wait`, return when it has ended."""
        del cancel_futures
        self._calls.put(None)
        if wait:
            self._thread.join()
