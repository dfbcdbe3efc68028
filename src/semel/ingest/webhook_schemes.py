"""The built-in schemes: Standard Webhooks, Stripe, GitHub, Shopify, Slack."""

import base64
import binascii
import hmac
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec
from msgspec import Struct

from semel.errors import KeyInvalid, PolicyInvalid
from semel.ingest.intake import TYPE_BYTES_MAX
from semel.ingest.signing import SECRET_BYTES_MIN, SECRET_PREFIX, SECRETS_MAX, key_of, text_to_sign
from semel.keys.limits import check as check_key
from semel.runtime.extras import install_command

__all__ = [
    "ID_BYTES_MAX",
    "SIGNATURES_MAX",
    "TOLERANCE_S",
    "Challenge",
    "Headers",
    "Named",
    "Scheme",
    "Verified",
    "Verify",
    "WebhookRefused",
    "fields_of",
    "fresh",
    "github",
    "headers_of",
    "matches",
    "secrets_of",
    "shopify",
    "slack",
    "standard",
    "stripe",
    "unbase64",
    "verify_id",
]

TOLERANCE_S = 300
"""The largest difference of a timestamp: clocks differ, and a recorded request must not be valid for ever."""
SIGNATURES_MAX = 8
"""The most signatures in one request: each is compared with each secret."""
ID_BYTES_MAX = 256
HEADER_CHARS_MAX = 8 * 1024
_SECONDS = re.compile(r"[0-9]{1,12}", re.ASCII)

Headers: TypeAlias = Mapping[str, str]
"""Headers; the names are in lower case."""


class Verified(Struct, frozen=True):
    """The signature is valid. `id`: the key."""

    id: str
    type: str = ""


class WebhookRefused(Struct, frozen=True):
    """401: no valid signature. 400: signed, but without a usable id."""

    status: int
    reason: str


class Challenge(Struct, frozen=True):
    """The sender verifies the URL; answer with this, and run nothing."""

    body: bytes


Verify: TypeAlias = Callable[[Headers, bytes, float], Verified | WebhookRefused | Challenge]
"""Takes headers, body and the time in seconds."""


class Scheme(Protocol):
    """Verifies the requests of one sender. Write your own as a class with these two members."""

    @property
    def name(self) -> str:
        """The name in logs."""

    def verify(self, headers: Headers, body: bytes, now_s: float) -> Verified | WebhookRefused | Challenge:
        """Verify a request. Never raises for bad content; takes the same time for any wrong signature."""


def headers_of(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str] | None:
    """Collect the headers of a request; values of a repeated header are joined, so that neither verifies.

    Returns `None` if there are too many.
    """
    found: dict[str, str] = {}
    size = 0
    for name, value in raw:
        size += len(name) + len(value)
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        found[key] = f"{found[key]}, {text}" if key in found else text
    return None if size > 8 * HEADER_CHARS_MAX else found


def secrets_of(secrets: str | Sequence[str]) -> list[str]:
    """Return the list of secrets: one, or several during a rotation. Raises `PolicyInvalid`."""
    given = [secrets] if isinstance(secrets, str) else list(secrets)
    if not 1 <= len(given) <= SECRETS_MAX:
        raise PolicyInvalid(f"1 to {SECRETS_MAX} secrets are needed to verify with")
    given = [each.strip() for each in given]
    shortest = min(len(each.removeprefix(SECRET_PREFIX)) for each in given)
    if shortest < SECRET_BYTES_MIN:
        raise PolicyInvalid(
            f"a webhook's secret has {shortest} characters, so it can be guessed; use at least {SECRET_BYTES_MIN}"
        )
    return given


def unbase64(text: str) -> bytes | None:
    """Decode base64; returns empty bytes for malformed text."""
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, ValueError):
        return None


def matches(keys: Sequence[bytes], signed: bytes, given: Sequence[bytes]) -> bool:
    """Whether one signature matches one key. Compares each with each, in constant time, also after a match."""
    good = False
    for key in keys:
        expected = hmac.digest(key, signed, "sha256")
        for signature in given:
            good |= hmac.compare_digest(expected, signature)
    return good


