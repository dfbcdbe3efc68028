"""Log at a limited rate: ten lines of a kind at once, then ten a minute; the rest is counted.

Also the hook that logs takeovers at that rate.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from time import monotonic
from typing import Any

from semel.observe import events
from semel.observe.log_format import about

__all__ = ["BURST", "LimitFilter", "LimitedLog", "OutageLog", "RateLimit", "TakeoverLog"]

BURST = 10
PER_S = 1 / 6
"""Lines of one kind: ten at once, then ten a minute. The rest is counted."""
RELEASED_MAX = 10_000
"""How many keys are remembered whose attempt failed in this process: their next attempt is no takeover."""

_log = logging.getLogger("semel")


class RateLimit:
    """Decides which lines are logged, and counts the others."""

    def __init__(self, steady_s: Callable[[], float] = monotonic) -> None:
        self._steady_s = steady_s
        self._left = float(BURST)
        self._at = steady_s()
        self._left_out = 0

    def take(self) -> int | None:
        """Return how many lines were left out since the last one, or `None` if this one must be left out."""
        now = self._steady_s()
        self._left, self._at = min(BURST, self._left + (now - self._at) * PER_S), now
        if self._left < 1:
            self._left_out += 1
            return None
        self._left -= 1
        left_out, self._left_out = self._left_out, 0
        return left_out


class LimitedLog(logging.LoggerAdapter[logging.Logger]):
    """A logger that leaves out lines of a kind that comes too often. The message's template is its kind."""

    def __init__(self, logger: logging.Logger, steady_s: Callable[[], float] = monotonic) -> None:
        super().__init__(logger, {})
        self._steady_s = steady_s
        self._kinds: dict[object, RateLimit] = {}
        """One per call in the code."""

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        """Keep the caller's `extra`, which the base class would replace."""
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log the line, or count it."""
        if msg not in self._kinds:
            self._kinds[msg] = RateLimit(self._steady_s)
        left_out = self._kinds[msg].take()
        if left_out is not None:
            more = f" ({left_out:,} more like it were not logged)" if left_out else ""
            super().log(level, f"{msg}{more}", *args, **kwargs)


KINDS_MAX = 100


class LimitFilter(logging.Filter):
    """The same for the logger of another library: the lines that strangers cause must not fill the disk."""

    def __init__(self, steady_s: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._steady_s = steady_s
        self._kinds: dict[object, RateLimit] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Pass the line on, or count it."""
        if record.msg not in self._kinds:
            if len(self._kinds) >= KINDS_MAX:
                self._kinds.clear()
            self._kinds[record.msg] = RateLimit(self._steady_s)
        left_out = self._kinds[record.msg].take()
        if left_out:
            record.msg = f"{record.msg} ({left_out:,} more like it were not logged)"
        return left_out is not None


REMIND_S = 60.0


class OutageLog:
    """Logs the outages of one server: a line at once, one a minute, and one when it answers again."""

    def __init__(
        self,
        log: logging.Logger,
        name: str,
        steady_s: Callable[[], float] = monotonic,
        *,
        event: str = "source_outage",
        then: str = "retrying until it answers",
        grace_s: float = 0.0,
    ) -> None:
        """`event`: its name in JSON logs; `then`: what happens next, for the first line.

        `grace_s`: for so long after an outage an error starts no new one: its call may be from before the answer.
        """
        self._log = LimitedLog(log, steady_s)
        self._name = name
        self._steady_s = steady_s
        self._event = event
        self._then = then
        self._grace_s = grace_s
        self._since: float | None = None
        self._reported_at = 0.0
        self._ended_at = -math.inf

    @property
    def away(self) -> bool:
        """Whether an outage was reported and has not ended."""
        return self._since is not None

    def report(self, error: object) -> None:
        """Report a call without an answer; logs the first one, and then one a minute."""
        now = self._steady_s()
        if self._since is None:
            if now - self._ended_at < self._grace_s:
                return
            self._since = self._reported_at = now
            extra = about(self._event, error=str(error), next=self._then)
            self._log.warning("%s cannot be reached: %s; %s", self._name, error, self._then, extra=extra)
        elif now - self._reported_at >= REMIND_S:
            self._reported_at = now
            extra = about(self._event, error=str(error), next=self._then)
            self._log.warning(
                "%s has been unreachable for %.0f s: %s", self._name, now - self._since, error, extra=extra
            )

    def end(self) -> None:
        """Report a call with an answer."""
        if self._since is not None:
            self._ended_at = self._steady_s()
            away_s, self._since = self._ended_at - self._since, None
            extra = about(f"{self._event}_end", next="work goes on")
            self._log.warning("%s answers again after %.1f s", self._name, away_s, extra=extra)


class TakeoverLog:
    """Logs each claim that is not the first of its key, unless this process itself released the key."""

    def __init__(self) -> None:
        self._limit = RateLimit()
        self._lock = Lock()
        self._released: OrderedDict[tuple[str, str, str], None] = OrderedDict()

    def __call__(self, happening: events.HookEvent) -> None:
        """Log a takeover."""
        if isinstance(happening, events.Released):
            with self._lock:
                self._released[_id(happening)] = None
                if len(self._released) > RELEASED_MAX:
                    self._released.popitem(last=False)
        elif isinstance(happening, events.ClaimedEvent) and happening.attempt > 1:
            with self._lock:
                own = self._released.pop(_id(happening), happening) is None
                left_out = None if own else self._limit.take()
            if left_out is not None:
                self._tell(happening, left_out)

    @staticmethod
    def _tell(claimed: events.ClaimedEvent, left_out: int) -> None:
        more = f" ({left_out:,} more like it were not logged)" if left_out else ""
        _log.warning(
            "%s: attempt %d at key %r is taken over here: an earlier one ended with its worker, or failed there;"
            " it runs now%s", claimed.consumer, claimed.attempt, claimed.key, more,
            extra=about("takeover", consumer=claimed.consumer, key=claimed.key, attempt=claimed.attempt,
                        next="it runs here now"),
        )  # fmt: skip


def _id(event: events.DeliveryEvent) -> tuple[str, str, str]:
    return event.tenant, event.consumer, event.key
