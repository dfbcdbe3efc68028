"""The last things that happened in this instance, for the live list and for the strip of one event."""

import time
from collections import deque
from threading import Lock

from msgspec import Struct

from semel.forks import restart_after_fork
from semel.observe import events

__all__ = ["RecentEvent", "Tail"]

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


class RecentEvent(Struct, frozen=True, gc=False):
    """One thing that happened."""

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
    """A hook that remembers the last few thousand."""

    def __init__(self) -> None:
        self._seen: deque[RecentEvent] = deque(maxlen=SEEN_MAX)
        self._number = 0
        self.after_fork()
        restart_after_fork(self)

    def after_fork(self) -> None:
        """The lock is another's."""
        self._lock = Lock()

    def __call__(self, happening: events.HookEvent) -> None:
        """Remember it."""
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

    def last(self, limit: int, tenant: str | None, consumer: str = "", what: str = "") -> list[RecentEvent]:
        """The newest first: of a tenant (`None`: all), a consumer, a kind."""
        found: list[RecentEvent] = []
        for seen in self._newest():
            if tenant in (None, seen.tenant) and consumer in ("", seen.consumer) and what in ("", seen.what):
                found.append(seen)
                if len(found) == limit:
                    break
        return found

    def of(self, record_id: tuple[str, str, str]) -> list[RecentEvent]:
        """Everything about one key, oldest first."""
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
