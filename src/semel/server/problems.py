"""Errors as `application/problem+json` (RFC 9457)."""

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
    """An error: `type` and `status` for programs, `detail` for people."""

    kind: str
    title: str
    status: int
    detail: str


class HttpProblem(Exception):
    """Ends a request with a status and a message."""

    def __init__(self, status: int, kind: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status: int = status
        self.kind: str = kind
        self.detail: str = detail[:DETAIL_CHARS_MAX]
        self.headers: dict[str, str] = dict(headers or {})

    def document(self) -> ProblemDocument:
        """The JSON document."""
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
    """Turn an error of semel into a problem. Details of the store are logged, not sent."""
    for kind, status, name in _KINDS:
        if isinstance(error, kind):
            if status == HTTPStatus.SERVICE_UNAVAILABLE:
                return unavailable()
            return HttpProblem(status, name, str(error))
    _log.error("a request failed: %s", error, exc_info=error)
    return server_fault()


def server_fault() -> HttpProblem:
    """Return the problem for an internal error, which the log describes."""
    return HttpProblem(500, "failed", "internal error; see the server's log")


def unavailable(detail: str = "the store gave no answer; send the same request again") -> HttpProblem:
    """Return the problem for a store that does not answer: the client may repeat the request."""
    return HttpProblem(503, "store-unavailable", detail, {"Retry-After": str(RETRY_AFTER_S)})


def problem_of_body(error: Exception) -> HttpProblem:
    """Return the problem for a body that cannot be decoded."""
    if isinstance(error, msgspec.ValidationError):
        return HttpProblem(422, "invalid", str(error))
    what: Any = "nested too deeply" if isinstance(error, RecursionError) else error
    return HttpProblem(400, "malformed", f"the body cannot be decoded: {what}")
