"""Limits per caller, in this instance's memory: request rates, costs, and claims held."""

import heapq
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Generic, TypeVar

from semel.core.commands import Claim, Item, Renew, Settle
from semel.core.ids import OWN
from semel.server.auth import Caller
from semel.server.problems import HttpProblem
from semel.server.settings import Limits
from semel.types import Id

__all__ = ["PAYER", "ROUTE", "AnswerCache", "Buckets", "Costs", "LiveClaims", "account_of", "retry_after"]

BURST = 2.0
CALLERS_MAX = 10_000
"""The most callers with a state of their own; the one that is idle longest is dropped, which only favours it."""

ENDS_SPARE = 64
"""Stale lease ends that may be kept, beyond two per claim, before they are removed."""


class Buckets:
    """A token bucket per caller: `rate_per_s`, and `burst` at once, which is twice that if it is not given."""

    def __init__(self, rate_per_s: float, clock: Callable[[], float], burst: float = 0.0) -> None:
        self._rate_per_s = rate_per_s
        self._most = burst or max(1.0, BURST * rate_per_s)
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, caller: str) -> float:
        """Take one token; returns 0, or the seconds until the next one."""
        if not self._rate_per_s:
            return 0.0
        left = self._balance(caller)
        if left < 1:
            return (1 - left) / self._rate_per_s
        self.charge(caller, 1)
        return 0.0

    def charge(self, caller: str, amount: float) -> None:
        """Take this much, even if the bucket becomes negative."""
        if self._rate_per_s and amount:
            self._left[caller] = (self._balance(caller) - amount, self._clock())

    def wait_s(self, caller: str) -> float:
        """Return the seconds until a negative bucket is at zero again; 0 if it is not negative."""
        left = self._balance(caller) if self._rate_per_s else 0.0
        return -left / self._rate_per_s if left < 0 else 0.0

    def _balance(self, caller: str) -> float:
        now = self._clock()
        left, since = self._left.pop(caller, (self._most, now))
        left = min(self._most, left + (now - since) * self._rate_per_s)
        self._left[caller] = (left, now)
        if len(self._left) > CALLERS_MAX:
            del self._left[next(iter(self._left))]
        return left


class LiveClaims:
    """The claims that each caller holds, until they are settled or their leases end."""

    def __init__(self, claims_max: int, clock: Callable[[], float]) -> None:
        self._claims_max = claims_max
        self._clock = clock
        self._until: dict[str, dict[Id, float]] = {}
        self._ends: dict[str, list[tuple[float, Id]]] = {}

    def room(self, caller: str) -> int:
        """Return how many more claims the caller may hold."""
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
        """Note a granted or renewed claim."""
        until = self._clock() + lease_us / 1e6
        held = self._until.setdefault(caller, {})
        held[record_id] = until
        ends = self._ends.setdefault(caller, [])
        heapq.heappush(ends, (until, record_id))
        if len(ends) > ENDS_SPARE + 2 * len(held):  # renewed and settled claims leave stale ends behind
            ends[:] = [(end, each) for each, end in held.items()]
            heapq.heapify(ends)

    def drop(self, caller: str, record_id: Id) -> None:
        """Note a settled or lost claim."""
        held = self._until.get(caller)
        if held is not None:
            held.pop(record_id, None)


def retry_after(wait_s: float) -> dict[str, str]:
    """Return the header that says when to come back."""
    return {"Retry-After": str(max(1, round(wait_s + 0.5)))}


PAYER: ContextVar[Caller | None] = ContextVar("semel_payer", default=None)
"""The account of the current request; `None`: none, such as for the service's own counts."""

ROUTE: ContextVar[str] = ContextVar("semel_route", default="")
"""The method and path of the current request, for the audit."""


class Costs:
    """Counts costs per tenant; a tenant that has overspent waits until its account is even again.

    A cost is known only after a request, so it is charged then and checked before the next request.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._items = Buckets(limits.items_per_s, clock)
        self._bytes = Buckets(limits.bytes_per_s, clock)
        self._store_s = Buckets(limits.store_share, clock)
        self._scan_s = Buckets(limits.scan_share, clock)

    def check(self, caller: Caller) -> None:
        """Raises `HttpProblem` while the caller's tenant has overspent."""
        account = account_of(caller)
        for bucket, what in (
            (self._items, "items"),
            (self._bytes, "bytes"),
            (self._store_s, "seconds of the store's time"),
        ):
            _refuse_overspent(bucket, account, what)

    def check_scan(self, caller: Caller) -> None:
        """Raises `HttpProblem` while counts and scans of the caller's tenant have overspent. Its claims go on."""
        what = "seconds of the store's time, by counts and scans"
        _refuse_overspent(self._scan_s, account_of(caller), what)

    def charge(self, caller: Caller, *, items: int = 0, size_bytes: int = 0) -> None:
        """Charge the caller's tenant."""
        account = account_of(caller)
        self._items.charge(account, items)
        self._bytes.charge(account, size_bytes)

    def charge_store(self, took_s: float) -> None:
        """Charge the store's time to the request of this context."""
        payer = PAYER.get()
        if payer is not None:
            self._store_s.charge(account_of(payer), took_s)

    def charge_posted(self, items: Sequence[Item], took_s: float) -> None:
        """Note the store's time for settles and renewals that the service sends itself, such as those of its handlers.

        No request waits for them: each tenant pays for its own records, also after its request is answered.
        """
        for item in items:
            if isinstance(item, Claim | Renew | Settle) and not item.id[0].startswith(OWN):
                self._store_s.charge(_account_of_tenant(item.id[0]), took_s / len(items))

    def charge_scan(self, took_s: float) -> None:
        """Charge the store's time of a count or a scan."""
        payer = PAYER.get()
        if payer is not None:
            self._store_s.charge(account_of(payer), took_s)
            self._scan_s.charge(account_of(payer), took_s)


def _refuse_overspent(bucket: Buckets, account: str, what: str) -> None:
    wait_s = bucket.wait_s(account)
    if wait_s:
        raise HttpProblem(429, "too-costly", f"too many {what}; wait, and send less", retry_after(wait_s))


def account_of(caller: Caller) -> str:
    """Return the account: the tenant for all of its tokens; a token of all tenants has its own."""
    return caller.name if caller.tenant is None else _account_of_tenant(caller.tenant)


def _account_of_tenant(tenant: str) -> str:
    return f"tenant {tenant}"


V = TypeVar("V")


class AnswerCache(Generic[V]):
    """A bounded cache of answers by name, which may be `None`; drops the oldest."""

    def __init__(self, live_s: float, names_max: int, clock: Callable[[], float]) -> None:
        self._live_s = live_s
        self._names_max = names_max
        self._clock = clock
        self._found: dict[str, tuple[float, V | None]] = {}

    def knows(self, name: str) -> bool:
        """Whether there is a valid cached answer."""
        return name in self._found and self._clock() < self._found[name][0]

    def __getitem__(self, name: str) -> V | None:
        return self._found[name][1]

    def __setitem__(self, name: str, answer: V | None) -> None:
        self._found.pop(name, None)
        self._found[name] = (self._clock() + self._live_s, answer)
        if len(self._found) > self._names_max:
            del self._found[next(iter(self._found))]

    def drop(self, name: str) -> None:
        """Invalidate an answer."""
        self._found.pop(name, None)
