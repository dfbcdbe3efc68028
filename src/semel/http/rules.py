"""The settings of the middlewares, and what they make of a request and of a finished handler."""

from importlib.util import find_spec
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from semel.aclient import AsyncSemel
from semel.client import Semel
from semel.errors import ModeMismatch, NotApplied, PolicyInvalid, UsageError
from semel.extras import install_command
from semel.http import problems
from semel.http.keys import KeyMalformed, read
from semel.http.presets import PRESETS, SERVER_ERRORS, Preset
from semel.http.problems import problem
from semel.http.replies import Reply, pack
from semel.policy import ATTEMPTS_LIMIT, VALUE_BYTES_LIMIT
from semel.types import Errored, Outcome

__all__ = ["STREAMED", "ResponseFailed", "RequestRefused", "Rules", "Unkept", "is_stranger", "prepared", "verdict"]

C = TypeVar("C", Semel, AsyncSemel)

MODES = ("lease", "quarantine", "observe")
MIB = 1024 * 1024
HEADERS_BYTES_MAX = 64 * 1024
"""Kept with a response, beside its body."""
RESPONSE_BYTES_LIMIT = VALUE_BYTES_LIMIT - HEADERS_BYTES_MAX
BODY_BYTES_LIMIT = 1024 * MIB
MAX_AGE = b"idempotency-key-max-age"
EVENT_STREAM = b"text/event-stream"
NOT_ACCEPTED = frozenset({401, 403})


class Rules(Struct, frozen=True, kw_only=True):
    """Settings of the middlewares and of the FastAPI dependency."""

    preset: Preset | str = "ietf"
    """Which responses are kept: one of `PRESETS` by its name, or your own."""
    required: bool = False
    """Whether a request without a key is refused with 400; else it passes unguarded."""
    strict: bool = False
    """Whether only structured-field strings are keys; else bare text is one too."""
    wait_s: float = 0.0
    """How long a duplicate waits for the first one, and takes over if that fails; 0: 409 at once."""
    methods: tuple[str, ...] = ("POST", "PATCH")
    """Which requests are looked at; all others pass untouched, with a key or without."""
    request_bytes_max: int = MIB
    """A longer body with a key is refused with 413: it has to be held to be compared."""
    response_bytes_max: int = 256 * 1024
    """Of the body: a longer response passes through and is not kept."""
    docs: str = ""
    """Where your API's documentation explains keys; problem documents link to it."""
    fail_open: bool = False
    """Whether requests run unguarded while the store cannot be reached; else they are refused with 503."""

    def __post_init__(self) -> None:
        if isinstance(self.preset, str) and self.preset not in PRESETS:
            raise PolicyInvalid(f"preset {self.preset!r} is unknown; choose one of {', '.join(PRESETS)}")
        if not 0 < self.response_bytes_max <= RESPONSE_BYTES_LIMIT:
            raise PolicyInvalid(f"response_bytes_max must lie between 1 and {RESPONSE_BYTES_LIMIT}")
        if not 0 < self.request_bytes_max <= BODY_BYTES_LIMIT:
            raise PolicyInvalid(f"request_bytes_max must lie between 1 and {BODY_BYTES_LIMIT}")
        if not self.docs.isascii() or not self.docs.isprintable() or set(self.docs) & set(" <>"):
            raise PolicyInvalid(f"docs is {self.docs!r}; it goes into a header: give a URL")

    @property
    def keeping(self) -> Preset:
        """The preset itself."""
        return PRESETS[self.preset] if isinstance(self.preset, str) else self.preset


