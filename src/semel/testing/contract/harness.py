"""The tools of a scenario: commands, names, times and checks."""

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

from semel.core.commands import (
    Answer,
    Claim,
    Command,
    Count,
    Flow,
    Granted,
    Item,
    Lookup,
    Purge,
    Purged,
    Renew,
    Settle,
)
from semel.types import Id, Record, Stats

K = TypeVar("K")

LONG = 600
"""Units of a lease or window that must not end during the scenario."""
SHORT = 2
"""Units of a lease or window that the scenario lets end."""
OVER = 3
"""Units to advance so that a `SHORT` lease or window is over."""
FAR = 180
"""Units to advance so that a store which rounds its cleanup to a minute has something to clean."""
PURGES_MAX = 1000

Settled: TypeAlias = Literal["done", "failed"]
End: TypeAlias = Literal["done", "failed", "released", "unknown"]
SETTLED: tuple[Settled, ...] = ("done", "failed")
ENDS: tuple[End, ...] = ("done", "failed", "released", "unknown")

Need: TypeAlias = Literal["durable", "notifies", "endless", "refreshes", "manual"]
"""A requirement of a scenario on its store or harness; `manual`: a clock that the test moves."""


# --- commands -----------------------------------------------------------------------------------


class Send(Command[list[Answer]], frozen=True):
    """Send these items in one call. A scenario may also yield a single item itself."""

    items: Sequence[Item]


class AtOnce(Command[list[list[Answer]]], frozen=True):
    """Send each batch from its own thread or task, all starting together."""

    batches: Sequence[Sequence[Item]]


class Advance(Command[None], frozen=True):
    """Let this much of the store's time pass: move the clock, or wait for the store's own."""

    us: int


class StepBack(Command[None], frozen=True):
    """Set the manual clock back."""

    us: int


class Reopen(Command[None], frozen=True):
    """Close the store and continue with another store object on the same records."""


class StartWatching(Command[None], frozen=True):
    """Watch the store from here on."""


class StopWatching(Command[None], frozen=True):
    """Stop watching."""


class AwaitNotification(Command[bool], frozen=True):
    """Return whether a notification of this record comes within a few seconds; then drop all notifications."""

    id: Id


class ReadNotifications(Command[list[Id]], frozen=True):
    """Return the notifications so far, without waiting."""


# --- checks --------------------------------------------------------------------------------------


def brief(thing: object, chars_max: int = 300) -> str:
    """Return the `repr`, cut to a length."""
    text = repr(thing)
    return text if len(text) <= chars_max else f"{text[:chars_max]}... ({len(text)} characters)"


def check(holds: object, otherwise: str) -> None:
    """Raise `AssertionError` unless it holds; unlike `assert`, also under `python -O`."""
    if not holds:
        raise AssertionError(otherwise)


def equal(found: object, wanted: object, what: str) -> None:
    """Raise `AssertionError` unless the two are equal."""
    check(found == wanted, f"{what}: expected {brief(wanted)}, got {brief(found)}")


def expect(answer: object, kind: type[K], **fields: object) -> K:
    """Return the answer. Raises `AssertionError` unless it has this type and these fields."""
    check(isinstance(answer, kind), f"expected {kind.__name__}, got {brief(answer)}")
    for name, wanted in fields.items():
        equal(getattr(answer, name), wanted, f"{kind.__name__}.{name}")
    return cast(K, answer)


def grows(numbers: Sequence[int], what: str) -> None:
    """Raise `AssertionError` unless each number is greater than the one before."""
    check(
        all(low < high for low, high in pairwise(numbers)),
        f"{what} must grow strictly, got {list(numbers)}",
    )


# --- names and times ----------------------------------------------------------------------------


class HeldClaim(NamedTuple):
    """A granted claim, with the commands of its holder."""

    claim: Claim
    granted: Granted
    unit_us: int

    @property
    def fence(self) -> int:
        """The fence of this claim."""
        return self.granted.fence

    def settle(
        self,
        to: End = "done",
        value: bytes | None = None,
        *,
        delay: float = 0,
        **more: Any,
    ) -> Settle:
        """Settle the claim; `delay` in units, `more` overrides any field."""
        fields: dict[str, Any] = {
            "id": self.claim.id,
            "owner": self.claim.owner,
            "fence": self.fence,
            "window_us": self.claim.window_us,
            "lease_us": self.claim.lease_us,
            "sliding": self.claim.sliding,
            "delay_us": round(delay * self.unit_us),
            "event_time_us": self.claim.event_time_us if self.claim.apart_us else None,
        }
        return Settle(to=to, value=value, **(fields | more))

    def renew(self, lease: float = LONG, step: tuple[str, bytes | None] | None = None, **more: Any) -> Renew:
        """Renew the claim; `lease` in units, `more` overrides any field."""
        fields: dict[str, Any] = {"id": self.claim.id, "owner": self.claim.owner, "fence": self.fence}
        return Renew(lease_us=round(lease * self.unit_us), step=step, **(fields | more))


