"""Turn records into rows and rows into records, and say it in SQL."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple, TypeAlias

import msgspec

from semel.core.machine import check
from semel.digests import DIGEST_BYTES, scope
from semel.errors import RecordCorrupt
from semel.types import FOREVER, Id, Record, State

BATCH_ROWS_MAX = 500
"""Rows of one statement: larger ones gain nothing, and every SQLite allows this many parameters."""

GRANULE_US = 60_000_000
"""Records expire exactly; what is indexed is the minute in which to look at them."""
PURGE_SLACK = 2
"""An indexed minute up to this much later than needed is left alone: moving it costs more than the room."""

STATES: tuple[State, ...] = ("claimed", "done", "failed", "unknown", "forgotten")
CODES: dict[State, int] = {state: code for code, state in enumerate(STATES)}
CLAIMED, DONE, FAILED, UNKNOWN, FORGOTTEN = range(5)
STATE_MASK = 7
QUARANTINE = 8
SLIDING = 16
EXTRAS = 32
JOURNAL = 64
FLAGS_ALL = QUARANTINE | SLIDING | EXTRAS | JOURNAL

COLUMNS = "id, digest, state, owner, fence, seen, attempt, lease, settled, expires, purge_at, value, fingerprint, event_type"
Row: TypeAlias = tuple[Any, ...]

INSERT_RECORD = (
    "INSERT INTO semel_records (state, owner, fence, seen, attempt, lease, settled, expires, value, fingerprint,"
    " event_type, purge_at, key, digest, consumer_id) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
)
UPDATE_RECORD = (
    "UPDATE semel_records SET state=?, owner=?, fence=?, seen=?, attempt=?, lease=?, settled=?, expires=?, value=?,"
    " fingerprint=?, event_type=? WHERE id=?"
)
"""The usual update: it touches no index."""
MOVE_RECORD = (
    "UPDATE semel_records SET state=?, owner=?, fence=?, seen=?, attempt=?, lease=?, settled=?, expires=?, value=?,"
    " fingerprint=?, event_type=?, purge_at=? WHERE id=?"
)

# What a stored record means at ?1, said in SQL: the same as `machine.standing`.
RUNNING = "(state & 7 = 0 AND coalesce(lease, -fence) > ?1 - fence)"
ORPHANED = f"(state & 15 = 8 AND length(owner) > 0 AND NOT {RUNNING})"
LIVE = f"({RUNNING} OR {ORPHANED} OR expires IS NULL OR expires > ?1 - fence)"
STANDING_STATE = f"(CASE WHEN {ORPHANED} THEN {UNKNOWN} ELSE state & 7 END)"
GONE_AT = "max(fence + expires, CASE WHEN state & 7 = 0 THEN fence + coalesce(lease, -fence) ELSE 0 END)"


class Stored(NamedTuple):
    """A record with where it lies: what an update needs to know."""

    rowid: int
    purge_at: int | None
    flags: int
    record: Record


def digests_of(tenant: str, consumer: str, keys: Iterable[str]) -> list[bytes]:
    """The digests of many keys of one consumer."""
    prefix = scope(tenant, consumer)
    return [sha256(prefix + key.encode()).digest()[:DIGEST_BYTES] for key in keys]


@lru_cache(maxsize=BATCH_ROWS_MAX)
def marks_of(count: int, start: int = 1) -> str:
    """`count` parameters with commas, numbered from `start`."""
    return ",".join(f"?{number}" for number in range(start, start + count))


@lru_cache(maxsize=BATCH_ROWS_MAX)
def select_records(count: int, columns: str = COLUMNS) -> str:
    """Read the rows of `count` digests."""
    return f"SELECT {columns} FROM semel_records WHERE digest IN ({marks_of(count)})"


@lru_cache(maxsize=BATCH_ROWS_MAX)
def insert_marks(count: int) -> str:
    """Mark `count` digests from ?4 on; ?1 consumer, ?2 expiry, ?3 now. Returns those that were new."""
    rows = ",".join(f"(?{number},?1,?2)" for number in range(4, 4 + count))
    return (
        f"INSERT INTO semel_marks (digest, consumer_id, expires_at) VALUES {rows}"
        " ON CONFLICT (digest) DO UPDATE SET expires_at = excluded.expires_at"
        " WHERE semel_marks.expires_at <= ?3 RETURNING digest"
    )


def chunks(things: Sequence[Any], size: int = BATCH_ROWS_MAX) -> Iterable[Sequence[Any]]:
    """Slices of at most `size`."""
    if len(things) <= size:
        return (things,) if things else ()
    return (things[start : start + size] for start in range(0, len(things), size))


def to_row(record: Record) -> Row:
    """The columns of a record, in the order of the statements above, up to event_type."""
    fence = record.fence
    code = CODES[record.state]
    state = code
    if record.quarantine:
        state |= QUARANTINE
    if record.sliding:
        state |= SLIDING
    if record.steps or record.meta is not None:
        state |= EXTRAS
    if record.journal is not None:
        state |= JOURNAL
    lease = record.lease_until - fence if record.lease_until else None
    if code == CLAIMED:
        settled = lease
    else:
        settled = record.settled_at - fence if record.settled_at else None
    return (
        state,
        record.owner,
        fence,
        fence - record.first_seen,
        record.attempt,
        lease,
        settled,
        None if record.expires_at == FOREVER else record.expires_at - fence,
        record.value,
        record.fingerprint,
        record.event_type or None,
    )


def from_row(
    row: Row,
    record_id: Id,
    steps: bytes | None = None,
    meta: bytes | None = None,
    journal: bytes | None = None,
) -> Record:
    """The record of a row. Raises `RecordCorrupt` where the row is none that semel writes."""
    _, _, state, owner, fence, seen, attempt, lease, settled, expires, _, value, fingerprint, event_type = row
    try:
        code = state & STATE_MASK
        sound = (
            type(owner) is bytes
            and type(attempt) is int
            and 0 <= state <= STATE_MASK | FLAGS_ALL
            and (value is None or type(value) is bytes)
            and (fingerprint is None or type(fingerprint) is bytes)
            and (event_type is None or type(event_type) is str)
            and (journal is not None) is bool(state & JOURNAL)
        )
        if sound:
            return check(
                Record(
                    id=record_id,
                    state=STATES[code],
                    owner=owner,
                    fence=fence,
                    lease_until=0 if lease is None else fence + lease,
                    attempt=attempt,
                    expires_at=FOREVER if expires is None else fence + expires,
                    first_seen=fence - seen,
                    settled_at=0 if settled is None or code == CLAIMED else fence + settled,
                    value=value,
                    fingerprint=fingerprint,
                    steps=() if steps is None else unpack_steps(steps),
                    journal=journal,
                    event_type=event_type or "",
                    meta=meta,
                    quarantine=bool(state & QUARANTINE),
                    sliding=bool(state & SLIDING),
                )
            )
    except (TypeError, IndexError, ValueError, msgspec.MsgspecError) as error:
        raise RecordCorrupt(f"record {record_id!r} does not read: {error}") from error
    raise RecordCorrupt(f"record {record_id!r} has columns that semel does not write")


def purge_at(record: Record, before: int | None) -> int | None:
    """The minute in which to look at the record again; `before`: what is stored, kept where it will do.

    For a claim it is when it would expire if it were completed within the next minute, so that
    completing it seldom moves the index; a purge that comes too early looks again later.
    """
    if record.expires_at == FOREVER:
        return None
    target = record.expires_at
    room = 0
    if record.state == "claimed" and not record.sliding:
        target += record.fence - record.lease_until
        room = 1
    minute = -(-target // GRANULE_US)
    if before is not None and minute <= before <= minute + PURGE_SLACK:
        return before
    return minute + room


_steps_encoder = msgspec.msgpack.Encoder()
_steps_decoder = msgspec.msgpack.Decoder(tuple[tuple[str, bytes | None], ...])


def pack_steps(steps: tuple[tuple[str, bytes | None], ...]) -> bytes | None:
    """The steps of a record as one column."""
    return _steps_encoder.encode(steps) if steps else None


def unpack_steps(steps: bytes) -> tuple[tuple[str, bytes | None], ...]:
    """The steps as they were."""
    return _steps_decoder.decode(steps)
