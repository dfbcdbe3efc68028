"""Decide duplicates by the events' own times: equal content less than a window apart is one event.

Arrival time needs none of this: there the record simply expires a window after its claim. Event time has to look in
both directions, because events arrive out of order, and has to admit when it cannot tell.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from threading import Lock
from typing import Literal, TypeAlias

from semel.errors import PolicyInvalid

__all__ = ["FINGERPRINTS_MAX", "HISTORY_MAX", "EventTimeWindow", "Sighting", "sight"]

Sighting: TypeAlias = Literal["new", "duplicate", "late"]
"""What an event is: the first in its window, a copy of an accepted one, or too old to tell."""

FINGERPRINTS_MAX = 100_000
"""How many fingerprints are remembered unless asked otherwise: some 30 MB."""
HISTORY_MAX = 10_000
"""How many windows of history may be kept, so that one fingerprint stays small."""


def sight(
    accepted: Sequence[int], newest_us: int | None, time_us: int, *, window_us: int, lateness_us: int
) -> Sighting:
    """Decide about an event at `time_us`, given the accepted times of its fingerprint, ascending. Pure.

    `duplicate` iff an accepted event lies less than the window away, before or after. Otherwise `late` iff the history
    that could hold one is gone already: `time < newest - lateness + window`. Otherwise `new`: accept it. Anchored at
    what was accepted, not at what was seen, so a steady stream yields one event per window instead of none.
    Logarithmic.
    """
    place = bisect_left(accepted, time_us)
    if place < len(accepted) and accepted[place] - time_us < window_us:
        return "duplicate"
    if place and time_us - accepted[place - 1] < window_us:
        return "duplicate"
    if newest_us is not None and time_us < newest_us - lateness_us + window_us:
        return "late"
    return "new"


class _History:
    __slots__ = ("accepted", "floor_us", "newest_us")

    def __init__(self, floor_us: int | None) -> None:
        self.accepted: list[int] = []
        self.newest_us: int | None = None
        # Below this there may be accepted events of an earlier history of this fingerprint, which was dropped.
        self.floor_us = floor_us


class EventTimeWindow:
    """The accepted times of many fingerprints, in the memory of one process, bounded.

    It holds within this object alone: two processes each accept their own first copy, and a restart forgets. Route a
    fingerprint's events to one process, or use arrival time, which every store keeps. Where room runs out, the
    fingerprint with the oldest newest event goes, and events old enough to have met it are `late`, never `new`. Safe
    between threads.
    """

    __slots__ = ("_ages", "_floor_us", "_histories", "_lock", "fingerprints_max", "lateness_us", "window_us")

    def __init__(
        self, window_us: int, lateness_us: int | None = None, *, fingerprints_max: int = FINGERPRINTS_MAX
    ) -> None:
        self.window_us: int = window_us
        self.lateness_us: int = 2 * window_us if lateness_us is None else lateness_us
        self.fingerprints_max: int = fingerprints_max
        if not 0 < window_us <= self.lateness_us <= HISTORY_MAX * window_us:
            raise PolicyInvalid(
                f"lateness {self.lateness_us / 1e6:g}s is the history that is kept: with a window of "
                f"{window_us / 1e6:g}s it must be 1 to {HISTORY_MAX} windows; an event may be late by lateness - window"
            )
        if fingerprints_max < 1:
            raise PolicyInvalid(f"fingerprints_max is {fingerprints_max}; remember at least one")
        self._lock = Lock()
        self._histories: dict[str, _History] = {}
        # One entry per fingerprint, brought up to date when it surfaces.
        self._ages: list[tuple[int, str]] = []
        # A fingerprint unknown so far may have been dropped with events up to here.
        self._floor_us: int | None = None

    def __len__(self) -> int:
        return len(self._histories)

    def see(self, fingerprint: str, time_us: int) -> Sighting:
        """Decide about one event and, where it is `new`, remember it as accepted. Logarithmic."""
        with self._lock:
            history = self._histories.get(fingerprint)
            known = history is not None
            if history is None:
                history = _History(self._floor_us)
            verdict = sight(
                history.accepted,
                history.newest_us,
                time_us,
                window_us=self.window_us,
                lateness_us=self.lateness_us,
            )
            if verdict != "new":
                return verdict
            if history.floor_us is not None and time_us < history.floor_us:
                return "late"
            if not known:
                self._histories[fingerprint] = history
                heappush(self._ages, (time_us, fingerprint))
            self._accept(history, time_us)
            return "new"

    def forget(self, fingerprint: str, time_us: int) -> bool:
        """Withdraw an accepted event whose handling failed, so that its copy is `new` again; False if unknown.

        What was already late stays late: the history behind it is gone.
        """
        with self._lock:
            history = self._histories.get(fingerprint)
            if history is None or time_us not in history.accepted:
                return False
            history.accepted.remove(time_us)
            return True

    def _accept(self, history: _History, time_us: int) -> None:
        insort(history.accepted, time_us)
        if history.newest_us is None or time_us > history.newest_us:
            history.newest_us = time_us
            # An event that is not late looks back one window at most, so nothing before this can decide anything.
            del history.accepted[: bisect_left(history.accepted, time_us - self.lateness_us)]
        while len(self._histories) > self.fingerprints_max:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        noted_us, fingerprint = self._ages[0]
        newest_us = self._histories[fingerprint].newest_us
        assert newest_us is not None
        if newest_us > noted_us:
            heapreplace(self._ages, (newest_us, fingerprint))
            return
        heappop(self._ages)
        del self._histories[fingerprint]
        # Everything it had accepted lies at or before newest, so only events within a window of it are in doubt.
        doubt_us = newest_us + self.window_us
        self._floor_us = doubt_us if self._floor_us is None else max(self._floor_us, doubt_us)
