"""Secrets and `v1` signatures as Standard Webhooks say: made by the relay's sink, checked by receivers."""

import base64
import binascii
import hmac
from collections.abc import Sequence

from semel.errors import PolicyInvalid

__all__ = ["SECRETS_MAX", "SECRET_BYTES_MIN", "key_of", "signatures", "signed_text"]

SECRET_BYTES_MIN = 16
SECRETS_MAX = 8
"""At once, while they are changed."""


def key_of(secret: str) -> bytes:
    """The key in a secret such as `whsec_MfKQ...`, which is base64. Raises `PolicyInvalid`."""
    try:
        key = base64.b64decode(secret.strip().removeprefix("whsec_"), validate=True)
    except (binascii.Error, ValueError):
        raise PolicyInvalid("a webhook's secret is whsec_ and base64, as Standard Webhooks say") from None
    if len(key) < SECRET_BYTES_MIN:
        raise PolicyInvalid(
            f"a webhook's secret holds {len(key)} bytes; at least {SECRET_BYTES_MIN} are needed"
        )
    return key


def signed_text(message_id: str, timestamp: int | str, body: bytes) -> bytes:
    """What is signed: whoever alters the id, the time or one byte of the body needs the secret."""
    return f"{message_id}.{timestamp}.".encode() + body


def signatures(keys: Sequence[bytes], message_id: str, timestamp: int, body: bytes) -> str:
    """One `v1` signature for each key, so that a receiver knows one of them while secrets are changed."""
    signed = signed_text(message_id, timestamp, body)
    made = (base64.b64encode(hmac.digest(key, signed, "sha256")).decode() for key in keys)
    return " ".join(f"v1,{each}" for each in made)
