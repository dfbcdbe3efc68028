"""Log at a limited rate: ten lines of a kind at once, then ten a minute; the rest is counted."""

import logging
from collections.abc import Callable
from time import monotonic
from typing import Any

__all__ = ["BURST", "LimitedLog", "OutageLog", "RateLimit"]

BURST = 10
PER_S = 1 / 6
"""Lines of one kind: ten at once, then ten a minute. The rest is counted."""


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


REMIND_S = 60.0


class OutageLog:
    """Logs the outages of one server."""

    def __init__(self, log: logging.Logger, name: str, steady_s: Callable[[], float] = monotonic) -> None:
        self._log = LimitedLog(log, steady_s)
        self._name = name
        self._steady_s = steady_s
        self._since: float | None = None
        self._reported_at = 0.0

    @property
    def away(self) -> bool:
        """Whether an outage was reported and has not ended."""
        return self._since is not None

    def report(self, error: object) -> None:
        """Report a call without an answer; logs the first one, and then one a minute."""
        now = self._steady_s()
        if self._since is None:
            self._since = self._reported_at = now
            self._log.warning("%s cannot be reached: %s; retrying until it answers", self._name, error)
        elif now - self._reported_at >= REMIND_S:
            self._reported_at = now
            self._log.warning("%s has been unreachable for %.0f s: %s", self._name, now - self._since, error)

    def end(self) -> None:
        """Report a call with an answer."""
        if self._since is not None:
            away_s, self._since = self._steady_s() - self._since, None
            self._log.warning("%s answers again after %.1f s", self._name, away_s)
