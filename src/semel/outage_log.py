"""Report an outage once, at once; then once a minute while it lasts; then its end."""

import logging
from collections.abc import Callable
from time import monotonic

__all__ = ["OutageLog"]

REMIND_S = 60.0


class OutageLog:
    """The outages of one server, as its operator reads of them."""

    def __init__(self, log: logging.Logger, name: str, steady_s: Callable[[], float] = monotonic) -> None:
        self._log = log
        self._name = name
        self._steady_s = steady_s
        self._since: float | None = None
        self._reported_at = 0.0

    @property
    def away(self) -> bool:
        """Whether an outage was reported and has not ended."""
        return self._since is not None

    def report(self, error: object) -> None:
        """A call had no answer: logged if it is the first, or if a minute has passed."""
        now = self._steady_s()
        if self._since is None:
            self._since = self._reported_at = now
            self._log.warning("%s cannot be reached: %s; trying again until it answers", self._name, error)
        elif now - self._reported_at >= REMIND_S:
            self._reported_at = now
            self._log.warning("%s has been away for %.0f s: %s", self._name, now - self._since, error)

    def end(self) -> None:
        """A call had an answer."""
        if self._since is not None:
            away_s, self._since = self._steady_s() - self._since, None
            self._log.warning("%s answers again after %.1f s", self._name, away_s)
