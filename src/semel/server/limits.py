"""Bounds over time, per caller and in this instance's memory: requests per second, and claims held."""

import heapq
from collections.abc import Callable

from semel.types import Id

__all__ = ["Buckets", "LiveClaims"]

BURST = 2.0
CALLERS_MAX = 10_000
"""How many callers are told apart at a time; who has been quiet longest is forgotten, which is in its favour."""


class Buckets:
    """A token bucket per caller: `rate_per_s`, and twice that at once."""

    def __init__(self, rate_per_s: float, clock: Callable[[], float]) -> None:
        self._rate_per_s = rate_per_s
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, caller: str) -> float:
        """Take one; returns 0, or in how many seconds there is one again."""
        if not self._rate_per_s:
            return 0.0
        now, most = self._clock(), max(1.0, BURST * self._rate_per_s)
        left, since = self._left.pop(caller, (most, now))
        left = min(most, left + (now - since) * self._rate_per_s)
        if left >= 1:
            self._left[caller] = (left - 1, now)
            wait_s = 0.0
        else:
            self._left[caller] = (left, now)
            wait_s = (1 - left) / self._rate_per_s
        if len(self._left) > CALLERS_MAX:
            del self._left[next(iter(self._left))]
        return wait_s


class LiveClaims:
    """Which claims each caller holds, until they are settled or their leases are over."""

    def __init__(self, claims_max: int, clock: Callable[[], float]) -> None:
        self._claims_max = claims_max
        self._clock = clock
        self._until: dict[str, dict[Id, float]] = {}
        self._ends: dict[str, list[tuple[float, Id]]] = {}

    def room(self, caller: str) -> int:
        """How many more it may hold now."""
        held = self._until.get(caller)
        if held is None:
            return self._claims_max
        ends, now = self._ends[caller], self._clock()
        while ends and ends[0][0] <= now:
            _, record_id = heapq.heappop(ends)
            if held.get(record_id, now + 1) <= now:
                del held[record_id]
        if not held:
            del self._until[caller], self._ends[caller]
        return self._claims_max - len(held)

    def hold(self, caller: str, record_id: Id, lease_us: int) -> None:
        """It was granted or renewed."""
        until = self._clock() + lease_us / 1e6
        self._until.setdefault(caller, {})[record_id] = until
        heapq.heappush(self._ends.setdefault(caller, []), (until, record_id))

    def drop(self, caller: str, record_id: Id) -> None:
        """It was settled or lost."""
        held = self._until.get(caller)
        if held is not None:
            held.pop(record_id, None)
