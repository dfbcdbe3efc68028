"""Turn items into parameters of statements, and rows into records and answers. No I/O here."""

from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, TypeAlias

import msgspec

from semel.core.machine import check
from semel.errors import KeyInvalid, RecordCorrupt
from semel.stores.rows import (
    JOURNAL,
    QUARANTINE,
    SLIDING,
    STATE_MASK,
    STATE_MAX,
    STATES,
    flags_of,
    pack_errors,
    unpack_errors,
    unpack_steps,
)
from semel.types import FOREVER, AttemptError, ErrorInfo, Id, Record

Row: TypeAlias = tuple[Any, ...]

GRANULE_US = 60_000_000
"""Records expire exactly; the purge index holds the minute in which to check them."""

RELEASED = 5
"""The goal of a settle that releases the claim; it is not a state."""
GOALS: dict[str, int] = {"done": 1, "failed": 2, "unknown": 3, "released": RELEASED}


# --- arrays, packed as the server reads them ----------------------------------------------------


class Packed:
    """An array parameter in binary form; its class is the element type."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data: bytes = data

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.data)} bytes)"


class Uuids(Packed):
    """An array of uuid."""


class Bigints(Packed):
    """An array of bigint."""


class Integers(Packed):
    """An array of integer."""


class Smallints(Packed):
    """An array of smallint."""


class Byteas(Packed):
    """An array of bytea."""


class Texts(Packed):
    """An array of text."""


ARRAY_OIDS: dict[type[Packed], int] = {
    Uuids: 2951, Bigints: 1016, Integers: 1007, Smallints: 1005, Byteas: 1001, Texts: 1009,
}  # fmt: skip
_ELEMENT_OIDS: dict[type[Packed], int] = {
    Uuids: 2950, Bigints: 20, Integers: 23, Smallints: 21, Byteas: 17, Texts: 25,
}  # fmt: skip

_HEAD = Struct(">iiIii")
_NULL = b"\xff\xff\xff\xff"
_UUID_LENGTH = b"\x00\x00\x00\x10"
_LENGTH = Struct(">i")
_BIGINT = Struct(">iq")
_INTEGER = Struct(">ii")
_SMALLINT = Struct(">ih")


def _head(kind: type[Packed], count: int, *, nulls: bool = False) -> bytes:
    if not count:
        return Struct(">iiI").pack(0, 0, _ELEMENT_OIDS[kind])
    return _HEAD.pack(1, int(nulls), _ELEMENT_OIDS[kind], count, 1)


def uuids(digests: Sequence[bytes]) -> Uuids:
    """Encode digests of 16 bytes each."""
    return Uuids(_head(Uuids, len(digests)) + _UUID_LENGTH.join([b"", *digests]))


def bigints(numbers: Sequence[int | None]) -> Bigints:
    """Encode 64-bit numbers or NULL."""
    return Bigints(_numbers(Bigints, _BIGINT, 8, numbers))


def integers(numbers: Sequence[int | None]) -> Integers:
    """Encode 32-bit numbers or NULL."""
    return Integers(_numbers(Integers, _INTEGER, 4, numbers))


def smallints(numbers: Sequence[int | None]) -> Smallints:
    """Encode 16-bit numbers or NULL."""
    return Smallints(_numbers(Smallints, _SMALLINT, 2, numbers))


def byteas(values: Sequence[bytes | None]) -> Byteas:
    """Encode byte strings or NULL."""
    return Byteas(_strings(Byteas, values))


def texts(values: Sequence[str | None]) -> Texts:
    """Encode texts or NULL. The texts must be `storable`."""
    return Texts(_strings(Texts, [None if value is None else value.encode() for value in values]))


def _numbers(kind: type[Packed], form: Struct, size: int, numbers: Sequence[int | None]) -> bytes:
    count = len(numbers)
    if count and numbers.count(numbers[0]) == count:  # most batches come from one caller
        first = numbers[0]
        one = _NULL if first is None else form.pack(size, first)
        return _head(kind, count, nulls=first is None) + one * count
    pack = form.pack
    parts = [_NULL if number is None else pack(size, number) for number in numbers]
    return _head(kind, count, nulls=None in numbers) + b"".join(parts)


def _strings(kind: type[Packed], values: Sequence[bytes | None]) -> bytes:
    count = len(values)
    if count and values.count(values[0]) == count:
        first = values[0]
        one = _NULL if first is None else _LENGTH.pack(len(first)) + first
        return _head(kind, count, nulls=first is None) + one * count
    pack = _LENGTH.pack
    parts = [_NULL if value is None else pack(len(value)) + value for value in values]
    return _head(kind, count, nulls=None in values) + b"".join(parts)


# --- names --------------------------------------------------------------------------------------

_ESCAPE = "\ue000"
_NUL = "\ue000\u2400"


def storable(text: str) -> str:
    """Escape NUL, the only character that PostgreSQL does not store. Prefixes stay prefixes."""
    if "\0" in text or _ESCAPE in text:
        return text.replace(_ESCAPE, _ESCAPE * 2).replace("\0", _NUL)
    return text


def original(text: str) -> str:
    """Undo `storable`."""
    if _ESCAPE not in text:
        return text
    parts = text.split(_ESCAPE * 2)
    return _ESCAPE.join(part.replace(_NUL, "\0") for part in parts)


@lru_cache(maxsize=1024)
def check_name(text: str) -> None:
    """Raise `KeyInvalid` if the text cannot be encoded, before it makes a statement fail for other items."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise KeyInvalid(f"{text!r} is not valid text: {error}") from error


