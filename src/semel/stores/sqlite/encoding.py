"""Turn records into rows and rows into records; the SQL statements for it."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec

from semel.core.machine import check
from semel.errors import RecordCorrupt
from semel.stores.rows import (
    FREE,
    JOURNAL,
    QUARANTINE,
    SLIDING,
    STATE_MASK,
    STATE_MAX,
    STATES,
    pack_errors,
    pack_steps,
    unpack_errors,
    unpack_steps,
)
from semel.types import FOREVER, Id, Record

BATCH_ROWS_MAX = 500
"""Rows of one statement: larger ones gain nothing, and every SQLite allows this many parameters."""

SIZES = (
    *range(1, 9),
    10,
    12,
    14,
    16,
    20,
    24,
    28,
    32,
    40,
    48,
    56,
    64,
    80,
    96,
    *range(120, 500, 20),
    BATCH_ROWS_MAX,
)
"""The row counts for which statements are prepared; for a count in between a row is repeated, which changes nothing."""

EPOCH_US = 1_861_920_000_000_000
"""Stored times count from 2029, so that they take six bytes from 2024 to 2033 (and eight at any other time)."""
GRANULE_US = 60_000_000
"""Records expire exactly; the purge index holds the minute in which to check them."""
PURGE_SLACK = 2
"""An indexed minute up to this much later than needed is kept: moving it costs more than the space."""

CLAIMED, DONE, FAILED, UNKNOWN, FORGOTTEN = range(5)
SETTLED_ROOM = 9_999_999
"""Placeholder in `settled` before the settle: as wide as most later values, so that rows do not grow."""

COLUMNS = (
    "id, digest, state, owner, fence, seen, attempt, lease, settled, expires, purge_at, value, fingerprint,"
    " event_type, errors"
)
Row: TypeAlias = tuple[Any, ...]

INSERT_CLAIM = (
    "INSERT INTO semel_records (id, digest, consumer_id, owner, fence, lease, expires, purge_at, key)"
    " VALUES (?,?,?,?,?,?,?,?,?)"
)
"""The usual first claim. The other columns keep their defaults, which costs less than naming them."""
INSERT_RECORD = (
    "INSERT INTO semel_records (id, digest, consumer_id, key, purge_at, state, owner, fence, seen, attempt, lease,"
    " settled, expires, value, fingerprint, event_type, errors) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
)
UPDATE_SETTLED = "UPDATE semel_records SET state=?, settled=?, expires=?, value=? WHERE id=?"
"""The usual end of a claim."""
UPDATE_RECORD = (
    "UPDATE semel_records SET state=?, owner=?, fence=?, seen=?, attempt=?, lease=?, settled=?, expires=?, value=?,"
    " fingerprint=?, event_type=?, errors=? WHERE id=?"
)
MOVE_RECORD = "UPDATE semel_records SET purge_at=? WHERE id=?"
"""Separate from the other updates, because those touch no index."""

# The effective state of a stored record at ?1 (since 2029), in SQL: the same rules as `machine.standing`.
RUNNING = "(state & 7 = 0 AND coalesce(lease > ?1 - fence, 0))"
ORPHANED = f"(state & 15 = 8 AND length(owner) > 0 AND NOT {RUNNING})"
LIVE = f"({RUNNING} OR {ORPHANED} OR expires IS NULL OR expires > ?1 - fence)"
STANDING_STATE = f"(CASE WHEN {ORPHANED} THEN {UNKNOWN} ELSE state & 7 END)"
COUNTED_STATE = f"(CASE WHEN state & 7 = 0 AND length(owner) = 0 THEN {FREE} ELSE {STANDING_STATE} END)"
GONE_AT = "(fence + max(expires, CASE WHEN state & 7 = 0 THEN coalesce(lease, expires) ELSE expires END))"


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A record with its place in the file, as an update needs it."""

    digest: bytes
    rowid: int
    purge_at: int | None
    record: Record


@lru_cache(maxsize=BATCH_ROWS_MAX)
def places(count: int) -> str:
    """Return placeholders for `count` parameters."""
    return ",".join("?" * count)


@lru_cache(maxsize=BATCH_ROWS_MAX)
def select_records(count: int, columns: str = COLUMNS) -> str:
    """Return the statement that reads the rows of `count` digests."""
    return f"SELECT {columns} FROM semel_records WHERE digest IN ({places(count)})"


def chunks(things: Sequence[Any], size: int = BATCH_ROWS_MAX) -> Iterable[Sequence[Any]]:
    """Split into slices of at most `size`."""
    if len(things) <= size:
        return (things,) if things else ()
    return (things[start : start + size] for start in range(0, len(things), size))


def pad_digests(digests: Sequence[bytes]) -> Sequence[bytes]:
    """Repeat the last digest until their count is in `SIZES`: SQLite must parse a statement for each new count."""
    count = len(digests)
    size = SIZES[bisect_left(SIZES, count)]
    return digests if size == count else [*digests, *[digests[-1]] * (size - count)]


def to_extras(record: Record) -> Row:
    """Return the columns of `semel_extras`, without the first."""
    if record.anchor_us is None:
        return pack_steps(record.steps), record.meta, None, None
    return pack_steps(record.steps), record.meta, record.anchor_us - EPOCH_US, record.horizon_us - EPOCH_US


