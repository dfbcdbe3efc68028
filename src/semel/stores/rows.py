"""Encoding shared by the stores that keep records in rows: the state with its flags as one number, steps as bytes."""

import msgspec

from semel.core.machine import RELEASED
from semel.types import AttemptError, Record, State

STATES: tuple[State, ...] = ("claimed", "done", "failed", "unknown", "forgotten")
CODES: dict[State, int] = {state: code for code, state in enumerate(STATES)}
FREE = 7
"""Not a state: in counts, the code of a claim that nobody holds."""
COUNTED: dict[int, str] = {0: "claimed", 1: "done", 2: "failed", 3: "unknown", FREE: RELEASED}
STATE_MASK = 7
QUARANTINE = 8
SLIDING = 16
EXTRAS = 32
"""The record has steps, metadata or an anchor, in a row of another table."""
JOURNAL = 64
"""The record has a journaled payload, in a row of another table."""
STATE_MAX = STATE_MASK | QUARANTINE | SLIDING | EXTRAS | JOURNAL

_steps_encoder = msgspec.msgpack.Encoder()
_errors_decoder = msgspec.json.Decoder(tuple[AttemptError, ...])
_steps_decoder = msgspec.msgpack.Decoder(tuple[tuple[str, bytes | None], ...])


def flags_of(record: Record) -> int:
    """Return the state with its flags, as the column stores them."""
    flags = CODES[record.state]
    if record.quarantine:
        flags |= QUARANTINE
    if record.sliding:
        flags |= SLIDING
    if has_extras(record):
        flags |= EXTRAS
    if record.journal is not None:
        flags |= JOURNAL
    return flags


def has_extras(record: Record) -> bool:
    """Whether part of the record is in another table: steps, metadata, or the time of the accepted event."""
    return bool(record.steps) or record.meta is not None or record.anchor_us is not None


def pack_errors(errors: tuple[AttemptError, ...]) -> bytes | None:
    """Encode the errors of a record as one column: a JSON array, that operators can read with SQL."""
    return msgspec.json.encode(errors) if errors else None


def unpack_errors(errors: bytes | str) -> tuple[AttemptError, ...]:
    """Decode the errors."""
    return _errors_decoder.decode(errors)


def pack_steps(steps: tuple[tuple[str, bytes | None], ...]) -> bytes | None:
    """Encode the steps of a record as one column."""
    return _steps_encoder.encode(steps) if steps else None


def unpack_steps(steps: bytes) -> tuple[tuple[str, bytes | None], ...]:
    """Decode the steps."""
    return _steps_decoder.decode(steps)
