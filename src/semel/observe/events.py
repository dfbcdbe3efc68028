"""Hook events of deliveries and stores, one small frozen class each, and the calls to the hooks.

    received ─► claimed ─► began ─► ended ─► completed | failed | released | quarantined | lost | unrecorded
        │          └ expired (the lease could not be kept)
        ├─► busy ─► (waits) ─► claimed, or duplicate
        ├─► duplicate (redelivery, producer, race, reuse)
        ├─► late | unreachable | unguarded (ran without a claim, by policy)
        ├─► probed (the policy's probe answered about an earlier attempt)
        ├─► dead_letter (the message was given up, and its copy was written)
        └─► marked (modes mark and inbox)

A hook is any callable that takes one event. It runs in the thread or task where the event happens, so it must be
quick; its errors are logged once and never reach the caller. Without hooks no event is built.
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
    "DeadLettered",
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
    """The base of all hook events."""

    name: ClassVar[str] = ""
    """The name in logs and in the history. It leaves the process, so it stays when a class is renamed."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.removesuffix("Event").lower()


class TypedEvent(HookEvent, frozen=True, kw_only=True):
    """The base of events with an event type, which comes last: positional arguments stay where they were."""

    event_type: str = ""
    """The type of the delivered event; empty if it has none."""


class DeliveryEvent(TypedEvent, frozen=True):
    """Something that happened to one delivery."""

    tenant: str
    consumer: str
    key: str
    owner: bytes
    """The random id of this call; it differs between two deliveries of a key."""
    handler: str = ""
    """The handler's module and name, such as `app.charge`; empty for the plain verbs."""
    source: str = ""
    """Where the delivery came from, if its `Delivery` says so."""


class Received(DeliveryEvent, frozen=True):
    """A delivery came in."""

    meta: Mapping[str, str] | None = None
    """The delivery's metadata, stored with its record."""
    again: bool = False
    """The delivery was received before and held back, for example while busy: count it once."""


class ClaimedEvent(DeliveryEvent, frozen=True):
    """The delivery got the claim."""

    attempt: int = 1
    """More than 1: earlier attempts failed, or ended with their worker and this one takes over."""
    first_seen: int = 0
    """When the key was first claimed (store clock, microseconds)."""
    window_s: float = 0.0
    """How long the key will be remembered."""


class Began(DeliveryEvent, frozen=True):
    """The handler is about to be called; reported in its own thread and context."""

    attempt: int = 1


class EndedEvent(DeliveryEvent, frozen=True):
    """The handler returned or raised; reported in its own thread and context."""

    duration_s: float = 0.0
    error: BaseException | None = None


class BusyEvent(DeliveryEvent, frozen=True):
    """Another attempt holds the claim; this delivery waits for it or returns `Busy`."""

    retry_after_s: float = 0.0


class Duplicate(DeliveryEvent, frozen=True):
    """The event was seen before."""

    reason: Reason = "redelivery"
    state: str = ""
    """The state of its record: `done`, `failed`, `unknown`, `claimed`, `marked`."""
    lag_s: float | None = None
    """How long after the first delivery, by the store's clock; `None`: the store does not say."""
    suppressed: bool = True
    """False in mode observe: the duplicate ran."""
    origin: Mapping[str, str] | None = None
    """Metadata that hooks stored with the first delivery, see `Hooks.record_metadata`."""
    parked: bool = False
    """The delivery is held back because the key is busy; its outcome follows, so do not count it yet."""


class CompletedEvent(DeliveryEvent, frozen=True):
    """The handler completed, and the record is `done`."""


class MarkedEvent(DeliveryEvent, frozen=True):
    """The key was marked for the first time: mode mark, or an inbox. Whether its transaction commits is not known."""


class FailedEvent(DeliveryEvent, frozen=True):
    """The handler failed, and the event will not run again."""

    error: BaseException | str = ""
    attempt: int = 0
    """The number of the attempt; 0: unknown."""


class Released(DeliveryEvent, frozen=True):
    """The handler failed or was stopped: the event may run again."""

    error: BaseException | None = None
    retry_after_s: float = 0.0
    attempt: int = 0
    """The number of the attempt; 0: unknown."""


class Quarantined(DeliveryEvent, frozen=True):
    """The outcome of an attempt is unknown: an operator has to resolve it."""

    error: BaseException | None = None


