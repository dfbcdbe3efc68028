"""Marks as bytes: the digest of a key, and when and with which body it was first seen."""

from hashlib import sha256
from struct import Struct
from typing import NamedTuple

__all__ = ["DIGEST_BYTES", "KeyMark", "digest_of", "pack_mark", "print_of", "unpack_mark"]

DIGEST_BYTES = 16
VERSION = 1
_LAYOUT = Struct(">BqQ")
NO_BODY = 0
"""The print of a record without a value."""


class KeyMark(NamedTuple):
    """When a key was first seen, and the print of the body that it came with."""

    at_us: int
    body_print: int


def digest_of(key: str) -> bytes:
    """Return the digest under which a key is marked."""
    return sha256(key.encode()).digest()[:DIGEST_BYTES]


def print_of(body: bytes | None) -> int:
    """Return the print of a body: 64 bits tell whether two bodies differ."""
    return NO_BODY if body is None else int.from_bytes(sha256(body).digest()[:8], "big") or 1


def pack_mark(mark: KeyMark) -> bytes:
    """Encode a mark: version, microseconds since 1970, print; 17 bytes."""
    return _LAYOUT.pack(VERSION, *mark)


def unpack_mark(packed: bytes) -> KeyMark:
    """Decode a mark. Raises `ValueError` for bytes that are no mark of this version."""
    if len(packed) != _LAYOUT.size or packed[0] != VERSION:
        raise ValueError(f"{packed[:20]!r} is no mark of version {VERSION}")
    _, at_us, body_print = _LAYOUT.unpack(packed)
    return KeyMark(at_us, body_print)
