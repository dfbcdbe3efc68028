"""What happens to deliveries and stores, one small frozen object each, and how it reaches those who listen.

    received ─► claimed ─► began ─► ended ─► completed | failed | released | quarantined | lost | unrecorded
        │          └ expired (the lease could not be kept)
        ├─► busy ─► (waits) ─► claimed, or duplicate
        ├─► duplicate (redelivery, producer, race, reuse)
        ├─► late | unreachable | unguarded (ran without an answer of the store, by choice)
        ├─► probed (the other system was asked about an earlier attempt)
        └─► marked (modes mark and inbox: the mark is all there is)

A hook is any callable that takes one event. It runs in the thread or task of whoever did the thing, so it must be
quick; what it raises is logged once and never reaches the caller. Where nobody listens nothing of this is built.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from msgspec import Struct

from semel.runtime.process import logging
from semel.types import Stats

__all__ = [
    "Began",
    "BusyEvent",
    "ClaimedEvent",
    "CompletedEvent",
    "Counted",
    "DeadLetterStuck",
    "DeliveryEvent",
    "Dropped",
    "Duplicate",
    "EndedEvent",
    "Expired",
    "FailedEvent",
    "Hook",
    "HookEvent",
    "Hooks",
    "LateArrivalEvent",
    "LostEvent",
    "MarkedEvent",
    "Probed",
    "PurgedEvent",
    "Quarantined",
    "Reason",
    "Received",
    "Released",
    "StoreFailed",
    "StoreLost",
    "StoreSent",
    "Unguarded",
    "Unreachable",
    "Unrecorded",
]

Reason: TypeAlias = Literal["redelivery", "producer", "race", "reuse"]
"""Why a delivery is a duplicate: its source sent it again; its producer made it again; it came while the first one
was under way; its key was used with another payload."""


class HookEvent(Struct, frozen=True):
    """Anything that happens."""

    name: ClassVar[str] = ""
    """How logs and the history name it. It leaves the process, so it stays when a class is renamed."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.removesuffix("Event").lower()


class DeliveryEvent(HookEvent, frozen=True):
    """Something that happened to one delivery."""

    tenant: str
    consumer: str
    key: str
    owner: bytes
    """The random id of this one call: what tells two deliveries of a key apart."""
    handler: str = ""
    """The handler's name; empty for the plain verbs."""
    source: str = ""
    """Where the delivery came from, if its `Delivery` says so."""


class Received(DeliveryEvent, frozen=True):
    """A delivery came in."""

    event_type: str = ""
    meta: Mapping[str, str] | None = None
    """What came with it, to be kept with its record."""
    again: bool = False
    """It came in before and was kept in hand, as when it was busy elsewhere: count it once."""


class ClaimedEvent(DeliveryEvent, frozen=True):
    """The right to run is ours."""

    attempt: int = 1
    first_seen: int = 0
    """When the key was first claimed (store clock, microseconds)."""
    window_s: float = 0.0
    """How long it will be remembered."""


class Began(DeliveryEvent, frozen=True):
    """The handler is about to be called; told in its own thread and context."""

    attempt: int = 1


class EndedEvent(DeliveryEvent, frozen=True):
    """The handler returned, or raised; told in its own thread and context."""

    duration_s: float = 0.0
    error: BaseException | None = None


class BusyEvent(DeliveryEvent, frozen=True):
    """Another attempt holds the claim; this delivery waits for it, or is turned away."""

    retry_after_s: float = 0.0


class Duplicate(DeliveryEvent, frozen=True):
    """The event was known."""

    reason: Reason = "redelivery"
    state: str = ""
    """What was known: `done`, `failed`, `unknown`, `claimed`, `marked`."""
    lag_s: float | None = None
    """How long after the first delivery, by the store's clock; `None`: the store does not say."""
    suppressed: bool = True
    """False: observe mode, in which it ran all the same."""
    origin: Mapping[str, str] | None = None
    """What a hook left with the delivery that did the work, see `Hooks.carried`."""
    parked: bool = False
    """It is busy elsewhere and kept in hand: what it comes to follows, so do not count it yet."""


class CompletedEvent(DeliveryEvent, frozen=True):
    """The effect has happened, and the record says so."""


class MarkedEvent(DeliveryEvent, frozen=True):
    """The key was marked for the first time: mode mark, or an inbox. Whether its transaction commits is not known."""


class FailedEvent(DeliveryEvent, frozen=True):
    """The handler failed for good."""

    error: BaseException | str = ""


