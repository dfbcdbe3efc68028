"""The clock of a store in a file: it never goes back, even if the computer's clock does."""

import time
from threading import Lock

from semel.clock import Clock

__all__ = ["StoreClock"]


class StoreClock:
    """The wall clock plus an offset, which grows when the wall clock steps back.

    Every writing transaction stores the last returned time and the offset, so that another process, or
    the next run of this one, continues from there and does not depend on its own wall clock.
    """

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock
        """The wall clock; `None`: the computer's, read directly to save a call."""
        self._lock = Lock()
        self._last_us = 0
        self._offset_us = 0

    def tick(self, last_us: int, offset_us: int) -> tuple[int, int]:
        """Return the time and the offset to store, given the stored ones. Never returns the same time twice."""
        with self._lock:
            if offset_us > self._offset_us:  # noqa: PLR1730 - every call runs this, and max() takes longer
                self._offset_us = offset_us
            if last_us > self._last_us:  # noqa: PLR1730
                self._last_us = last_us
            wall_us = time.time_ns() // 1000 if self._clock is None else self._clock.now_us()
            now = wall_us + self._offset_us
            if now <= self._last_us:
                self._offset_us += self._last_us + 1 - now
                now = self._last_us + 1
            self._last_us = now
            return now, self._offset_us

    def peek(self) -> tuple[int, int]:
        """Return the time and the offset for reading only: the next tick may be the same, never earlier."""
        with self._lock:
            wall_us = time.time_ns() // 1000 if self._clock is None else self._clock.now_us()
            now = wall_us + self._offset_us
            if now > self._last_us:
                self._last_us = now - 1
            return self._last_us + 1, self._offset_us

    def after_fork(self) -> None:
        """Replace the lock: another thread of the parent may have held it, and does not exist here to release it."""
        self._lock = Lock()
