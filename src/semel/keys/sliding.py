"""Content keys with a sliding window: it starts when an event is accepted, not at full minutes."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias, TypeVar

from semel.errors import KeyInvalid, PolicyInvalid
from semel.keys.extract import Content, parse, walk
from semel.keys.message import json_body, payload_of
from semel.types import Delivery
from semel.windows import OFF, WINDOW_MAX_S, Duration, duration_us, window_us

__all__ = ["EventTime", "Sliding", "sliding"]

EventTime: TypeAlias = str | Callable[[Any], datetime | str]
"""Where an event's own time is: a path in its body, or a callable; an aware datetime or RFC 3339 text."""

T = TypeVar("T")

LATENESS: Final = "24h"
"""The default lateness: how far behind the store's clock an event may be."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Sliding(Content):
    """A content key that is remembered for `window_us` from its claim, or by the events' own times.

    Two equal events one second apart are duplicates wherever the clock stands; after the window, an equal event is a
    new one. The key holds no bucket: the store decides, by the expiry of the record, or by the time of the event that
    it accepted. With `event_time` an event that is too old to tell is `Late`.
    """

    __slots__ = ("_event_time", "lateness_us", "window_us")

    sliding: Final = True
    """Tells the client that the record expires a window after the claim."""

    def __init__(
        self,
        window: Duration,
        *paths: str,
        event_time: EventTime | None = None,
        lateness: Duration | None = None,
        namespace: str = "sliding",
        version: int = 1,
        allow_floats: bool = False,
    ) -> None:
        super().__init__(*paths, namespace=namespace, version=version, allow_floats=allow_floats)
        self.window_us: int = window_us(window)
        if self.window_us == OFF:
            raise PolicyInvalid("a sliding window that is off forgets at once; give a duration like 5m")
        if self.window_us > WINDOW_MAX_S * 10**6:
            raise PolicyInvalid(
                f"a sliding window of {window!r} is too long; use 90d at most, or a key without sliding and a longer"
                " window"
            )
        self._event_time = parse(event_time) if isinstance(event_time, str) else event_time
        self.lateness_us: int | None = None
        if event_time is not None:
            self.lateness_us = duration_us(LATENESS if lateness is None else lateness)
            if self.lateness_us > WINDOW_MAX_S * 10**6:
                raise PolicyInvalid(f"a lateness of {lateness!r} keeps records too long; use 90d at most")
        elif lateness is not None:
            raise PolicyInvalid(
                "lateness is about the events' own times; say where they are with event_time="
            )

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

    def delivery(self, event: T) -> Delivery[T]:
        """The event as a delivery: its key, its time and this window, for `run_many` and `claim_many`."""
        return Delivery(
            key=self(event),
            body=event,
            event_time_us=self.event_time_us(event),
            sliding_us=self.window_us,
            lateness_us=self.lateness_us,
        )


def sliding(
    window: Duration,
    *paths: str,
    event_time: EventTime | None = None,
    lateness: Duration | None = None,
    namespace: str = "sliding",
    version: int = 1,
    allow_floats: bool = False,
) -> Sliding:
    """Make the key from the content of the fields named, or of the whole body, remembered for `window` from the claim.

    With `event_time` the events' own times decide: equal events less than `window` apart are one. `lateness` is how far
    behind the store's clock an event may come (24h unless said otherwise); an older event is late. Raises
    `PolicyInvalid` for windows out of bounds.
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
