"""Encode values to bytes and back, without loss. The first byte is the codec; decoding never runs code.

======  ==========================================================================================
``j``   JSON: None, bool, int, float, str, list, dict with text keys, and nothing else inside
``m``   MessagePack with tags: tuples, sets, Decimal, dates, UUID, bytes, big integers, any dict keys
``r``   raw bytes
``o``   JSON of an object (dataclass, msgspec, attrs, pydantic, enum) that the handler's return annotation names
``p``   the plain data of an object whose handler has no annotation, as ``m``
``x``   no value: the text is the reason why it was not stored
======  ==========================================================================================
"""

import math
from collections.abc import Callable
from contextlib import suppress
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
from msgspec.msgpack import Ext

from semel.errors import (
    HandlerFailed,
    RecordCorrupt,
    ValueInvalid,
    ValueNotEncodable,
    ValueNotKept,
    ValueTooLarge,
)

__all__ = [
    "decode",
    "decode_error",
    "encode",
    "encode_error",
    "encode_reason",
    "kind_of",
    "message_of",
    "reason_in",
]

DEPTH_MAX = 64
"""Deeper values are refused: they are cycles, or would overflow the reader's stack."""
ERROR_CHARS_MAX = 4096
REASON_CHARS_MAX = 500
"""The longest reason for a missing value: a long text must not fill the store."""
_INT64 = 2**63
_SCALARS = frozenset((str, bool, type(None)))
"""The classes whose every value is plain JSON."""

_json = msgspec.json.Encoder()
_decode_failure = msgspec.json.Decoder(tuple[str, str]).decode
_pack = msgspec.msgpack.Encoder()
_NULL = b"jnull"
_BY_IDENTITY: Any = object.__eq__


def encode(
    value: Any, returns: Any = None, bytes_max: int | None = None, *, as_plain_data: bool = True
) -> bytes:
    """Encode a value. `returns`: the annotated type of an object that is not plain data.

    Without a type, an object comes back as its plain data, unless `as_plain_data` is `False`. Raises
    `ValueNotEncodable` if it could not be decoded again, `ValueTooLarge` above `bytes_max`.
    """
    if value is None:
        return _NULL
    try:
        encoded = _encode(value, returns, as_plain_data=as_plain_data)
    except ValueNotEncodable:
        raise
    except Exception as error:
        # Any error, also of the value's own class: the effect has happened and must be completed.
        raise ValueNotEncodable(f"a {type(value).__name__} cannot be stored: {error}") from error
    if bytes_max is not None and len(encoded) > bytes_max:
        raise ValueTooLarge(
            f"the value takes {len(encoded)} bytes, more than {bytes_max}; return less or raise value_bytes_max"
        )
    return encoded


def decode(encoded: bytes, returns: Any = None) -> Any:
    """Decode a value. Raises `RecordCorrupt` for malformed data, `ValueNotKept` if there is none."""
    codec, body = encoded[:1], encoded[1:]
    if codec == b"x":
        raise ValueNotKept(f"the value was not kept: {reason_in(encoded)}")
    if codec not in (b"j", b"m", b"r", b"o", b"p"):
        raise RecordCorrupt(f"a stored value has the unknown codec {codec!r}; upgrade semel")
    try:
        match codec:
            case b"j":
                return msgspec.json.decode(body)
            case b"m":
                return _unpack.decode(body)
            case b"r":
                return body
            case b"p":
                return _from_plain_data(_unpack.decode(body), returns)
            case _:
                return msgspec.json.decode(body) if returns is None else _decode_object(body, returns)
    except RecordCorrupt:
        raise
    except Exception as error:  # an unknown time zone, a number out of range, a class that refuses
        raise RecordCorrupt(f"a stored value cannot be decoded: {error}") from error


def encode_reason(error: ValueInvalid) -> bytes:
    """Encode the reason why a value is not stored."""
    return b"x" + str(error)[:REASON_CHARS_MAX].encode("utf-8", "replace")


def reason_in(encoded: bytes | None) -> str:
    """Return the reason why there is no value, or an empty text."""
    return encoded[1:].decode("utf-8", "replace") if encoded is not None and encoded[:1] == b"x" else ""


