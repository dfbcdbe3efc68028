"""Settings of the middleware, and the rules for requests and responses."""

import re
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from importlib.util import find_spec
from operator import attrgetter
from types import FunctionType
from typing import Any, Generic, TypeVar, assert_never
from urllib.parse import quote

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from semel.client import deliver
from semel.client.client import Semel
from semel.client.client_async import AsyncSemel
from semel.errors import LateEvent, ModeMismatch, NotApplied, PolicyInvalid, UsageError
from semel.http import responses
from semel.http.presets import PRESETS, SERVER_ERRORS, Preset
from semel.http.responses import RETRY_SOON_S, ProblemType, Reply, pack, unpack
from semel.keys.limits import KEY_BYTES_MAX
from semel.policy import ATTEMPTS_LIMIT, VALUE_BYTES_LIMIT
from semel.runtime.extras import install_command
from semel.types import Busy, Done, Errored, Failed, Late, Lost, Mismatch, Outcome, Unavailable, Unknown

__all__ = [
    "HEADER",
    "STREAMED",
    "Front",
    "KeyMalformed",
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

HEADER = b"idempotency-key"
KEY_CHARS_MAX = 255
"""The limit of well-known clients and servers."""
FIELD_BYTES_MAX = 1024
"""The longest header: every character escaped, and parameters."""
NOBODY = "*"
"""The name of the shared caller; a real caller of that name is written %2A."""

_PLAIN_STRING = re.compile(rb'"([\x20\x21\x23-\x5b\x5d-\x7e]+)"')
_BARE = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")


class KeyMalformed(ValueError):
    """The header has no valid key; the message goes to the client."""


def read(fields: Sequence[bytes], *, strict: bool) -> str:
    """Parse the key in the header's fields. Raises `KeyMalformed`.

    `"8e03"` is a structured string; unless `strict`, bare printable ASCII is accepted too. Both are the same key.
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
        key = _parse_string(field)
    elif _BARE.fullmatch(field):
        key = field.decode("ascii")
    else:
        raise KeyMalformed("the key is not printable ASCII")
    if not 0 < len(key) <= KEY_CHARS_MAX:
        raise KeyMalformed(f"the key has {len(key)} characters; 1 to {KEY_CHARS_MAX} are allowed")
    return key


def _parse_string(field: bytes) -> str:
    """Parse an RFC 9651 item, which must be a string; its parameters are ignored."""
    from http_sf import StructuredFieldError, parse

    try:
        item = parse(field, tltype="item")
    except StructuredFieldError as error:
        raise KeyMalformed('the key is not a structured-field string such as "8e03978e-40d5"') from error
    value = item[0] if isinstance(item, tuple) else item
    if not isinstance(value, str):  # a token or a display string is not a string
        raise KeyMalformed('the key is not a structured-field string such as "8e03978e-40d5"')
    return value


def record_key(method: str, route: str, caller: str | None, key: str) -> str:
    """Return the record's key: method, route, caller and key, so that other callers and routes never share it.

    The first three parts contain no space, so the text is unambiguous. A text that is too long becomes a digest.
    """
    whose = NOBODY if caller is None else quote(caller, safe="")
    text = f"{method} {quote(route, safe='/{}:')} {whose} {key}"
    if len(text) <= KEY_BYTES_MAX:  # ASCII: as many bytes as characters
        return text
    return "sha256:" + sha256(text.encode()).hexdigest()


def payload_of(path: bytes, query: bytes, body: bytes) -> bytes:
    """Return the bytes that must be equal for two requests with one key."""
    return b"%d:%b%d:%b%b" % (len(path), path, len(query), query, body)


def digest_of_credentials(authorization: bytes) -> str | None:
    """Return a caller's name: a digest of its credentials; `None` without any. The credentials are not stored."""
    return sha256(authorization).hexdigest()[:32] if authorization.strip() else None


C = TypeVar("C", Semel, AsyncSemel)

MODES = ("lease", "quarantine", "observe")
MIB = 1024 * 1024
HEADERS_BYTES_MAX = 64 * 1024
"""Space for the parts of a stored response besides its body."""
RESPONSE_BYTES_LIMIT = VALUE_BYTES_LIMIT - HEADERS_BYTES_MAX
BODY_BYTES_LIMIT = 1024 * MIB
MAX_AGE = b"idempotency-key-max-age"
EVENT_STREAM = b"text/event-stream"
NOT_ACCEPTED = frozenset({401, 403})


class Rules(Struct, frozen=True, kw_only=True):
    """Settings of the middleware and of the FastAPI dependency."""

    preset: Preset | str = "ietf"
    """Which responses are stored: the name of one of `PRESETS`, or your own."""
    required: bool = False
    """Whether a request without a key is refused with 400; else it runs unguarded."""
    strict: bool = False
    """Whether only structured-field strings are valid keys; else bare text is valid too."""
    wait_s: float = 0.0
    """How long a duplicate waits for the first request, and takes over if that fails; 0: 409 at once."""
    methods: tuple[str, ...] = ("POST", "PATCH")
    """Which methods are guarded; others run unguarded, with or without a key."""
    request_bytes_max: int = MIB
    """A longer body with a key is refused with 413, because it must be held in memory."""
    response_bytes_max: int = 256 * 1024
    """The longest stored body: a longer response passes through and is not stored."""
    docs: str = ""
    """Where your API's documentation explains keys; problem documents link to it."""
    fail_open: bool = False
    """Whether requests run unguarded while the store cannot be reached; else they are refused with 503."""

    def __post_init__(self) -> None:
        if isinstance(self.preset, str) and self.preset not in PRESETS:
            raise PolicyInvalid(f"preset {self.preset!r} is unknown; choose one of {', '.join(PRESETS)}")
        if not 0 < self.response_bytes_max <= RESPONSE_BYTES_LIMIT:
            raise PolicyInvalid(f"response_bytes_max must be between 1 and {RESPONSE_BYTES_LIMIT}")
        if not 0 < self.request_bytes_max <= BODY_BYTES_LIMIT:
            raise PolicyInvalid(f"request_bytes_max must be between 1 and {BODY_BYTES_LIMIT}")
        if not self.docs.isascii() or not self.docs.isprintable() or set(self.docs) & set(" <>"):
            raise PolicyInvalid(f"docs is {self.docs!r}; it goes into a header: give a URL")
        if self.keeping.required:
            force_setattr(self, "required", self.keeping.required)  # frozen for everybody else

    @property
    def keeping(self) -> Preset:
        """The preset."""
        return PRESETS[self.preset] if isinstance(self.preset, str) else self.preset

    def refuse(self, kind: ProblemType, detail: str, retry_after_s: float | None = None) -> Reply:
        """Return the response of a refusal, in the form of the preset."""
        return self.keeping.refuse(kind, detail, self.docs, retry_after_s)

    def payload(self, path: bytes, query: bytes, body: bytes) -> bytes:
        """Return the bytes that must be equal for two requests with one key."""
        canonical = self.keeping.canonical
        if canonical is None:
            return payload_of(path, query, body)
        return payload_of(path, b"", canonical(body))


class RequestRefused(Exception):
    """Refuse the request with this response."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


class ResponseFailed(Exception):
    """The handler ran, and the preset does not store its response: the claim is released, a retry runs."""

    def __init__(self, status: int, reply: Reply | None) -> None:
        super().__init__(status)
        self.status = status
        self.reply = reply
        """The response; `None`: it was streamed."""


class Unkept(ResponseFailed, NotApplied):
    """The same without any effect, so that even a claim in mode quarantine is released."""


class Streamed:
    """The value of a streamed response. It cannot be encoded, so it is not stored."""

    never_kept = True  # intended: no warning


STREAMED = Streamed()


def prepare_client(client: C, rules: Rules, take: Any) -> C:
    """Return the client with the policy for HTTP; `take` computes the fingerprint from the handler's arguments.

    The number of attempts is unlimited: a client that retries through an outage must find its key usable. Errors
    come from the framework, so none is permanent.
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
            probe=None,  # a probe would have to return a whole response
            on_unavailable="refuse",  # `rules.fail_open` decides this
        )
    )
    items = deliver.items_of(made)
    items.warns_not_kept = False  # a long response is answered by a problem document instead
    items.source = "http"
    return made