class Released(DeliveryEvent, frozen=True):
    """The handler failed this time, or was stopped: the event may run again."""

    error: BaseException | None = None
    retry_after_s: float = 0.0


class Quarantined(DeliveryEvent, frozen=True):
    """An attempt ended without saying what happened: somebody has to decide."""

    error: BaseException | None = None


class LostEvent(DeliveryEvent, frozen=True):
    """Another attempt took over while this one ran; nothing was overwritten."""


class Expired(DeliveryEvent, frozen=True):
    """This process could not keep a lease: renewals had no answer, or the handler took longer than `run_max_s`."""


class LateArrivalEvent(DeliveryEvent, frozen=True):
    """The event is older than what is remembered."""

    name: ClassVar[str] = "late"

    age_s: float = 0.0


class Unrecorded(DeliveryEvent, frozen=True):
    """The handler ran, but the store could not be told: a repeat may run again."""


class Unreachable(DeliveryEvent, frozen=True):
    """The store gave no answer, so nothing ran."""

    error: BaseException | None = None


class Unguarded(DeliveryEvent, frozen=True):
    """The store gave no answer, and by `Policy(on_unavailable="run")` the handler ran without a claim.

    Nothing is recorded: a duplicate runs too.
    """


class Probed(DeliveryEvent, frozen=True):
    """The policy's probe was asked whether an earlier attempt had its effect."""

    answer: str = ""
    """`happened`, `did_not_happen` or `cannot_tell`."""
    text: str = ""
    """Why it cannot tell."""
    duration_s: float = 0.0


class Dropped(DeliveryEvent, frozen=True):
    """The call was broken off by an interrupt before it came to an outcome."""


class DeadLetterStuck(DeliveryEvent, frozen=True):
    """A dead letter could not be written; its message stays at the broker, and it is tried again."""

    error: BaseException | None = None


class PurgedEvent(HookEvent, frozen=True):
    """Expired records were removed."""

    count: int
    lag_s: float
    partitions: int = 0


class Counted(HookEvent, frozen=True):
    """Somebody asked the store how much it holds."""

    stats: Stats


class StoreSent(HookEvent, frozen=True):
    """One round trip of the store: `op` is the kind of its items, `mixed` if there are several."""

    op: str
    items: int
    duration_s: float


class StoreFailed(HookEvent, frozen=True):
    """A round trip without an answer, or with errors for some of its items."""

    op: str
    error: BaseException


class StoreLost(HookEvent, frozen=True):
    """The store has lost records that it had: a completion found nothing, or the store says so itself."""


Hook: TypeAlias = Callable[[HookEvent], object]
"""Told of everything; must be quick. With a method `carry(received)` it may leave words with the record."""


class Hooks:
    """All that listen to one client, and how far the store's clock is from this computer's."""

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._hooks = tuple(hooks)
        self._carriers = tuple(carry for hook in self._hooks if (carry := getattr(hook, "carry", None)))
        self.carries: bool = bool(self._carriers)
        """Whether a hook leaves words with records, so that duplicates are asked for them."""
        self._broken: set[int] = set()
        self._ahead_us = 0

    def __call__(self, happening: HookEvent) -> None:
        """Tell everybody. A hook that raises is reported once, and told the next thing all the same."""
        for hook in self._hooks:
            try:
                hook(happening)
            except Exception as error:  # noqa: BLE001 - who only listens must not break what it listens to
                self._report(hook, error)

    def _report(self, hook: Hook, error: Exception) -> None:
        if id(hook) not in self._broken:
            self._broken.add(id(hook))
            logging.getLogger("semel").error(
                "a hook raised, which is reported once: %r", hook, exc_info=error
            )

    def record_metadata(self, received: Received) -> dict[str, str]:
        """What the hooks want kept with the record of this delivery, such as a `traceparent`."""
        kept: dict[str, str] = {}
        for carry in self._carriers:
            try:
                kept.update(carry(received) or {})
            except Exception as error:  # noqa: BLE001 - as above
                self._report(carry, error)
        return kept

    def note_time(self, store_us: int) -> None:
        """The store's clock says this now."""
        self._ahead_us = store_us - time.time_ns() // 1000

    def since_s(self, store_us: int) -> float | None:
        """How long ago an instant of the store's clock was, as far as its clock is known; `None`: no such instant."""
        if not store_us:
            return None
        return max(0.0, (time.time_ns() // 1000 + self._ahead_us - store_us) / 1e6)
