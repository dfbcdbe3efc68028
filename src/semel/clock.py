"""Time as an argument: the clock of a client or an embedded store."""

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Microseconds since the epoch, and a steady count of seconds for deadlines."""

    def now_us(self) -> int:
        """The wall clock; it may step back, and stores that use it guard against that."""
        ...

    def steady_s(self) -> float:
        """A clock that only goes forward, unrelated to the date."""
        ...


class SystemClock:
    """The computer's own clocks."""

    def now_us(self) -> int:
        """The wall clock in microseconds."""
        return time.time_ns() // 1000

    def steady_s(self) -> float:
        """The monotonic clock in seconds."""
        return time.monotonic()