def to_row(record: Record, state: int) -> Row:
    """Return the columns of a record in the order of `UPDATE_RECORD`, without the last."""
    fence = record.fence
    return (
        state,
        record.owner,
        fence - EPOCH_US,
        fence - record.first_seen_us,
        record.attempt,
        record.lease_until_us - fence if record.lease_until_us else None,
        _settled_at(record),
        _expires(record),
        record.value,
        record.fingerprint,
        record.event_type or None,
        pack_errors(record.errors),
    )


def to_settled_row(record: Record, state: int, rowid: int) -> Row:
    """Return the columns of `UPDATE_SETTLED`."""
    return state, _settled_at(record), _expires(record), record.value, rowid


def to_claim_row(
    record: Record, digest: bytes, rowid: int | None, purge_at: int | None, consumer_id: int, key: str | None
) -> Row:
    """Return the columns of `INSERT_CLAIM`. `rowid`: with `None` SQLite chooses it."""
    fence = record.fence
    return (
        rowid,
        digest,
        consumer_id,
        record.owner,
        fence - EPOCH_US,
        record.lease_until_us - fence,
        _expires(record),
        purge_at,
        key,
    )


def is_plain_claim(record: Record, state: int) -> bool:
    """Whether every column that `INSERT_CLAIM` leaves out has its default."""
    return (
        state == CLAIMED
        and record.attempt == 1
        and record.fingerprint is None
        and not record.event_type
        and record.first_seen_us == record.fence
        and record.lease_until_us != 0
        and not record.errors
    )


def is_settling(record: Record, before: Record) -> bool:
    """Whether `UPDATE_SETTLED` writes every change: the machine changes only these columns to settle a claim."""
    return (
        record.state in ("done", "failed")
        and before.state == "claimed"
        and record.fence == before.fence
        and record.owner == before.owner
        and record.lease_until_us == before.lease_until_us
        and record.attempt == before.attempt
        and record.errors == before.errors
    )


def _settled_at(record: Record) -> int | None:
    if record.state == "claimed":
        return SETTLED_ROOM
    return record.settled_at_us - record.fence if record.settled_at_us else None


def _expires(record: Record) -> int | None:
    return None if record.expires_at_us == FOREVER else record.expires_at_us - record.fence


def from_row(
    row: Row,
    record_id: Id,
    steps: bytes | None = None,
    meta: bytes | None = None,
    anchor: int | None = None,
    horizon: int | None = None,
    journal: bytes | None = None,
) -> Record:
    """Decode the record of a row. Raises `RecordCorrupt` if semel does not write such rows."""
    (
        _, _, state, owner, fence, seen, attempt, lease, settled, expires, _, value, fingerprint, event_type,
        errors,
    ) = row  # fmt: skip
    try:
        code = state & STATE_MASK
        fence += EPOCH_US
        sound = (
            type(owner) is bytes
            and type(attempt) is int
            and 0 <= state <= STATE_MAX
            and (value is None or type(value) is bytes)
            and (fingerprint is None or type(fingerprint) is bytes)
            and (event_type is None or type(event_type) is str)
            and (errors is None or type(errors) is bytes)
            and (journal is not None) is bool(state & JOURNAL)
        )
        if sound:
            return check(
                Record(
                    id=record_id,
                    state=STATES[code],
                    owner=owner,
                    fence=fence,
                    lease_until_us=0 if lease is None else fence + lease,
                    attempt=attempt,
                    expires_at_us=FOREVER if expires is None else fence + expires,
                    first_seen_us=fence - seen,
                    settled_at_us=0 if settled is None or code == CLAIMED else fence + settled,
                    value=value,
                    fingerprint=fingerprint,
                    steps=() if steps is None else unpack_steps(steps),
                    journal=journal,
                    event_type=event_type or "",
                    meta=meta,
                    quarantine=bool(state & QUARANTINE),
                    sliding=bool(state & SLIDING),
                    anchor_us=None if anchor is None else anchor + EPOCH_US,
                    horizon_us=0 if anchor is None or horizon is None else horizon + EPOCH_US,
                    errors=() if errors is None else unpack_errors(errors),
                )
            )
    except (TypeError, IndexError, ValueError, msgspec.MsgspecError) as error:
        raise RecordCorrupt(f"record {record_id!r} cannot be decoded: {error}") from error
    raise RecordCorrupt(f"record {record_id!r} has columns that semel does not write")


def minute_after(time_us: int) -> int:
    """Return the first whole minute that is not before `time_us`, counted from 2029."""
    return -((EPOCH_US - time_us) // GRANULE_US)


def purge_at(record: Record, before: int | None) -> int | None:
    """Return the minute in which to check the record for removal. `before`: the stored minute, kept if it fits.

    For a claim it is when it would expire if it were completed within the next minute, so that
    completing it seldom moves the index; a purge that comes too early checks again later.
    """
    target = record.expires_at_us
    if target == FOREVER:
        return None
    room = 0
    if record.state == "claimed" and not record.sliding:
        target += record.fence - record.lease_until_us
        room = 1
    minute = -((EPOCH_US - target) // GRANULE_US)
    if before is not None and minute <= before <= minute + PURGE_SLACK:
        return before
    return minute + room
