"""Messages that wait for another try, the log of failures, and the runner's limits and counters."""

import heapq
import logging
from collections import OrderedDict
from itertools import count
from traceback import format_exception
from typing import Generic, Literal, TypeVar

import msgspec

from semel.brokers.source import DeadLetterInfo
from semel.core.error_info import redact
from semel.observe.formatting import plural
from semel.observe.limited_log import RateLimit
from semel.observe.log_format import about
from semel.policy import Policy
from semel.types import escape_controls

__all__ = ["FailureCounts", "FailureLog", "RetryQueue", "RunnerCounters", "RunnerLimits"]

T = TypeVar("T")


class RetryQueue(Generic[T]):
    """Waiting deliveries, ordered by due time. O(log n) to enter and to leave."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._heap: list[tuple[float, int, T]] = []
        self._order = count()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def full(self) -> bool:
        """Whether the queue has reached its size."""
        return len(self._heap) >= self._size

    def enter(self, held: T, due_at: float) -> None:
        """Add a delivery until `due_at`, even to a full queue: some deliveries cannot be returned to the broker."""
        heapq.heappush(self._heap, (due_at, next(self._order), held))

    def due(self, now: float) -> list[T]:
        """Remove and return the due deliveries, the earliest first."""
        ready = []
        while self._heap and self._heap[0][0] <= now:
            ready.append(heapq.heappop(self._heap)[2])
        return ready

    def next_at(self) -> float | None:
        """Return when the next delivery is due; `None` if the queue is empty."""
        return self._heap[0][0] if self._heap else None

    def empty(self) -> list[T]:
        """Remove and return all deliveries."""
        held = [entry[2] for entry in self._heap]
        self._heap.clear()
        return held


KEYS_MAX = 10_000
"""How many failing messages are remembered; beyond it the oldest entry is dropped, and its count starts again."""


class FailureCounts:
    """Failures by key: the broker's count or this process's count, whichever is higher."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, int] = OrderedDict()

    def count_failure(self, key: str, deliveries: int) -> int:
        """Count a failure; returns the number of the attempt."""
        attempt = max(self.attempts(key) + 1, deliveries)
        self.note(key, attempt)
        return attempt

    def note(self, key: str, attempt: int) -> None:
        """Remember that this attempt failed."""
        self._failures.pop(key, None)
        self._failures[key] = attempt
        if len(self._failures) > KEYS_MAX:
            self._failures.popitem(last=False)

    def attempts(self, key: str) -> int:
        """Return how many attempts failed, as far as this process knows."""
        return self._failures.get(key, 0)

    def __contains__(self, key: str) -> bool:
        return key in self._failures

    def forget(self, key: str) -> None:
        """Remove the count of a key."""
        self._failures.pop(key, None)


class RunnerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a runner: batch size, concurrency, messages in hand."""

    batch: int = 200
    """The most deliveries that are claimed together, or share a transaction."""
    concurrency: int = 10
    """How many handlers run at once."""
    in_hand: int = 1000
    """The most deliveries held, waiting ones included; beyond it nothing is received."""
    room: int = 100
    """How many busy or postponed deliveries wait in hand; beyond it they go back to the broker."""
    order: bool = False
    """Whether the deliveries of one lane (a partition, a message group) run one after the other, in order."""
    drain_s: float = 30.0
    """How long a stop waits for running handlers before it cancels them."""
    no_key: Literal["dead_letter", "refuse"] = "dead_letter"
    """What to do with a message without a key: dead-letter it, or stop the runner with `KeyMissing`."""


class RunnerCounters(msgspec.Struct):
    """Counts of a runner since its creation."""

    received: int = 0
    acked: int = 0
    duplicates: int = 0
    parked: int = 0
    returned: int = 0
    dead_lettered: int = 0
    stuck: int = 0
    """Messages whose dead letters could not be written yet; writing is retried."""
    errors: int = 0
    unguarded: int = 0
    """Ran without a claim because the store could not be reached, by `Policy(on_unavailable="run")`."""


_log = logging.getLogger("semel.runner")


_AFTER = {
    "unknown": "semel resolve decides; if it did not happen, semel dlq replay runs it again",
    "mismatch": "semel dlq replay --new-key runs it as another event",
    "no-key": "semel dlq replay --new-key runs it under that key",
}
"""What an operator can do with a dead letter, by its reason."""


class FailureLog:
    """The failures and dead letters of one source."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._failures = RateLimit()
        self._letters = RateLimit()
        self._lost = RateLimit()

    def log_failure(
        self, key: str, attempt: int, retry_after_s: float, error: BaseException, policy: Policy | None = None
    ) -> None:
        """Log a failed attempt; the message will be retried. A policy that redacts errors redacts this one too."""
        left_out = self._failures.take()
        if left_out is None:
            return
        if policy is not None and policy.redact_error is not None:
            info = redact(error, policy)
            short = _one_line(f"{info.kind}: {info.message}")
            said = f": {short}{_more(left_out)}"
        else:  # not as `exc_info`: a formatter would write control characters of the message as they are
            short = _one_line(f"{type(error).__name__}: {error}")
            said = f"{_more(left_out)}\n{escape_controls(''.join(format_exception(error)).rstrip())}"
        after = f"again in {retry_after_s:.1f} s"
        _log.warning(
            "%s: the handler failed for key %r, attempt %d; %s%s", self._source, key, attempt, after, said,
            extra=about("failed", source=self._source, key=key, attempt=attempt, error=short, next=after),
        )  # fmt: skip

    def log_dead_letter(self, letter: DeadLetterInfo) -> None:
        """Log a dead letter."""
        left_out = self._letters.take()
        if left_out is not None:
            after = _AFTER.get(letter.reason, "semel dlq replay runs it again")
            if letter.body_at:
                after = f"its body is left out, so publish it again from where it was: {letter.body_at}"
            _log.warning(
                "%s: key %r went to the dead letters: %s%s%s%s; %s",
                self._source, letter.key, letter.reason,
                f" after {plural(letter.attempts, 'attempt')}" if letter.attempts else "",
                f": {_one_line(letter.error)}" if letter.error else "", _more(left_out), after,
                extra=about("dead_letter", source=self._source, consumer=letter.consumer, key=letter.key,
                            reason=letter.reason, error=letter.error, next=after,
                            **({"attempt": letter.attempts} if letter.attempts else {})),
            )  # fmt: skip

    def log_lost(self, key: str) -> None:
        """Log a claim that another worker has taken over while the handler ran here."""
        left_out = self._lost.take()
        if left_out is not None:
            _log.warning(
                "%s: another worker took over key %r while it ran here; the other's result counts%s",
                self._source, key, _more(left_out),
                extra=about("lost", source=self._source, key=key, next="the other worker's result counts"),
            )  # fmt: skip


def _one_line(text: str) -> str:
    return text if text.isprintable() else ascii(text)


def _more(left_out: int) -> str:
    return f" ({left_out:,} more like it were not logged)" if left_out else ""