class ScenarioContext:
    """Unique names, so that many scenarios may share a server, and times in units of the harness."""

    def __init__(self, unit_us: int, *, manual: bool = True) -> None:
        self.unit_us = unit_us
        self.manual = manual
        self.tenant: str = f"contract-{os.urandom(6).hex()}"

    def us(self, units: float) -> int:
        """Return this many units in microseconds."""
        return round(units * self.unit_us)

    def id(self, key: str = "key", *, consumer: str = "consumer", tenant: str = "") -> Id:
        """Return the id of a record of this scenario."""
        return (self.tenant + tenant, consumer, key)

    def owner(self) -> bytes:
        """Return a new owner, as each claim call has one."""
        return os.urandom(16)

    def claim(
        self,
        key: str | Id = "key",
        *,
        owner: bytes | None = None,
        lease: float = LONG,
        window: float = LONG,
        **more: Any,
    ) -> Claim:
        """Return a claim by a new owner; `lease` and `window` in units, `more` overrides any field."""
        fields: dict[str, Any] = {"lease_us": self.us(lease), "window_us": self.us(window)}
        return Claim(
            id=self.id(key) if isinstance(key, str) else key, owner=owner or self.owner(), **(fields | more)
        )

    def hold(self, key: str | Id = "key", **more: Any) -> Flow[HeldClaim]:
        """Claim a key that must be free."""
        claim = self.claim(key, **more)
        granted = expect((yield from claim), Granted)
        return HeldClaim(claim, granted, self.unit_us)

    def finish(self, key: str | Id = "key", value: bytes | None = b"rvalue", **more: Any) -> Flow[HeldClaim]:
        """Claim a key that must be free, and complete it."""
        held = yield from self.hold(key, **more)
        yield from held.settle("done", value)
        return held

    def record(self, key: str | Id = "key") -> Flow[Record]:
        """Return the record of a key that must have one."""
        found = yield from Lookup(self.id(key) if isinstance(key, str) else key)
        return expect(found, Record)

    def records(self, *keys: str | Id) -> Flow[list[Record]]:
        """Return the records of keys that must have one each."""
        found = []
        for key in keys:
            found.append((yield from self.record(key)))
        return found

    def now(self) -> Flow[int]:
        """Return the store's time."""
        return expect((yield from Count(self.tenant)), Stats).now_us

    def later(self, units: float = OVER) -> Flow[None]:
        """Let this many units of the store's time pass."""
        yield from Advance(self.us(units))

    def much_later(self) -> Flow[None]:
        """Let `SHORT` times end; with a manual clock also pass the minute to which cleanup is rounded."""
        yield from Advance(self.us(FAR if self.manual else 2 * OVER))

    def purge(self) -> Flow[int]:
        """Purge until nothing more is due. Returns the number of removed records."""
        count = 0
        for _ in range(PURGES_MAX):
            purged = expect((yield from Purge()), Purged)
            count += purged.count
            if not purged.more:
                return count
        raise AssertionError(f"{PURGES_MAX} purges in a row have left more to do")


# --- the table ----------------------------------------------------------------------------------


class Scenario(NamedTuple):
    """One promise of the contract: a flow that sends commands to the store and checks its answers."""

    name: str
    about: str
    flow: Callable[[ScenarioContext], Flow[None]]
    needs: frozenset[Need] = frozenset()

    def __repr__(self) -> str:
        return self.name


SCENARIOS: dict[str, Scenario] = {}
"""All scenarios by name. `semel.testing.store_contract` fills it."""


def scenario(
    *needs: Need,
) -> Callable[[Callable[[ScenarioContext], Flow[None]]], Callable[[ScenarioContext], Flow[None]]]:
    """Add a flow to the table under its own name."""

    def enter(flow: Callable[[ScenarioContext], Flow[None]]) -> Callable[[ScenarioContext], Flow[None]]:
        name = flow.__name__
        check(name not in SCENARIOS, f"two scenarios are named {name}")
        SCENARIOS[name] = Scenario(name, (flow.__doc__ or "").strip(), flow, frozenset(needs))
        return flow

    return enter
