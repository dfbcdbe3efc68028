"""Messages of an outbox: their limits, and their attributes as a CloudEvent."""

import re
import sys
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from typing import Any
from uuid import UUID

import msgspec

from semel.core.ids import scope
from semel.core.relay_flow import OutboxRow
from semel.errors import UsageError, ValueNotEncodable, ValueTooLarge
from semel.types import Id

__all__ = [
    "ID_NAME_BYTES_MAX",
    "Draft",
    "Message",
    "attributes",
    "check_id",
    "id_for_event",
    "iso_time",
    "make_draft",
    "new_id",
]

NAME_BYTES_MAX = 255
"""The longest type, aggregate or destination: every broker takes it as a name."""
HEADERS_MAX = 32
HEADERS_BYTES_MAX = 8 * 1024
_HEADER = re.compile(r"[a-z0-9][a-z0-9_-]{0,126}")
_RESERVED = re.compile(
    r"(?:ce[-_]|cloudevents|webhook-|content-|nats-|x-|data$|message_id$|traceparent$|host$|connection$"
    r"|transfer-encoding$|authorization$|user-agent$)"
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Message(msgspec.Struct, frozen=True):
    """A message to be published once the transaction around it commits."""

    type: str
    """What happened, as `order.taken`: the CloudEvents type."""
    data: Any = None
    """The body: bytes and text go out as they are, anything else as JSON."""
    aggregate: tuple[str, str] | None = None
    """Type and id of what the message is about: `("order", "42")`.

    Messages of one aggregate are published in the order of writing, if your code lets only one transaction at a time
    write them.
    """
    destination: str = ""
    """Topic, queue, subject or stream; else the relay's own."""
    headers: Mapping[str, str] = {}
    """More headers, beside those of CloudEvents."""
    source: str = ""
    """CloudEvents source; else the consumer's name."""
    subject: str = ""
    """CloudEvents subject."""
    content_type: str = ""
    """Of the body; else by the type of `data`."""
    traceparent: str = ""
    """W3C trace context; else that of the current OpenTelemetry span, if there is one."""
    not_before: datetime | None = None
    """It is not published earlier, and does not block the messages behind it."""
    id: UUID | str | None = None
    """A UUID of your own; else one is made. A second message with an id that is in the outbox is not written again."""


class Draft(msgspec.Struct, frozen=True):
    """A checked and encoded message: the values of the caller's columns."""

    not_before: int | None
    aggregate_type: str | None
    aggregate_id: str | None
    event_type: str
    source: str
    subject: str | None
    destination: str
    content_type: str
    traceparent: str | None
    headers: str
    payload: bytes


def make_draft(message: Message, source: str, bytes_max: int) -> Draft:
    """Check and encode a message. Raises `UsageError` or `ValueInvalid` for one that no broker accepts."""
    kind, identity = message.aggregate or (None, None)
    payload, content_type = _encode(message.data)
    if len(payload) > bytes_max:
        raise ValueTooLarge(
            f"the payload has {len(payload):,} bytes, {bytes_max:,} are allowed; put large data elsewhere and send"
            " a reference to it"
        )
    if message.traceparent and not _TRACEPARENT.fullmatch(message.traceparent):
        raise UsageError(f"{message.traceparent!r} is not a traceparent: 00-<32 hex digits>-<16>-<2>")
    return Draft(
        not_before=None if message.not_before is None else _time_us(message.not_before),
        aggregate_type=None if kind is None else _name("the aggregate's type", kind),
        aggregate_id=None if identity is None else _name("the aggregate's id", identity),
        event_type=_name("the type", message.type),
        source=_name("the source", message.source or source),
        subject=_name("the subject", message.subject) if message.subject else None,
        destination=_name("the destination", message.destination) if message.destination else "",
        content_type=_name("the content type", message.content_type or content_type),
        traceparent=message.traceparent or current_traceparent(),
        headers=_headers(message.headers),
        payload=payload,
    )


def check_id(message: Message) -> UUID | None:
    """Return the caller's own id, if any. Raises `UsageError` if it is not a UUID."""
    given = message.id
    if given is None or isinstance(given, UUID):
        return given
    try:
        if not isinstance(given, str):
            raise TypeError  # noqa: TRY301 - one refusal for both
        return UUID(given)
    except (TypeError, ValueError):
        raise UsageError(
            f"a message's id is a UUID, not {given!r:.100}; make one of your own name by uuid.uuid5(namespace, name)"
        ) from None


def current_traceparent() -> str | None:
    """Return the current OpenTelemetry span, if the program has imported OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return None
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def _encode(data: Any) -> tuple[bytes, str]:
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data), "application/octet-stream"
    if isinstance(data, str):
        return data.encode(), "text/plain; charset=utf-8"
    try:
        return msgspec.json.encode(data), "application/json"
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ValueNotEncodable(
            f"the data cannot be written as JSON: {error}; give plain data or bytes"
        ) from error


def _name(what: str, given: object) -> str:
    if not isinstance(given, str) or not 0 < len(given.encode(errors="replace")) <= NAME_BYTES_MAX:
        raise UsageError(f"{what} takes 1 to {NAME_BYTES_MAX} bytes of text, not {given!r:.100}")
    if _CONTROL.search(given):
        raise UsageError(f"{what} has control characters: {given!r:.100}")
    return given


def _headers(headers: Mapping[str, Any]) -> str:
    if not headers:
        return "{}"
    for name, value in headers.items():
        if not _HEADER.fullmatch(name) or _RESERVED.match(name):
            raise UsageError(
                f"{name!r} is not a valid header name: use lower case letters, digits, - and _; what begins"
                " with ce-, content-, webhook-, nats- and x- is the relay's"
            )
        if not isinstance(value, str) or _CONTROL.search(value):
            raise UsageError(f"the header {name} must be text without control characters, not {value!r:.100}")
    text = msgspec.json.encode(dict(headers)).decode()
    if len(headers) > HEADERS_MAX or len(text.encode()) > HEADERS_BYTES_MAX:
        raise UsageError(f"at most {HEADERS_MAX} headers of {HEADERS_BYTES_MAX:,} bytes together")
    return text


def _time_us(at: datetime) -> int:
    if at.tzinfo is None:
        raise UsageError(f"not_before is {at}, without a time zone; write datetime.now(timezone.utc) + ...")
    return round(at.timestamp() * 1_000_000)


def attributes(row: OutboxRow) -> dict[str, str]:
    """Return the row as attributes of a CloudEvent; each binding adds `datacontenttype` and `traceparent`."""
    found = {
        "specversion": "1.0",
        "id": row.id,
        "source": row.source,
        "type": row.event_type,
        "time": iso_time(row.created_at),
    }
    if row.subject is not None:
        found["subject"] = row.subject
    if row.aggregate is not None:
        found["partitionkey"] = row.aggregate[1]
    return found


def iso_time(at_us: int) -> str:
    """Format an instant as CloudEvents require."""
    return f"{_iso_second(at_us // 1_000_000)}.{at_us % 1_000_000:06d}Z"


@lru_cache(maxsize=256)
def _iso_second(at_s: int) -> str:
    """Cached, because messages of one batch were written within a few seconds."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%dT%H:%M:%S}"


ID_NAME_BYTES_MAX = 128
"""The same limit as for a step's name."""
_MS_MASK = (1 << 48) - 1
_VERSION_AND_VARIANT = 7 << 76 | 0b10 << 62
_CHANCE = (1 << 76) - 1 & ~(0b11 << 62)
"""The random bits of a UUIDv7: all below the version, except the variant."""


def new_id() -> uuid.UUID:
    """Return a new id; its first 48 bits are this computer's time in milliseconds."""
    if sys.version_info >= (3, 14):
        return uuid.uuid7()
    import uuid_utils

    return uuid.UUID(int=uuid_utils.uuid7().int)


def id_for_event(parent: Id, first_seen_us: int, name: str) -> uuid.UUID:
    """Return the id of the message `name` of an event: the same on every attempt of its handler.

    It has the layout of UUIDv7: the time at which the event was first seen, then a digest of
    (tenant, consumer, key, name) instead of random bits.
    """
    tenant, consumer, key = parent
    named, keyed = name.encode(), key.encode()
    digest = sha256(b"message%b%d:%b%b" % (scope(tenant, consumer), len(named), named, keyed)).digest()
    time = (first_seen_us // 1000 & _MS_MASK) << 80
    return uuid.UUID(int=time | _VERSION_AND_VARIANT | (int.from_bytes(digest[:10]) & _CHANCE))
