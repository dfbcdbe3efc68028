"""JSON bodies of requests and responses of the endpoints for `curl`, and their checks."""

import re
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from semel.core.commands import (
    Admit,
    Claim,
    Count,
    Forget,
    Item,
    Lookup,
    Mark,
    Purge,
    ReadSettings,
    Renew,
    Resolve,
    Scan,
    Settle,
    SetWindow,
    SwitchMode,
)
from semel.core.ids import check_kind
from semel.errors import RecordCorrupt, SemelError
from semel.ingest.intake import body_from_journal
from semel.keys.limits import CONSUMER_BYTES_MAX, KEY_BYTES_MAX, check_all, check_consumer
from semel.keys.limits import check as check_key
from semel.policy import LEASE_MAX_S
from semel.runtime.process import OWNER_BYTES
from semel.server.problems import HttpProblem, problem_of
from semel.server.settings import Limits

__all__ = [
    "ClaimAsked",
    "ClaimHandle",
    "ClaimOutcome",
    "ClaimOutcomes",
    "ClaimsAsked",
    "Completing",
    "Ending",
    "EventOutcome",
    "EventOutcomes",
    "Failing",
    "Purging",
    "Releasing",
    "Renewing",
    "SettleReplies",
    "SettleReply",
    "WindowAsked",
    "check",
    "check_event_journal",
]

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=CONSUMER_BYTES_MAX)]
Key: TypeAlias = Annotated[str, Meta(min_length=1, max_length=KEY_BYTES_MAX)]
Owner: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", description="128 random bits, in hex")]
Held: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=4096, description="The handle of a granted claim")
]
Duration: TypeAlias = Annotated[str, Meta(min_length=1, max_length=32, description="Such as 30s, 15m, 24h")]


class ClaimAsked(Struct, frozen=True, forbid_unknown_fields=True):
    """One event to claim."""

    key: Key
    owner: Owner | None = None
    """If given, a request that is repeated after a lost reply finds its own claim again."""
    event_type: Annotated[str, Meta(max_length=CONSUMER_BYTES_MAX)] = ""
    event_time: Annotated[datetime, Meta(tz=True)] | None = None
    fingerprint: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    """Identifies the payload: the same key with another fingerprint is a mismatch."""
    journal: Any = None
    """The payload, stored with the claim until it is settled."""


class ClaimsAsked(Struct, frozen=True, forbid_unknown_fields=True):
    """Claims of one consumer."""

    consumer: Name
    claims: Annotated[list[ClaimAsked], Meta(min_length=1)]
    lease: Duration = "30s"
    window: Duration = "24h"


class ClaimHandle(Struct, frozen=True, array_like=True):
    """The handle that a claim's owner sends with its next requests. Only the owner in it is secret."""

    consumer: str
    key: str
    owner: bytes
    fence: int
    lease_us: int
    window_us: int
    event_type: str


class ClaimOutcome(Struct, frozen=True, omit_defaults=True):
    """The answer to one claim; its fields depend on `outcome`."""

    key: str
    outcome: Literal[
        "claimed", "done", "failed", "busy", "mismatch", "late", "unknown", "unavailable", "refused"
    ]
    claim: str | None = None
    """claimed: send it with complete, renew, release or fail."""
    fence: int | None = None
    attempt: int | None = None
    lease_s: float | None = None
    idempotency_key: str | None = None
    """claimed: the same on every attempt; pass it to the systems that you call."""
    journal: Any = None
    value: Any = None
    """done: the value of the completion."""
    kept: bool = True
    error: dict[str, str] | None = None
    retry_after_s: float | None = None
    recoverable: bool = False
    age_s: float | None = None
    detail: str = ""


class ClaimOutcomes(Struct, frozen=True):
    """In the order of the claims."""

    outcomes: list[ClaimOutcome]


class Completing(Struct, frozen=True, forbid_unknown_fields=True):
    """The effect has happened."""

    claim: Held
    value: Any = None
    """The value for every duplicate."""


ErrorName = Annotated[str, Meta(max_length=256)]


class Failing(Struct, frozen=True, forbid_unknown_fields=True):
    """The event failed and must not run again."""

    claim: Held
    error: Annotated[str, Meta(max_length=4096)] = "failed"
    kind: ErrorName = ""
    """The class of the error; empty: `reported`."""
    traceback: Annotated[str, Meta(max_length=16384)] = ""
    worker: ErrorName = ""