def fresh(text: str, now_s: float, tolerance_s: float) -> str | WebhookRefused:
    """Return the signed timestamp if it is near enough to now."""
    if not _SECONDS.fullmatch(text):
        return WebhookRefused(401, "the timestamp is missing or not a number of seconds")
    if abs(now_s - int(text)) > tolerance_s:
        return WebhookRefused(401, f"the timestamp is more than {tolerance_s:g} s from now")
    return text


def verify_id(event_id: Any, event_type: Any = "") -> Verified | WebhookRefused:
    """Check the id of an event."""
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
    """Return the fields of a JSON object."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return WebhookRefused(400, "the body is not JSON")
    return fields if isinstance(fields, dict) else WebhookRefused(400, "the body is not a JSON object")


_NOT_SIGNED = WebhookRefused(401, "no signature that is known here")
_TOO_MANY = WebhookRefused(401, f"more than {SIGNATURES_MAX} signatures")


class Named(Struct, frozen=True):
    """A scheme from a name and a function."""

    name: str
    verify: Verify

    def __repr__(self) -> str:
        return f"<webhooks from {self.name}>"  # the function contains secrets


def standard(
    secrets: str | Sequence[str], *, tolerance_s: float = TOLERANCE_S, type_field: str = "type"
) -> Named:
    """Standard Webhooks: `whsec_...` verifies `v1` (HMAC), `whpk_...` verifies `v1a` (ed25519). Any may match.

    The key is `webhook-id`, which is signed. `type_field`: the field of the event's type in the JSON body.
    """
    given = secrets_of(secrets)
    shared = [key_of(each) for each in given if not each.startswith("whpk_")]
    public = [_public_key(each) for each in given if each.startswith("whpk_")]

    def verify(headers: Headers, body: bytes, now_s: float) -> Verified | WebhookRefused | Challenge:
        event_id, text = headers.get("webhook-id", ""), headers.get("webhook-signature", "")
        if not event_id or "." in event_id or not event_id.isascii() or len(event_id) > ID_BYTES_MAX:
            return WebhookRefused(401, "webhook-id is missing, too long, or holds a dot")
        timestamp = fresh(headers.get("webhook-timestamp", ""), now_s, tolerance_s)
        if isinstance(timestamp, WebhookRefused):
            return timestamp
        found = _versions(text)
        if isinstance(found, WebhookRefused):
            return found
        signed = text_to_sign(event_id, timestamp, body)
        good = matches(shared, signed, found.get("v1", []))
        for check in public:
            for signature in found.get("v1a", []):
                good |= check(signature, signed)
        if not good:
            return _NOT_SIGNED
        fields = fields_of(body)
        return verify_id(event_id, fields.get(type_field, "") if isinstance(fields, dict) else "")

    return Named("standard", verify)


def _versions(text: str) -> dict[str, list[bytes]] | WebhookRefused:
    """Return the signatures in `v1,AAAA v1a,BBBB` by version, without unknown versions."""
    parts = text.split(" ") if len(text) <= HEADER_CHARS_MAX else []
    if len(parts) > SIGNATURES_MAX:
        return _TOO_MANY
    found: dict[str, list[bytes]] = {}
    for part in parts:
        version, _, encoded = part.partition(",")
        signature = unbase64(encoded)
        if signature:
            found.setdefault(version, []).append(signature)
    return found


def _public_key(text: str) -> Callable[[bytes, bytes], bool]:
    """Return the verifier of a public key: `whpk_` and base64 of 32 bytes."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        raise PolicyInvalid(
            f"v1a signatures need cryptography; install the extra: {install_command('ed25519')}"
        ) from None
    raw = unbase64(text.removeprefix("whpk_"))
    try:
        key = Ed25519PublicKey.from_public_bytes(raw or b"")
    except ValueError:
        raise PolicyInvalid(
            "a public key is whpk_ and base64 of 32 bytes, as Standard Webhooks say"
        ) from None

    def check(signature: bytes, signed: bytes) -> bool:
        try:
            key.verify(signature, signed)
        except InvalidSignature:
            return False
        return True

    return check


