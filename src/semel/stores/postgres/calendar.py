"""Where partitions begin and end, how long they live, and what is to be done about them. Pure."""

import re
from datetime import UTC, datetime, timedelta
from typing import Literal

from msgspec import Struct

from semel.errors import PolicyInvalid
from semel.windows import duration_us

__all__ = ["AHEAD_US", "ALARM_US", "FUTURE_US", "LIVE_US", "STEP", "Partition", "PartitionStep", "Retention"]

DAY_US = 86400 * 10**6
AHEAD_US = 7 * DAY_US
"""How far ahead partitions are made: whoever makes them may be down for a week."""
ALARM_US = 2 * DAY_US
"""Fewer than this ahead is told of: nobody makes new ones."""
LIVE_US = 8 * DAY_US
"""How long a partition lives, unless told otherwise: a window of a day, and the longest outage, a week."""
FUTURE_US = 300 * 10**6
"""How far ahead of the server's clock the time inside an id may be: producers' clocks differ."""
GRACE_US = 10 * 10**6
"""How long the low-water mark has to be in force before what is below it goes: statements under way end first."""
STEP = "1 day"
STEP_MIN_US = 3600 * 10**6
PARTITIONS_MAX = 400
"""The server plans with each of them, so that more cost every statement."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_STEP = re.compile(r"(\d{1,4}) ?(hour|day|week|month|year|h|d|w)s?")
_UNIT_US = {"h": 3600 * 10**6, "d": DAY_US, "w": 7 * DAY_US}


class PartitionStep(Struct, frozen=True):
    """How much time a partition holds: so many microseconds, or so many months of the calendar (UTC)."""

    us: int = 0
    months: int = 0

    @classmethod
    def of(cls, text: str) -> "PartitionStep":
        """The step of `"1 day"`, `"1 month"`, `"6 hours"`, `"2w"`. Raises `PolicyInvalid`."""
        match = _STEP.fullmatch(text.strip())
        count = int(match[1]) if match else 0
        if match is None or not count:
            raise PolicyInvalid(
                f"partition_step is {text!r}; write it like 1 day, 6 hours, 2 weeks or 1 month"
            )
        if match[2] in ("month", "year"):
            return cls(months=count * (12 if match[2] == "year" else 1))
        return cls(us=count * _UNIT_US[match[2][0]])

    @property
    def about_us(self) -> int:
        """Its length; of months, the shortest that there can be."""
        return self.us or self.months * 28 * DAY_US

    def floor(self, time_us: int) -> int:
        """The boundary at or before a time."""
        if self.us:
            return time_us - time_us % self.us
        at = _EPOCH + timedelta(microseconds=time_us)
        return _month(_months(at) // self.months * self.months)

    def next(self, time_us: int) -> int:
        """The boundary after a time."""
        if self.us:
            return self.floor(time_us) + self.us
        at = _EPOCH + timedelta(microseconds=self.floor(time_us))
        return _month(_months(at) + self.months)


def _months(at: datetime) -> int:
    return at.year * 12 + at.month - 1


def _month(number: int) -> int:
    start = datetime(number // 12, number % 12 + 1, 1, tzinfo=UTC)
    return (start - _EPOCH) // timedelta(microseconds=1)


class Retention(Struct, frozen=True):
    """What a store is told about partitions; `None`: as recorded, and at first the defaults."""

    step: str | None = None
    live: str | None = None

    def __post_init__(self) -> None:
        if self.step is not None:
            PartitionStep.of(self.step)
        if self.live is not None:
            duration_us(self.live)
        if self.step is not None and self.live is not None:
            check(self.step, duration_us(self.live))


def check(step: str, live_us: int) -> None:
    """Refuse what cannot work together. Raises `PolicyInvalid`."""
    about_us = PartitionStep.of(step).about_us
    if about_us < STEP_MIN_US:
        raise PolicyInvalid(f"partition_step is {step!r}; an hour is the least")
    if live_us <= 0 or (live_us + AHEAD_US) // about_us > PARTITIONS_MAX:
        raise PolicyInvalid(
            f"partition_live of {live_us / 1e6:g}s in steps of {step} makes more than {PARTITIONS_MAX} partitions,"
            " or none; take a longer step"
        )


class Partition(Struct, frozen=True):
    """A partition, and how far it has come: attached, on its way out (`leaving`), detached, or gone."""

    name: str
    lower: int
    upper: int
    state: Literal["attached", "leaving", "detached", "gone"]


def name_of(lower: int) -> str:
    """The name of the partition that begins there: readable, and one for each time."""
    at = _EPOCH + timedelta(microseconds=lower)
    return at.strftime("timed_%Y%m%d" if lower % DAY_US == 0 else "timed_%Y%m%d_%H%M")


def missing(
    step: PartitionStep, live_us: int, low: int | None, partitions: list[Partition], now: int
) -> list[tuple[int, int]]:
    """The bounds of the partitions to be made: from the last one on, never below the low-water mark."""
    end = max(
        [step.floor(now - live_us), *(each.upper for each in partitions), *([] if low is None else [low])]
    )
    found: list[tuple[int, int]] = []
    while end < now + AHEAD_US + FUTURE_US:
        found.append((end, step.next(end)))
        end = found[-1][1]
    return found


def low_water(live_us: int, low: int | None, partitions: list[Partition], now: int) -> int | None:
    """Up to where ids are too old: the end of the last partition that has lived; it never falls."""
    ends = [each.upper for each in partitions if each.upper <= now - live_us]
    return max([*ends, *([] if low is None else [low])], default=None)
