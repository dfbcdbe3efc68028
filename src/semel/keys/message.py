"""Incoming messages, from which keys are read: headers and body."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import cached_property
from typing import Any, Protocol, TypeAlias
from uuid import UUID

import msgspec

from semel.errors import KeyInvalid, KeyMissing
from semel.keys.limits import check

__all__ = [
    "Envelope",
    "HeaderIndex",
    "Headers",
    "Incoming",
    "as_key",
    "headers_of",
    "json_body",
    "payload_of",
]

Headers: TypeAlias = Mapping[str, Any] | Iterable[tuple[str | bytes, Any]]
"""Headers as clients give them: a mapping, or pairs where a name may come twice; values are str or bytes."""


class Incoming(Protocol):
    """The protocol of a message; every source's deliveries have it. Nothing in it is changed."""

    @property
    def headers(self) -> Headers:
        """Headers, properties or fields as they came."""
        ...

    @property
    def body(self) -> Any:
        """The payload: raw bytes, or the value that the source decoded."""
        ...

    @property
    def broker_id(self) -> str | bytes | None:
        """The id that the *producer* set in the broker's own field; never an id that the broker made up."""
        ...


class HeaderIndex:
    """Headers by name in lower case, made once for several look-ups. Linear in the number of headers."""

    __slots__ = ("_clashes", "_values")

    def __init__(self, headers: Headers) -> None:
        self._values: dict[str, Any] = {}
        self._clashes: set[str] = set()
        pairs: Any = headers.items() if isinstance(headers, Mapping) else headers
        for name, value in pairs:
            lower = (name.decode("latin-1") if isinstance(name, bytes) else name).lower()
            if self._values.setdefault(lower, value) != value:
                self._clashes.add(lower)

    def get(self, name: str) -> str | None:
        """Return the header as text, or None where it is absent or empty; the name's case does not matter.

        Raises `KeyInvalid` for one that came twice with different values: choosing either would be a guess.
        """
        lower = name.lower()
        if lower not in self._values:
            return None
        if lower in self._clashes:
            raise KeyInvalid(
                f"the header {name} came more than once with different values; the producer must send one"
            )
        value = self._values[lower]
        return None if value is None else text_of(value, f"header {name}").strip(" \t") or None

    def first(self, names: Iterable[str]) -> str | None:
        """The first of these names, in lower case, that a header has, whatever its value."""
        values = self._values
        for name in names:
            if name in values:
                return name
        return None

    def beginning(self, prefix: str) -> Iterator[str]:
        """Return the names with this prefix, in lower case."""
        return (name for name in self._values if name.startswith(prefix))


class Envelope(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A simple `Incoming` message, for custom sources and tests."""

    headers: Headers = ()
    body: Any = b""
    broker_id: str | bytes | None = None
    """AMQP `message_id`, SQS `MessageDeduplicationId`; a NATS message has it in the header `Nats-Msg-Id`."""
    position: str | None = None
    """The id of this delivery (Kafka offset, SQS `MessageId`): no key, unless by `keys.path("position")`."""
    transport: str = ""
    """Where it came from, for error messages."""

    @cached_property
    def by_name(self) -> HeaderIndex:
        """The headers by name, cached: route, key and handler read many of them."""
        return HeaderIndex(self.headers)


def headers_of(message: Any) -> HeaderIndex:
    """Return the headers of a message; none for an object that has none."""
    if isinstance(message, Envelope):
        return message.by_name
    return HeaderIndex(() if isinstance(message, Mapping) else getattr(message, "headers", None) or ())


def payload_of(message: Any) -> Any:
    """Return the body of a message; an object that is no message (it lacks headers or body) is its own payload."""
    if not isinstance(message, Mapping) and hasattr(message, "headers") and hasattr(message, "body"):
        return message.body
    return message


# Decimal keeps 50.00 exact and equal to 50, where a float would lose digits; so no float ever comes from the wire.
_decode: Callable[[bytes | str], Any] = msgspec.json.Decoder(float_hook=Decimal).decode


def json_body(payload: Any) -> Any:
    """Decode a payload of bytes as JSON, numbers exact; anything else is returned as it is.

    Raises `KeyMissing` for bytes that are not JSON.
    """
    if not isinstance(payload, bytes | bytearray | memoryview):
        return payload
    try:
        return _decode(bytes(payload))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KeyMissing(
            f"the body is not JSON ({error}), so no key can be read from it; take it from a header"
        ) from error


def text_of(value: object, where: str) -> str:
    """Return an id as text: str, bytes of UTF-8, int and UUID are ids; 7 and "7" are one. `KeyInvalid` otherwise."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError as error:
            raise KeyInvalid(
                f"{where} is not UTF-8, so it cannot be a key; hash it with semel.keys.of()"
            ) from error
    if (isinstance(value, int) and not isinstance(value, bool)) or isinstance(value, UUID):
        return str(value) if isinstance(value, UUID) else str(int(value))
    raise KeyInvalid(
        f"{where} is a {type(value).__name__}, not an id; choose a field that holds a str, int or UUID, "
        "or make the key from several with semel.keys.content(...)"
    )


def as_key(value: object, where: str) -> str:
    """Return a value as a checked key. Raises `KeyMissing` for None and "", `KeyInvalid` for what is no id."""
    if value is None or value == "":
        raise KeyMissing(f"{where} is empty, and semel invents no key; have the producer send one")
    return check(text_of(value, where))