def window_s_of(client: Semel | AsyncSemel) -> float:
    """Return how long the client remembers a finished key, without reading the store."""
    return deliver.known_window_us(client) / 1e6


def keeps_errors(client: Semel | AsyncSemel, rules: Rules) -> bool:
    """Whether an exception of the application is stored as a response; never in quarantine: its effect is unknown."""
    return client.mode != "quarantine" and rules.keeping.keeps(SERVER_ERRORS)


def key_in(rules: Rules, fields: list[bytes]) -> str | None:
    """Return the key of a request; `None` if there is none and none is required. Raises `RequestRefused`."""
    if not fields:
        if not rules.required:
            return None
        detail = "Send a header Idempotency-Key with a value of your own, the same on every retry."
        raise RequestRefused(rules.refuse(responses.MISSING, detail))
    try:
        return read(fields, strict=rules.strict)
    except KeyMalformed as error:
        raise RequestRefused(rules.refuse(responses.MALFORMED, f"{error}.")) from error


def caller_unknown(rules: Rules) -> RequestRefused:
    """Return the refusal of an unknown caller: two callers could share a key and get each other's response."""
    return RequestRefused(rules.refuse(responses.CALLER_UNKNOWN, "Authenticate, and send the request again."))


def too_large(rules: Rules) -> RequestRefused:
    """Return the refusal of a body that is too large to compare."""
    detail = f"With an Idempotency-Key a body has at most {rules.request_bytes_max} bytes."
    return RequestRefused(rules.refuse(responses.TOO_LARGE, detail))


