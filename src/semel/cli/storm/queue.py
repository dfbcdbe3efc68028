"""An at-least-once queue: it delivers a message again and again until it is acknowledged."""

import heapq
from collections import deque
from collections.abc import Iterable

from msgspec import Struct

__all__ = ["DemoQueue"]

VISIBILITY_S = 0.5
"""A delivery that is not acknowledged after this is made again, to somebody else: before a stopped worker goes on."""


class Flight(Struct):
    """One delivery under way."""

    worker: int
    until: float


class DemoQueue:
    """Messages by number; each is in one place: ready, delayed, in flight, or gone."""

    def __init__(self, events: Iterable[str]) -> None:
        self.events: list[str] = list(events)
        self.deliveries: int = 0
        self._ready = deque(range(len(self.events)))
        self._delayed: list[tuple[float, int]] = []
        self._flying: dict[int, Flight] = {}
        self._left = set(self._ready)

    @property
    def left(self) -> int:
        """How many messages are not acknowledged."""
        return len(self._left)

    def take(self, worker: int, now: float) -> int | None:
        """The next message for this worker, or `None`."""
        while self._ready:
            number = self._ready.popleft()
            if number in self._left and number not in self._flying:
                self._flying[number] = Flight(worker, now + VISIBILITY_S)
                self.deliveries += 1
                return number
        return None

    def ack(self, number: int) -> None:
        """The message is done with; a late acknowledgement counts too."""
        self._left.discard(number)
        self._flying.pop(number, None)

    def nack(self, number: int, at: float) -> None:
        """Deliver it again, not before `at`."""
        self._flying.pop(number, None)
        heapq.heappush(self._delayed, (at, number))

    def abandon(self, worker: int) -> None:
        """The worker is gone: what it had is delivered again, to others, before the rest."""
        for number in [number for number, flight in self._flying.items() if flight.worker == worker]:
            del self._flying[number]
            self._ready.appendleft(number)

    def tick(self, now: float) -> float | None:
        """Make ready what is due; returns when there is more to do."""
        while self._delayed and self._delayed[0][0] <= now:
            self._ready.append(heapq.heappop(self._delayed)[1])
        for number in [number for number, flight in self._flying.items() if flight.until <= now]:
            del self._flying[number]
            self._ready.append(number)
        ends = [flight.until for flight in self._flying.values()]
        return min([*ends, *(at for at, _ in self._delayed[:1])], default=None)
