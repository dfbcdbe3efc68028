"""The last things that happened in this instance, for the live list and for the strip of one event."""

import time
from collections import deque
from threading import Lock

from msgspec import Struct

from semel.forks import restart_after_fork
from semel.observe import events

__all__ = ["Seen", "Tail"]

SEEN_MAX = 5000
_KEPT: dict[type[events.Happening], str] = {
    events.Claimed: "claimed",
    events.Completed: "done",
    events.Marked: "marked",
    events.Failed: "failed",
    events.Released: "released",
    events.Quarantined: "unknown",
    events.Lost: "lost",
    events.Expired: "expired",
    events.Late: "late",
    events.Unguarded: "unguarded",
    events.Unrecorded: "unrecorded",
    events.Duplicate: "duplicate",
}


class Seen(Struct, frozen=True, gc=False):
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
        self._seen: deque[Seen] = deque(maxlen=SEEN_MAX)
        self._number = 0
        self.after_fork()
        restart_after_fork(self)

    def after_fork(self) -> None:
        """The lock is another's."""
        self._lock = Lock()

    def __call__(self, happening: events.Happening) -> None:
        """Remember it."""
        what = _KEPT.get(type(happening))
        if what is None:
            return
        assert isinstance(happening, events.Event)
        with self._lock:
            self._number += 1
            self._seen.append(
                Seen(
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

    def last(self, limit: int, tenant: str | None, consumer: str = "", what: str = "") -> list[Seen]:
        """The newest first: of a tenant (`None`: all), a consumer, a kind."""
        found: list[Seen] = []
        for seen in self._newest():
            if tenant in (None, seen.tenant) and consumer in ("", seen.consumer) and what in ("", seen.what):
                found.append(seen)
                if len(found) == limit:
                    break
        return found

    def of(self, record_id: tuple[str, str, str]) -> list[Seen]:
        """Everything about one key, oldest first."""
        mine = [each for each in self._newest() if (each.tenant, each.consumer, each.key) == record_id]
        return mine[::-1]

    def _newest(self) -> list[Seen]:
        with self._lock:
            return list(reversed(self._seen))


def _detail(event: events.Event) -> str:
    match event:
        case events.Duplicate(reason=reason, suppressed=suppressed):
            return reason if suppressed else f"{reason}, ran all the same"
        case events.Claimed(attempt=attempt):
            return f"attempt {attempt}"
        case events.Failed(error=error) | events.Released(error=error) if error:
            return error if isinstance(error, str) else type(error).__name__
        case _:
            return ""