def failure_reply(rules: Rules) -> Reply:
    """Return the stored response for a handler that raised."""
    detail = (
        "The server failed while it handled this request. A retry with the same key is answered the same."
    )
    return rules.refuse(responses.FAILED, detail)


def streams(headers: list[tuple[bytes, bytes]], bytes_max: int) -> tuple[bool, int | None]:
    """Return whether the headers say that a response is streamed, and its declared length."""
    length: int | None = None
    for name, value in headers:
        lower = name.lower()
        if lower == b"content-length" and value.isdigit():
            length = int(value)
        elif lower == b"content-type" and value.lower().startswith(EVENT_STREAM):
            return True, None
    return length is not None and length > bytes_max, length


def verdict(rules: Rules, status: int, reply: Reply | None) -> Any:
    """Return the bytes for the record, or raise `ResponseFailed`.

    `reply`: `None` if it was streamed.
    """
    if rules.keeping.keeps(status):
        return STREAMED if reply is None else pack(reply.status, reply.headers, reply.body)
    raise ResponseFailed(status, reply) if status >= SERVER_ERRORS else Unkept(status, reply)


def is_stranger(outcome: Outcome[Any]) -> bool:
    """Whether the application has rejected the caller of a new key, so that its record is dropped.

    Otherwise each request with a forged `Authorization` would leave a record for the whole window. A key that was
    used before keeps its record.
    """
    match outcome:
        case Errored(Unkept(status=status), attempt=1):
            return status in NOT_ACCEPTED
        case _:
            return False


_ID_SEGMENT = re.compile(r"(?<=/)(?!v\d+(?:/|$))[^/{}]*\d[^/{}]*(?=/|$)")
"""A part of a path with a digit, which is probably an id; not a version such as `v1`."""
NAMES_MAX = 500
"""The most routes whose names are kept; a hook bounds the number of its labels itself."""


