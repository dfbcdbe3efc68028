"""Marks as bytes: the digest of a key, and when and with which body it was first seen.

A mark is 17 bytes: a version, microseconds since 1970, and the print of the body. Packed marks of one version sort by
their time.
"""

import os
from collections.abc import Iterator, Mapping
from hashlib import sha256
from itertools import chain
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_digest

__all__ = [
    "DIGEST_BYTES",
    "ENTRY_BYTES",
    "MARKS_MAX",
    "MARK_BYTES",
    "TIME_BYTES",
    "KeyMark",
    "digest_of",
    "pack_mark",
    "pack_time",
    "print_of",
    "records_of_marks",
    "unpack_mark",
    "unpack_marks",
]

DIGEST_BYTES = 16
MARK_BYTES = 17
ENTRY_BYTES = DIGEST_BYTES + MARK_BYTES
TIME_BYTES = 9
"""The bytes before the print."""
VERSION = 1
MARKS_MAX = 1000
"""The most marks in one record of the marks topic."""
NO_BODY = bytes(8)
"""The print of a record without a value."""
_TIME = Struct(">Bq")
_ENTRY = Struct(f"{DIGEST_BYTES}s{MARK_BYTES}s")


class KeyMark(NamedTuple):
    """When a key was first seen, and the print of the body that it came with."""

    at_us: int
    body_print: bytes


def digest_of(key: str) -> bytes:
    """Return the digest under which a key is marked: cryptographic, because equal digests lose an event."""
    return sha256(key.encode()).digest()[:DIGEST_BYTES]


def print_of(body: bytes | None) -> bytes:
    """Return the print of a body: 64 bits tell whether two bodies differ. It only names a copy, and decides nothing."""
    return NO_BODY if body is None else xxh3_64_digest(body)


def pack_time(at_us: int) -> bytes:
    """Return the beginning of a mark; the print follows."""
    return _TIME.pack(VERSION, at_us)


def pack_mark(mark: KeyMark) -> bytes:
    """Encode a mark."""
    return pack_time(mark.at_us) + mark.body_print


def unpack_mark(packed: bytes) -> KeyMark:
    """Decode a mark. Raises `ValueError` for bytes that are no mark of this version."""
    if len(packed) != MARK_BYTES or packed[0] != VERSION:
        raise ValueError(f"{packed[:20]!r} is no mark of version {VERSION}")
    _, at_us = _TIME.unpack_from(packed)
    return KeyMark(at_us, packed[TIME_BYTES:])


def records_of_marks(marks: Mapping[bytes, bytes], most: int = MARKS_MAX) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of the records of the marks topic that hold these packed marks, by digest.

    One mark alone has its digest as the key, so that compaction leaves the latest. Several share a record, because a
    record costs more than what is in it; its key is random, so that compaction never removes it.
    """
    if len(marks) == 1:
        yield from marks.items()
        return
    together = b"".join(chain.from_iterable(marks.items()))
    for at in range(0, len(together), most * ENTRY_BYTES):
        yield os.urandom(DIGEST_BYTES), together[at : at + most * ENTRY_BYTES]


def unpack_marks(key: bytes | None, value: bytes) -> dict[bytes, bytes]:
    """Return the packed marks of a record by digest. Raises `ValueError` for a record that is none of marks."""
    if key is None or len(key) != DIGEST_BYTES:
        raise ValueError("its key is no digest")
    if len(value) == MARK_BYTES:
        marks = {key: value}
    elif value and len(value) % ENTRY_BYTES == 0:
        marks = dict(_ENTRY.iter_unpack(value))
    else:
        raise ValueError(f"{len(value)} bytes are no marks")
    versions = value[DIGEST_BYTES::ENTRY_BYTES] if len(value) > MARK_BYTES else value[:1]
    if versions.strip(bytes([VERSION])):
        raise ValueError(f"these are no marks of version {VERSION}")
    return marks
