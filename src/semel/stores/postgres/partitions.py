"""The partitions of records, by the time inside their ids, and of marks, by arrival: created ahead, removed when old.

Every step is small, committed or atomic by itself, and reads the current state first. So a cleaner may be killed
anywhere, and the next one continues. Nothing here waits for claims, and no claim waits for it: a new partition is
attached, an old one detached concurrently, and either gives up after a second if it does not get its lock.
"""

import logging
from typing import Any

from msgspec import Struct

from semel.errors import StoreRefused
from semel.stores.postgres import calendar
from semel.stores.postgres.batch import PostgresBatch, SendCalls, Talk
from semel.stores.postgres.calendar import (
    ALARM_US,
    GRACE_US,
    LIVE_US,
    MARKS,
    RECORDS,
    STEP,
    Partition,
    PartitionStep,
)
from semel.windows import duration_us

__all__ = ["PartitionState", "live_us", "look", "look_all", "maintain", "make", "remove", "set_up"]

OLDEST = 140000
"""The first PostgreSQL that detaches a partition without blocking others."""
LOCKED = "55P03"
NO_RIGHT = "42501"
NOT_MADE = frozenset((LOCKED, NO_RIGHT, "42P07", "42P17", "40P01"))
"""The lock was not free in time, the role lacks the right, or another process created it first."""
NOT_REMOVED = frozenset((LOCKED, NO_RIGHT, "42P01", "55000", "40P01", "57014"))
"""The lock was not free in time, the role lacks the right, or another process is removing it or has removed it."""
STORAGE = {
    RECORDS: " WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05)",
    MARKS: "",
}
"""The same as for the tables `records` and `marks`, for the same reasons."""

_log = logging.getLogger("semel")


class PartitionState(Struct, frozen=True):
    """The current partitions of a table and their settings."""

    now: int
    partitions: list[Partition]
    parent: str = RECORDS
    step: str = STEP
    live_us: int = 0
    """0: no consumer has declared its ids yet, and there are no partitions."""
    low: int | None = None
    low_at: int = 0

    @property
    def ahead_us(self) -> int:
        """How far ahead partitions exist."""
        return max((each.upper for each in self.partitions), default=self.now) - self.now

    def overdue(self) -> list[Partition]:
        """Return the partitions that are old enough to be removed, oldest first."""
        return [each for each in self.partitions if each.over_at is not None and each.over_at <= self.now]

    def missing(self) -> list[tuple[int, int]]:
        """Return the bounds of the partitions to create. Marks need none before now: they go by arrival."""
        timed = self.parent == RECORDS
        return calendar.missing_bounds(
            PartitionStep.of(self.step),
            self.live_us if timed else 0,
            self.low if timed else None,
            self.partitions,
            self.now,
        )

    def removable(self) -> list[Partition]:
        """Return the partitions that may be removed now: no running statement needs them any more."""
        if self.parent == RECORDS:
            if self.low is None or self.now - self.low_at < GRACE_US:
                return []
            return [each for each in self.partitions if each.upper <= (self.low or 0)]
        return [each for each in self.overdue() if (each.over_at or 0) + GRACE_US <= self.now]

    def lag_s(self) -> float:
        """Return for how long the oldest of those has been overdue; 0 if there is none."""
        return (self.now - min((each.over_at or 0 for each in self.overdue()), default=self.now)) / 1e6


def look(batch: PostgresBatch, parent: str) -> Talk[PartitionState]:
    """Read the state of the partitions of a table: one statement if none were ever needed."""
    noted: dict[str, str] = dict((yield SendCalls("retention")))
    if "partition_live" not in noted:
        return PartitionState(0, [], parent)
    rows = yield SendCalls("partitions", {"now": batch.now, "parent": parent})
    lived_us = int(noted["partition_live"])
    partitions = [
        _partition(row, lived_us if parent == RECORDS else None) for row in rows if row[1] is not None
    ]
    low = noted.get("low_water")
    return PartitionState(
        rows[0][0],
        partitions,
        parent,
        noted["partition_step"],
        lived_us,
        None if low is None else int(low),
        int(noted.get("low_water_at", 0)),
    )


def look_all(batch: PostgresBatch) -> Talk[list[PartitionState]]:
    """Read the state of every table that needs partitions; empty: no consumer has declared its ids."""
    found: list[PartitionState] = []
    for (parent,) in (yield SendCalls("partition_parents")):
        found.append((yield from look(batch, parent)))
    return found


def live_us() -> Talk[int]:
    """Read how long partitions are kept; 0: there are none."""
    noted: dict[str, str] = dict((yield SendCalls("retention")))
    return int(noted.get("partition_live", 0))


def _partition(row: Any, lived_us: int | None) -> Partition:
    """`lived_us`: how long records live; `None`: it is a partition of marks, which says itself when they are over."""
    _, name, lower, upper, exists, attached, pending, over_at = row
    if lived_us is not None:
        over_at = upper + lived_us
    if not exists:
        return Partition(name, lower, upper, "gone", over_at)
    state: Any = "leaving" if pending else "attached" if attached else "detached"
    return Partition(name, lower, upper, state, over_at)


# --- creating -------------------------------------------------------------------------------------


def set_up(batch: PostgresBatch, schema: str) -> Talk[None]:
    """Store the options for partitions in the database, and create those that are needed soon."""
    ((version, *_),) = yield SendCalls("server")
    if version < OLDEST:
        raise StoreRefused(f"this is PostgreSQL {version // 10000}; ids= needs {OLDEST // 10000} or newer")
    noted: dict[str, str] = dict((yield SendCalls("retention")))
    options = batch.retention
    step = options.step or noted.get("partition_step", STEP)
    lived_us = duration_us(options.live) if options.live else int(noted.get("partition_live", LIVE_US))
    calendar.check(step, lived_us)
    for what, value in (("partition_step", step), ("partition_live", str(lived_us))):
        if noted.get(what) != value:
            yield SendCalls("note", {"name": what, "value": value})
    enough_us = calendar.AHEAD_US - PartitionStep.of(step).about_us
    if any(each.ahead_us < enough_us or not each.partitions for each in (yield from look_all(batch))):
        yield from make(batch, schema)


