"""The time of a store in a file: it never goes back, whatever the computer's clock does."""

import time
from threading import Lock

from semel.clock import Clock

__all__ = ["StoreClock"]


class StoreClock:
    """The wall clock plus an offset, which is raised when the wall clock steps back.

    The last time given out and the offset are stored with every writing transaction, so that another
    process, or the next run of this one, goes on from there instead of believing its wall clock.
    """

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock
        """Where the wall clock is read; `None`: of the computer, without a call in between."""
        self._lock = Lock()
        self._last_us = 0
        self._offset_us = 0

    def tick(self, last_us: int, offset_us: int) -> tuple[int, int]:
        """The time now and the offset to store, given what is stored. Never the same time twice."""
        with self._lock:
            if offset_us > self._offset_us:  # noqa: PLR1730 - every call passes here, and max() takes longer
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
        """The time now and the offset, to look by and not to write: the next tick may be the same, never earlier."""
        with self._lock:
            wall_us = time.time_ns() // 1000 if self._clock is None else self._clock.now_us()
            now = wall_us + self._offset_us
            if now > self._last_us:
                self._last_us = now - 1
            return self._last_us + 1, self._offset_us

    def after_fork(self) -> None:
        """Another thread of the parent may have held the lock, and is not here to let go."""
        self._lock = Lock()
