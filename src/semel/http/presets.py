"""Presets: which responses are stored, for how long at least, and what a refusal looks like."""

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import Struct

from semel.http import responses
from semel.http.responses import ProblemType, Reply, problem

__all__ = ["PRESETS", "Preset", "acp_error", "same_json"]

BEFORE_EXECUTION = frozenset({400, 401, 403, 429})
"""Refusals before any work: malformed, unauthenticated, forbidden, too many."""
NOT_THE_ENDPOINTS = frozenset({401, 403, 429})
"""Refusals that say nothing about the request itself."""
CLIENT_ERRORS, SERVER_ERRORS = 400, 500
"""The first server error."""
DAY_S = 86_400.0

Refuse = Callable[[ProblemType, str, str, float | None], Reply]


class Preset(Struct, frozen=True):
    """Which responses are stored, and for how long at least. Write your own if none of `PRESETS` fits."""

    name: str
    """What documents and messages call it."""
    keeps: Callable[[int], bool]
    """Whether a response with this status is stored for retries; else the claim is released and a retry runs."""
    window_s_min: float = 0.0
    """The least window; a shorter one of the client is raised to this."""
    required: bool = False
    """Whether a request without a key is refused, whatever `Rules.required` says."""
    by_path: bool = False
    """Whether a key belongs to the concrete path, not to the route's template."""
    canonical: Callable[[bytes], bytes] | None = None
    """The form of a body that is compared, and then without the query. `None`: query and body as they are."""
    refuse: Refuse = problem
    """Builds the response of a refusal; by default a problem document (RFC 9457)."""


def same_json(body: bytes) -> bytes:
    """Return one form for JSON bodies that mean the same; any other body as it is.

    The order of members, white space and `1.0` for `1` do not count. The order of arrays does, and so does `null`,
    which is not the same as no member.
    """
    try:
        value = json.loads(body, parse_float=Decimal, parse_int=Decimal, parse_constant=_refuse_constant)
        return _canonical(value).encode()
    except (ArithmeticError, ValueError, RecursionError):  # not JSON: the endpoint says so
        return body


def _canonical(value: Any) -> str:
    match value:
        case dict():
            return (
                "{"
                + ",".join(f"{json.dumps(name)}:{_canonical(value[name])}" for name in sorted(value))
                + "}"
            )
        case list():
            return "[" + ",".join(map(_canonical, value)) + "]"
        case Decimal():
            sign, digits, exponent = value.as_tuple()
            text = "".join(map(str, digits))
            short = text.rstrip("0")
            return f"{'-' * sign}{short}e{int(exponent) + len(text) - len(short)}" if short else "0"
        case _:
            return json.dumps(value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


ACP_CODES = {
    responses.MISSING: "idempotency_key_required",
    responses.MISMATCH: "idempotency_conflict",
    responses.RUNNING: "idempotency_in_flight",
}
"""The codes that the protocol names; other refusals have their own word, with `_` for `-`."""


def acp_error(kind: ProblemType, detail: str, docs: str, retry_after_s: float | None = None) -> Reply:
    """Return a refusal as the flat error of the Agentic Commerce Protocol, with the same status and headers."""
    made = problem(kind, detail, docs, retry_after_s)
    if kind.status >= SERVER_ERRORS:
        said = "processing_error" if kind is responses.FAILED else "service_unavailable"
    else:
        said = "invalid_request"
    code = ACP_CODES.get(kind) or kind.slug.replace("-", "_")
    body = msgspec.json.encode({"type": said, "code": code, "message": f"{kind.title}. {detail}"})
    replaced = {b"content-type": b"application/json", b"content-length": b"%d" % len(body)}
    return Reply(made.status, [(name, replaced.get(name, value)) for name, value in made.headers], body)


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("ietf", lambda status: status < SERVER_ERRORS and status not in BEFORE_EXECUTION),
        Preset("stripe-v1", lambda status: status not in BEFORE_EXECUTION, DAY_S),
        Preset("stripe-v2", lambda status: status < CLIENT_ERRORS, 30 * DAY_S),
        Preset(
            "acp",
            lambda status: status < SERVER_ERRORS and status not in NOT_THE_ENDPOINTS,
            DAY_S,
            required=True,
            by_path=True,
            canonical=same_json,
            refuse=acp_error,
        ),
    )
}
"""`ietf`: all but server errors. `stripe-v1`: those too. `stripe-v2`: successes only. `acp`: agentic commerce."""
