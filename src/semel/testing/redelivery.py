"""An at-least-once queue by message numbers: it delivers a message again until it is acknowledged."""

import heapq
from collections import deque
from collections.abc import Iterable

from msgspec import Struct

__all__ = ["VISIBILITY_S", "RedeliveryQueue"]

VISIBILITY_S = 0.5
"""A delivery that is not acknowledged by then goes to another worker, before a stopped worker continues."""


class DeliveryInFlight(Struct):
    """One delivery in flight."""

    worker: int
    until: float


class RedeliveryQueue:
    """Messages by number; each is ready, delayed, in flight or acknowledged."""

    def __init__(self, events: Iterable[str] = (), *, visibility_s: float = VISIBILITY_S) -> None:
        self.events: list[str] = []
        self.deliveries: int = 0
        self._visibility_s = visibility_s
        self._ready: deque[int] = deque()
        self._delayed: list[tuple[float, int]] = []
        self._flying: dict[int, DeliveryInFlight] = {}
        self._left: set[int] = set()
        self.add(events)

    def add(self, events: Iterable[str]) -> None:
        """Append messages; an event may have several."""
        first = len(self.events)
        self.events.extend(events)
        numbers = range(first, len(self.events))
        self._ready.extend(numbers)
        self._left.update(numbers)

    @property
    def left(self) -> int:
        """How many messages are not acknowledged."""
        return len(self._left)

    def take(self, worker: int, now: float) -> int | None:
        """Return the next message for this worker, or `None`."""
        while self._ready:
            number = self._ready.popleft()
            if number in self._left and number not in self._flying:
                self._flying[number] = DeliveryInFlight(worker, now + self._visibility_s)
                self.deliveries += 1
                return number
        return None

    def extend(self, number: int, worker: int, now: float) -> bool:
        """Give the worker more time for its delivery. Returns `False` if the delivery is no longer its own."""
        flight = self._flying.get(number)
        if flight is None or flight.worker != worker:
            return False
        flight.until = now + self._visibility_s
        return True

    def ack(self, number: int) -> None:
        """Acknowledge a message; a late acknowledgement counts too."""
        self._left.discard(number)
        self._flying.pop(number, None)

    def nack(self, number: int, at: float) -> None:
        """Deliver it again, not before `at`."""
        self._flying.pop(number, None)
        heapq.heappush(self._delayed, (at, number))

    def abandon(self, worker: int) -> None:
        """Requeue the messages of a worker that died, in front of the others."""
        for number in [number for number, flight in self._flying.items() if flight.worker == worker]:
            del self._flying[number]
            self._ready.appendleft(number)

    def tick(self, now: float) -> float | None:
        """Move due messages to ready. Returns the time of the next one."""
        while self._delayed and self._delayed[0][0] <= now:
            self._ready.append(heapq.heappop(self._delayed)[1])
        for number in [number for number, flight in self._flying.items() if flight.until <= now]:
            del self._flying[number]
            self._ready.append(number)
        ends = [flight.until for flight in self._flying.values()]
        return min([*ends, *(at for at, _ in self._delayed[:1])], default=None)
