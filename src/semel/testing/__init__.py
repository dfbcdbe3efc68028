"""Test tools for applications that use semel and for authors of stores. Public."""

from datetime import timedelta
from threading import Lock

from semel.windows import duration_us

__all__ = ["ManualClock"]

START_US = 1_800_000_000_000_000
"""A moment in January 2027: large enough that no difference of times falls below zero."""


class ManualClock:
    """A `semel.clock.Clock` for tests. Thread-safe.

    A store that uses it still advances its own time by a microsecond with each call.
    """

    def __init__(self, now_us: int = START_US) -> None:
        self._lock = Lock()
        self._now_us = now_us
        self._steady_us = 0

    def now_us(self) -> int:
        """The wall clock in microseconds, as the test has set it."""
        return self._now_us

    def steady_s(self) -> float:
        """Seconds since the clock was created; `step_back` does not change it."""
        return self._steady_us / 1e6

    def advance(self, duration: float | str | timedelta = 0, *, us: int = 0) -> None:
        """Let time pass on both clocks: seconds, `"1h"` or a timedelta. `us`: extra microseconds."""
        step = _step_us(duration, us, "time only moves forward; use step_back to set the wall clock back")
        with self._lock:
            self._now_us += step
            self._steady_us += step

    def step_back(self, duration: float | str | timedelta = 0, *, us: int = 0) -> None:
        """Set the wall clock back, as an operator or a time server does; the steady clock does not change."""
        step = _step_us(duration, us, "give the size of the step back as a positive number")
        with self._lock:
            self._now_us -= step


def _step_us(duration: float | str | timedelta, us: int, refusal: str) -> int:
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if us < 0 or (not isinstance(seconds, str) and seconds < 0):
        raise ValueError(refusal)
    return duration_us(seconds) + us
