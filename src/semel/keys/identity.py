"""Find the key of a message in the places where producers put it, in a fixed order; never invent one."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from semel.errors import KeyInvalid, KeyMissing
from semel.keys.extract import Body, Content, KeyExtractor, KeySpec, extractor
from semel.keys.limits import KEY_BYTES_MAX, check
from semel.keys.message import HeaderIndex, Incoming, as_key, headers_of, payload_of
from semel.keys.schemes import derive

__all__ = [
    "CloudEvent",
    "FoundKey",
    "Identity",
    "Origin",
    "attribute_of",
    "attributes_of",
    "cloudevent",
    "compose",
    "find",
    "find_cloudevent",
    "instant",
]

if TYPE_CHECKING:
    from datetime import datetime


# (prefix of the header, whether its values are percent-encoded): HTTP and NATS, Kafka, AMQP in both its spellings.
_BINDINGS = (("ce-", True), ("ce_", False), ("cloudevents:", False), ("cloudevents_", False))
_NAMES = {
    name: tuple(prefix + name for prefix, _ in _BINDINGS) for name in ("id", "time", "type")
}  # a quick check for messages that are not CloudEvents
_DATE_DIGITS = 8
_ESCAPED = re.compile(r"\\(.)")


class _Structured(msgspec.Struct):
    specversion: str
    source: str
    id: str


_decode = msgspec.json.Decoder(_Structured).decode


class CloudEvent(KeyExtractor):
    """The key of a CloudEvent in binary mode (headers) or structured mode (a JSON body)."""

    __slots__ = ()

    def __call__(self, event: Any, /) -> str:
        """Read source and id. Raises `KeyMissing` where either is absent: an SDK may invent an id, semel does not."""
        found = find_cloudevent(headers_of(event), payload_of(event))
        if found is None:
            raise KeyMissing(
                "the message is not a CloudEvent with both source and id (headers ce-*, ce_*, cloudEvents:*, "
                "or a JSON body with specversion); have the producer set them"
            )
        return found[0]

    def __repr__(self) -> str:
        return "CloudEvent()"


def cloudevent() -> CloudEvent:
    """Read the key from a CloudEvent's source and id, in either mode."""
    return CloudEvent()


def compose(source: str, event_id: str) -> str:
    """Join source and id so that no other pair gives the same key: `ce:<length of source>:<source>:<id>`.

    A pair too long for a key becomes `ce:v1.<SHA-256>`. Raises `KeyInvalid` for control characters.
    """
    key = f"ce:{len(source)}:{source}:{event_id}"
    if len(key) > KEY_BYTES_MAX or len(key.encode(errors="replace")) > KEY_BYTES_MAX:
        return derive([("source", source), ("id", event_id)], namespace="ce", version=1, allow_floats=False)
    return check(key)


def find_cloudevent(headers: HeaderIndex, payload: Any) -> tuple[str, str] | None:
    """Return the key and its location, or None for a message that is not a complete CloudEvent."""
    for prefix, encoded in _BINDINGS if headers.first(_NAMES["id"]) else ():
        event_id, source = headers.get(prefix + "id"), headers.get(prefix + "source")
        if event_id is not None and source is not None:
            if encoded:
                event_id, source = _decode_header(event_id), _decode_header(source)
            return compose(source, event_id), f"headers {prefix}source and {prefix}id"
    pair = _from_structured_mode(payload)
    return None if pair is None else (compose(*pair), "source and id in the body")


def attribute_of(headers: HeaderIndex, name: Literal["time", "type"]) -> str | None:
    """Return one attribute of an event in binary mode, with any binding."""
    for prefix, encoded in _BINDINGS if headers.first(_NAMES[name]) else ():
        value = headers.get(prefix + name)
        if value is not None:
            return _decode_header(value) if encoded else value
    return None


def attributes_of(headers: HeaderIndex) -> dict[str, str]:
    """Return all attributes of an event in binary mode; empty if no binding has both source and id."""
    for prefix, encoded in _BINDINGS:
        if headers.get(prefix + "id") is None or headers.get(prefix + "source") is None:
            continue
        found = {name.removeprefix(prefix): headers.get(name) for name in headers.beginning(prefix)}
        return {
            name: _decode_header(value) if encoded else value
            for name, value in found.items()
            if value is not None
        }
    return {}


def instant(time: str) -> "datetime":
    """Return the attribute `time` as an instant: RFC 3339, or AMQP's milliseconds. Raises `ValueError`."""
    from datetime import UTC, datetime

    if time.isdecimal() and len(time) > _DATE_DIGITS:
        try:
            return datetime.fromtimestamp(int(time) / 1000, UTC)
        except (OSError, OverflowError) as error:  # more than the system's calendar has
            raise ValueError(f"the time {time} is out of range") from error
    moment = datetime.fromisoformat(time)
    if moment.tzinfo is None:
        raise ValueError(f"the time {time} has no time zone")
    return moment


def _from_structured_mode(payload: Any) -> tuple[str, str] | None:
    """Recognise structured mode by its required members: a WebSocket message has no content type."""
    members: Any = payload
    if isinstance(payload, bytes):
        if b'"specversion"' not in payload:  # spares other bodies the decoding
            return None
        members = _members(payload)
    if not isinstance(members, Mapping):
        return None
    version, source, event_id = members.get("specversion"), members.get("source"), members.get("id")
    if (
        isinstance(version, str)
        and isinstance(source, str)
        and isinstance(event_id, str)
        and source
        and event_id
    ):
        return source, event_id
    return None