class RequestRefused(Exception):
    """The request is answered with this, and goes no further."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


class ResponseFailed(Exception):
    """The handler ran, and the preset does not keep its response: the claim is released, a retry runs."""

    def __init__(self, status: int, reply: Reply | None) -> None:
        super().__init__(status)
        self.status = status
        self.reply = reply
        """What it answered; `None`: it was streamed, and is on its way."""


class Unkept(ResponseFailed, NotApplied):
    """The same where nothing has happened, so that even a quarantined claim is released."""


class Streamed:
    """The value of a request whose response was not gathered. It cannot be encoded, so no record keeps it."""

    never_kept = True  # as it is meant: nobody is warned


STREAMED = Streamed()


def prepared(client: C, rules: Rules, take: Any) -> C:
    """The client by the policy of HTTP; `take` gets the fingerprint from what the handler is called with.

    Attempts are not counted to an end: a client that retries through an outage must find its key usable, and how
    often it comes is its own affair. Errors are the framework's, so none is permanent.
    """
    if client.mode not in MODES:
        raise ModeMismatch(
            f"consumer {client.consumer!r} works in mode {client.mode!r}; HTTP is for {' or '.join(MODES)}"
        )
    if find_spec("http_sf") is None:
        raise UsageError(f"keys are structured fields, which need http-sf: {install_command('http')}")
    window_s = max(rules.keeping.window_s_min, window_s_of(client))
    made = client.using(
        replace(
            client.policy,
            window_s=window_s,
            wait_s=rules.wait_s,
            max_attempts=ATTEMPTS_LIMIT,
            retry_delay_s=0.0,
            permanent=(),
            keep_value=True,
            value_bytes_max=rules.response_bytes_max + HEADERS_BYTES_MAX,
            fingerprint=take,
            probe=None,  # it would have to answer with a whole response
            on_unavailable="refuse",  # `rules.fail_open` says what happens then
        )
    )
    made._plan.warns_not_kept = False  # noqa: SLF001 - a long response is answered by a problem document instead
    return made


def window_s_of(client: Semel | AsyncSemel) -> float:
    """How long the client remembers a finished key, as far as it knows without asking."""
    return client._window_known("") / 1e6  # noqa: SLF001 - the middleware publishes what its client does


def keeps_errors(client: Semel | AsyncSemel, rules: Rules) -> bool:
    """Whether an exception that leaves the application is kept as a response; in quarantine nobody can tell."""
    return client.mode != "quarantine" and rules.keeping.keeps(SERVER_ERRORS)


def key_in(rules: Rules, fields: list[bytes]) -> str | None:
    """The key of a request; `None` where there is none and none is needed. Raises `RequestRefused`."""
    if not fields:
        if not rules.required:
            return None
        detail = "Send a header Idempotency-Key with a value of your own, the same on every retry."
        raise RequestRefused(problem(problems.MISSING, detail, rules.docs))
    try:
        return read(fields, strict=rules.strict)
    except KeyMalformed as error:
        raise RequestRefused(problem(problems.MALFORMED, f"{error}.", rules.docs)) from error


def caller_unknown(rules: Rules) -> RequestRefused:
    """Without a caller two of them might share a key, and one get the other's response."""
    return RequestRefused(problem(problems.CALLER_UNKNOWN, "Authenticate, and send the request again.", rules.docs))


def too_large(rules: Rules) -> RequestRefused:
    """The body cannot be compared with that of a retry."""
    detail = f"With an Idempotency-Key a body has at most {rules.request_bytes_max} bytes."
    return RequestRefused(problem(problems.TOO_LARGE, detail, rules.docs))


def failed(rules: Rules) -> Reply:
    """What is kept of a handler that raised, where failures are kept."""
    detail = (
        "The server failed while it handled this request. A retry with the same key is answered the same."
    )
    return problem(problems.FAILED, detail, rules.docs)


def streams(headers: list[tuple[bytes, bytes]], bytes_max: int) -> tuple[bool, int | None]:
    """Whether a response passes through by what its headers say, and the length that it declares."""
    length: int | None = None
    for name, value in headers:
        lower = name.lower()
        if lower == b"content-length" and value.isdigit():
            length = int(value)
        elif lower == b"content-type" and value.lower().startswith(EVENT_STREAM):
            return True, None
    return length is not None and length > bytes_max, length


def verdict(rules: Rules, status: int, reply: Reply | None) -> Any:
    """What the handler's run comes to for its record: bytes that it keeps, or `ResponseFailed` raised.

    `reply`: `None` where it was streamed.
    """
    if rules.keeping.keeps(status):
        return STREAMED if reply is None else pack(reply.status, reply.headers, reply.body)
    raise ResponseFailed(status, reply) if status >= SERVER_ERRORS else Unkept(status, reply)


def is_stranger(outcome: Outcome[Any]) -> bool:
    """Whether the application has not accepted the caller of a new key, so that nothing of it is to be kept.

    Else whoever forges an `Authorization` leaves a record for the whole window with each request. A key that was
    used before stays as it is.
    """
    match outcome:
        case Errored(Unkept(status=status), attempt=1):
            return status in NOT_ACCEPTED
        case _:
            return False