def kind_of(error: BaseException) -> str:
    """Return the class of an error, with its module."""
    kind = type(error)
    return f"{kind.__module__}.{kind.__qualname__}"


def message_of(error: BaseException) -> str:
    """Return the text of an error, bounded and encodable; empty if it has none that can be read."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an error whose text is broken is still a failure to be kept
        text = ""
    return text[:ERROR_CHARS_MAX].encode("utf-8", "replace").decode()


def encode_error(error: BaseException, message: str | None = None) -> bytes:
    """Encode a permanent failure: its type and message, never the object. `message`: instead of its own."""
    return b"j" + _json.encode([kind_of(error), message_of(error) if message is None else message])


def decode_error(encoded: bytes | None) -> HandlerFailed:
    """Decode a stored failure into the error for a duplicate. Raises `RecordCorrupt` for malformed data."""
    if encoded is None:
        return HandlerFailed("unknown", "the error was not kept")
    if encoded[:1] == b"x":
        return HandlerFailed("unknown", f"the error was not kept: {reason_in(encoded)}")
    if encoded[:1] == b"j":  # nothing else is written, and other codecs build what costs seconds to hash
        with suppress(msgspec.MsgspecError, ValueError, RecursionError):
            return HandlerFailed(*_decode_failure(encoded[1:]))
    raise RecordCorrupt("a stored error is not a pair of its type and its message")


def _encode(value: Any, returns: Any, *, as_plain_data: bool) -> bytes:
    if type(value) is bytes:
        return b"r" + value
    if _is_plain(value, 0):
        return b"j" + _json.encode(value)
    try:
        return b"m" + _pack.encode(_to_tagged(value, 0))
    except ValueNotEncodable:
        if returns is not None:
            return b"o" + _encode_object(value, returns)
        if not as_plain_data:
            raise
        return b"p" + _pack.encode(_to_tagged(_plain_data(value), 0))


def _is_plain(value: Any, depth: int) -> bool:
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is int:
        return bool(-_INT64 <= value < _INT64)
    if kind is float:
        return math.isfinite(value)
    if depth > DEPTH_MAX:
        raise RecursionError("nested too deeply")
    if kind is dict:
        for name in value:
            if type(name) is not str:
                return False
        value = value.values()
    elif kind is not list:
        return False
    for part in value:  # noqa: SIM110 - every stored value passes here, and a scalar costs no call
        if type(part) not in _SCALARS and not _is_plain(part, depth + 1):
            return False
    return True


# --- MessagePack with tags ----------------------------------------------------------------------


def _pack_datetime(moment: datetime) -> list[Any]:
    """Encode a datetime's text, fold and zone; a named zone stays a named zone."""
    from zoneinfo import ZoneInfo  # slow to import, and rarely needed

    zone = moment.tzinfo
    if zone is None or type(zone) is timezone:
        return [moment.isoformat(), moment.fold, None]
    if type(zone) is ZoneInfo and zone.key:
        return [moment.replace(tzinfo=None).isoformat(), moment.fold, zone.key]
    raise ValueNotEncodable(f"a datetime with the time zone {zone!r} cannot be stored; use UTC or a ZoneInfo")


def _unpack_datetime(text: str, fold: int, zone: str | None) -> datetime:
    from zoneinfo import ZoneInfo

    moment = datetime.fromisoformat(text).replace(fold=fold)
    return moment if zone is None else moment.replace(tzinfo=ZoneInfo(zone))


def _pack_time(moment: time) -> list[Any]:
    if moment.tzinfo is not None and type(moment.tzinfo) is not timezone:
        raise ValueNotEncodable(f"a time with the time zone {moment.tzinfo!r} cannot be stored")
    return [moment.isoformat(), moment.fold]


