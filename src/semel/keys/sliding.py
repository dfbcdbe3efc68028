"""Content keys whose window slides: it runs from the acceptance of an event, not from the clock's full minutes."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

from semel.errors import KeyInvalid, PolicyInvalid
from semel.keys.event_time import FINGERPRINTS_MAX, EventTimeWindow
from semel.keys.extract import Content
from semel.keys.message import json_body, payload_of
from semel.keys.paths import parse, walk
from semel.windows import OFF, duration_us, window_us

__all__ = ["EventTime", "Sliding", "sliding"]

EventTime: TypeAlias = str | Callable[[Any], datetime | str]
"""Where an event's own time is: a path in its body, or a callable; an aware datetime or RFC 3339 text."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Sliding(Content):
    """A content key that is remembered for `window_us` from its claim.

    Two equal events one second apart are duplicates wherever the clock stands; after the window, an equal event is a
    new one. The key holds no bucket: the store's clock decides, by the expiry of the record.
    """

    __slots__ = ("_event_time", "lateness_us", "window_us")

    sliding: Final = True
    """Tells the client that the record expires a window after the claim."""

    def __init__(
        self,
        window: str | float,
        *paths: str,
        event_time: EventTime | None = None,
        lateness: str | float | None = None,
        namespace: str = "sliding",
        version: int = 1,
        allow_floats: bool = False,
    ) -> None:
        super().__init__(*paths, namespace=namespace, version=version, allow_floats=allow_floats)
        self.window_us: int = window_us(window)
        if self.window_us == OFF:
            raise PolicyInvalid("a sliding window that is off forgets at once; give a duration like 5m")
        self._event_time = parse(event_time) if isinstance(event_time, str) else event_time
        self.lateness_us: int | None = None if lateness is None else duration_us(lateness)
        if self.lateness_us is not None and event_time is None:
            raise PolicyInvalid(
                "lateness is about the events' own times; say where they are with event_time="
            )
        if event_time is not None:
            self.history()  # refuses a bad pair of window and lateness on birth

    @property
    def by_event_time(self) -> bool:
        """Whether the events' own times decide, instead of their arrival."""
        return self._event_time is not None

    def event_time_us(self, event: Any) -> int | None:
        """Return the event's own time in microseconds since 1970; None where arrival time decides.

        Raises `KeyMissing` for an event without it and `KeyInvalid` for one that names no instant.
        """
        if self._event_time is None:
            return None
        if isinstance(self._event_time, tuple):
            return _instant_us(walk(json_body(payload_of(event)), self._event_time))
        return _instant_us(self._event_time(event))

    def history(self, *, fingerprints_max: int = FINGERPRINTS_MAX) -> EventTimeWindow:
        """Return a new, empty memory of accepted event times for this window, for one process."""
        return EventTimeWindow(self.window_us, self.lateness_us, fingerprints_max=fingerprints_max)


def sliding(
    window: str | float,
    *paths: str,
    event_time: EventTime | None = None,
    lateness: str | float | None = None,
    namespace: str = "sliding",
    version: int = 1,
    allow_floats: bool = False,
) -> Sliding:
    """Make the key from the content of the fields named, or of the whole body, remembered for `window` from the claim.

    With `event_time` the events' own times decide; `lateness` is how much history is kept (two windows unless said
    otherwise), and an event further behind than lateness - window is late. Raises `PolicyInvalid` for windows out of
    bounds.
    """
    return Sliding(
        window,
        *paths,
        event_time=event_time,
        lateness=lateness,
        namespace=namespace,
        version=version,
        allow_floats=allow_floats,
    )


def _instant_us(moment: object) -> int:
    if isinstance(moment, str):
        try:
            moment = datetime.fromisoformat(moment)
        except ValueError as error:
            raise KeyInvalid(
                f"the event time {moment!r} is not RFC 3339, like 2026-11-15T10:00:00Z"
            ) from error
    if not isinstance(moment, datetime):
        raise KeyInvalid(
            f"the event time is a {type(moment).__name__}; a bare number may be seconds or milliseconds, "
            "so convert it to an aware datetime in a callable: event_time=lambda event: ..."
        )
    if moment.utcoffset() is None:
        raise KeyInvalid(
            f"the event time {moment.isoformat()} has no time zone, so it is no instant; send it with one"
        )
    return (moment - _EPOCH) // timedelta(microseconds=1)
