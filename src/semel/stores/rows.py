"""What the stores that keep records in rows have in common: a state with its flags as one number, steps as bytes."""

import msgspec

from semel.core.machine import RELEASED
from semel.types import Record, State

STATES: tuple[State, ...] = ("claimed", "done", "failed", "unknown", "forgotten")
CODES: dict[State, int] = {state: code for code, state in enumerate(STATES)}
FREE = 7
"""Stands for no state: how a count of rows names a claim that nobody holds."""
COUNTED: dict[int, str] = {0: "claimed", 1: "done", 2: "failed", 3: "unknown", FREE: RELEASED}
STATE_MASK = 7
QUARANTINE = 8
SLIDING = 16
EXTRAS = 32
"""It has steps, metadata or an anchor, which lie beside it."""
JOURNAL = 64
"""It has a journaled payload, which lies beside it."""
STATE_MAX = STATE_MASK | QUARANTINE | SLIDING | EXTRAS | JOURNAL

_steps_encoder = msgspec.msgpack.Encoder()
_steps_decoder = msgspec.msgpack.Decoder(tuple[tuple[str, bytes | None], ...])


def flags_of(record: Record) -> int:
    """The state with its flags, as the column holds them."""
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
    """Whether something of it lies in a row beside it: steps, metadata, or the time it was accepted at."""
    return bool(record.steps) or record.meta is not None or record.anchor_us is not None


def pack_steps(steps: tuple[tuple[str, bytes | None], ...]) -> bytes | None:
    """The steps of a record as one column."""
    return _steps_encoder.encode(steps) if steps else None


def unpack_steps(steps: bytes) -> tuple[tuple[str, bytes | None], ...]:
    """The steps as they were."""
    return _steps_decoder.decode(steps)
