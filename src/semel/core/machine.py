"""Decide what one item does to one record: the specification of every store.

`decide(record, item, now)` answers the item and says what to write. Memory and SQLite call it under
their lock; the Lua and SQL of the other stores implement the same rules, and one contract suite
compares them.
"""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from semel.core.commands import (
    Claim,
    Forget,
    Granted,
    Known,
    Lookup,
    RecordItem,
    Renew,
    Resolve,
    Scan,
    Settle,
)
from semel.core.ids import worker_id
from semel.errors import RecordCorrupt
from semel.types import (
    ERRORS_MAX,
    FOREVER,
    Absent,
    AttemptError,
    Busy,
    Completed,
    ErrorInfo,
    Forgotten,
    Id,
    Late,
    Lost,
    Mismatch,
    Record,
    Renewed,
    State,
    Unknown,
)

__all__ = ["RELEASED", "UNFINISHED", "counted_state", "fits", "mark_record"]

TOMBSTONE_US = 12 * 3600 * 1_000_000
"""How long a forgotten key keeps its fence: the longest that a lease may last, so no run outlives it."""

AHEAD_US = 5 * 60 * 1_000_000
"""How far an event's own time may be ahead of the store's clock; larger than usual clock skew."""

NOBODY = b""
"""The owner of a released or forgotten record; no claim call has it."""

LEASE_ENDED = "lease ended"
"""The kind of a kept error that no attempt has reported: its lease ended."""
LEASE_ENDED_MESSAGE = "the worker died, hung or was cut off: its lease ended before it settled"

Decision = tuple[Any, Record | None]
"""The answer, and the record to write (`None`: nothing changes)."""


def decide(record: Record | None, item: RecordItem, now: int) -> Decision:
    """Answer `item` against what is stored; `now` is the store's clock in microseconds."""
    return _RULES[type(item)](standing(record, now), item, now, record)


def standing(record: Record | None, now: int) -> Record | None:
    """Return the effective record at `now`.

    Expired with no running lease is absent in every respect, and a quarantined claim whose owner let its
    lease run out is unknown: whether somebody purged or swept it meanwhile never changes an answer.
    """
    if record is None:
        return None
    if record.state != "claimed":
        return record if record.expires_at_us > now else None
    if record.lease_until_us > now:
        return record
    if record.quarantine and record.owner:
        return replace(
            record,
            state="unknown",
            settled_at_us=record.lease_until_us,
            expires_at_us=FOREVER,
            errors=_with_lease_end(record),
        )
    return record if record.expires_at_us > now else None


def differs(mine: bytes | None, stored: bytes | None) -> bool:
    """Whether two fingerprints mean different payloads. The first byte is their version."""
    return bool(mine) and bool(stored) and mine[0] == stored[0] and mine != stored  # type: ignore[index]


def _with_error(
    errors: tuple[AttemptError, ...], attempt: int, error: ErrorInfo, at: int
) -> tuple[AttemptError, ...]:
    """Return the errors with that of one more attempt, without the oldest if there are too many."""
    added = AttemptError(attempt, error.kind, error.message, error.traceback, error.worker, at)
    return (*errors, added)[-ERRORS_MAX:]


def _with_lease_end(record: Record) -> tuple[AttemptError, ...]:
    """Return the errors with that of an attempt whose lease ended. Of its worker only the id is known."""
    error = ErrorInfo(LEASE_ENDED, LEASE_ENDED_MESSAGE, worker=worker_id(record.owner))
    return _with_error(record.errors, record.attempt, error, record.lease_until_us)


# Each rule gets the record as it stands and, last, as it is stored: the fence goes on even from an expired one.


