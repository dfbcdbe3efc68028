"""Decode the records that the scripts write. `scripts/prelude.lua` describes their layout."""

from struct import Struct, error

import msgspec

from semel.core.commands import Known
from semel.core.ids import worker_id
from semel.core.machine import LEASE_ENDED, LEASE_ENDED_MESSAGE, check
from semel.errors import RecordCorrupt
from semel.types import AttemptError, ErrorInfo, Id, Record, State

VERSION = 1
HEADER_BYTES = 26
TIME_BYTES = 7
STATES: tuple[State, ...] = ("claimed", "done", "failed", "unknown", "forgotten")
CODES: dict[State | str, int] = {state: code for code, state in enumerate(STATES)}

STATE_MASK = 7
QUARANTINE, SLIDING, SEEN, VALUE, JOURNAL = 8, 16, 32, 64, 128
NAME, TYPE, PRINT, META, STEPS, ANCHOR, NOTHING, ERRORS = 1, 2, 4, 8, 16, 32, 64, 128
NULL = b"jnull"
"""The value of a handler that returns nothing. Most do, so a flag replaces the bytes."""

_SCOPE = Struct(">HH")


def id_of(name: bytes | None, digest: bytes) -> Id:
    """Return the record's id; if the key was not kept, its digest takes the key's place."""
    if name is None:
        return ("", "", digest.hex())
    whose, who = _SCOPE.unpack_from(name)
    at = _SCOPE.size + whose
    key = name[at + who :]
    return (name[_SCOPE.size : at].decode(), name[at : at + who].decode(), key.decode() or digest.hex())


class RecordReader:
    """Reads the parts of a record one after the other."""

    __slots__ = ("at", "raw")

    def __init__(self, raw: bytes, at: int) -> None:
        self.raw: bytes = raw
        self.at: int = at

    def number(self, width: int) -> int:
        """Read a number of `width` bytes."""
        at, self.at = self.at, self.at + width
        return int.from_bytes(self.raw[at : self.at], "big")

    def part(self, width: int) -> bytes:
        """Read a part with its length of `width` bytes before it."""
        length = self.number(width)
        at, self.at = self.at, self.at + length
        if self.at > len(self.raw):
            raise ValueError("cut short")
        return self.raw[at : self.at]

    def end(self) -> None:
        """Raise `ValueError` if bytes are left."""
        if self.at != len(self.raw):
            raise ValueError("it is too long")


class RecordHead:
    """The header and the name of a record: enough for a scan to decide whether the record matches."""

    __slots__ = (
        "anchor",
        "at",
        "attempt",
        "expires_at",
        "fence",
        "first_seen",
        "flags",
        "horizon",
        "more",
        "name",
        "owner",
        "rest",
        "type",
    )

    def __init__(self, raw: bytes) -> None:
        if len(raw) <= HEADER_BYTES or raw[0] != VERSION or raw[1] & STATE_MASK > CODES["forgotten"]:
            raise ValueError("semel writes no such header")
        self.flags: int = raw[1]
        self.more: int = raw[2]
        reader = RecordReader(raw, 3)
        self.attempt: int = reader.number(2)
        self.expires_at: int = reader.number(TIME_BYTES)
        self.at: int = reader.number(TIME_BYTES)
        self.fence: int = reader.number(TIME_BYTES)
        self.owner: bytes = reader.part(1)
        self.first_seen: int = reader.number(TIME_BYTES) if self.flags & SEEN else self.fence
        self.anchor: int | None = reader.number(TIME_BYTES) if self.more & ANCHOR else None
        self.horizon: int = reader.number(TIME_BYTES) if self.more & ANCHOR else 0
        self.name: bytes | None = reader.part(2) if self.more & NAME else None
        self.type: str = reader.part(2).decode() if self.more & TYPE else ""
        self.rest: RecordReader = reader


def unpack(raw: bytes, record_id: Id) -> Record:
    """Decode a record. Raises `RecordCorrupt` if the bytes are not a record that semel writes."""
    try:
        head = RecordHead(raw)
        rest = head.rest
        fingerprint = rest.part(2) if head.more & PRINT else None
        meta = rest.part(4) if head.more & META else None
        steps = _steps(rest.part(4)) if head.more & STEPS else ()
        errors = _errors(rest.part(4)) if head.more & ERRORS else ()
        journal = rest.part(4) if head.flags & JOURNAL else None
        value = rest.part(4) if head.flags & VALUE else NULL if head.more & NOTHING else None
        rest.end()
    except (ValueError, IndexError, error, msgspec.MsgspecError) as trouble:
        raise RecordCorrupt(f"record {record_id!r} cannot be decoded: {trouble}") from trouble
    return check(_record(head, record_id, fingerprint, meta, steps, journal, value, errors))