def stripe(secrets: str | Sequence[str], *, tolerance_s: float = TOLERANCE_S) -> Named:
    """Stripe: `Stripe-Signature: t=...,v1=...`. The key is the event's `id`, in the signed body."""
    keys = _plain_keys(secrets)

    def verify(headers: Headers, body: bytes, now_s: float) -> Verified | WebhookRefused | Challenge:
        text = headers.get("stripe-signature", "")
        parts = text.split(",") if len(text) <= HEADER_CHARS_MAX else []
        if len(parts) > 2 * SIGNATURES_MAX:
            return _TOO_MANY
        pairs = [part.strip().partition("=") for part in parts]
        times = [value for name, _, value in pairs if name == "t"]
        given = _hex_all([value for name, _, value in pairs if name == "v1"])
        if len(times) != 1 or not given:
            return _NOT_SIGNED
        timestamp = fresh(times[0], now_s, tolerance_s)
        if isinstance(timestamp, WebhookRefused):
            return timestamp
        if not matches(keys, f"{timestamp}.".encode() + body, given):
            return _NOT_SIGNED
        return _in_body(body, "id", "type")

    return Named("stripe", verify)


def github(secrets: str | Sequence[str]) -> Named:
    """GitHub: `X-Hub-Signature-256` over the body. The key is `X-GitHub-Delivery`, the same when it is sent again.

    That header is not signed, and there is no timestamp: only TLS protects against a replay of a recorded request
    with another id.
    """
    keys = _plain_keys(secrets)

    def verify(headers: Headers, body: bytes, now_s: float) -> Verified | WebhookRefused | Challenge:
        del now_s
        prefix, _, signature = headers.get("x-hub-signature-256", "").partition("=")
        if prefix != "sha256" or not matches(keys, body, _hex_all([signature])):
            return _NOT_SIGNED
        return verify_id(headers.get("x-github-delivery"), headers.get("x-github-event", ""))

    return Named("github", verify)


def shopify(secrets: str | Sequence[str]) -> Named:
    """Shopify: `X-Shopify-Hmac-Sha256` over the body. The key is `X-Shopify-Webhook-Id`, the same when sent again.

    As with GitHub, the header with the id is not signed, and there is no timestamp.
    """
    keys = _plain_keys(secrets)

    def verify(headers: Headers, body: bytes, now_s: float) -> Verified | WebhookRefused | Challenge:
        del now_s
        signature = unbase64(headers.get("x-shopify-hmac-sha256", ""))
        if not signature or not matches(keys, body, [signature]):
            return _NOT_SIGNED
        return verify_id(headers.get("x-shopify-webhook-id"), headers.get("x-shopify-topic", ""))

    return Named("shopify", verify)


def slack(secrets: str | Sequence[str], *, tolerance_s: float = TOLERANCE_S) -> Named:
    """Slack's Events API: `X-Slack-Signature: v0=...`. The key is `event_id`, in the signed body.

    The request by which Slack verifies a URL is answered with its challenge.
    """
    keys = _plain_keys(secrets)

    def verify(headers: Headers, body: bytes, now_s: float) -> Verified | WebhookRefused | Challenge:
        timestamp = fresh(headers.get("x-slack-request-timestamp", ""), now_s, tolerance_s)
        if isinstance(timestamp, WebhookRefused):
            return timestamp
        version, _, signature = headers.get("x-slack-signature", "").partition("=")
        signed = f"v0:{timestamp}:".encode() + body
        if version != "v0" or not matches(keys, signed, _hex_all([signature])):
            return _NOT_SIGNED
        fields = fields_of(body)
        if isinstance(fields, WebhookRefused):
            return fields
        if fields.get("type") == "url_verification":
            challenge = fields.get("challenge")
            return (
                Challenge(challenge.encode(errors="replace"))
                if isinstance(challenge, str)
                else WebhookRefused(400, "a challenge without its text")
            )
        event = fields.get("event")
        return verify_id(fields.get("event_id"), event.get("type", "") if isinstance(event, dict) else "")

    return Named("slack", verify)


def _in_body(body: bytes, id_field: str, type_field: str) -> Verified | WebhookRefused:
    fields = fields_of(body)
    if isinstance(fields, WebhookRefused):
        return fields
    return verify_id(fields.get(id_field), fields.get(type_field, ""))


def _plain_keys(secrets: str | Sequence[str]) -> list[bytes]:
    """Return the secrets as bytes."""
    return [secret.encode() for secret in secrets_of(secrets)]


def _hex_all(texts: Sequence[str]) -> list[bytes]:
    """Decode the hexadecimal texts; skips others."""
    found = []
    for text in texts:
        try:
            found.append(bytes.fromhex(text))
        except ValueError:
            continue
    return found
