"""The schemes that are known by name: Standard Webhooks, Stripe, GitHub, Shopify, Slack."""

from collections.abc import Callable, Sequence

from msgspec import Struct

from semel.errors import PolicyInvalid
from semel.extras import install_command
from semel.signing import key_of, signed_text
from semel.webhooks.verify import (
    HEADER_CHARS_MAX,
    ID_BYTES_MAX,
    SIGNATURES_MAX,
    TOLERANCE_S,
    Challenge,
    Headers,
    WebhookRefused,
    Verified,
    Verify,
    fields_of,
    fresh,
    matches,
    secrets_of,
    unbase64,
    verified,
)

__all__ = ["Named", "github", "shopify", "slack", "standard", "stripe"]

_NOT_SIGNED = WebhookRefused(401, "no signature that is known here")
_TOO_MANY = WebhookRefused(401, f"more than {SIGNATURES_MAX} signatures")


class Named(Struct, frozen=True):
    """A scheme made of a name and a function."""

    name: str
    verify: Verify

    def __repr__(self) -> str:
        return f"<webhooks from {self.name}>"  # what the function holds is secret


def standard(
    secrets: str | Sequence[str], *, tolerance_s: float = TOLERANCE_S, type_field: str = "type"
) -> Named:
    """Standard Webhooks: `whsec_...` verifies `v1` (HMAC), `whpk_...` verifies `v1a` (ed25519). Any may match.

    The key is `webhook-id`, which is signed. `type_field`: where the JSON body names the event's type.
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
        signed = signed_text(event_id, timestamp, body)
        good = matches(shared, signed, found.get("v1", []))
        for check in public:
            for signature in found.get("v1a", []):
                good |= check(signature, signed)
        if not good:
            return _NOT_SIGNED
        fields = fields_of(body)
        return verified(event_id, fields.get(type_field, "") if isinstance(fields, dict) else "")

    return Named("standard", verify)


def _versions(text: str) -> dict[str, list[bytes]] | WebhookRefused:
    """The signatures in `v1,AAAA v1a,BBBB`, by version; those that nobody here can check are left out."""
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
    """What verifies with `whpk_` and base64 of 32 bytes."""
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

    That header is not signed, and there is no timestamp: what keeps a recorded request from being played again
    under another id is TLS alone.
    """
    keys = _plain_keys(secrets)

    def verify(headers: Headers, body: bytes, now_s: float) -> Verified | WebhookRefused | Challenge:
        del now_s
        prefix, _, signature = headers.get("x-hub-signature-256", "").partition("=")
        if prefix != "sha256" or not matches(keys, body, _hex_all([signature])):
            return _NOT_SIGNED
        return verified(headers.get("x-github-delivery"), headers.get("x-github-event", ""))

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
        return verified(headers.get("x-shopify-webhook-id"), headers.get("x-shopify-topic", ""))

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
        return verified(fields.get("event_id"), event.get("type", "") if isinstance(event, dict) else "")

    return Named("slack", verify)


def _in_body(body: bytes, id_field: str, type_field: str) -> Verified | WebhookRefused:
    fields = fields_of(body)
    if isinstance(fields, WebhookRefused):
        return fields
    return verified(fields.get(id_field), fields.get(type_field, ""))


def _plain_keys(secrets: str | Sequence[str]) -> list[bytes]:
    """Secrets that are used as they are written."""
    return [secret.encode() for secret in secrets_of(secrets)]


def _hex_all(texts: Sequence[str]) -> list[bytes]:
    """The bytes of each that is hexadecimal; the others are no signatures."""
    found = []
    for text in texts:
        try:
            found.append(bytes.fromhex(text))
        except ValueError:
            continue
    return found
