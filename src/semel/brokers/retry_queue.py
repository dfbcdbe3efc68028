"""Where deliveries wait in hand until it is their time: busy elsewhere, to be tried again, or the store is away."""

import heapq
from collections import OrderedDict
from itertools import count
from typing import Generic, Literal, TypeVar

import msgspec

__all__ = ["FailureCounts", "RetryQueue", "RunnerCounters", "RunnerLimits"]

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


KEYS_MAX = 10_000
"""How many failing messages are remembered; the longest forgotten one begins anew."""


class FailureCounts:
    """Failures by key: the broker's count where it gives one, or what was seen in this process, whichever is more."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, int] = OrderedDict()

    def count_failure(self, key: str, deliveries: int) -> int:
        """Another failure; returns which attempt it was."""
        attempt = max(self.attempts(key) + 1, deliveries)
        self.note(key, attempt)
        return attempt

    def note(self, key: str, attempt: int) -> None:
        """Remember that this attempt failed."""
        self._failures.pop(key, None)
        self._failures[key] = attempt
        if len(self._failures) > KEYS_MAX:
            self._failures.popitem(last=False)

    def attempts(self, key: str) -> int:
        """How many attempts failed, as far as is known here."""
        return self._failures.get(key, 0)

    def __contains__(self, key: str) -> bool:
        return key in self._failures

    def forget(self, key: str) -> None:
        """It is dealt with."""
        self._failures.pop(key, None)


class RunnerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much a runner takes on at once."""

    batch: int = 200
    """The most deliveries that are claimed together, or share a transaction."""
    concurrency: int = 10
    """How many handlers run at once."""
    in_hand: int = 1000
    """The most deliveries held, waiting ones included; beyond it nothing is received."""
    room: int = 100
    """How many busy or postponed deliveries wait in hand; beyond it they go back to the broker."""
    order: bool = False
    """Whether the deliveries of one lane (a partition, a message group) run one after the other, in order."""
    drain_s: float = 30.0
    """How long a stop waits for running handlers before it cancels them."""
    no_key: Literal["dead_letter", "refuse"] = "dead_letter"
    """What becomes of a message without a key: to the dead letters, or the runner stops with `KeyMissing`."""


class RunnerCounters(msgspec.Struct):
    """What a runner has done since it was made."""

    received: int = 0
    acked: int = 0
    duplicates: int = 0
    parked: int = 0
    returned: int = 0
    dead_lettered: int = 0
    stuck: int = 0
    """Messages whose dead letters could not be written so far; they are tried again."""
    errors: int = 0
    unguarded: int = 0
    """Ran without a claim because the store could not be reached, by `Policy(on_unavailable="run")`."""
