"""Bounds over time, per caller and in this instance's memory: requests per second, and claims held."""

import heapq
from collections.abc import Callable

from semel.types import Id

__all__ = ["Buckets", "LiveClaims"]

BURST = 2.0
CALLERS_MAX = 10_000
"""How many callers are told apart at a time; who has been quiet longest is forgotten, which is in its favour."""

ENDS_SPARE = 64
"""Ends of leases that may be kept beyond two for each claim, before those that say nothing any more are dropped."""


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
        left = self._balance(caller)
        if left < 1:
            return (1 - left) / self._rate_per_s
        self.charge(caller, 1)
        return 0.0

    def charge(self, caller: str, amount: float) -> None:
        """Take that much, also where it is more than there is."""
        if self._rate_per_s and amount:
            self._left[caller] = (self._balance(caller) - amount, self._clock())

    def wait_s(self, caller: str) -> float:
        """In how many seconds what was overdrawn is paid back; 0: nothing is."""
        left = self._balance(caller) if self._rate_per_s else 0.0
        return -left / self._rate_per_s if left < 0 else 0.0

    def _balance(self, caller: str) -> float:
        now, most = self._clock(), max(1.0, BURST * self._rate_per_s)
        left, since = self._left.pop(caller, (most, now))
        left = min(most, left + (now - since) * self._rate_per_s)
        self._left[caller] = (left, now)
        if len(self._left) > CALLERS_MAX:
            del self._left[next(iter(self._left))]
        return left


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
        held = self._until.setdefault(caller, {})
        held[record_id] = until
        ends = self._ends.setdefault(caller, [])
        heapq.heappush(ends, (until, record_id))
        if len(ends) > ENDS_SPARE + 2 * len(held):  # renewals and settled claims leave ends behind
            ends[:] = [(end, each) for each, end in held.items()]
            heapq.heapify(ends)

    def drop(self, caller: str, record_id: Id) -> None:
        """It was settled or lost."""
        held = self._until.get(caller)
        if held is not None:
            held.pop(record_id, None)
