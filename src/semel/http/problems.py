"""Refusals as problem documents (RFC 9457)."""

import math

import msgspec

from semel.http.replies import Headers, Reply

__all__ = ["RETRY_SOON_S", "ProblemType", "problem"]

RETRY_SOON_S = 1.0
"""What a client is told where nobody can know: soon, and not at once."""


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
    """The document, with a link to the docs and the time to come back after, where there are any."""
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
