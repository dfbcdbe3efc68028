"""Look at records, in any store: what a mark looks like, and whether a scan is for a record."""

from semel.core.commands import Scan
from semel.types import FOREVER, Id, Record, State

__all__ = ["RELEASED", "UNFINISHED", "counted_state", "fits", "mark_record"]

RELEASED = "released"
"""How statistics count a claim that nobody holds: its attempt failed, and the next delivery runs."""
UNFINISHED: tuple[State, ...] = ("claimed", "unknown")
"""The counted states that forbid another mode."""


def mark_record(record_id: Id, expires_at: int) -> Record:
    """A mark as a record: done, without owner or value."""
    return Record(
        id=record_id,
        state="done",
        owner=b"",
        fence=1,
        lease_until=0,
        attempt=1,
        expires_at=min(expires_at, FOREVER),
        first_seen=0,
    )


def counted_state(record: Record) -> str:
    """The state as which statistics count a record: its own, or `released`."""
    return RELEASED if record.state == "claimed" and not record.owner else record.state


def fits(record: Record, item: Scan, now: int) -> bool:
    """Whether a record is looked for."""
    return (
        item.tenant in (None, record.id[0])
        and item.consumer in (None, record.id[1])
        and item.state in (None, record.state)
        and record.id[2].startswith(item.prefix)
        and (item.seen_before is None or record.first_seen < item.seen_before)
        and (not item.orphaned or (record.state == "claimed" and record.lease_until <= now))
    )