def _record(
    head: RecordHead,
    record_id: Id,
    fingerprint: bytes | None = None,
    meta: bytes | None = None,
    steps: tuple[tuple[str, bytes | None], ...] = (),
    journal: bytes | None = None,
    value: bytes | None = None,
    errors: tuple[AttemptError, ...] = (),
) -> Record:
    state = STATES[head.flags & STATE_MASK]
    claimed = state == "claimed"
    return Record(
        id=record_id,
        state=state,
        owner=head.owner,
        fence=head.fence,
        lease_until_us=head.at if claimed else 0,
        attempt=head.attempt,
        expires_at_us=head.expires_at,
        first_seen_us=head.first_seen,
        settled_at_us=0 if claimed else head.at,
        value=value,
        fingerprint=fingerprint,
        steps=steps,
        journal=journal,
        event_type=head.type,
        meta=meta,
        quarantine=bool(head.flags & QUARANTINE),
        sliding=bool(head.flags & SLIDING),
        anchor_us=head.anchor,
        horizon_us=head.horizon,
        errors=errors,
    )


_TIME_BITS = 56
_TIME_MASK = (1 << _TIME_BITS) - 1
_DONE, _FAILED = 1, 2


def unpack_known(raw: bytes, record_id: Id, now: int) -> Known:
    """Decode the answer to a duplicate and skip the parts that it does not need. Raises `RecordCorrupt`."""
    try:
        flags, more, state = raw[1], raw[2], raw[1] & STATE_MASK
        times = int.from_bytes(raw[5:HEADER_BYTES])
        fence = first_seen = times & _TIME_MASK
        at = HEADER_BYTES + 1 + raw[HEADER_BYTES]
        if flags & SEEN:
            first_seen = int.from_bytes(raw[at : at + TIME_BYTES])
            at += TIME_BYTES
        if more & ANCHOR:
            at += 2 * TIME_BYTES
        for flag in _SHORT_PARTS:
            if more & flag:
                at += 2 + (raw[at] << 8) + raw[at + 1]
        for flag in _LONG_PARTS:
            if more & flag:
                at += 4 + int.from_bytes(raw[at : at + 4])
        value = NULL if more & NOTHING else None
        if flags & VALUE:
            value = raw[at + 4 :]
            at += 4 + int.from_bytes(raw[at : at + 4])
    except IndexError as trouble:
        raise RecordCorrupt(f"record {record_id!r} cannot be decoded: {trouble}") from trouble
    if at != len(raw) or raw[0] != VERSION or state not in (_DONE, _FAILED) or flags & JOURNAL or not fence:
        raise RecordCorrupt(f"record {record_id!r} cannot be decoded as a settled record")
    return Known(
        "done" if state == _DONE else "failed",
        value,
        fence,
        times >> _TIME_BITS & _TIME_MASK,
        first_seen,
        (times >> 2 * _TIME_BITS) - now,
    )


_SHORT_PARTS = (NAME, TYPE, PRINT)
_LONG_PARTS = (META, STEPS, ERRORS)


def outline(raw: bytes, digest: bytes) -> Record:
    """Decode a record without its payloads, from its first bytes. Raises `RecordCorrupt`."""
    try:
        head = RecordHead(raw)
        record_id = id_of(head.name, digest)
    except (ValueError, IndexError, error) as trouble:
        raise RecordCorrupt(f"the record of {digest.hex()} cannot be decoded: {trouble}") from trouble
    return _record(head, record_id, journal=b"" if head.flags & JOURNAL else None)


def _steps(raw: bytes) -> tuple[tuple[str, bytes | None], ...]:
    reader = RecordReader(raw, 0)
    found: list[tuple[str, bytes | None]] = []
    while reader.at < len(raw):
        name = reader.part(2).decode()
        length = reader.number(4)
        if not length:
            found.append((name, None))
            continue
        at, reader.at = reader.at, reader.at + length - 1
        found.append((name, raw[at : reader.at]))
    if reader.at != len(raw):
        raise ValueError("its steps are cut short")
    return tuple(found)


_pack_error = msgspec.msgpack.Encoder().encode
_unpack_error = msgspec.msgpack.Decoder(tuple[str, str, str, str]).decode
_LEASE_END = 0
"""The first byte of an error that a script wrote: the beginning of the owner follows."""


def pack_error(info: ErrorInfo) -> bytes:
    """Encode what is kept of an error; the script adds the attempt and the time."""
    return _pack_error((info.kind, info.message, info.traceback, info.worker))


def _errors(raw: bytes) -> tuple[AttemptError, ...]:
    reader = RecordReader(raw, 0)
    found: list[AttemptError] = []
    while reader.at < len(raw):
        attempt, at = reader.number(2), reader.number(TIME_BYTES)
        packed = reader.part(4)
        if packed[0] == _LEASE_END:
            found.append(
                AttemptError(attempt, LEASE_ENDED, LEASE_ENDED_MESSAGE, "", worker_id(packed[1:]), at)
            )
        else:
            found.append(AttemptError(attempt, *_unpack_error(packed), at))
    return tuple(found)
