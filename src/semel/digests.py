"""Digests of keys: what stores use instead of raw text, and what handlers hand to other systems.

The parts are length-prefixed, so that no two different (tenant, consumer, key) read the same.
"""

from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256

from semel.errors import UsageError
from semel.types import Id

__all__ = ["DIGEST_BYTES", "digest", "digests_of", "fingerprint", "idempotency_key", "scope"]

DIGEST_BYTES = 16
FINGERPRINT_VERSION = b"\x01"


@lru_cache(maxsize=1024)
def scope(tenant: str, consumer: str) -> bytes:
    """The part of a digest's input that a consumer's keys have in common."""
    whose, who = tenant.encode(), consumer.encode()
    return b"%d:%b%d:%b" % (len(whose), whose, len(who), who)


def digest(record_id: Id) -> bytes:
    """The 16 bytes that stand for (tenant, consumer, key) in a store."""
    return sha256(scope(record_id[0], record_id[1]) + record_id[2].encode()).digest()[:DIGEST_BYTES]


def digests_of(tenant: str, consumer: str, keys: Iterable[str]) -> list[bytes]:
    """The digests of many keys of one consumer."""
    prefix = scope(tenant, consumer)
    return [sha256(prefix + key.encode()).digest()[:DIGEST_BYTES] for key in keys]


def idempotency_key(record_id: Id, step: str = "") -> str:
    """A key for the systems a handler calls: the same on every attempt, another for each step."""
    base = scope(record_id[0], record_id[1])
    name, key = step.encode(), record_id[2].encode()
    return sha256(b"key%b%d:%b%b" % (base, len(name), name, key)).hexdigest()[:32]


def fingerprint(payload: bytes) -> bytes:
    """What tells two payloads under one key apart, from the caller's bytes. The first byte is the version."""
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise UsageError(
            f"a fingerprint is made of bytes, not of a {type(payload).__name__}; encode it first"
        )
    return FINGERPRINT_VERSION + sha256(payload).digest()[:DIGEST_BYTES]
