"""Log at a rate that cannot flood: ten lines of a kind at once, then ten a minute; the rest is counted."""

import logging
from collections.abc import Callable, MutableMapping
from time import monotonic
from typing import Any

__all__ = ["LimitedLog"]

BURST = 10
PER_S = 1 / 6


class LimitedLog(logging.LoggerAdapter[logging.Logger]):
    """A logger that leaves out lines of a kind that comes too often. The message's template is its kind."""

    def __init__(self, logger: logging.Logger, steady_s: Callable[[], float] = monotonic) -> None:
        super().__init__(logger, {})
        self._steady_s = steady_s
        self._kinds: dict[object, tuple[float, float, int]] = {}
        """Lines left, since when, and how many were left out; there are as many kinds as calls in the code."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log the line, or count it."""
        now = self._steady_s()
        left, since, left_out = self._kinds.get(msg, (float(BURST), now, 0))
        left = min(float(BURST), left + (now - since) * PER_S)
        if left < 1:
            self._kinds[msg] = (left, now, left_out + 1)
            return
        self._kinds[msg] = (left - 1, now, 0)
        more = f" ({left_out} more like it were not logged)" if left_out else ""
        super().log(level, f"{msg}{more}", *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add nothing."""
        return msg, kwargs