def _claim(record: Record | None, item: Claim, now: int, stored: Record | None) -> Decision:
    if record is None or record.state == "forgotten":
        return _begin(item, now, stored)
    if is_apart(record, item):
        return _repeat(record, item, now, stored)
    if differs(item.fingerprint, record.fingerprint):
        return Mismatch(), None
    if record.state == "claimed":
        if record.lease_until_us <= now:
            return _grant(item, now, _next_fence(stored, now), record)
        if record.owner == item.owner:
            # Our own, repeated because the reply was lost. Its lease runs from now: the caller counts from this try.
            lease_until = now + item.lease_us
            mine = replace(
                record, lease_until_us=lease_until, expires_at_us=_renew_expiry(record, lease_until)
            )
            return _to_granted(mine), mine
        return Busy((record.lease_until_us - now) / 1e6, record.journal is not None), None
    if record.state == "unknown":
        return Unknown(record.settled_at_us), None if record is stored else record
    refreshed = None
    # An event's own time sets the expiry of its record: no sighting moves it.
    if item.refresh and record.anchor_us is None and now + item.window_us > record.expires_at_us:
        refreshed = replace(record, expires_at_us=now + item.window_us)
    return Known(
        record.state,
        record.value,
        record.fence,
        record.settled_at_us,
        record.first_seen_us,
        (refreshed or record).expires_at_us - now,
    ), refreshed


def _begin(item: Claim, now: int, stored: Record | None) -> Decision:
    """Begin a new record, or answer `Late` if the event is older than the window."""
    if item.event_time_us is not None:
        age_us = now - item.event_time_us
        if item.apart_us:
            late = age_us > item.window_us - item.apart_us or age_us < -AHEAD_US
        else:
            late = item.refuse_late and age_us > item.window_us
        if late:
            return Late(age_us / 1e6), None
    return _grant(item, now, _next_fence(stored, now), None)


def is_apart(record: Record, item: Claim) -> bool:
    """Whether by their own times this is another event than the accepted one, before or after it."""
    if record.anchor_us is None or item.event_time_us is None:
        return False
    return 0 < item.apart_us <= abs(item.event_time_us - record.anchor_us)


def _repeat(record: Record, item: Claim, now: int, stored: Record | None) -> Decision:
    """Equal content at another time. One record holds one event: the later one follows when the former is settled.

    A former event that does not continue is replaced after `apart_us`, unless only `resolve` may end it. A caller
    answered `Busy` here is not a copy of the journaled event, so it is never recoverable.
    """
    assert record.anchor_us is not None
    assert item.event_time_us is not None
    if item.event_time_us < record.anchor_us:
        return Late((now - item.event_time_us) / 1e6), None
    if record.state == "unknown":
        return Unknown(record.settled_at_us), None
    if record.state == "claimed":
        if record.lease_until_us > now:
            return Busy((record.lease_until_us - now) / 1e6), None
        if record.expires_at_us == FOREVER:
            return Busy(item.lease_us / 1e6), None
        if record.lease_until_us + item.apart_us > now:
            return Busy((record.lease_until_us + item.apart_us - now) / 1e6), None
    return _begin(item, now, stored)


def _grant(item: Claim, now: int, fence: int, orphan: Record | None) -> Decision:
    lease_until = now + item.lease_us
    journal = item.journal if orphan is None or orphan.journal is None else orphan.journal
    anchor, horizon = (None, 0) if orphan is None else (orphan.anchor_us, orphan.horizon_us)
    if anchor is None and item.apart_us and item.event_time_us is not None:
        anchor, horizon = item.event_time_us, item.event_time_us + item.window_us
    if item.quarantine or journal is not None:
        expires_at = FOREVER
    elif anchor is not None:
        expires_at = horizon
    elif item.sliding:
        expires_at = now + item.window_us if orphan is None else orphan.expires_at_us
    else:
        expires_at = lease_until + item.window_us
    record = Record(
        id=item.id,
        state="claimed",
        owner=item.owner,
        fence=fence,
        lease_until_us=lease_until,
        attempt=1 if orphan is None else orphan.attempt + 1,
        expires_at_us=expires_at,
        first_seen_us=now if orphan is None else orphan.first_seen_us,
        fingerprint=item.fingerprint if orphan is None else item.fingerprint or orphan.fingerprint,
        steps=() if orphan is None else orphan.steps,
        journal=journal,
        event_type=item.event_type if orphan is None else item.event_type or orphan.event_type,
        meta=item.meta if orphan is None else item.meta or orphan.meta,
        quarantine=item.quarantine,
        sliding=item.sliding,
    )
    if (
        anchor is not None
    ):  # apart from the others: a struct made with more than 15 keywords takes four times as long
        record = replace(record, sliding=True, anchor_us=anchor, horizon_us=horizon)
    errors = () if orphan is None else orphan.errors
    if orphan is not None and orphan.owner not in (NOBODY, item.owner):
        errors = _with_lease_end(orphan)
    if item.error is not None:
        errors = _with_error(errors, record.attempt, item.error, now)
    if errors:  # nearly all have none, and need no other struct
        record = replace(record, errors=errors)
    return _to_granted(record), record


