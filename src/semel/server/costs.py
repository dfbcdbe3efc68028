"""What callers cost, paced for each tenant: items, bytes, and the store's time. Requests alone say little."""

from collections.abc import Callable

from semel.server.callers import Caller
from semel.server.limits import Buckets
from semel.server.problems import HttpProblem
from semel.server.settings import Limits

__all__ = ["Costs"]


class Costs:
    """Counts what was spent; whoever has overdrawn waits until the account is even again.

    A cost is known only afterwards, so it is charged when it is known and checked before the next request.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._items = Buckets(limits.items_per_s, clock)
        self._bytes = Buckets(limits.bytes_per_s, clock)
        self._store_s = Buckets(limits.store_share, clock)

    def check(self, caller: Caller) -> None:
        """Raises `HttpProblem` while the caller's tenant owes something."""
        account = account_of(caller)
        for bucket, what in (
            (self._items, "items"),
            (self._bytes, "bytes"),
            (self._store_s, "time of the store, by counts and scans"),
        ):
            wait_s = bucket.wait_s(account)
            if wait_s:
                after = {"Retry-After": str(max(1, round(wait_s + 0.5)))}
                raise HttpProblem(429, "too-costly", f"too many {what} for now; wait, and ask for less", after)

    def charge(self, caller: Caller, *, items: int = 0, size_bytes: int = 0, store_s: float = 0.0) -> None:
        """Note what the caller's tenant has spent."""
        account = account_of(caller)
        self._items.charge(account, items)
        self._bytes.charge(account, size_bytes)
        self._store_s.charge(account, store_s)


def account_of(caller: Caller) -> str:
    """Who pays: the tenant, whichever of its tokens is used; a token of all tenants pays for itself."""
    return caller.name if caller.tenant is None else f"tenant {caller.tenant}"
