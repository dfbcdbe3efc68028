"""The settings of the middlewares, and what they make of a request and of a finished handler."""

import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, Generic, TypeVar, assert_never
from urllib.parse import quote

from msgspec import Struct
from msgspec.structs import replace

from semel.client import deliver
from semel.client.client import Semel
from semel.client.client_async import AsyncSemel
from semel.errors import LateEvent, ModeMismatch, NotApplied, PolicyInvalid, UsageError
from semel.http import responses
from semel.http.responses import RETRY_SOON_S, Reply, pack, problem, unpack
from semel.keys.limits import KEY_BYTES_MAX
from semel.policy import ATTEMPTS_LIMIT, VALUE_BYTES_LIMIT
from semel.runtime.extras import install_command
from semel.types import Busy, Done, Errored, Failed, Late, Lost, Mismatch, Outcome, Unavailable, Unknown

__all__ = [
    "HEADER",
    "PRESETS",
    "STREAMED",
    "Front",
    "KeyMalformed",
    "Preset",
    "RequestRefused",
    "ResponseFailed",
    "Rules",
    "Unkept",
    "answer",
    "digest_of_credentials",
    "is_stranger",
    "payload_of",
    "prepare_client",
    "read",
    "record_key",
    "verdict",
]

BEFORE_EXECUTION = frozenset({400, 401, 403, 429})
"""Refused before anything was done: badly formed, not known, not allowed, too many."""
CLIENT_ERRORS, SERVER_ERRORS = 400, 500
"""Where they begin."""
DAY_S = 86_400.0


class Preset(Struct, frozen=True):
    """What is kept, and for how long at least. Make your own where none of `PRESETS` fits."""

    name: str
    keeps: Callable[[int], bool]
    """Whether a response with this status answers every retry; else the claim is released and a retry runs."""
    window_s_min: float = 0.0
    """A shorter window of the client is lengthened to this."""


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("ietf", lambda status: status < SERVER_ERRORS and status not in BEFORE_EXECUTION),
        Preset("stripe-v1", lambda status: status not in BEFORE_EXECUTION, DAY_S),
        Preset("stripe-v2", lambda status: status < CLIENT_ERRORS, 30 * DAY_S),
    )
}
"""`ietf`: what the handler decided, not its failures. `stripe-v1`: its failures too. `stripe-v2`: successes only."""


HEADER = b"idempotency-key"
KEY_CHARS_MAX = 255
"""As the field's best known clients and servers have it."""
FIELD_BYTES_MAX = 1024
"""A string with every character escaped, and parameters: more than that is no key."""
NOBODY = "*"
"""Stands for the caller where none is told from another; a caller of that name is written %2A."""

_PLAIN_STRING = re.compile(rb'"([\x20\x21\x23-\x5b\x5d-\x7e]+)"')
_BARE = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")


class KeyMalformed(ValueError):
    """The header holds no key; the text says why, and goes to the client."""


def read(fields: Sequence[bytes], *, strict: bool) -> str:
    """The key in the header's fields. Raises `KeyMalformed`.

    `"8e03"` is a structured string; bare printable ASCII is taken as it is unless `strict`. Both spell one key.
    """
    if len(fields) != 1:
        raise KeyMalformed("the header is given more than once")
    field = fields[0].strip(b" \t")
    if len(field) > FIELD_BYTES_MAX:
        raise KeyMalformed(f"the key is longer than {KEY_CHARS_MAX} characters")
    found = _PLAIN_STRING.fullmatch(field)
    if found is not None:
        key = found[1].decode("ascii")
    elif strict or field.startswith(b'"'):
        key = _structured_string(field)
    elif _BARE.fullmatch(field):
        key = field.decode("ascii")
    else:
        raise KeyMalformed("the key is not printable ASCII")
    if not 0 < len(key) <= KEY_CHARS_MAX:
        raise KeyMalformed(f"the key has {len(key)} characters; 1 to {KEY_CHARS_MAX} are allowed")
    return key


def _structured_string(field: bytes) -> str:
    """The value of an RFC 9651 item, which must be a string; its parameters mean nothing here."""
    from http_sf import StructuredFieldError, parse

    try:
        item = parse(field, tltype="item")
    except StructuredFieldError as error:
        raise KeyMalformed('the key is not a structured-field string such as "8e03978e-40d5"') from error
    value = item[0] if isinstance(item, tuple) else item
    if not isinstance(value, str):  # a token or a display string is none
        raise KeyMalformed('the key is not a structured-field string such as "8e03978e-40d5"')
    return value


def record_key(method: str, route: str, caller: str | None, key: str) -> str:
    """The record's key: what one caller asked of one route under one key, and nobody else elsewhere.

    The first three parts hold no space, so that no two scopes read the same. Past what a store takes, its digest.
    """
    whose = NOBODY if caller is None else quote(caller, safe="")
    text = f"{method} {quote(route, safe='/{}:')} {whose} {key}"
    if len(text) <= KEY_BYTES_MAX:  # ASCII: as many bytes as characters
        return text
    return "sha256:" + sha256(text.encode()).hexdigest()


def payload_of(path: bytes, query: bytes, body: bytes) -> bytes:
    """What two requests under one key must agree on."""
    return b"%d:%b%d:%b%b" % (len(path), path, len(query), query, body)


