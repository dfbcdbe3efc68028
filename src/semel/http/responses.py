"""Responses as stored in records, and the headers that must not be stored."""

import math
from collections.abc import Iterable

import msgspec

from semel.errors import RecordCorrupt

__all__ = ["RETRY_SOON_S", "Headers", "ProblemType", "Reply", "pack", "problem", "unpack"]

Headers = list[tuple[bytes, bytes]]

HEADERS_NOT_KEPT = frozenset(
    {
        b"set-cookie",  # personal: a replay may go to another browser, or revive a session
        b"date",  # valid only for the first response
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
"""Headers of one connection, as are those that `Connection` names."""
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
    """Encode a response for a record."""
    lower = [(name.lower(), value) for name, value in headers]
    gone = HEADERS_NOT_KEPT
    for name, value in lower:
        if name == b"connection":
            gone = gone.union(part.strip().lower() for part in value.split(b","))
    return _encode(Reply(status, [pair for pair in lower if pair[0] not in gone], body))


def unpack(kept: object) -> Reply:
    """Decode the response of a record. Raises `RecordCorrupt`."""
    if not isinstance(kept, bytes):
        raise RecordCorrupt(
            f"the record holds a {type(kept).__name__}, not a response; give HTTP a consumer of its own"
        )
    try:
        reply = _decode(kept)
    except msgspec.MsgspecError as error:
        raise RecordCorrupt(f"a stored response cannot be decoded: {error}") from error
    if reply.version != VERSION:
        raise RecordCorrupt(f"a stored response has version {reply.version}; upgrade semel")
    return reply


RETRY_SOON_S = 1.0
"""The default Retry-After if no time is known."""


class ProblemType(msgspec.Struct, frozen=True):
    """One kind of refusal."""

    slug: str
    status: int
    title: str


MISSING = ProblemType("key-missing", 400, "An Idempotency-Key is required")
MALFORMED = ProblemType("key-malformed", 400, "The Idempotency-Key cannot be read")
CALLER_UNKNOWN = ProblemType("caller-unknown", 401, "An Idempotency-Key needs a caller who is known")
RUNNING = ProblemType("still-running", 409, "The first request with this Idempotency-Key is still running")
UNKNOWN = ProblemType("outcome-unknown", 409, "What came of the first request is not known")
RESPONSE_NOT_KEPT = ProblemType("response-not-kept", 409, "Executed, response not kept")
GIVEN_UP = ProblemType("given-up", 409, "The request failed for good")
TOO_LARGE = ProblemType("body-too-large", 413, "The body is too large for an Idempotency-Key")
MISMATCH = ProblemType("key-reused", 422, "The Idempotency-Key was used for another request")
FAILED = ProblemType("handler-failed", 500, "The request failed")
UNAVAILABLE = ProblemType("store-unavailable", 503, "Idempotency-Keys cannot be checked now")
NOT_RECORDED = ProblemType("not-recorded", 503, "The request ran, and that could not be recorded")
LOST = ProblemType("claim-lost", 503, "Another attempt took over")


def problem(kind: ProblemType, detail: str, docs: str, retry_after_s: float | None = None) -> Reply:
    """Return the problem document, with a link to the docs and Retry-After, if any."""
    document = {
        "type": f"{docs}#{kind.slug}" if docs else f"urn:semel:{kind.slug}",
        "title": kind.title,
        "status": kind.status,
        "detail": detail,
    }
    body = msgspec.json.encode(document)
    headers: Headers = [
        (b"content-type", b"application/problem+json"),
        (b"content-length", b"%d" % len(body)),
    ]
    if docs:
        headers.append((b"link", b'<%b>; rel="help"' % docs.encode("ascii")))
    if retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(retry_after_s))))
    if kind is CALLER_UNKNOWN:
        headers.append((b"www-authenticate", b"Bearer"))
    return Reply(kind.status, headers, body)