class Releasing(Struct, frozen=True, forbid_unknown_fields=True):
    """The effect did not happen; the event may run again."""

    claim: Held
    delay_s: Annotated[float, Meta(ge=0, le=43200)] = 0.0
    count_attempt: bool = True
    error: Annotated[str, Meta(max_length=4096)] = ""
    """Why it failed, kept in the record for operators; empty, and without a kind: no error is kept."""
    kind: ErrorName = ""
    traceback: Annotated[str, Meta(max_length=16384)] = ""
    worker: ErrorName = ""


class Renewing(Struct, frozen=True, forbid_unknown_fields=True):
    """The claim must be extended."""

    claim: Held


Ending: TypeAlias = Completing | Failing | Releasing | Renewing


class SettleReply(Struct, frozen=True, omit_defaults=True):
    """The answer to one settlement. `lost`: another attempt took over; nothing was overwritten."""

    outcome: Literal["completed", "renewed", "lost", "unavailable", "refused"]
    already: bool = False
    recreated: bool = False
    kept: bool = True
    """False: the value is too large to be stored, or the record was resolved first with another; the key is done."""
    lease_s: float | None = None
    retry_after_s: float | None = None
    """refused: when to send the same again, if it helps."""
    detail: str = ""


class SettleReplies(Struct, frozen=True):
    """In the order of the claims."""

    outcomes: list[SettleReply]


class WindowAsked(Struct, frozen=True, forbid_unknown_fields=True):
    """How long finished keys are remembered."""

    consumer: Name
    window: Duration | None
    """Such as 24h, a preset, `off`; null removes it."""
    event_type: Annotated[str, Meta(max_length=CONSUMER_BYTES_MAX)] = ""
    existing: bool = False
    """Also change existing records."""


class Purging(Struct, frozen=True, forbid_unknown_fields=True):
    """Removes expired records."""

    limit: Annotated[int, Meta(ge=1, le=100_000)] = 5000
    dry_run: bool = False


class EventOutcome(Struct, frozen=True, omit_defaults=True):
    """The answer to one event."""

    status: Literal["accepted", "duplicate", "busy", "invalid"]
    """`busy`: not accepted, send it again. `invalid`: do not send it again."""
    key: str = ""
    detail: str = ""
    retry_after_s: float | None = None


class EventOutcomes(Struct, frozen=True):
    """In the order of the events."""

    events: list[EventOutcome]


INSTANT_MAX = 2**53 - 1
"""The largest time or fence that is exact in every store and in JSON."""
TEXT_BYTES_MAX = 128
"""The longest event type and step name."""
CURSOR_CHARS_MAX = 64 * 1024
FINGERPRINT_BYTES_MAX = 64
SCAN_MAX = 1000
PURGE_MAX = 100_000
DELAY_MAX_US = round(LEASE_MAX_S * 1e6)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def check(item: Item, limits: Limits) -> None:
    """Check an item. Raises `HttpProblem` if it is out of bounds."""
    try:
        _CHECKS[type(item)](item, limits)
    except SemelError as error:
        raise problem_of(error) from error


def check_event_journal(item: Item, events_consumer: str) -> None:
    """Check a journal. Raises `HttpProblem` if the service could not run it as an event after its owner dies."""
    if isinstance(item, Claim) and item.id[1] == events_consumer:
        try:
            body_from_journal(item.journal)
        except RecordCorrupt:
            raise HttpProblem(
                422,
                "unreadable-journal",
                f"a journal of consumer {events_consumer!r} is run as an event and holds its bytes; send events to"
                " /v1/events, or use another consumer",
            ) from None


def _claim(item: Claim, limits: Limits) -> None:
    _place(item.id)
    _owner(item.owner)
    _lease(item.lease_us, limits)
    _window(item.window_us, limits)
    _short(item.event_type, "event_type")
    _size(item.fingerprint, FINGERPRINT_BYTES_MAX, "fingerprint")
    _size(item.journal, limits.value_bytes_max, "journal")
    _size(item.meta, limits.value_bytes_max, "meta")
    _instant(item.event_time_us, "event_time_us", -INSTANT_MAX)
    _window(item.apart_us, limits)


def _renew(item: Renew, limits: Limits) -> None:
    _place(item.id)
    _size(item.owner, OWNER_BYTES, "owner")
    _instant(item.fence, "fence")
    _lease(item.lease_us, limits)
    if item.step is not None:
        name, value = item.step
        _short(name, "the name of a step", least=1)
        _size(value, limits.value_bytes_max, "the value of a step")


def _settle(item: Settle, limits: Limits) -> None:
    _place(item.id)
    _size(item.owner, OWNER_BYTES, "owner")
    _instant(item.fence, "fence")
    _size(item.value, limits.value_bytes_max, "value")
    _window(item.window_us, limits)
    _range(item.lease_us, 0, limits.lease_max_us, "lease_us")
    _range(item.delay_us, 0, DELAY_MAX_US, "delay_us")
    _instant(item.event_time_us, "event_time_us", -INSTANT_MAX)


