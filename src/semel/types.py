"""The types of the protocol: outcomes, deliveries, records.

Outcomes are frozen and exhaustive: `match` them and end with `assert_never`.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from msgspec import Struct, field
from msgspec.structs import force_setattr

__all__ = [
    "Absent",
    "AttemptError",
    "Busy",
    "CannotTell",
    "Completed",
    "Delivery",
    "DidNotHappen",
    "Done",
    "ErrorInfo",
    "Errored",
    "Failed",
    "Forgotten",
    "Happened",
    "Id",
    "Inquiry",
    "Late",
    "Lost",
    "Mismatch",
    "Mode",
    "Outcome",
    "Probe",
    "ProbeAnswer",
    "Record",
    "Renewed",
    "SettleAnswer",
    "State",
    "Stats",
    "Unavailable",
    "Unknown",
]

T = TypeVar("T")

Id: TypeAlias = tuple[str, str, str]
"""What names a record: (tenant, consumer, key)."""

State: TypeAlias = Literal["claimed", "done", "failed", "unknown", "forgotten"]
Mode: TypeAlias = Literal["inbox", "lease", "quarantine", "mark", "transaction", "observe"]

FOREVER = 2**53 - 1
"""The expiry of records that only `resolve` ends; exact in JSON and in Lua's doubles."""


class Done(Struct, Generic[T], frozen=True, repr_omit_defaults=True):
    """The effect has happened, now or on an earlier delivery."""

    value: T
    """What the handler returned; for a duplicate the stored value."""
    replayed: bool = False
    """Whether an earlier delivery ran the handler."""
    kept: bool = True
    """False: the value was too large or not encodable, or the record was resolved meanwhile: duplicates lack it."""
    recorded: bool = True
    """False: the handler ran but the store could not record it; do not acknowledge the source."""
    reason: str = ""
    """Why the value was not stored; empty if it was, or if the policy stores none."""
    guarded: bool = True
    """False: the store could not be reached, and `Policy(on_unavailable="run")` let the handler run without a claim."""


class Failed(Struct, frozen=True):
    """The handler failed for good; the failure is stored and answers every duplicate."""

    error: BaseException
    """What the handler raised; for a duplicate a `HandlerFailed` with its kind and message."""
    replayed: bool = False
    """Whether it failed on an earlier delivery."""


class Errored(Struct, frozen=True):
    """The handler failed; the claim was released and the event may run again."""

    error: BaseException
    """What the handler raised."""
    attempt: int
    """Which attempt it was, counted from 1."""
    retry_after_s: float = 0.0
    """How long the key stays closed: `Policy.retry_delay_s`, doubled with each attempt."""


class Busy(Struct, frozen=True):
    """Another attempt holds the claim."""

    retry_after_s: float
    """When to ask again: the rest of its lease."""
    recoverable: bool = False
    """Whether its payload is journaled: if its worker dies, another one runs it without a redelivery."""


class Mismatch(Struct, frozen=True):
    """The key was used before with another payload. It says nothing about that record."""


class Lost(Struct, Generic[T], frozen=True):
    """Another attempt took over, or the record was forgotten; nothing was overwritten."""

    value: T | None = None
    """What the handler of this attempt returned; it is not stored."""


class Late(Struct, frozen=True):
    """The event is older than the window, so whether it ran before is not known."""

    age_s: float
    """By the store's clock; below zero for an event whose own time is too far ahead of it."""


class Unknown(Struct, frozen=True, rename={"since_us": "since"}):
    """The outcome of an attempt is unknown; `resolve` decides."""

    since_us: int
    """Since when: store clock, microseconds."""
    error: BaseException | None = None
    """What the handler raised, for the caller whose own attempt it was."""


class Unavailable(Struct, frozen=True):
    """The store did not answer this item."""

    error: BaseException
    """Why: a `StoreUnavailable` in most cases."""


Outcome: TypeAlias = Done[T] | Failed | Errored | Busy | Mismatch | Lost[T] | Late | Unknown | Unavailable
"""The outcome of one delivery."""


class Happened(Struct, Generic[T], frozen=True):
    """A probe's answer: the effect is there. `value`: what the handler would have returned."""

    value: T = None  # type: ignore[assignment]


class DidNotHappen(Struct, frozen=True):
    """A probe's answer: the effect is not there, and no call of an earlier attempt can still make it."""


class CannotTell(Struct, frozen=True):
    """A probe's answer: not known. Lease runs the handler again, quarantine leaves the decision to an operator."""

    reason: str = ""