def make(batch: PostgresBatch, schema: str) -> Talk[None]:
    """Create the missing partitions; all of them, or none."""
    yield SendCalls("begin")
    yield SendCalls("quickly")
    failure = yield from _make_missing(batch, schema)
    if failure:
        yield SendCalls("rollback")
        for found in (yield from look_all(batch)):
            if found.ahead_us < ALARM_US:
                warn(found, schema, failure)
        return
    yield SendCalls("commit")


def _make_missing(batch: PostgresBatch, schema: str) -> Talk[str]:
    """Create the missing partitions. Returns the SQLSTATE of the error that prevented it; empty: no error."""
    ((refused,),) = yield SendCalls("migration_lock", expected_errors=NOT_MADE)
    if refused in NOT_MADE:
        return str(refused)
    for found in (yield from look_all(batch)):
        bounds = found.missing()
        if found.parent == RECORDS and found.low is None and bounds:
            yield SendCalls("note", {"name": "low_water", "value": str(bounds[0][0])})
        for lower, upper in bounds:
            failed = yield from _make_one(schema, found.parent, lower, upper)
            if failed:
                return failed
    return ""


def _make_one(schema: str, parent: str, lower: int, upper: int) -> Talk[str]:
    name = calendar.name_of(lower, parent)
    table = f'"{schema}"."{name}"'
    for script in (
        f'CREATE TABLE {table} (LIKE "{schema}".{parent} INCLUDING ALL){STORAGE[parent]}',
        f'ALTER TABLE "{schema}".{parent} ATTACH PARTITION {table} FOR VALUES FROM ({lower}) TO ({upper})',
    ):
        failed = yield SendCalls("make", script=script, expected_errors=NOT_MADE)
        if failed:
            return str(failed[0][0])
    yield SendCalls("note_partition", {"name": name, "lower": lower, "upper": upper, "parent": parent})
    return ""


def warn(found: PartitionState, schema: str, why: str = "") -> None:
    """Log that the partitions reach only a short time ahead."""
    _log.warning(
        "partitions of schema %s reach only %.1f days ahead%s; run semel purge, or a Cleaner, as their owner",
        schema,
        found.ahead_us / calendar.DAY_US,
        f" and none could be created ({why})" if why else "",
    )


# --- removing -----------------------------------------------------------------------------------


def maintain(batch: PostgresBatch, position: int, schema: str) -> Talk[list[PartitionState]]:
    """Create partitions ahead, raise the low-water mark, and note which partitions may be removed now.

    Once the mark is raised, ids below it are `Late`. Partitions below it are removed in a later round, after the
    mark has been in force for a while: nothing waits here. A partition of marks may go only after another one became
    the current one, which has waited for every transaction that wrote to it.
    """
    found = yield from look_all(batch)
    if any(each.missing() for each in found if each.live_us):
        yield from make(batch, schema)
        found = yield from look_all(batch)
    if any(each.parent == MARKS for each in found):
        yield SendCalls("next_slot", {"now": batch.now}, expected_errors=NOT_REMOVED)
        found = yield from look_all(batch)
    for each in found:
        if not each.live_us:
            continue
        if each.ahead_us < ALARM_US:
            warn(each, schema)
        low = calendar.low_water(each.low, each.overdue()) if each.parent == RECORDS else each.low
        if low is not None and low != each.low:
            yield SendCalls("raise_low", {"low": str(low), "at": str(each.now)})
        elif names := [one.name for one in each.removable()]:
            batch.leaving[position] = batch.leaving.get(position, []) + names
    return found


def remove(batch: PostgresBatch, schema: str, names: list[str]) -> Talk[int]:
    """Detach partitions concurrently and drop them; returns their number. Needs its own connection, no transaction.

    Finishes what an earlier run left unfinished. A partition whose lock is not free is left for the next round.
    """
    yield SendCalls("patience", script="SET lock_timeout = '1s'")
    count = 0
    for name in names:
        parent = MARKS if name.startswith(calendar.PREFIXES[MARKS]) else RECORDS
        found = yield from look(batch, parent)
        one = next((each for each in found.removable() if each.name == name), None)
        if one is None:
            continue
        table = f'"{schema}"."{name}"'
        if one.state in ("attached", "leaving"):
            how = "CONCURRENTLY" if one.state == "attached" else "FINALIZE"
            script = f'ALTER TABLE "{schema}".{parent} DETACH PARTITION {table} {how}'
            failed = yield SendCalls("detach", script=script, expected_errors=NOT_REMOVED)
            if failed:
                _not_now(name, failed[0][0])
                continue
        yield SendCalls("begin")
        if one.state != "gone":
            failed = yield SendCalls("drop", script=f"DROP TABLE {table}", expected_errors=NOT_REMOVED)
            if failed:
                yield SendCalls("rollback")
                _not_now(name, failed[0][0])
                continue
        yield SendCalls("drop_partition_note", {"name": name})
        yield SendCalls("commit")
        count += 1
    return count


def _not_now(name: str, why: str) -> None:
    level = logging.WARNING if why == NO_RIGHT else logging.INFO
    _log.log(
        level, "partition %s stays for now (%s)%s", name, why, "; clean as its owner" * (why == NO_RIGHT)
    )
