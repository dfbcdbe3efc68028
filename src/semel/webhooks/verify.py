"""What every scheme of signed webhooks is made of: bytes in, `Verified` or a refusal out. No clock, no I/O.

Whatever the request holds, the answer is a value: nothing in here raises for what somebody sent.
"""

import base64
import binascii
import hmac
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec
from msgspec import Struct

from semel.errors import KeyInvalid, PolicyInvalid
from semel.intake import TYPE_BYTES_MAX
from semel.keys.limits import check as check_key
from semel.signing import SECRET_BYTES_MIN, SECRETS_MAX

__all__ = [
    "ID_BYTES_MAX",
    "SIGNATURES_MAX",
    "TOLERANCE_S",
    "Challenge",
    "Headers",
    "WebhookRefused",
    "Scheme",
    "Verified",
    "Verify",
    "fields_of",
    "fresh",
    "headers_of",
    "matches",
    "secrets_of",
    "unbase64",
    "verified",
]

TOLERANCE_S = 300
"""A timestamp may be so far off, either way: clocks differ, and a recorded request must not serve for ever."""
SIGNATURES_MAX = 8
"""In one request: each is compared with each secret."""
ID_BYTES_MAX = 256
HEADER_CHARS_MAX = 8 * 1024
_SECONDS = re.compile(r"[0-9]{1,12}", re.ASCII)

Headers: TypeAlias = Mapping[str, str]
"""Names in lower case."""


class Verified(Struct, frozen=True):
    """It is from whom it says. `id`: the key."""

    id: str
    type: str = ""


class WebhookRefused(Struct, frozen=True):
    """401: not signed as it must be. 400: signed, and not a webhook that has an id."""

    status: int
    reason: str


class Challenge(Struct, frozen=True):
    """The sender asks whether somebody is here; answer with this, and run nothing."""

    body: bytes


Verify: TypeAlias = Callable[[Headers, bytes, float], Verified | WebhookRefused | Challenge]
"""Takes headers, body and the time in seconds."""


class Scheme(Protocol):
    """Who sends, and how that is known. Write your own as a class with these two."""

    @property
    def name(self) -> str:
        """For the logs."""

    def verify(self, headers: Headers, body: bytes, now_s: float) -> Verified | WebhookRefused | Challenge:
        """Look at a request. Never raises for what is in it; takes the same time for any wrong signature."""


def headers_of(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str] | None:
    """Headers as a server hands them over; one that comes twice is joined, so that neither verifies.

    `None`: more than anybody needs.
    """
    found: dict[str, str] = {}
    size = 0
    for name, value in raw:
        size += len(name) + len(value)
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        found[key] = f"{found[key]}, {text}" if key in found else text
    return None if size > 8 * HEADER_CHARS_MAX else found


def secrets_of(secrets: str | Sequence[str]) -> list[str]:
    """One secret, or several while they are changed. Raises `PolicyInvalid`."""
    given = [secrets] if isinstance(secrets, str) else list(secrets)
    if not 1 <= len(given) <= SECRETS_MAX:
        raise PolicyInvalid(f"1 to {SECRETS_MAX} secrets are needed to verify with")
    given = [each.strip() for each in given]
    shortest = min(map(len, given))
    if shortest < SECRET_BYTES_MIN:
        raise PolicyInvalid(
            f"a webhook's secret has {shortest} characters, so it can be guessed; use at least {SECRET_BYTES_MIN}"
        )
    return given


def unbase64(text: str) -> bytes | None:
    """What is written there, or nothing that anybody wrote."""
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, ValueError):
        return None


def matches(keys: Sequence[bytes], signed: bytes, given: Sequence[bytes]) -> bool:
    """Whether one signature is by one key. Each is compared with each, in constant time, also after a match."""
    good = False
    for key in keys:
        expected = hmac.digest(key, signed, "sha256")
        for signature in given:
            good |= hmac.compare_digest(expected, signature)
    return good


def fresh(text: str, now_s: float, tolerance_s: float) -> str | WebhookRefused:
    """The timestamp as it was signed, if it is near enough."""
    if not _SECONDS.fullmatch(text):
        return WebhookRefused(401, "the timestamp is missing or no number of seconds")
    if abs(now_s - int(text)) > tolerance_s:
        return WebhookRefused(401, f"the timestamp is more than {tolerance_s:g} s from now")
    return text


def verified(event_id: Any, event_type: Any = "") -> Verified | WebhookRefused:
    """The id that was found, if it is one."""
    if not isinstance(event_id, str) or not event_id:
        return WebhookRefused(400, "the event has no id")
    try:
        if len(check_key(event_id).encode()) > ID_BYTES_MAX:
            return WebhookRefused(400, f"the event's id is longer than {ID_BYTES_MAX} bytes")
    except KeyInvalid:
        return WebhookRefused(400, "the event's id cannot be a key")
    plain = isinstance(event_type, str) and event_type.isprintable() and len(event_type) <= TYPE_BYTES_MAX
    return Verified(event_id, event_type if plain and event_type.isascii() else "")


def fields_of(body: bytes) -> dict[str, Any] | WebhookRefused:
    """The fields of a JSON object."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return WebhookRefused(400, "the body is not JSON")
    return fields if isinstance(fields, dict) else WebhookRefused(400, "the body is no JSON object")
