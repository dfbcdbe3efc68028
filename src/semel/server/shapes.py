"""What people send and read: the bodies of the endpoints for `curl`, in JSON."""

from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from semel.keys.limits import CONSUMER_BYTES_MAX, KEY_BYTES_MAX

__all__ = [
    "ClaimAsked",
    "ClaimOutcome",
    "ClaimOutcomes",
    "ClaimsAsked",
    "Completing",
    "Ending",
    "EventOutcome",
    "EventOutcomes",
    "Failing",
    "ClaimHandle",
    "Purging",
    "Releasing",
    "Renewing",
    "SettleReply",
    "SettleReplies",
    "WindowAsked",
]

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=CONSUMER_BYTES_MAX)]
Key: TypeAlias = Annotated[str, Meta(min_length=1, max_length=KEY_BYTES_MAX)]
Owner: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", description="128 random bits, in hex")]
Held: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=4096, description="What a granted claim was answered with")
]
Duration: TypeAlias = Annotated[str, Meta(min_length=1, max_length=32, description="Such as 30s, 15m, 24h")]


class ClaimAsked(Struct, frozen=True, forbid_unknown_fields=True):
    """One event that somebody wants to process."""

    key: Key
    owner: Owner | None = None
    """Give one, and a request repeated after a lost reply finds its own claim again."""
    event_type: Annotated[str, Meta(max_length=CONSUMER_BYTES_MAX)] = ""
    event_time: Annotated[datetime, Meta(tz=True)] | None = None
    fingerprint: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    """What the payload is known by: the same key with another one is a mismatch."""
    journal: Any = None
    """The payload, kept with the claim until it is finished."""


class ClaimsAsked(Struct, frozen=True, forbid_unknown_fields=True):
    """Claims of one consumer."""

    consumer: Name
    claims: Annotated[list[ClaimAsked], Meta(min_length=1)]
    lease: Duration = "30s"
    window: Duration = "24h"


class ClaimHandle(Struct, frozen=True, array_like=True):
    """What a claim's holder shows again: all that its next items need. No secret but its owner."""

    consumer: str
    key: str
    owner: bytes
    fence: int
    lease_us: int
    window_us: int
    event_type: str


class ClaimOutcome(Struct, frozen=True, omit_defaults=True):
    """What became of one claim; which fields there are depends on `outcome`."""

    key: str
    outcome: Literal[
        "claimed", "done", "failed", "busy", "mismatch", "late", "unknown", "unavailable", "refused"
    ]
    claim: str | None = None
    """claimed: to be sent with complete, renew, release or fail."""
    fence: int | None = None
    attempt: int | None = None
    lease_s: float | None = None
    idempotency_key: str | None = None
    """claimed: the same on every attempt; pass it on to what you call."""
    journal: Any = None
    value: Any = None
    """done: what was completed with."""
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
    """What every duplicate is answered with."""


class Failing(Struct, frozen=True, forbid_unknown_fields=True):
    """It failed for good."""

    claim: Held
    error: Annotated[str, Meta(max_length=4096)] = "failed"


class Releasing(Struct, frozen=True, forbid_unknown_fields=True):
    """It did not happen; anybody may try again."""

    claim: Held
    delay_s: Annotated[float, Meta(ge=0, le=43200)] = 0.0
    count_attempt: bool = True


class Renewing(Struct, frozen=True, forbid_unknown_fields=True):
    """It takes longer."""

    claim: Held


Ending: TypeAlias = Completing | Failing | Releasing | Renewing


class SettleReply(Struct, frozen=True, omit_defaults=True):
    """What became of one of them. `lost`: another attempt took over; nothing was overwritten."""

    outcome: Literal["completed", "renewed", "lost", "unavailable", "refused"]
    already: bool = False
    recreated: bool = False
    kept: bool = True
    """False: the value is too large to be kept; the key is done all the same."""
    lease_s: float | None = None
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
    """Move what is stored, too."""


class Purging(Struct, frozen=True, forbid_unknown_fields=True):
    """Removes what is over."""

    limit: Annotated[int, Meta(ge=1, le=100_000)] = 5000
    dry_run: bool = False


class EventOutcome(Struct, frozen=True, omit_defaults=True):
    """What became of one event."""

    status: Literal["accepted", "duplicate", "busy", "invalid"]
    """`busy`: not taken, send it again. `invalid`: no repetition cures it."""
    key: str = ""
    detail: str = ""
    retry_after_s: float | None = None


class EventOutcomes(Struct, frozen=True):
    """In the order of the events."""

    events: list[EventOutcome]