def _mark(item: Mark, limits: Limits) -> None:
    _names(item.tenant, item.consumer)
    if len(item.keys) > limits.batch_items_max:
        raise HttpProblem(
            413, "too-many", f"a mark takes {limits.batch_items_max} keys at once, not {len(item.keys)}"
        )
    check_all(item.keys)
    if len(set(item.keys)) != len(item.keys):
        raise _out("the keys of a mark differ from one another")
    _window(item.window_us, limits)


def _lookup(item: Lookup, _limits: Limits) -> None:
    _place(item.id)


def _forget(item: Forget, _limits: Limits) -> None:
    _place(item.id)
    _instant(item.fence, "fence")


def _resolve(item: Resolve, limits: Limits) -> None:
    _place(item.id)
    _instant(item.fence, "fence")
    _size(item.value, limits.value_bytes_max, "value")
    _window(item.window_us, limits)
    if item.to == "claimed":
        _owner(item.owner)
        _lease(item.lease_us, limits)


def _scan(item: Scan, _limits: Limits) -> None:
    if item.tenant:
        check_consumer(item.tenant)
    if item.consumer is not None:
        check_consumer(item.consumer)
    _short(item.prefix, "prefix", KEY_BYTES_MAX)
    _instant(item.seen_before, "seen_before")
    _range(item.limit, 1, SCAN_MAX, "limit")
    if item.cursor is not None and (len(item.cursor) > CURSOR_CHARS_MAX or not item.cursor.isprintable()):
        raise _out("the cursor is not one of this server")


def _purge(item: Purge, _limits: Limits) -> None:
    _range(item.limit, 1, PURGE_MAX, "limit")


def _count(item: Count, _limits: Limits) -> None:
    if item.tenant:
        check_consumer(item.tenant)


def _nothing(_item: ReadSettings, _limits: Limits) -> None:
    """Check an item without bounds."""


def _set_window(item: SetWindow, limits: Limits) -> None:
    _names(item.tenant, item.consumer)
    _short(item.event_type, "event_type")
    if item.window_us is not None:
        _window(item.window_us, limits)


def _admit(item: Admit, _limits: Limits) -> None:
    _names(item.tenant, item.consumer)
    if item.ids:
        check_kind(item.ids)


def _switch_mode(item: SwitchMode, _limits: Limits) -> None:
    _names(item.tenant, item.consumer)


_CHECKS: dict[type, Callable[[Any, Limits], None]] = {
    Claim: _claim,
    Renew: _renew,
    Settle: _settle,
    Mark: _mark,
    Lookup: _lookup,
    Forget: _forget,
    Resolve: _resolve,
    Scan: _scan,
    Purge: _purge,
    Count: _count,
    ReadSettings: _nothing,
    SetWindow: _set_window,
    Admit: _admit,
    SwitchMode: _switch_mode,
}

# --- one field each -----------------------------------------------------------------------------


def _place(record_id: tuple[str, str, str]) -> None:
    _names(record_id[0], record_id[1])
    check_key(record_id[2])


def _names(tenant: str, consumer: str) -> None:
    if tenant:
        check_consumer(tenant)
    check_consumer(consumer)


def _owner(owner: bytes) -> None:
    if len(owner) != OWNER_BYTES:
        raise _out(f"owner has {len(owner)} bytes; it is {OWNER_BYTES} random ones, new for every call")


def _lease(lease_us: int, limits: Limits) -> None:
    _range(lease_us, limits.lease_min_us, limits.lease_max_us, "lease_us")


def _window(window_us: int, limits: Limits) -> None:
    _range(window_us, 0, limits.window_max_us, "a window, in microseconds,")


def _instant(number: int | None, what: str, least: int = 0) -> None:
    if number is not None:
        _range(number, least, INSTANT_MAX, what)


def _range(number: int, least: int, most: int, what: str) -> None:
    if not least <= number <= most:
        raise _out(f"{what} is {number}; it must be between {least} and {most}")


def _short(text: str, what: str, bytes_max: int = TEXT_BYTES_MAX, *, least: int = 0) -> None:
    if not least <= len(text.encode()) <= bytes_max or _CONTROL.search(text):
        raise _out(f"{what} must have {least} to {bytes_max} bytes and no control characters")


def _size(data: bytes | None, bytes_max: int, what: str) -> None:
    if data is not None and len(data) > bytes_max:
        raise HttpProblem(413, "value-too-large", f"{what} has {len(data)} bytes; {bytes_max} are allowed")


def _out(detail: str) -> HttpProblem:
    return HttpProblem(422, "out-of-bounds", detail)