ProbeAnswer: TypeAlias = Happened[T] | DidNotHappen | CannotTell


class Inquiry(Struct, frozen=True, kw_only=True, rename={"first_seen_us": "first_seen"}):
    """The argument of a probe: an event whose earlier attempt may have had its effect."""

    tenant: str
    consumer: str
    key: str
    idempotency_key: str
    """The value of `current().idempotency_key` in every attempt."""
    attempt: int
    """The attempt that asks, in mode lease; the one that ended without a result, in mode quarantine."""
    first_seen_us: int
    """When the event was first claimed: store clock, microseconds."""
    event_type: str = ""
    steps: tuple[str, ...] = ()
    """The steps that earlier attempts have noted: those effects have happened."""
    args: tuple[Any, ...] = ()
    """The handler's arguments."""
    kwargs: dict[str, Any] = {}


Probe: TypeAlias = Callable[[Inquiry], ProbeAnswer[Any] | Awaitable[ProbeAnswer[Any]]]


class Completed(Struct, frozen=True, rename={"at_us": "at"}):
    """The end of the attempt is recorded."""

    already: bool = False
    """Whether it was recorded before: the call was repeated."""
    recreated: bool = False
    """Whether the store had lost the record, and it was written again."""
    at_us: int = 0
    """When, by the store's clock."""
    kept: bool = True
    """False: it was recorded before with another value, which stays; somebody resolved the record meanwhile."""


class Renewed(Struct, frozen=True, rename={"lease_until_us": "lease_until"}):
    """The lease was extended."""

    lease_until_us: int
    """When it ends now: store clock, microseconds."""


class Forgotten(Struct, frozen=True):
    """The record is forgotten; a late completion of its run gets `Lost`."""

    fence: int


class Absent(Struct, frozen=True):
    """There is no record for this key."""


SettleAnswer: TypeAlias = Completed | Lost[Any] | Unavailable
"""The answer to a complete, fail or release."""


class Delivery(Struct, Generic[T], frozen=True, kw_only=True):
    """One delivery of an event: its key and the handler's arguments."""

    key: str
    body: T
    event_type: str = ""
    event_time_us: int | None = None
    """When it happened, in microseconds since 1970."""
    sliding_us: int | None = None
    """The window from its claim, instead of the consumer's; set by `keys.sliding`."""
    lateness_us: int | None = None
    """With `sliding_us`: event times decide, and this is how far one may be behind the store's clock."""
    fingerprint: bytes | None = None
    """Identifies the payload: two deliveries of one key must have the same."""
    journal: Any = None
    """Stored with the claim, for sources that never send again."""
    meta: dict[str, str] | None = None
    """Stored with the record, for operators."""
    source: str = ""
    """Where it came from, for metrics and traces: a topic, a queue."""
    redelivered: bool | None = None
    """Whether its source redelivers it; `None`: unknown. Reported to hooks only; never affects the outcome."""
    again: bool = False
    """Whether this delivery was tried before and held back. Reported to hooks only, which count it once."""


KIND_BYTES_MAX = 200
MESSAGE_BYTES_MAX = 1000
TRACEBACK_BYTES_MAX = 2000
WORKER_BYTES_MAX = 150
"""The most bytes of each part of a kept error. An error takes at most their sum, a record `ERRORS_MAX` errors."""
ERRORS_MAX = 5
"""How many errors a record keeps: those of its last attempts."""