@lru_cache(NAMES_MAX)
def _under_name(serve: FunctionType, name: str) -> FunctionType:
    """Return a copy of a function that hooks see under this name."""
    copy = FunctionType(serve.__code__, serve.__globals__, name)
    copy.__qualname__, copy.__module__ = name, ""
    return copy


class Front(Generic[C]):
    """The client of a middleware; `payload` of an exchange is the basis of the fingerprint."""

    def __init__(self, client: C, rules: Rules | None) -> None:
        self.rules: Rules = rules or Rules()
        self.client: C = prepare_client(client, self.rules, attrgetter("payload"))
        self.keeps_errors: bool = keeps_errors(self.client, self.rules)
        self._methods = frozenset(self.rules.methods)

    def handler(self, serve: Any, method: str, route: str) -> Any:
        """Return the handler of a request: `serve`; with hooks, under the name of the request's route."""
        if not deliver.reporter_of(self.client).listens:
            return serve
        return _under_name(serve, f"{method} {_ID_SEGMENT.sub('{id}', route)}")

    def max_age(self) -> tuple[bytes, bytes]:
        """Return the header with the window of keys."""
        return MAX_AGE, b"%d" % window_s_of(self.client)


REPLAYED = (b"idempotent-replayed", b"true")


def answer(rules: Rules, outcome: Outcome[Any], own: Reply | None) -> Reply:
    """Return the response to an outcome; `own`: the response of this request's handler. Raises the handler's error."""
    match outcome:
        case Done():
            return _reply_of_done(rules, outcome, own)
        case Errored(error):
            if own is None or not isinstance(error, ResponseFailed):
                raise error
            return own
        case Unknown(_, error) if error is not None:
            if own is None or not isinstance(error, ResponseFailed):
                raise error
            return own
        case _:
            return _reply_of_refusal(rules, outcome)


def _reply_of_done(rules: Rules, done: Done[Any], own: Reply | None) -> Reply:
    if done.replayed and done.kept:
        stored = unpack(done.value)
        return Reply(stored.status, [*stored.headers, REPLAYED], stored.body)
    if done.replayed:
        detail = "The request was executed. Its response was long, or a stream, and was not kept."
        return rules.refuse(responses.RESPONSE_NOT_KEPT, detail)
    if done.recorded and own is not None:
        return own
    detail = "Send it again with the same key: it may run again."
    return rules.refuse(responses.NOT_RECORDED, detail, RETRY_SOON_S)


def _reply_of_refusal(
    rules: Rules, outcome: Busy | Mismatch | Lost[Any] | Unknown | Unavailable | Failed | Late
) -> Reply:
    match outcome:
        case Busy(retry_after_s):
            detail = "Send the same request again later; it will then be answered, or run."
            return rules.refuse(responses.RUNNING, detail, retry_after_s)
        case Mismatch():
            detail = (
                "Path, query or body differ from the first use of this key. A new request needs a new key."
            )
            return rules.refuse(responses.MISMATCH, detail)
        case Lost():
            detail = "Send it again with the same key: it is answered with the result that counts."
            return rules.refuse(responses.LOST, detail, RETRY_SOON_S)
        case Unknown():
            detail = "The request may or may not have been executed. It is not run again; ask the operator."
            return rules.refuse(responses.UNKNOWN, detail)
        case Unavailable():
            return rules.refuse(responses.UNAVAILABLE, "Send it again later.", RETRY_SOON_S)
        case Failed():
            return rules.refuse(responses.GIVEN_UP, "It is not tried again. A new request needs a new key.")
        case Late(age_s):
            raise LateEvent(f"the key passes for an event {age_s:g} s old; give HTTP a consumer of its own")
        case _:
            assert_never(outcome)