def _to_granted(record: Record) -> Granted:
    return Granted(
        record.fence,
        record.attempt,
        record.lease_until_us,
        record.first_seen_us,
        record.steps,
        record.journal,
    )


def _renew(record: Record | None, item: Renew, now: int, _stored: Record | None) -> Decision:
    if record is None or record.state != "claimed" or not _mine(record, item):
        return Lost(), None
    lease_until = now + item.lease_us
    steps = record.steps
    if item.step is not None and item.step[0] not in {name for name, _ in steps}:
        steps = (*steps, item.step)
    renewed = replace(
        record, lease_until_us=lease_until, expires_at_us=_renew_expiry(record, lease_until), steps=steps
    )
    return Renewed(lease_until), renewed


def _settle(record: Record | None, item: Settle, now: int, _stored: Record | None) -> Decision:
    if record is None:
        return _recreate(item, now) if item.to in ("done", "failed") else (Lost(), None)
    if not _mine(record, item):
        return Lost(), None
    if record.state == item.to:
        # Sent again, the value is the same. After `resolve` it may not be, and the value that was seen stays.
        kept = record.value == item.value
        return Completed(already=True, at_us=record.settled_at_us, kept=kept), None
    errors = record.errors
    if item.error is not None:
        errors = _with_error(errors, record.attempt, item.error, now)
    if item.to in ("done", "failed"):
        if record.state not in ("claimed", "unknown"):
            return Lost(), None
        expires_at = now + item.window_us
        if record.anchor_us is not None:
            expires_at = record.horizon_us
        elif record.sliding:
            expires_at = (
                record.expires_at_us
                if record.expires_at_us != FOREVER
                else record.first_seen_us + item.window_us
            )
        return Completed(at_us=now), replace(
            record,
            state=item.to,
            value=item.value,
            settled_at_us=now,
            expires_at_us=expires_at,
            journal=None,
            errors=errors,
        )
    if record.state != "claimed":
        return Lost(), None
    if item.to == "unknown":
        return Completed(at_us=now), replace(
            record, state="unknown", settled_at_us=now, expires_at_us=FOREVER, errors=errors
        )
    lease_until = now + item.delay_us
    return Completed(at_us=now), replace(
        record,
        owner=NOBODY,
        lease_until_us=lease_until,
        expires_at_us=_renew_expiry(record, lease_until),
        attempt=record.attempt if item.count_attempt else record.attempt - 1,
        errors=errors,
    )


def _recreate(item: Settle, now: int) -> Decision:
    """Recreate the record of an effect that the store lost, with its original expiry."""
    if item.event_time_us is not None:
        expires_at = item.event_time_us + item.window_us
    else:
        expires_at = item.fence + item.window_us + (0 if item.sliding else item.lease_us)
    if expires_at <= now:
        return Completed(recreated=True, at_us=now), None
    record = Record(
        id=item.id,
        state="failed" if item.to == "failed" else "done",
        owner=item.owner,
        fence=item.fence,
        lease_until_us=0,
        attempt=1,
        expires_at_us=expires_at,
        first_seen_us=item.fence,
        settled_at_us=now,
        value=item.value,
        sliding=item.sliding,
        anchor_us=item.event_time_us,
        horizon_us=0 if item.event_time_us is None else expires_at,
    )
    if item.error is not None:
        record = replace(record, errors=_with_error((), 1, item.error, now))
    return Completed(recreated=True, at_us=now), record


def _lookup(record: Record | None, _item: Lookup, _now: int, _stored: Record | None) -> Decision:
    return (Absent() if record is None or record.state == "forgotten" else record), None


def _forget(record: Record | None, item: Forget, now: int, _stored: Record | None) -> Decision:
    if record is None or record.state == "forgotten":
        return Absent(), None
    if item.fence not in (None, record.fence) or item.state not in (None, record.state):
        return Lost(), None
    if record.state == "claimed" and record.owner and record.lease_until_us > now and not item.force:
        return Busy((record.lease_until_us - now) / 1e6, record.journal is not None), None
    return _to_tombstone(record, now)


