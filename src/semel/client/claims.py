"""A claim that the caller settles: the result of `claim` for a granted key."""

from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import Any, Self

from msgspec import Struct

from semel.codec import decode
from semel.core.commands import Claim, Granted
from semel.core.ids import idempotency_key
from semel.runtime.context import enter_by_hand, leave_by_hand
from semel.runtime.keeper import LiveClaim
from semel.runtime.reporter import DeliveryObserver

__all__ = ["ClaimActions", "Claimed", "ObservedClaim"]


class ClaimActions(Struct, frozen=True, eq=False):
    """The actions of a client that its claims call."""

    awaits: bool
    """Whether `settle` is awaited."""
    keeper: Callable[[], Any]
    """Returns the keeper that renews the caller's claims: that of its event loop, or of the client."""
    settle: Callable[["Claimed", BaseException | None], Any]
    """Settles a claim whose block has ended, with the error of the block."""


class Claimed:
    """The exclusive right to run. Settle it with `complete`, `fail` or `release`.

    `with claim:` renews it until the block ends. A block that succeeds completes it; a block that raises
    releases it (or fails it, as the policy says), unless it was settled inside. If a block succeeds but
    cannot be recorded, it raises `ClaimLost` or `NotRecorded`. Outside a block a claim is not renewed.
    """

    __slots__ = ("_actions", "_kept", "claim", "granted", "settled")

    def __init__(self, actions: ClaimActions, claim: Claim, granted: Granted, kept: LiveClaim) -> None:
        self._actions = actions
        self._kept = kept
        self.claim: Claim = claim
        self.granted: Granted = granted
        self.settled: bool = False

    def __repr__(self) -> str:
        return f"Claimed(key={self.key!r}, fence={self.fence}, attempt={self.attempt})"

    @property
    def observer(self) -> DeliveryObserver | None:
        """Reports its end to hooks, for a runner; `None`: the client reports it."""
        return None

    def with_observer(self, observer: DeliveryObserver) -> "ObservedClaim":
        """Return the same claim with an observer that reports its end."""
        return ObservedClaim(self._actions, self.claim, self.granted, self._kept, observer)

    @property
    def key(self) -> str:
        """The event's key."""
        return self.claim.id[2]

    @property
    def fence(self) -> int:
        """A number that grows with every claim of this key: a sink that remembers it can refuse stale workers."""
        return self.granted.fence

    @property
    def attempt(self) -> int:
        """The number of the attempt; 1 for the first."""
        return self.granted.attempt

    @property
    def first_seen_us(self) -> int:
        """When the event was first claimed: store clock, microseconds."""
        return self.granted.first_seen_us

    @property
    def journal(self) -> Any:
        """The payload stored with the claim, or `None`."""
        return None if self.granted.journal is None else decode(self.granted.journal)

    @property
    def idempotency_key(self) -> str:
        """A key for the systems you call: the same on every attempt."""
        return idempotency_key(self.claim.id)

    @property
    def deadline_s(self) -> float:
        """Seconds until the claim ends if it is not renewed."""
        return self._kept.deadline - monotonic()

    @property
    def lost(self) -> bool:
        """Whether the keeper found the claim lost: the handler must stop and have no more effects."""
        return self._kept.lost

    def __enter__(self) -> Self:
        if self._actions.awaits:
            raise TypeError("this claim belongs to an async client: write `async with claim:`")
        self._actions.keeper().keep(self._kept)
        enter_by_hand(self._kept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave_by_hand(self._kept)
        try:
            if not self.settled:
                self._actions.settle(self, error)
        finally:
            self._actions.keeper().drop(self.claim.owner)

    async def __aenter__(self) -> Self:
        self._actions.keeper().keep(self._kept)
        enter_by_hand(self._kept)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave_by_hand(self._kept)
        try:
            if not self.settled:
                await self._actions.settle(self, error)
        finally:
            self._actions.keeper().drop(self.claim.owner)


class ObservedClaim(Claimed):
    """A claim of a runner that reports to hooks."""

    __slots__ = ("_observer",)

    def __init__(
        self,
        actions: ClaimActions,
        claim: Claim,
        granted: Granted,
        kept: LiveClaim,
        observer: DeliveryObserver,
    ) -> None:
        super().__init__(actions, claim, granted, kept)
        self._observer = observer

    @property
    def observer(self) -> DeliveryObserver:
        """Reports its end to hooks."""
        return self._observer
