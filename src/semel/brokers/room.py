"""Where deliveries wait in hand until it is their time: busy elsewhere, to be tried again, or the store is away."""

import heapq
from itertools import count
from typing import Generic, TypeVar

__all__ = ["RetryQueue"]

T = TypeVar("T")


class RetryQueue(Generic[T]):
    """What waits, by when it is due. O(log n) to enter and to leave."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._heap: list[tuple[float, int, T]] = []
        self._order = count()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def full(self) -> bool:
        """Whether nothing more should be taken in."""
        return len(self._heap) >= self._size

    def enter(self, held: T, due_at: float) -> None:
        """Wait until then; also when the room is full, for what has nowhere else to go."""
        heapq.heappush(self._heap, (due_at, next(self._order), held))

    def due(self, now: float) -> list[T]:
        """Take out what has waited long enough, the earliest first."""
        ready = []
        while self._heap and self._heap[0][0] <= now:
            ready.append(heapq.heappop(self._heap)[2])
        return ready

    def next_at(self) -> float | None:
        """When the next one is due."""
        return self._heap[0][0] if self._heap else None

    def empty(self) -> list[T]:
        """Take out everything."""
        held = [entry[2] for entry in self._heap]
        self._heap.clear()
        return held
