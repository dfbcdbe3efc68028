"""Answers of the store that are believed for a while, in this instance's memory."""

from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Believed"]

V = TypeVar("V")


class Believed(Generic[V]):
    """The last answers by name, `None` among them; the oldest are forgotten past a bound."""

    def __init__(self, live_s: float, names_max: int, clock: Callable[[], float]) -> None:
        self._live_s = live_s
        self._names_max = names_max
        self._clock = clock
        self._found: dict[str, tuple[float, V | None]] = {}

    def knows(self, name: str) -> bool:
        """Whether there is an answer that is still believed."""
        return name in self._found and self._clock() < self._found[name][0]

    def __getitem__(self, name: str) -> V | None:
        return self._found[name][1]

    def __setitem__(self, name: str, answer: V | None) -> None:
        self._found.pop(name, None)
        self._found[name] = (self._clock() + self._live_s, answer)
        if len(self._found) > self._names_max:
            del self._found[next(iter(self._found))]

    def drop(self, name: str) -> None:
        """Ask again next time."""
        self._found.pop(name, None)