def _resolve(record: Record | None, item: Resolve, now: int, _stored: Record | None) -> Decision:
    if record is None or record.state != "unknown" or record.fence != item.fence:
        return Lost(), None
    if item.to == "claimed":
        return _take(replace(record, attempt=record.attempt + 1), item.owner, now, now + item.lease_us)
    if item.to == "absent":
        return _to_tombstone(record, now) if record.journal is None else _as_released(record, now)
    expires_at = now + item.window_us if record.anchor_us is None else record.horizon_us
    return Completed(at_us=now), replace(
        record, state="done", value=item.value, settled_at_us=now, expires_at_us=expires_at, journal=None
    )


def _as_released(record: Record, now: int) -> Decision:
    """Return the record as released: a sweep runs it, because its source will not send it again."""
    return _take(replace(record, attempt=0, steps=()), NOBODY, now, now)


def _take(record: Record, owner: bytes, now: int, lease_until: int) -> Decision:
    """Give an unknown record to an owner, or to none, with a new fence that refuses its late owner."""
    taken = replace(
        record,
        state="claimed",
        owner=owner,
        fence=_next_fence(record, now),
        lease_until_us=lease_until,
        settled_at_us=0,
    )
    return Forgotten(taken.fence), taken


def _to_tombstone(record: Record, now: int) -> Decision:
    tombstone = Record(
        id=record.id,
        state="forgotten",
        owner=NOBODY,
        fence=_next_fence(record, now),
        lease_until_us=0,
        attempt=0,
        expires_at_us=now + TOMBSTONE_US,
        first_seen_us=record.first_seen_us,
    )
    return Forgotten(tombstone.fence), tombstone


def _next_fence(stored: Record | None, now: int) -> int:
    return now if stored is None or stored.fence < now else stored.fence + 1


def _mine(record: Record, item: Renew | Settle) -> bool:
    return record.fence == item.fence and record.owner == item.owner and bool(item.owner)


def _renew_expiry(record: Record, lease_until: int) -> int:
    """Return the expiry after a renewal: moved as the lease, unless a decision or the first claim sets it."""
    if record.sliding or record.expires_at_us == FOREVER:
        return record.expires_at_us
    return record.expires_at_us + lease_until - record.lease_until_us


def check(record: Record) -> Record:
    """Raise `RecordCorrupt` for a record that breaks the table of states; called before writes and after reads."""
    sound = (
        record.state in ("claimed", "done", "failed", "unknown", "forgotten")
        and record.fence > 0
        and record.attempt >= 0
        and (record.owner != NOBODY or record.state in ("claimed", "forgotten", "done"))
        and (record.expires_at_us == FOREVER or record.state != "unknown")
        and (
            record.anchor_us is None
            or (record.sliding and record.expires_at_us in (record.horizon_us, FOREVER))
        )
    )
    if not sound:
        raise RecordCorrupt(f"record {record.id!r} is in no state that semel writes: {record.state!r}")
    return record


_RULES: dict[type, Callable[[Record | None, Any, int, Record | None], Decision]] = {
    Claim: _claim,
    Renew: _renew,
    Settle: _settle,
    Lookup: _lookup,
    Forget: _forget,
    Resolve: _resolve,
}


RELEASED = "released"
"""The counted state of a claim without an owner: its attempt failed, and the next delivery runs."""
UNFINISHED: tuple[State, ...] = ("claimed", "unknown")
"""The counted states that forbid a change of mode."""


def mark_record(record_id: Id, expires_at: int) -> Record:
    """A mark as a record: done, without owner or value."""
    return Record(
        id=record_id,
        state="done",
        owner=b"",
        fence=1,
        lease_until_us=0,
        attempt=1,
        expires_at_us=min(expires_at, FOREVER),
        first_seen_us=0,
    )


def counted_state(record: Record) -> str:
    """Return the state for statistics: the record's own, or `released`."""
    return RELEASED if record.state == "claimed" and not record.owner else record.state


def fits(record: Record, item: Scan, now: int) -> bool:
    """Whether a record matches a scan."""
    return (
        item.tenant in (None, record.id[0])
        and item.consumer in (None, record.id[1])
        and item.state in (None, record.state)
        and record.id[2].startswith(item.prefix)
        and (item.seen_before is None or record.first_seen_us < item.seen_before)
        and (not item.orphaned or (record.state == "claimed" and record.lease_until_us <= now))
    )
