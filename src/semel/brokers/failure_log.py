"""Log failing handlers and dead letters, at a limited rate."""

import logging

from semel.brokers.source import DeadLetterInfo
from semel.observe.limited_log import RateLimit

__all__ = ["FailureLog"]

_log = logging.getLogger("semel.runner")


class FailureLog:
    """The failures and dead letters of one source."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._failures = RateLimit()
        self._letters = RateLimit()

    def log_failure(self, key: str, attempt: int, retry_after_s: float, error: BaseException) -> None:
        """Log a failed attempt; the message will be retried."""
        left_out = self._failures.take()
        if left_out is not None:
            _log.warning(
                "%s: the handler failed for key %r, attempt %d; again in %.1f s%s",
                self._source, key, attempt, retry_after_s, _more(left_out), exc_info=error,
            )  # fmt: skip

    def log_dead_letter(self, letter: DeadLetterInfo) -> None:
        """Log a dead letter."""
        left_out = self._letters.take()
        if left_out is not None:
            _log.warning(
                "%s: key %r went to the dead letters: %s%s%s%s",
                self._source, letter.key, letter.reason,
                f" after {letter.attempts} attempts" if letter.attempts else "",
                f": {letter.error}" if letter.error else "", _more(left_out),
            )  # fmt: skip


def _more(left_out: int) -> str:
    return f" ({left_out:,} more like it were not logged)" if left_out else ""