def digest_of_credentials(authorization: bytes) -> str | None:
    """A caller's name from what it authenticates with; `None` for nothing. The credentials themselves are not kept."""
    return sha256(authorization).hexdigest()[:32] if authorization.strip() else None


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


def prepare_client(client: C, rules: Rules, take: Any) -> C:
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
    deliver.items_of(made).warns_not_kept = False  # a long response is answered by a problem document instead
    return made


def window_s_of(client: Semel | AsyncSemel) -> float:
    """How long the client remembers a finished key, as far as it knows without asking."""
    return deliver.known_window_us(client) / 1e6


def keeps_errors(client: Semel | AsyncSemel, rules: Rules) -> bool:
    """Whether an exception that leaves the application is kept as a response; in quarantine nobody can tell."""
    return client.mode != "quarantine" and rules.keeping.keeps(SERVER_ERRORS)


def key_in(rules: Rules, fields: list[bytes]) -> str | None:
    """The key of a request; `None` where there is none and none is needed. Raises `RequestRefused`."""
    if not fields:
        if not rules.required:
            return None
        detail = "Send a header Idempotency-Key with a value of your own, the same on every retry."
        raise RequestRefused(problem(responses.MISSING, detail, rules.docs))
    try:
        return read(fields, strict=rules.strict)
    except KeyMalformed as error:
        raise RequestRefused(problem(responses.MALFORMED, f"{error}.", rules.docs)) from error


def caller_unknown(rules: Rules) -> RequestRefused:
    """Without a caller two of them might share a key, and one get the other's response."""
    return RequestRefused(
        problem(responses.CALLER_UNKNOWN, "Authenticate, and send the request again.", rules.docs)
    )


def too_large(rules: Rules) -> RequestRefused:
    """The body cannot be compared with that of a retry."""
    detail = f"With an Idempotency-Key a body has at most {rules.request_bytes_max} bytes."
    return RequestRefused(problem(responses.TOO_LARGE, detail, rules.docs))


def failure_reply(rules: Rules) -> Reply:
    """What is kept of a handler that raised, where failures are kept."""
    detail = (
        "The server failed while it handled this request. A retry with the same key is answered the same."
    )
    return problem(responses.FAILED, detail, rules.docs)


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


class Front(Generic[C]):
    """The client behind a middleware; an exchange's `payload` is what its requests are told apart by."""

    def __init__(self, client: C, rules: Rules | None) -> None:
        self.rules: Rules = rules or Rules()
        self.client: C = prepare_client(client, self.rules, attrgetter("payload"))
        self.keeps_errors: bool = keeps_errors(self.client, self.rules)
        self._methods = frozenset(self.rules.methods)

    def max_age(self) -> tuple[bytes, bytes]:
        """The header that says how long keys are remembered."""
        return MAX_AGE, b"%d" % window_s_of(self.client)


REPLAYED = (b"idempotent-replayed", b"true")


def answer(docs: str, outcome: Outcome[Any], own: Reply | None) -> Reply:
    """The response to an outcome; `own`: what this request's handler answered. Raises the handler's own error."""
    match outcome:
        case Done():
            return _reply_of_done(docs, outcome, own)
        case Errored(error):
            if own is None or not isinstance(error, ResponseFailed):
                raise error
            return own
        case Unknown(_, error) if error is not None:
            if own is None or not isinstance(error, ResponseFailed):
                raise error
            return own
        case _:
            return _reply_of_refusal(docs, outcome)


def _reply_of_done(docs: str, done: Done[Any], own: Reply | None) -> Reply:
    if done.replayed and done.kept:
        stored = unpack(done.value)
        return Reply(stored.status, [*stored.headers, REPLAYED], stored.body)
    if done.replayed:
        detail = "The request was executed. Its response was long, or a stream, and was not kept."
        return problem(responses.RESPONSE_NOT_KEPT, detail, docs)
    if done.recorded and own is not None:
        return own
    detail = "Send it again with the same key: it may run again."
    return problem(responses.NOT_RECORDED, detail, docs, RETRY_SOON_S)


def _reply_of_refusal(
    docs: str, outcome: Busy | Mismatch | Lost[Any] | Unknown | Unavailable | Failed | Late
) -> Reply:
    match outcome:
        case Busy(retry_after_s):
            detail = "Send the same request again later; it will then be answered, or run."
            return problem(responses.RUNNING, detail, docs, retry_after_s)
        case Mismatch():
            detail = (
                "Path, query or body differ from the first use of this key. A new request needs a new key."
            )
            return problem(responses.MISMATCH, detail, docs)
        case Lost():
            detail = "Send it again with the same key: it is answered with the result that counts."
            return problem(responses.LOST, detail, docs, RETRY_SOON_S)
        case Unknown():
            detail = "The request may or may not have been executed. It is not run again; ask the operator."
            return problem(responses.UNKNOWN, detail, docs)
        case Unavailable():
            return problem(responses.UNAVAILABLE, "Send it again later.", docs, RETRY_SOON_S)
        case Failed():
            return problem(responses.GIVEN_UP, "It is not tried again. A new request needs a new key.", docs)
        case Late(age_s):
            raise LateEvent(f"the key passes for an event {age_s:g} s old; give HTTP a consumer of its own")
        case _:
            assert_never(outcome)