_UNSAFE = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"  # noqa: PLR2004 - two digits are enough
    for code in (*range(32), *range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
"""Characters that move a terminal's cursor, end a line or turn the direction of text, as their escapes."""
_UNSAFE_IN_LINES = {code: escape for code, escape in _UNSAFE.items() if code not in (9, 10)}
_CUT = "…"


def escape_controls(text: str) -> str:
    """Return text of several lines with every other control character escaped, for a log."""
    return text.translate(_UNSAFE_IN_LINES)


def _bound(text: str, bytes_max: int, *, lines: bool = False, end: bool = False) -> str:
    """Return the text without control characters, as valid UTF-8, cut to a size; with `end` its end is kept."""
    cut = text[-bytes_max:] if end else text[:bytes_max]
    safe = escape_controls(cut) if lines else cut.translate(_UNSAFE)
    encoded = safe.encode("utf-8", "backslashreplace")
    if len(encoded) <= bytes_max and len(cut) == len(text):
        return encoded.decode()
    left = bytes_max - len(_CUT.encode())
    if end:
        return _CUT + encoded[-left:].decode("utf-8", "ignore")
    return encoded[:left].decode("utf-8", "ignore") + _CUT


class ErrorInfo(Struct, frozen=True, gc=False):
    """What is kept of an error. Its parts are cut to their size, and control characters in them are escaped."""

    kind: str
    """The class of the error, with its module."""
    message: str = ""
    traceback: str = ""
    """Places in the code, the most recent one last; before them those of the errors that led to it."""
    worker: str = ""
    """Where it ran: host, process id, and the id with which the owners of this process begin."""

    def __post_init__(self) -> None:
        force_setattr(self, "kind", _bound(self.kind, KIND_BYTES_MAX))
        force_setattr(self, "message", _bound(self.message, MESSAGE_BYTES_MAX, lines=True))
        force_setattr(self, "traceback", _bound(self.traceback, TRACEBACK_BYTES_MAX, lines=True, end=True))
        force_setattr(self, "worker", _bound(self.worker, WORKER_BYTES_MAX))


class AttemptError(Struct, frozen=True, gc=False, rename={"at_us": "at"}):
    """The error of one attempt, as its record keeps it."""

    attempt: int
    kind: str
    message: str = ""
    traceback: str = ""
    worker: str = ""
    at_us: int = 0
    """When the attempt ended: store clock, microseconds."""


class Record(
    Struct,
    frozen=True,
    gc=False,
    kw_only=True,
    rename={
        "lease_until_us": "lease_until",
        "expires_at_us": "expires_at",
        "first_seen_us": "first_seen",
        "settled_at_us": "settled_at",
        "anchor_us": "anchor",
        "horizon_us": "horizon",
    },
):
    """What a store keeps for one key. All times: the store's clock, microseconds."""

    id: Id
    """Tenant, consumer and key."""
    state: State
    """`claimed`, `done`, `failed`, `unknown` or `forgotten`."""
    owner: bytes
    """Empty: no owner (released or forgotten)."""
    fence: int
    """Grows with every claim; a settle with an older one is refused."""
    lease_until_us: int
    """When the claim ends; of a released one, when the key may be claimed again."""
    attempt: int
    """The number of the last attempt, counted from 1."""
    expires_at_us: int
    """When the record counts as absent."""
    first_seen_us: int
    """When the key was first claimed."""
    settled_at_us: int = 0
    """When it was completed or failed; 0: not yet."""
    value: bytes | None = None
    """Encoded value or error; `None`: not kept."""
    fingerprint: bytes | None = None
    """Identifies the payload."""
    steps: tuple[tuple[str, bytes | None], ...] = ()
    """The steps that were recorded: name and encoded value."""
    journal: bytes | None = None
    """The encoded payload, if the event is journaled."""
    event_type: str = ""
    """The type of the event; it may have a window of its own."""
    meta: bytes | None = None
    """What the caller noted about it, encoded."""
    quarantine: bool = False
    """Whether an attempt that breaks off makes it `unknown`."""
    sliding: bool = False
    """Whether its key comes from `keys.sliding`."""
    anchor_us: int | None = None
    """The accepted event's own time, if event times distinguish equal keys."""
    horizon_us: int = 0
    """With an anchor: when it may be removed, because later copies count as late."""
    errors: tuple[AttemptError, ...] = ()
    """The errors of its last attempts, the oldest first. They stay when a later attempt succeeds."""

    @property
    def tenant(self) -> str:
        """The tenant; empty without tenants."""
        return self.id[0]

    @property
    def consumer(self) -> str:
        """The consumer that processes the event."""
        return self.id[1]

    @property
    def key(self) -> str:
        """What makes two deliveries the same event."""
        return self.id[2]


class Stats(Struct, frozen=True, kw_only=True, rename={"now_us": "now"}):
    """How many records a store holds, by state and by consumer."""

    now_us: int
    states: dict[str, int] = field(default_factory=dict[str, int])
    """`released`: claims without an owner. Their attempt failed, and the next delivery runs."""
    consumers: dict[str, int] = field(default_factory=dict[str, int])
    marks: int = 0
    expired: int = 0
    """Past their expiry and not yet purged."""
    purge_lag_s: float = 0.0
    """How long the oldest of those has been waiting."""
    bytes_used: int | None = None
    tiers: dict[str, float] = field(default_factory=dict[str, float])
    """For a tiered store: the answers of each tier by name; empty for others."""
    ahead_s: float | None = None
    """How far ahead partitions exist; `None`: the store has none."""
