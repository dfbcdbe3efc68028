"""Recent hook events of this instance, for the live list and for the timeline of one event."""

import time
from collections import deque
from collections.abc import Sequence
from threading import Lock

from msgspec import Struct

from semel.observe import events
from semel.runtime.process import restart_after_fork
from semel.types import FOREVER, Record
from semel.windows import is_endless

__all__ = ["KINDS", "RecentEvent", "Tail", "TimelinePoint", "strip"]

SEEN_MAX = 5000
_KEPT: dict[type[events.HookEvent], str] = {
    events.ClaimedEvent: "claimed",
    events.CompletedEvent: "done",
    events.MarkedEvent: "marked",
    events.FailedEvent: "failed",
    events.Released: "released",
    events.Quarantined: "unknown",
    events.LostEvent: "lost",
    events.Expired: "expired",
    events.LateArrivalEvent: "late",
    events.Unguarded: "unguarded",
    events.Unrecorded: "unrecorded",
    events.Duplicate: "duplicate",
}


KINDS: tuple[str, ...] = tuple(_KEPT.values())
"""The outcomes by which the live list is filtered."""


class RecentEvent(Struct, frozen=True, gc=False):
    """One hook event."""

    number: int
    at_us: int
    """By this computer's clock."""
    what: str
    tenant: str
    consumer: str
    key: str
    detail: str = ""
    lag_s: float | None = None


class Tail:
    """A hook that keeps the last few thousand events."""

    def __init__(self) -> None:
        self._seen: deque[RecentEvent] = deque(maxlen=SEEN_MAX)
        self._number = 0
        self.after_fork()
        restart_after_fork(self)

    def after_fork(self) -> None:
        """Replace the lock in a child process."""
        self._lock = Lock()

    def __call__(self, happening: events.HookEvent) -> None:
        """Keep the event."""
        what = _KEPT.get(type(happening))
        if what is None:
            return
        assert isinstance(happening, events.DeliveryEvent)
        with self._lock:
            self._number += 1
            self._seen.append(
                RecentEvent(
                    self._number,
                    time.time_ns() // 1000,
                    what,
                    happening.tenant,
                    happening.consumer,
                    happening.key,
                    _detail(happening),
                    getattr(happening, "lag_s", None),
                )
            )

    def last(
        self, limit: int, tenant: str | None, consumer: str = "", what: str = "", prefix: str = ""
    ) -> list[RecentEvent]:
        """Return events, the newest first: of a tenant (`None`: all), a consumer, a kind, keys that begin so."""
        found: list[RecentEvent] = []
        for seen in self._newest():
            if tenant not in (None, seen.tenant) or not seen.key.startswith(prefix):
                continue
            if consumer in ("", seen.consumer) and what in ("", seen.what):
                found.append(seen)
                if len(found) == limit:
                    break
        return found

    def of(self, record_id: tuple[str, str, str]) -> list[RecentEvent]:
        """Return the events of one key, oldest first."""
        mine = [each for each in self._newest() if (each.tenant, each.consumer, each.key) == record_id]
        return mine[::-1]

    def _newest(self) -> list[RecentEvent]:
        with self._lock:
            return list(reversed(self._seen))


def _detail(event: events.DeliveryEvent) -> str:
    match event:
        case events.Duplicate(reason=reason, suppressed=suppressed):
            return reason if suppressed else f"{reason}, ran all the same"
        case events.ClaimedEvent(attempt=attempt):
            return f"attempt {attempt}"
        case events.FailedEvent(error=error) | events.Released(error=error) if error:
            return error if isinstance(error, str) else type(error).__name__
        case _:
            return ""


NEAR_US = 1_500_000
"""A point of the record and an event within this time are the same."""


class TimelinePoint(Struct, frozen=True):
    """One point on the timeline."""

    at_us: int
    what: str
    tone: str
    """good, bad, dull, warn, or ahead."""
    detail: str = ""
    after_us: int | None = None
    """Since the first delivery."""
    where: str = ""
    """The instance that saw it; empty: it comes from the record."""


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
    """Return the timeline, from the first delivery to the end of the window."""
    first = record.first_seen_us
    stops = (
        [TimelinePoint(first, "received", "dull", "the first delivery, and its claim", 0)] if first else []
    )
    stops += [
        TimelinePoint(0, f"step {name}", "good", "kept for the next attempt") for name, _ in record.steps
    ]
    if record.settled_at_us:
        tone = TONES.get(record.state, "dull")
        detail = f"attempt {record.attempt}" if record.attempt > 1 else ""
        stops.append(
            TimelinePoint(record.settled_at_us, record.state, tone, detail, record.settled_at_us - first)
        )
    for each in seen:
        if not _is_in_record(record, each):
            detail = each.detail
            lag_us = each.at_us - first if each.lag_s is None else round(each.lag_s * 1e6)
            stops.append(
                TimelinePoint(each.at_us, each.what, TONES[each.what], detail, max(0, lag_us), instance)
            )
    if record.state == "claimed" and record.owner:
        over = record.lease_until_us <= now
        text = "the next delivery takes over" if over else "unless it is renewed"
        stops.append(
            TimelinePoint(
                record.lease_until_us,
                "lease over" if over else "lease ends",
                "bad" if over else "ahead",
                text,
            )
        )
    if (
        record.expires_at_us != FOREVER
        and record.state in ("done", "failed")
        and not is_endless(record.expires_at_us - now)
    ):
        stops.append(
            TimelinePoint(record.expires_at_us, "window ends", "ahead", "from then on it is new again")
        )
    steps = [stop for stop in stops if not stop.at_us]
    timed = sorted((stop for stop in stops if stop.at_us), key=lambda stop: stop.at_us)
    return timed[:1] + steps + timed[1:]


def _is_in_record(record: Record, seen: RecentEvent) -> bool:
    """Whether the record shows the same point: its claim or its end."""
    if seen.what == "claimed":
        return abs(seen.at_us - record.first_seen_us) < NEAR_US and record.attempt == 1
    return seen.what == record.state and abs(seen.at_us - record.settled_at_us) < NEAR_US
