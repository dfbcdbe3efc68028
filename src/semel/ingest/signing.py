"""Secrets and signatures of Standard Webhooks: the relay's sink signs, receivers verify."""

import base64
import binascii
import hmac
from collections.abc import Callable, Sequence
from typing import TypeAlias

from semel.errors import PolicyInvalid
from semel.runtime.extras import install_command

__all__ = [
    "SECRETS_MAX",
    "SECRET_BYTES_MIN",
    "SECRET_PREFIX",
    "Signer",
    "key_of",
    "signatures",
    "signer_of",
    "text_to_sign",
]

SECRET_PREFIX = "whsec_"  # noqa: S105 - the same for every secret
SECRET_BYTES_MIN = 16
SECRETS_MAX = 8
"""The most secrets at once, during a rotation."""
SEED_BYTES = 32
Signer: TypeAlias = Callable[[bytes], str]
"""Signs bytes; returns the signature with the name of its scheme."""


def key_of(secret: str) -> bytes:
    """Return the key in a secret such as `whsec_MfKQ...`, which is base64. Raises `PolicyInvalid`."""
    key = _decode_secret(secret.strip().removeprefix(SECRET_PREFIX))
    if len(key) < SECRET_BYTES_MIN:
        raise PolicyInvalid(
            f"a webhook's secret holds {len(key)} bytes; at least {SECRET_BYTES_MIN} are needed"
        )
    return key


def signer_of(secret: str) -> Signer:
    """Return the signer of a secret: HMAC for `whsec_`, ed25519 for `whsk_`. Raises `PolicyInvalid`."""
    secret = secret.strip()
    if secret.startswith("whsk_"):
        return _ed25519(_decode_secret(secret.removeprefix("whsk_")))
    key = key_of(secret)
    return lambda signed: f"v1,{base64.b64encode(hmac.digest(key, signed, 'sha256')).decode()}"


def text_to_sign(message_id: str, timestamp: int | str, body: bytes) -> bytes:
    """Return the bytes to sign: the id, the time and the body."""
    return f"{message_id}.{timestamp}.".encode() + body


def signatures(signers: Sequence[Signer], message_id: str, timestamp: int, body: bytes) -> str:
    """Sign with each secret, so that receivers can verify during a rotation."""
    signed = text_to_sign(message_id, timestamp, body)
    return " ".join(sign(signed) for sign in signers)


def _decode_secret(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise PolicyInvalid(
            "a webhook's secret is whsec_ or whsk_ and base64, as Standard Webhooks say"
        ) from None


def _ed25519(key: bytes) -> Signer:
    """Return a signer for a private key: its seed, with or without the public key."""
    if len(key) not in (SEED_BYTES, 2 * SEED_BYTES):
        raise PolicyInvalid(f"a whsk_ secret holds {SEED_BYTES} or {2 * SEED_BYTES} bytes, not {len(key)}")
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ModuleNotFoundError as error:
        raise PolicyInvalid(
            f"whsk_ needs cryptography; install the extra: {install_command('ed25519')}"
        ) from error
    private = Ed25519PrivateKey.from_private_bytes(key[:SEED_BYTES])
    return lambda signed: f"v1a,{base64.b64encode(private.sign(signed)).decode()}"