# --- records ------------------------------------------------------------------------------------


def minute_after(time_us: int) -> int:
    """Return the first whole minute that is not before `time_us`."""
    return -(-time_us // GRANULE_US)


def purge_at(record: Record) -> int | None:
    """Return the minute in which to check the record for removal.

    For a claim it is when it would expire if it were completed within the next minute, so that
    completing it seldom moves the index; a purge that comes too early checks again later.
    """
    if record.expires_at_us == FOREVER:
        return None
    if record.state == "claimed" and not record.sliding:
        return minute_after(record.expires_at_us + record.fence - record.lease_until_us) + 1
    return minute_after(record.expires_at_us)


def to_columns(records: Sequence[tuple[bytes, Record]], keys: Sequence[str | None]) -> dict[str, Packed]:
    """Return the parameters of the statement `write`."""
    only = [record for _, record in records]
    return {
        "digests": uuids([digest for digest, _ in records]),
        "states": smallints([flags_of(record) for record in only]),
        "owners": byteas([record.owner for record in only]),
        "fences": bigints([record.fence for record in only]),
        "seens": bigints([None if each.first_seen_us == each.fence else each.first_seen_us for each in only]),
        "attempts": integers([record.attempt for record in only]),
        "leases": bigints([each.lease_until_us if each.state == "claimed" else None for each in only]),
        "settleds": bigints([each.settled_at_us or None for each in only]),
        "expiries": bigints([None if each.expires_at_us == FOREVER else each.expires_at_us for each in only]),
        "purges": integers([purge_at(record) for record in only]),
        "values": byteas([record.value for record in only]),
        "fingerprints": byteas([record.fingerprint for record in only]),
        "types": texts([storable(record.event_type) or None for record in only]),
        "keys": texts(keys),
        "errors": texts([_errors_text(record.errors) for record in only]),
    }


def _errors_text(errors: tuple[AttemptError, ...]) -> str | None:
    packed = pack_errors(errors)
    return None if packed is None else packed.decode()


def error_text(error: ErrorInfo | None) -> str | None:
    """Return the error of an attempt as JSON; the statement adds the attempt and the time."""
    return None if error is None else msgspec.json.encode(error).decode()


def from_row(row: Row, record_id: Id) -> Record:
    """Decode a row of the fragment `columns`. Raises `RecordCorrupt` if semel does not write such rows."""
    (
        _, state, owner, fence, first_seen, attempt, lease_until, settled_at, expires_at, value, fingerprint,
        event_type, errors, steps, meta, anchor, horizon, journal,
    ) = row  # fmt: skip
    try:
        code = state & STATE_MASK
        sound = (
            0 <= state <= STATE_MAX
            and (journal is not None) is bool(state & JOURNAL)
            and (lease_until is not None or code != 0)
        )
        if sound:
            return check(
                Record(
                    id=record_id,
                    state=STATES[code],
                    owner=owner,
                    fence=fence,
                    lease_until_us=lease_until or 0,
                    attempt=attempt,
                    expires_at_us=FOREVER if expires_at is None else expires_at,
                    first_seen_us=first_seen,
                    settled_at_us=settled_at or 0,
                    value=value,
                    fingerprint=fingerprint,
                    steps=() if steps is None else unpack_steps(steps),
                    journal=journal,
                    event_type=original(event_type or ""),
                    meta=meta,
                    quarantine=bool(state & QUARANTINE),
                    sliding=bool(state & SLIDING),
                    anchor_us=anchor,
                    horizon_us=horizon or 0,
                    errors=() if errors is None else _errors_since(errors, first_seen),
                )
            )
    except (TypeError, IndexError, ValueError, msgspec.MsgspecError) as error:
        raise RecordCorrupt(f"record {record_id!r} cannot be decoded: {error}") from error
    raise RecordCorrupt(f"record {record_id!r} has columns that semel does not write")


def _errors_since(errors: str, first_seen: int) -> tuple[AttemptError, ...]:
    """Return the errors of this record. Older ones are of an expired record that an inbox has replaced."""
    return tuple(each for each in unpack_errors(errors) if each.at_us >= first_seen)


def fit(record: Record) -> Record:
    """Raise an error for values that a row cannot hold, before they make the statement fail for other records."""
    if max(record.fence, record.expires_at_us, record.lease_until_us, record.horizon_us) > FOREVER:
        raise RecordCorrupt(f"record {record.id!r} has a time that no store can hold")
    for name, _ in record.steps:
        check_name(name)
    return check(record)
