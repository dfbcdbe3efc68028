"""A wheel of expiry times: what is due is found without looking at what is not."""

from heapq import heappop, heappush

from semel.types import Id

GRANULE_US = 1_000_000
"""Records expire exactly; they are *removed* by the wheel's buckets of a second."""


class Wheel:
    """Ids by the second in which they expire. Adding and taking what is due are O(1) per id."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[Id]] = {}
        self._order: list[int] = []

    def add(self, record_id: Id, expires_at: int) -> None:
        """Remember to look at this record once `expires_at` is over."""
        granule = expires_at // GRANULE_US + 1
        bucket = self._buckets.get(granule)
        if bucket is None:
            bucket = self._buckets[granule] = []
            heappush(self._order, granule)
        bucket.append(record_id)

    def due(self, now: int) -> bool:
        """Whether anything is to be looked at."""
        return bool(self._order) and self._order[0] * GRANULE_US <= now

    def pop(self, now: int, limit: int) -> list[Id]:
        """Up to `limit` ids whose time has come."""
        taken: list[Id] = []
        while len(taken) < limit and self.due(now):
            bucket = self._buckets[self._order[0]]
            taken += [bucket.pop() for _ in range(min(len(bucket), limit - len(taken)))]
            if not bucket:
                del self._buckets[heappop(self._order)]
        return taken
