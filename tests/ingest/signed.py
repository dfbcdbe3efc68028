"""Requests as the senders sign them, made without the code that verifies them."""

import base64
import hashlib
import hmac
import json
from datetime import UTC, datetime
from typing import Any

import standardwebhooks

NOW = 1_700_000_000
SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()
OTHER = "whsec_" + base64.b64encode(b"fedcba9876543210fedcba9876543210").decode()
BODY = json.dumps({"id": "evt_1", "type": "order.paid", "cents": 500}).encode()


def standard(
    body: bytes = BODY, *, message_id: str = "msg_1", at: int = NOW, secret: str = SECRET
) -> dict[str, str]:
    """By the reference library."""
    moment = datetime.fromtimestamp(at, UTC)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(at),
        "webhook-signature": standardwebhooks.Webhook(secret).sign(message_id, moment, body.decode()),
    }


def _mac(secret: str, text: bytes) -> "hmac.HMAC":
    return hmac.new(secret.encode(), text, hashlib.sha256)


def stripe(
    body: bytes = BODY, *, at: int = NOW, secret: str = "whsec_a-rather-plain-secret"
) -> dict[str, str]:
    made = _mac(secret, f"{at}.".encode() + body).hexdigest()
    return {"stripe-signature": f"t={at},v1={made},v0=ignored"}


def github(body: bytes = BODY, *, secret: str = "a-rather-plain-secret", **more: Any) -> dict[str, str]:
    return {
        "x-hub-signature-256": "sha256=" + _mac(secret, body).hexdigest(),
        "x-github-delivery": "72d3162e-cc78-11e3-81ab-4c9367dc0958",
        "x-github-event": "push",
    }


def shopify(body: bytes = BODY, *, secret: str = "a-rather-plain-secret", **more: Any) -> dict[str, str]:
    return {
        "x-shopify-hmac-sha256": base64.b64encode(_mac(secret, body).digest()).decode(),
        "x-shopify-webhook-id": "b54557e4-bdd9-4b37-8a5f-bf7d70bcd043",
        "x-shopify-topic": "orders/create",
    }


def slack(
    body: bytes = b'{"event_id":"Ev1","type":"event_callback","event":{"type":"message"}}',
    *,
    at: int = NOW,
    secret: str = "a-rather-plain-secret",
) -> dict[str, str]:
    return {
        "x-slack-request-timestamp": str(at),
        "x-slack-signature": "v0=" + _mac(secret, f"v0:{at}:".encode() + body).hexdigest(),
    }