_TAGS: list[tuple[int, type, Callable[[Any], Any], Callable[..., Any]]] = [
    (1, tuple, list, lambda *parts: parts),
    (2, set, list, lambda *parts: set(parts)),
    (3, frozenset, list, lambda *parts: frozenset(parts)),
    (4, Decimal, lambda number: [str(number)], Decimal),
    (5, datetime, _pack_datetime, _unpack_datetime),
    (6, date, lambda day: [day.isoformat()], date.fromisoformat),
    (7, time, _pack_time, lambda text, fold: time.fromisoformat(text).replace(fold=fold)),
    (8, timedelta, lambda span: [span.days, span.seconds, span.microseconds], timedelta),
    (9, UUID, lambda uid: [uid.bytes], lambda raw: UUID(bytes=raw)),
    (10, int, lambda number: [hex(number)], lambda text: int(text, 16)),
    (
        11,
        dict,
        lambda mapping: [list(pair) for pair in mapping.items()],
        lambda *pairs: dict(map(tuple, pairs)),
    ),
    (12, bytearray, lambda raw: [bytes(raw)], bytearray),
    (13, complex, lambda number: [number.real, number.imag], complex),
]
_BY_TYPE = {kind: (code, parts) for code, kind, parts, _ in _TAGS}
_BY_CODE = {code: build for code, _, _, build in _TAGS}


def _to_tagged(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in (str, bool, float, bytes) or value is None or (kind is int and -_INT64 <= value < _INT64):
        return value
    if depth > DEPTH_MAX:
        raise RecursionError("nested too deeply")
    if kind is list:
        return [_to_tagged(part, depth + 1) for part in value]
    if kind is dict and all(type(name) is str for name in value):
        return {name: _to_tagged(part, depth + 1) for name, part in value.items()}
    if kind not in _BY_TYPE:
        raise ValueNotEncodable(
            f"a {kind.__module__}.{kind.__qualname__} cannot be stored; return plain data, a dataclass, or a msgspec,"
            " attrs or pydantic class"
        )
    code, parts = _BY_TYPE[kind]
    return Ext(code, _pack.encode([_to_tagged(part, depth + 1) for part in parts(value)]))


def _untag(code: int, data: memoryview) -> Any:
    if code not in _BY_CODE:
        raise RecordCorrupt(f"a stored value has the unknown tag {code}; upgrade semel")
    return _BY_CODE[code](*_unpack.decode(data))


_unpack = msgspec.msgpack.Decoder(ext_hook=_untag)


# --- objects ------------------------------------------------------------------------------------


def _encode_object(value: Any, returns: Any) -> bytes:
    """Encode an object as JSON, and check that the annotation decodes it."""
    try:
        body = _object_json(value)
        back = _decode_object(body, returns)
        # Equal text is not enough: a tuple in a field that takes anything would come back as a list.
        same = back == value or type(value).__eq__ is _BY_IDENTITY
        if type(back) is type(value) and same and _object_json(back) == body:
            return body
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise ValueNotEncodable(f"a {type(value).__name__} cannot be stored: {error}") from error
    raise ValueNotEncodable(f"a {type(value).__name__} cannot be decoded as the annotation {returns!r}")


_KEPT_AS_THEY_ARE = (bytes, bytearray, memoryview, datetime, date, time, timedelta, UUID, Decimal)


def _plain_data(value: Any) -> Any:
    """Return an object as dicts, lists and supported values. Raises `ValueNotEncodable`."""
    return msgspec.to_builtins(value, builtin_types=_KEPT_AS_THEY_ARE, enc_hook=_dump_object)


def _dump_object(value: Any) -> Any:
    if hasattr(type(value), "model_dump"):
        return value.model_dump()
    return _to_tagged(value, 0)  # its error is the message


def _from_plain_data(data: Any, returns: Any) -> Any:
    if returns is None:
        return data
    return (
        returns.model_validate(data) if hasattr(returns, "model_validate") else msgspec.convert(data, returns)
    )


def _object_json(value: Any) -> bytes:
    if hasattr(type(value), "model_dump_json"):
        return str(value.model_dump_json()).encode()
    return _json.encode(value)


def _decode_object(body: bytes, returns: Any) -> Any:
    if hasattr(returns, "model_validate_json"):
        return returns.model_validate_json(body)
    return msgspec.json.decode(body, type=returns)