class LostEvent(DeliveryEvent, frozen=True):
    """Another attempt took over while this one ran; nothing was overwritten."""


class Expired(DeliveryEvent, frozen=True):
    """This process could not keep a lease: renewals had no answer, or the handler took longer than `run_max_s`."""


class LateArrivalEvent(DeliveryEvent, frozen=True):
    """The event is older than the window."""

    name: ClassVar[str] = "late"

    age_s: float = 0.0


class Unrecorded(DeliveryEvent, frozen=True):
    """The handler ran, but the store could not record it: a duplicate may run again."""


class Unreachable(DeliveryEvent, frozen=True):
    """The store did not answer, so nothing ran."""

    error: BaseException | None = None


class Unguarded(DeliveryEvent, frozen=True):
    """The store did not answer, and by `Policy(on_unavailable="run")` the handler ran without a claim.

    Nothing is recorded: a duplicate runs too.
    """


class Probed(DeliveryEvent, frozen=True):
    """The policy's probe answered whether an earlier attempt had its effect."""

    answer: str = ""
    """`happened`, `did_not_happen` or `cannot_tell`."""
    text: str = ""
    """Why it cannot tell."""
    duration_s: float = 0.0


class Dropped(DeliveryEvent, frozen=True):
    """An interrupt ended the call before it had an outcome."""


class DeadLettered(DeliveryEvent, frozen=True):
    """A message was given up, and its dead letter was written."""

    name: ClassVar[str] = "dead_letter"

    reason: str = ""
    """`failed`, `unknown`, `mismatch`, `late` or `no-key`."""
    attempts: int = 0
    error: BaseException | str = ""


class DeadLetterStuck(DeliveryEvent, frozen=True):
    """A dead letter could not be written; its message stays at the broker, and the write is retried."""

    error: BaseException | None = None


class PurgedEvent(HookEvent, frozen=True):
    """Expired records were removed."""

    count: int
    lag_s: float
    partitions: int = 0


class Counted(HookEvent, frozen=True):
    """`records.stats()` was called."""

    stats: Stats


class StoreSent(HookEvent, frozen=True):
    """One round trip of the store: `op` is the kind of its items, `mixed` if there are several."""

    op: str
    items: int
    duration_s: float


class StoreFailed(HookEvent, frozen=True):
    """A round trip had no answer, or errors for some of its items."""

    op: str
    error: BaseException


class StoreLost(HookEvent, frozen=True):
    """The store has lost records: a completion found no record, or the store reports it."""


Hook: TypeAlias = Callable[[HookEvent], object]
"""Receives every event; must be quick. An optional method `carry(received)` returns metadata for the record."""


class Hooks:
    """The hooks of one client, and the offset of the store's clock."""

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._hooks = tuple(hooks)
        self._carriers = tuple(carry for hook in self._hooks if (carry := getattr(hook, "carry", None)))
        self.carries: bool = bool(self._carriers)
        """Whether a hook stores metadata with records, so that duplicates read it."""
        self._broken: set[int] = set()
        self._ahead_us = 0

    def __call__(self, happening: HookEvent) -> None:
        """Call every hook. A hook that raises is logged once, and still gets the next event."""
        for hook in self._hooks:
            try:
                hook(happening)
            except Exception as error:  # noqa: BLE001 - who only listens must not break what it listens to
                self._report(hook, error)

    def _report(self, hook: Hook, error: Exception) -> None:
        if id(hook) not in self._broken:
            self._broken.add(id(hook))
            logging.getLogger("semel").error("a hook raised an error (logged once): %r", hook, exc_info=error)

    def record_metadata(self, received: Received) -> dict[str, str]:
        """Return the hooks' metadata for the record of this delivery, such as a `traceparent`."""
        kept: dict[str, str] = {}
        for carry in self._carriers:
            try:
                kept.update(carry(received) or {})
            except Exception as error:  # noqa: BLE001 - as above
                self._report(carry, error)
        return kept

    def note_time(self, store_us: int) -> None:
        """Set the store's clock from an answer of the store."""
        self._ahead_us = store_us - time.time_ns() // 1000

    def since_s(self, store_us: int) -> float | None:
        """Return the time since an instant of the store's clock, estimated; `None` for no instant."""
        if not store_us:
            return None
        return max(0.0, (time.time_ns() // 1000 + self._ahead_us - store_us) / 1e6)
