"""The strip of one event: what its record says, and what this instance saw, in the order of time."""

from collections.abc import Sequence

from msgspec import Struct

from semel.server.dashboard.tail import RecentEvent
from semel.types import FOREVER, Record

__all__ = ["TimelinePoint", "strip"]

NEAR_US = 1_500_000
"""Told by the record and seen here within this time: one and the same."""
_SAID = {"claimed": "claimed", "done": "done", "failed": "failed", "unknown": "unknown"}


class TimelinePoint(Struct, frozen=True):
    """One point on the strip."""

    at_us: int
    what: str
    tone: str
    """good, bad, dull, warn, or ahead."""
    detail: str = ""
    after_us: int | None = None
    """Since the first delivery."""
    where: str = ""
    """Which instance saw it; empty: the record says so."""


TONES = {
    "claimed": "dull",
    "done": "good",
    "marked": "good",
    "duplicate": "warn",
    "released": "warn",
    "late": "warn",
    "failed": "bad",
    "unknown": "bad",
    "lost": "bad",
    "expired": "bad",
    "unrecorded": "bad",
}


def strip(record: Record, seen: Sequence[RecentEvent], now: int, instance: str) -> list[TimelinePoint]:
    """From the first delivery to the end of its window."""
    first = record.first_seen
    stops = [TimelinePoint(first, "received", "dull", "the first delivery, and its claim", 0)] if first else []
    stops += [TimelinePoint(0, f"step {name}", "good", "kept for the next attempt") for name, _ in record.steps]
    if record.settled_at:
        tone = TONES.get(record.state, "dull")
        detail = f"attempt {record.attempt}" if record.attempt > 1 else ""
        stops.append(TimelinePoint(record.settled_at, record.state, tone, detail, record.settled_at - first))
    for each in seen:
        if not _is_told(record, each):
            detail = each.detail
            lag_us = each.at_us - first if each.lag_s is None else round(each.lag_s * 1e6)
            stops.append(TimelinePoint(each.at_us, each.what, TONES[each.what], detail, max(0, lag_us), instance))
    if record.state == "claimed" and record.owner:
        over = record.lease_until <= now
        text = "whoever comes next takes over" if over else "unless it is renewed"
        stops.append(
            TimelinePoint(record.lease_until, "lease over" if over else "lease ends", "bad" if over else "ahead", text)
        )
    if record.expires_at != FOREVER and record.state in ("done", "failed"):
        stops.append(TimelinePoint(record.expires_at, "window ends", "ahead", "from then on it is new again"))
    steps = [stop for stop in stops if not stop.at_us]
    timed = sorted((stop for stop in stops if stop.at_us), key=lambda stop: stop.at_us)
    return timed[:1] + steps + timed[1:]


def _is_told(record: Record, seen: RecentEvent) -> bool:
    """Whether the record says the same: its claim, its end."""
    if seen.what == "claimed":
        return abs(seen.at_us - record.first_seen) < NEAR_US and record.attempt == 1
    return seen.what == record.state and abs(seen.at_us - record.settled_at) < NEAR_US
