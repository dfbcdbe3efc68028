"""A response as it is kept in a record, and what of it must not be kept."""

from collections.abc import Iterable

import msgspec

from semel.errors import RecordCorrupt

__all__ = ["Headers", "Reply", "pack", "unpack"]

Headers = list[tuple[bytes, bytes]]

HEADERS_NOT_KEPT = frozenset(
    {
        b"set-cookie",  # belongs to the one who got it; a replay may go to another browser, or revive a session
        b"date",  # of that moment, not of this one
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""And whatever `Connection` names: headers of one connection, not of the response."""
VERSION = 1


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """One whole response."""

    status: int
    headers: Headers
    body: bytes
    version: int = VERSION


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Reply).decode


def pack(status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
    """The bytes that a record keeps of a response."""
    lower = [(name.lower(), value) for name, value in headers]
    gone = HEADERS_NOT_KEPT
    for name, value in lower:
        if name == b"connection":
            gone = gone.union(part.strip().lower() for part in value.split(b","))
    return _encode(Reply(status, [pair for pair in lower if pair[0] not in gone], body))


def unpack(kept: object) -> Reply:
    """The response of a record. Raises `RecordCorrupt` rather than guess."""
    if not isinstance(kept, bytes):
        raise RecordCorrupt(
            f"the record holds a {type(kept).__name__}, not a response; give HTTP a consumer of its own"
        )
    try:
        reply = _decode(kept)
    except msgspec.MsgspecError as error:
        raise RecordCorrupt(f"a kept response does not read any more: {error}") from error
    if reply.version != VERSION:
        raise RecordCorrupt(f"a kept response has the version {reply.version}; is this semel too old?")
    return reply
