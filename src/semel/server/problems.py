"""What goes wrong, as the caller reads it: `application/problem+json` (RFC 9457)."""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from semel.errors import (
    KeyInvalid,
    KeyMissing,
    ModeMismatch,
    PolicyInvalid,
    SemelError,
    StoreRefused,
    StoreUnavailable,
    UsageError,
    ValueInvalid,
)

__all__ = ["PROBLEM_JSON", "HttpProblem", "ProblemDocument", "problem_of"]

PROBLEM_JSON = "application/problem+json"
RETRY_AFTER_S = 1
DETAIL_CHARS_MAX = 1000

_log = logging.getLogger("semel")


class ProblemDocument(msgspec.Struct, frozen=True, omit_defaults=True, rename={"kind": "type"}):
    """What went wrong, for programs by `type` and `status`, for people by `detail`."""

    kind: str
    title: str
    status: int
    detail: str


class HttpProblem(Exception):
    """Ends a request with a status and a sentence."""

    def __init__(self, status: int, kind: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status: int = status
        self.kind: str = kind
        self.detail: str = detail[:DETAIL_CHARS_MAX]
        self.headers: dict[str, str] = dict(headers or {})

    def document(self) -> ProblemDocument:
        """What is sent."""
        return ProblemDocument(
            f"urn:semel:{self.kind}", HTTPStatus(self.status).phrase, self.status, self.detail
        )

    def response(self) -> Response:
        """The answer."""
        body = msgspec.json.encode(self.document())
        headers = {"X-Content-Type-Options": "nosniff", **self.headers}
        return Response(body, self.status, headers, media_type=PROBLEM_JSON)


_KINDS: tuple[tuple[type[SemelError], int, str], ...] = (
    (KeyMissing, 422, "key-missing"),
    (KeyInvalid, 422, "key-invalid"),
    (ModeMismatch, 409, "mode-mismatch"),
    (PolicyInvalid, 422, "out-of-bounds"),
    (ValueInvalid, 413, "value-too-large"),
    (UsageError, 422, "misused"),
    (StoreUnavailable, 503, "store-unavailable"),
    (StoreRefused, 503, "store-refused"),
)


def problem_of(error: SemelError) -> HttpProblem:
    """The problem that an error of semel is to a caller. What the store says of itself stays inside."""
    for kind, status, name in _KINDS:
        if isinstance(error, kind):
            if status == HTTPStatus.SERVICE_UNAVAILABLE:
                return unavailable()
            return HttpProblem(status, name, str(error))
    _log.error("a request failed: %s", error, exc_info=error)
    return server_fault()


def server_fault() -> HttpProblem:
    """A fault of the server itself, of which its log says more."""
    return HttpProblem(500, "failed", "the server failed; its log says why")


def unavailable(detail: str = "the store gave no answer; send the same request again") -> HttpProblem:
    """The store is down: nothing is known, and the same request may be repeated."""
    return HttpProblem(503, "store-unavailable", detail, {"Retry-After": str(RETRY_AFTER_S)})


def malformed_body(error: Exception) -> HttpProblem:
    """The body is no document of the kind that is asked for."""
    if isinstance(error, msgspec.ValidationError):
        return HttpProblem(422, "invalid", str(error))
    what: Any = "nested too deeply" if isinstance(error, RecursionError) else error
    return HttpProblem(400, "malformed", f"the body does not read: {what}")
