"""Find the key of a message: the places where producers put it, in one order, and never an invented one."""

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from semel.errors import KeyMissing
from semel.keys.cloudevents import find_cloudevent
from semel.keys.extract import Body, Content, KeySpec, KeyExtractor, extractor
from semel.keys.limits import check
from semel.keys.message import HeaderIndex, Incoming, as_key, headers_of, payload_of

__all__ = ["FoundKey", "Identity", "Origin", "find"]

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
    """For people: the header, field or path."""


class Identity(KeyExtractor):
    """How one source's messages are identified; made once, called for every message.

    The first hit wins: `key` where it is given; CloudEvents source and id; `Idempotency-Key`; the broker's own field;
    the header `message_id` or `event_id`; the path `body`; a hash of the content only where `content` is given. With
    `key` nothing else is tried: a second place would give the same event two keys.
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

        Raises `KeyMissing` where there is none: refuse the message or put it aside. Raises `KeyInvalid` for one
        that breaks the limits or contradicts itself; the search does not go on, since it *is* the producer's key.
        """
        if self._key is not None:
            return FoundKey(self._key(message), "explicit", repr(self._key))
        headers, payload = headers_of(message), payload_of(message)
        event = find_cloudevent(headers, payload)
        if event is not None:
            return FoundKey(event[0], "cloudevents", event[1])
        found = _sent(headers, message)
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


def _sent(headers: HeaderIndex, message: Any) -> FoundKey | None:
    """Look where producers and brokers put an id, besides CloudEvents."""
    sent = headers.get("idempotency-key")
    if sent is not None:
        return FoundKey(
            as_key(_unquoted(sent), "the header Idempotency-Key"), "idempotency-key", "header Idempotency-Key"
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
    return None


def _unquoted(value: str) -> str:
    """Read `"abc"` as its String and `abc` as itself: many clients send the bare form."""
    quoted = _SF_STRING.fullmatch(value)
    return _SF_ESCAPE.sub(r"\1", quoted[1]) if quoted else value


def _from(message: Any) -> str:
    transport = None if isinstance(message, Mapping) else getattr(message, "transport", None)
    return f" from {transport}" if transport else ""
