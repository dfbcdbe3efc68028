"""Limit how much a caller makes the store keep or write: consumers, windows, steps, renewals of one claim."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from semel.core.commands import (
    Admit,
    Answer,
    Claim,
    Granted,
    Item,
    Lookup,
    Mark,
    ReadSettings,
    Renew,
    Settle,
    SetWindow,
    StoreSettings,
    SwitchMode,
)
from semel.server.limits import retry_after
from semel.server.problems import HttpProblem
from semel.server.settings import Limits
from semel.types import Id, Mode, Record, Renewed, Unavailable

__all__ = ["Growth", "RenewalLimit"]

SETTINGS_LIVE_S = 5.0
"""How long additions of other instances may go unnoticed."""
RECORDS_MAX = 10_000
"""The most records with cached steps; for others the store is read."""
STEP_VALUES = 4
"""The steps of a record may take as much space as this many values."""
RENEWED_MAX = 20_000
"""The most claims whose renewals are counted; the one that is idle longest is dropped."""

ROUNDING_S = 1e-6
"""The parts of a lease together may be longer than it by this much."""


class Names:
    """Names that are known to be in the store, by tenant: consumers or windows."""

    def __init__(self, what: str, found: Sequence[tuple[str, ...]] = ()) -> None:
        self.what: str = what
        self._known: dict[str, set[tuple[str, ...]]] = {}
        self.replace(found)

    def replace(self, found: Sequence[tuple[str, ...]]) -> None:
        """Take over what was read from the store."""
        self._known = {}
        for name in found:
            self.add(name)

    def add(self, name: tuple[str, ...]) -> None:
        """Note a name; its first part is the tenant."""
        self._known.setdefault(name[0], set()).add(name)

    def drop(self, name: tuple[str, ...]) -> None:
        """Remove a name that did not get into the store."""
        self._known.get(name[0], set()).discard(name)

    def __contains__(self, name: tuple[str, ...]) -> bool:
        return name in self._known.get(name[0], ())

    def count(self, tenant: str) -> int:
        """Return how many a tenant has."""
        return len(self._known.get(tenant, ()))


class Growth:
    """Limits the number of consumers, windows and steps."""

    def __init__(self, limits: Limits, send: Callable[[Sequence[Item]], Awaitable[list[Answer]]]) -> None:
        self._limits = limits
        self._send = send
        self._consumers = Names("consumers")
        self._windows = Names("windows")
        self._fresh_until = 0.0
        self._steps: dict[tuple[Id, bytes], tuple[int, int]] = {}
        self._pending: dict[tuple[Id, bytes], tuple[int, int]] = {}
        """Steps that were checked and are not answered yet: a read of the record does not show them."""

    async def check(self, item: Item) -> None:
        """Check an item. Raises `HttpProblem` if it would exceed a limit; else `settle` must follow its answer."""
        match item:
            case Claim() if item.id[:2] not in self._consumers:
                await self._check_user(item.id[:2], "quarantine" if item.quarantine else "lease")
            case Settle() if item.id[:2] not in self._consumers:
                await self._check_user(item.id[:2], "lease")
            case Mark() if (item.tenant, item.consumer) not in self._consumers:
                await self._check_user((item.tenant, item.consumer), "mark")
            case Admit() | SwitchMode():
                await self._check_name((item.tenant, item.consumer), self._consumers)
            case SetWindow() if item.window_us is not None:
                await self._check_name((item.tenant, item.consumer, item.event_type), self._windows)
            case Renew() if item.step is not None:
                await self._check_step(item)
            case _:
                pass

    def settle(self, item: Item) -> None:
        """Note that a checked item was answered, or not sent."""
        if isinstance(item, Renew) and item.step is not None:
            place, (count, used) = _place_and_pending(item, self._pending)
            if count > 1:
                self._pending[place] = (count - 1, used - len(item.step[1] or b""))
            else:
                self._pending.pop(place, None)

    async def _check_user(self, name: tuple[str, str], mode: Mode) -> None:
        """Admit a consumer that a record names for the first time: only what is admitted can be counted."""
        await self._check_name(name, self._consumers)
        (answer,) = await self._send((Admit(*name, mode),))
        if isinstance(answer, Unavailable):
            self._consumers.drop(name)

    async def _check_name(self, name: tuple[str, ...], known: Names) -> None:
        if name in known:
            return
        if time.monotonic() >= self._fresh_until:
            (found,) = await self._send((ReadSettings(),))
            if isinstance(found, StoreSettings):
                self._consumers.replace(list(found.modes))
                self._windows.replace(list(found.windows))
                self._fresh_until = time.monotonic() + SETTINGS_LIVE_S
        most = self._limits.consumers_max
        if name not in known and known.count(name[0]) >= most:
            raise HttpProblem(
                409,
                f"too-many-{known.what}",
                f"there are {most} {known.what} already; use one of them, or raise consumers_max",
            )
        known.add(name)

    async def _check_step(self, item: Renew) -> None:
        assert item.step is not None
        place, size = (item.id, item.owner), len(item.step[1] or b"")
        count, used = self._steps.get(place) or await self._read_steps(item)
        if self._exceeds(count, used + size):
            count, used = await self._read_steps(item)  # a step that is sent again is kept once
            if self._exceeds(count, used + size):
                raise HttpProblem(
                    413,
                    "too-many-steps",
                    f"a record takes {self._limits.steps_max} steps with {self._bytes_max} bytes together; complete it,"
                    " or keep less in a step",
                )
        self._steps.pop(place, None)
        self._steps[place] = (count + 1, used + size)
        if len(self._steps) > RECORDS_MAX:
            del self._steps[next(iter(self._steps))]
        _, (count, used) = _place_and_pending(item, self._pending)
        self._pending[place] = (count + 1, used + size)

    @property
    def _bytes_max(self) -> int:
        return STEP_VALUES * self._limits.value_bytes_max

    def _exceeds(self, count: int, size_bytes: int) -> bool:
        return count >= self._limits.steps_max or size_bytes > self._bytes_max

    async def _read_steps(self, item: Renew) -> tuple[int, int]:
        (found,) = await self._send((Lookup(item.id),))
        _, (count, used) = _place_and_pending(item, self._pending)
        if not isinstance(found, Record):
            return count, used
        return count + len(found.steps), used + sum(len(value or b"") for _, value in found.steps)


def _place_and_pending(
    item: Renew, pending: dict[tuple[Id, bytes], tuple[int, int]]
) -> tuple[tuple[Id, bytes], tuple[int, int]]:
    place = (item.id, item.owner)
    return place, pending.get(place, (0, 0))


ClaimAccount: TypeAlias = tuple[Id, bytes, int | str]


class RenewalLimit:
    """Limits how often one claim is written: `renewals_max` times per lease, and `steps_max` times with a step.

    Each takes its part of the lease, and the time that passes gives it back; at most one lease can be taken ahead.
    A claim that its owner repeats is a renewal too. Clients of semel renew about four times per lease.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._taken_until: dict[ClaimAccount, float] = {}

    def take(self, item: Item) -> None:
        """Count a renewal. Raises `HttpProblem` if the claim was renewed too often."""
        if not isinstance(item, Claim | Renew):
            return
        account, lease_s, now = _account_of_claim(item), item.lease_us / 1e6, self._clock()
        until = max(now, self._taken_until.get(account, now)) + self._part_s(item)
        ahead_s = until - now - lease_s
        if ahead_s > ROUNDING_S:
            raise HttpProblem(
                429,
                "renewed-too-often",
                f"the claim of {item.id[2]!a} was renewed {self._most(item)} times within its lease of {lease_s:g} s;"
                f" it is still held: come back in {ahead_s:.3g} s, and renew a few times per lease",
                retry_after(ahead_s),
            )
        self._taken_until.pop(account, None)
        self._taken_until[account] = until
        if len(self._taken_until) > RENEWED_MAX:
            del self._taken_until[next(iter(self._taken_until))]

    def settle(self, item: Item, answer: Answer) -> None:
        """Give back what an item took if it changed nothing, such as a claim that has to wait for another."""
        if not isinstance(item, Claim | Renew) or isinstance(answer, Granted | Renewed):
            return
        account = _account_of_claim(item)
        until = self._taken_until.get(account)
        if until is not None:
            until -= self._part_s(item)
            if until <= self._clock():
                del self._taken_until[account]
            else:
                self._taken_until[account] = until

    def _part_s(self, item: Claim | Renew) -> float:
        return item.lease_us / 1e6 / self._most(item)

    def _most(self, item: Claim | Renew) -> int:
        with_step = isinstance(item, Renew) and item.step is not None
        return self._limits.steps_max if with_step else self._limits.renewals_max


def _account_of_claim(item: Claim | Renew) -> ClaimAccount:
    """Return the account: of the owner, so that nobody else can use it up."""
    if isinstance(item, Claim):
        return item.id, item.owner, "claim"
    return item.id, item.owner, item.fence if item.step is None else f"steps {item.fence}"