def _members(payload: bytes) -> Mapping[str, Any] | None:
    """Read the three members that identify a CloudEvent, and skip the rest."""
    try:
        event = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return {"specversion": event.specversion, "source": event.source, "id": event.id}


def _decode_header(value: str) -> str:
    """Decode a value of the HTTP binding, so that both modes give the same key: quotes, then percent signs."""
    if len(value) > 1 and value[0] == value[-1] == '"':
        value = _ESCAPED.sub(r"\1", value[1:-1])
    if "%" not in value:
        return value
    from urllib.parse import unquote

    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError as error:
        raise KeyInvalid(f"the CloudEvents header value {value!r} is not percent-encoded UTF-8") from error


Origin: TypeAlias = Literal[
    "explicit", "cloudevents", "idempotency-key", "broker", "header", "body", "content"
]
"""Where a key came from, in the order of the search."""

# HTTP proxies drop underscores, brokers' clients keep them: either spelling is the same header.
_ID_HEADERS = ("message_id", "message-id", "event_id", "event-id")
# A structured-field String (RFC 8941), whose parameters say nothing about the key.
_SF_STRING = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"[ ]*(?:;.*)?')
_SF_ESCAPE = re.compile(r"\\(.)")


class FoundKey(msgspec.Struct, frozen=True):
    """A key and where it was found."""

    key: str
    origin: Origin
    where: str
    """The header, field or path, for messages."""


class Identity(KeyExtractor):
    """Finds the keys of one source's messages; build it once, call it for every message.

    The first hit wins: `key` where it is given; CloudEvents source and id; `Idempotency-Key`; the broker's own
    field; the header `message_id` or `event_id`, on Kafka also `id`; the path `body`; a hash of the content only
    where `content` is given. With `key` nothing else is tried: a second place would give the same event two keys.
    """

    __slots__ = ("_body", "_content", "_key")

    def __init__(
        self, *, key: KeySpec | None = None, body: str | None = None, content: bool | Content = False
    ) -> None:
        self._key = None if key is None else extractor(key)
        self._body = None if body is None else Body(body)
        self._content = Content() if content is True else (content or None)

    def __call__(self, event: Any, /) -> str:
        """Return the key alone."""
        return self.find(event).key

    def find(self, message: Incoming | Mapping[str, Any]) -> FoundKey:
        """Return the key and where it came from; a bare mapping is a body without headers.

        Raises `KeyMissing` if there is none: refuse or dead-letter the message. Raises `KeyInvalid` for one
        that breaks the limits or is ambiguous; the search stops there, because it *is* the producer's key.
        """
        if self._key is not None:
            return FoundKey(self._key(message), "explicit", repr(self._key))
        headers, payload = headers_of(message), payload_of(message)
        event = find_cloudevent(headers, payload)
        if event is not None:
            return FoundKey(event[0], "cloudevents", event[1])
        found = _from_producer(headers, message)
        if found is not None:
            return found
        if self._body is not None and (found := self._in_body(payload)) is not None:
            return found
        if self._content is not None:
            return FoundKey(self._content(message), "content", repr(self._content))
        raise KeyMissing(
            f"no key in the message{_from(message)}: no CloudEvents source and id, no Idempotency-Key, no id in the "
            "broker's own field, no header message_id or event_id; have the producer send one, or say where it is "
            "with key= or body=. semel invents no key: every delivery would be new"
        )

    def _in_body(self, payload: Any) -> FoundKey | None:
        assert self._body is not None
        try:
            return FoundKey(self._body(payload), "body", self._body.path)
        except KeyMissing:
            if self._content is None:
                raise
            return None  # the content was asked for as the last resort

    def __repr__(self) -> str:
        return f"Identity(key={self._key!r}, body={self._body!r}, content={self._content!r})"


def find(
    message: Incoming | Mapping[str, Any],
    *,
    key: KeySpec | None = None,
    body: str | None = None,
    content: bool | Content = False,
) -> FoundKey:
    """Find the key of one message; `Identity` says how, and is made once where there are many messages."""
    return Identity(key=key, body=body, content=content).find(message)


def _from_producer(headers: HeaderIndex, message: Any) -> FoundKey | None:
    """Look where producers and brokers put an id, besides CloudEvents."""
    sent = headers.get("idempotency-key")
    if sent is not None:
        return FoundKey(
            as_key(_unquote(sent), "the header Idempotency-Key"), "idempotency-key", "header Idempotency-Key"
        )
    own = None if isinstance(message, Mapping) else getattr(message, "broker_id", None)
    if own:
        return FoundKey(as_key(own, "the broker's own field"), "broker", "the broker's own field")
    sent = headers.get("nats-msg-id")
    if sent is not None:
        return FoundKey(check(sent), "broker", "header Nats-Msg-Id")
    for name in _ID_HEADERS:
        sent = headers.get(name)
        if sent is not None:
            return FoundKey(check(sent), "header", f"header {name}")
    if getattr(message, "transport", "") == "kafka" and (sent := headers.get("id")) is not None:
        return FoundKey(check(sent), "header", "header id")  # as Debezium's outbox event router sends it
    return None


def _unquote(value: str) -> str:
    """Read `"abc"` as its String and `abc` as itself: many clients send the bare form."""
    quoted = _SF_STRING.fullmatch(value)
    return _SF_ESCAPE.sub(r"\1", quoted[1]) if quoted else value


def _from(message: Any) -> str:
    transport = None if isinstance(message, Mapping) else getattr(message, "transport", None)
    return f" from {transport}" if transport else ""
