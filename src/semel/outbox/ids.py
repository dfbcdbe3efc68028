"""Ids of messages: minted once, or derived from the event in whose handler the message is written."""

import sys
import uuid
from hashlib import sha256

from semel.digests import scope
from semel.types import Id

__all__ = ["ID_NAME_BYTES_MAX", "derived", "minted"]

ID_NAME_BYTES_MAX = 128
"""As of a step."""
_MS_MASK = (1 << 48) - 1
_VERSION_AND_VARIANT = 7 << 76 | 0b10 << 62
_CHANCE = (1 << 76) - 1 & ~(0b11 << 62)
"""Where UUIDv7 keeps chance: all below the version, but for the variant."""


def minted() -> uuid.UUID:
    """A new id, whose first 48 bits are this computer's time in milliseconds."""
    if sys.version_info >= (3, 14):
        return uuid.uuid7()
    import uuid_utils

    return uuid.UUID(int=uuid_utils.uuid7().int)


def derived(parent: Id, first_seen_us: int, name: str) -> uuid.UUID:
    """The id of the message `name` of an event: the same on every attempt of its handler.

    It has the layout of UUIDv7: the time at which the event was first seen, then a digest of
    (tenant, consumer, key, name) in place of chance.
    """
    tenant, consumer, key = parent
    named, keyed = name.encode(), key.encode()
    digest = sha256(b"message%b%d:%b%b" % (scope(tenant, consumer), len(named), named, keyed)).digest()
    time = (first_seen_us // 1000 & _MS_MASK) << 80
    return uuid.UUID(int=time | _VERSION_AND_VARIANT | (int.from_bytes(digest[:10]) & _CHANCE))
