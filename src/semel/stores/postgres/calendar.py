"""Bounds and lifetimes of partitions, and which to create or remove. Pure functions."""

import re
from datetime import UTC, datetime, timedelta
from typing import Literal

from msgspec import Struct

from semel.errors import PolicyInvalid
from semel.windows import duration_us

__all__ = ["AHEAD_US", "ALARM_US", "FUTURE_US", "LIVE_US", "STEP", "Partition", "PartitionStep", "Retention"]

DAY_US = 86400 * 10**6
AHEAD_US = 7 * DAY_US
"""How far ahead partitions are created: the cleaner that creates them may be down for a week."""
ALARM_US = 2 * DAY_US
"""A warning is logged when partitions reach less far ahead than this: nobody creates new ones."""
LIVE_US = 8 * DAY_US
"""How long a partition is kept by default: a window of a day, and the longest outage, a week."""
FUTURE_US = 300 * 10**6
"""How far ahead of the server's clock the time inside an id may be: producers' clocks differ."""
GRACE_US = 10 * 10**6
"""How long a low-water mark is in force before partitions below it are removed: running statements end first."""
STEP = "1 day"
STEP_MIN_US = 3600 * 10**6
RECORDS, MARKS = "timed_records", "timed_marks"
PREFIXES = {RECORDS: "timed", MARKS: "marks"}
"""The tables in partitions, and what the names of their partitions begin with."""
PARTITIONS_MAX = 400
"""The planner looks at each partition, so more of them slow down every statement."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_STEP = re.compile(r"(\d{1,4}) ?(hour|day|week|month|year|h|d|w)s?")
_UNIT_US = {"h": 3600 * 10**6, "d": DAY_US, "w": 7 * DAY_US}


class PartitionStep(Struct, frozen=True):
    """How much time a partition holds: a number of microseconds, or of calendar months (UTC)."""

    us: int = 0
    months: int = 0

    @classmethod
    def of(cls, text: str) -> "PartitionStep":
        """Parse `"1 day"`, `"1 month"`, `"6 hours"`, `"2w"`. Raises `PolicyInvalid`."""
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
        """The length of the step; for months, the shortest possible."""
        return self.us or self.months * 28 * DAY_US

    def floor(self, time_us: int) -> int:
        """Return the boundary at or before a time."""
        if self.us:
            return time_us - time_us % self.us
        at = _EPOCH + timedelta(microseconds=time_us)
        return _month(_months(at) // self.months * self.months)

    def next(self, time_us: int) -> int:
        """Return the boundary after a time."""
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
    """The store's options for partitions; `None`: the value stored in the database, else the default."""

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
    """Raise `PolicyInvalid` if the step and the lifetime do not fit together."""
    about_us = PartitionStep.of(step).about_us
    if about_us < STEP_MIN_US:
        raise PolicyInvalid(f"partition_step is {step!r}; it must be an hour or more")
    if live_us <= 0 or (live_us + AHEAD_US) // about_us > PARTITIONS_MAX:
        raise PolicyInvalid(
            f"partition_live of {live_us / 1e6:g}s in steps of {step} makes more than {PARTITIONS_MAX} partitions,"
            " or none; take a longer step"
        )


class Partition(Struct, frozen=True):
    """A partition and its state: attached, being detached (`leaving`), detached, or gone."""

    name: str
    lower: int
    upper: int
    state: Literal["attached", "leaving", "detached", "gone"]
    over_at: int | None = None
    """When it has become useless; `None`: not known yet."""


def name_of(lower: int, parent: str) -> str:
    """Return the name of the partition that starts at `lower`: readable, and unique for each time."""
    at = _EPOCH + timedelta(microseconds=lower)
    return PREFIXES[parent] + at.strftime("_%Y%m%d" if lower % DAY_US == 0 else "_%Y%m%d_%H%M")


def missing_bounds(
    step: PartitionStep, live_us: int, low: int | None, partitions: list[Partition], now: int
) -> list[tuple[int, int]]:
    """Return the bounds of the partitions to create: after the last one, never below the low-water mark."""
    end = max(
        [step.floor(now - live_us), *(each.upper for each in partitions), *([] if low is None else [low])]
    )
    found: list[tuple[int, int]] = []
    while end < now + AHEAD_US + FUTURE_US:
        found.append((end, step.next(end)))
        end = found[-1][1]
    return found


def low_water(low: int | None, overdue: list[Partition]) -> int | None:
    """Return the time below which ids are too old: the end of the last overdue partition. It never decreases."""
    ends = [each.upper for each in overdue]
    return max([*ends, *([] if low is None else [low])], default=None)
