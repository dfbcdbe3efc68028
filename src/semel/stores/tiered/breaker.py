"""Leave a cache alone that does not answer: it would cost every call its timeout, and gives speed only."""

from collections.abc import Callable
from threading import Lock

__all__ = ["Breaker"]

PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 15.0


class Breaker:
    """Says whether the cache is worth asking. After a failure: not for a while, longer each time."""

    def __init__(self, steady_s: Callable[[], float]) -> None:
        self._steady_s = steady_s
        self._pause_s = 0.0
        self._until = 0.0
        self.after_fork()

    def after_fork(self) -> None:
        """Another thread of the parent may have held the lock."""
        self._lock = Lock()

    @property
    def is_open(self) -> bool:
        """Whether the cache is being left alone."""
        return self._pause_s > 0.0

    def allows(self) -> bool:
        """Whether to ask. When the pause is over one caller tries, and the others wait for what comes of it."""
        if not self._pause_s:
            return True
        with self._lock:
            now = self._steady_s()
            if now < self._until:
                return False
            self._until = now + self._pause_s
            return True

    def failed(self) -> bool:
        """The cache gave no answer; whether that is news."""
        with self._lock:
            news = not self._pause_s
            self._pause_s = PAUSE_FIRST_S if news else min(PAUSE_MAX_S, 2 * self._pause_s)
            self._until = self._steady_s() + self._pause_s
            return news

    def worked(self) -> None:
        """It did."""
        if self._pause_s:
            with self._lock:
                self._pause_s = 0.0
