"""The partitions of records by the time inside their ids: created ahead of time, and removed when they are too old.

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
from semel.stores.postgres.calendar import ALARM_US, GRACE_US, LIVE_US, STEP, Partition, PartitionStep
from semel.windows import duration_us

__all__ = ["PartitionState", "live_us", "look", "maintain", "make", "remove", "set_up"]

OLDEST = 140000
"""The first PostgreSQL that detaches a partition without blocking others."""
LOCKED = "55P03"
NO_RIGHT = "42501"
NOT_MADE = frozenset((LOCKED, NO_RIGHT, "42P07", "42P17", "40P01"))
"""The lock was not free in time, the role lacks the right, or another process created it first."""
NOT_REMOVED = frozenset((LOCKED, NO_RIGHT, "42P01", "55000", "40P01", "57014"))
"""The lock was not free in time, the role lacks the right, or another process is removing it or has removed it."""
STORAGE = "fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05"
"""The same as for the table `records`, for the same reason."""

_log = logging.getLogger("semel")


class PartitionState(Struct, frozen=True):
    """The current partitions and their settings."""

    now: int
    partitions: list[Partition]
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
        return [each for each in self.partitions if each.upper <= self.now - self.live_us]

    def lag_s(self) -> float:
        """Return for how long the oldest of those has been overdue; 0 if there is none."""
        over = self.overdue()
        return (self.now - self.live_us - over[0].upper) / 1e6 if over else 0.0


def look(batch: PostgresBatch) -> Talk[PartitionState]:
    """Read the state of the partitions: one statement if there are none."""
    noted: dict[str, str] = dict((yield SendCalls("retention")))
    if "partition_live" not in noted:
        return PartitionState(0, [])
    rows = yield SendCalls("partitions", {"now": batch.now})
    partitions = [_partition(row) for row in rows if row[1] is not None]
    low = noted.get("low_water")
    return PartitionState(
        rows[0][0],
        partitions,
        noted["partition_step"],
        int(noted["partition_live"]),
        None if low is None else int(low),
        int(noted.get("low_water_at", 0)),
    )


def live_us() -> Talk[int]:
    """Read how long partitions are kept; 0: there are none."""
    noted: dict[str, str] = dict((yield SendCalls("retention")))
    return int(noted.get("partition_live", 0))


def _partition(row: Any) -> Partition:
    _, name, lower, upper, exists, attached, pending = row
    if not exists:
        return Partition(name, lower, upper, "gone")
    return Partition(name, lower, upper, "leaving" if pending else "attached" if attached else "detached")


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
    found = yield from look(batch)
    if found.ahead_us < calendar.AHEAD_US - PartitionStep.of(step).about_us or not found.partitions:
        yield from make(batch, schema)


def make(batch: PostgresBatch, schema: str) -> Talk[None]:
    """Create the missing partitions; all of them, or none."""
    yield SendCalls("begin")
    yield SendCalls("quickly")
    failure = yield from _make_missing(batch, schema)
    if failure:
        yield SendCalls("rollback")
        found = yield from look(batch)
        if found.ahead_us < ALARM_US:
            warn(found, schema, failure)
        return
    yield SendCalls("commit")


def _make_missing(batch: PostgresBatch, schema: str) -> Talk[str]:
    """Create the missing partitions. Returns the SQLSTATE of the error that prevented it; empty: no error."""
    ((refused,),) = yield SendCalls("migration_lock", expected_errors=NOT_MADE)
    if refused in NOT_MADE:
        return str(refused)
    found = yield from look(batch)
    bounds = calendar.missing_bounds(
        PartitionStep.of(found.step), found.live_us, found.low, found.partitions, found.now
    )
    if found.low is None and bounds:
        yield SendCalls("note", {"name": "low_water", "value": str(bounds[0][0])})
    for lower, upper in bounds:
        name = calendar.name_of(lower)
        table = f'"{schema}"."{name}"'
        for script in (
            f'CREATE TABLE {table} (LIKE "{schema}".timed_records INCLUDING ALL) WITH ({STORAGE})',
            f'ALTER TABLE "{schema}".timed_records ATTACH PARTITION {table} FOR VALUES FROM ({lower}) TO ({upper})',
        ):
            failed = yield SendCalls("make", script=script, expected_errors=NOT_MADE)
            if failed:
                return str(failed[0][0])
        yield SendCalls("note_partition", {"name": name, "lower": lower, "upper": upper})
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


def maintain(batch: PostgresBatch, position: int, schema: str) -> Talk[PartitionState]:
    """Create partitions ahead, raise the low-water mark, and note which partitions may be removed now.

    Once the mark is raised, ids below it are `Late`. Partitions below it are removed in a later round, after the
    mark has been in force for a while: nothing waits here.
    """
    found = yield from look(batch)
    if not found.live_us:
        return found
    if calendar.missing_bounds(
        PartitionStep.of(found.step), found.live_us, found.low, found.partitions, found.now
    ):
        yield from make(batch, schema)
        found = yield from look(batch)
    if found.ahead_us < ALARM_US:
        warn(found, schema)
    low = calendar.low_water(found.live_us, found.low, found.partitions, found.now)
    if low is not None and low != found.low:
        yield SendCalls("raise_low", {"low": str(low), "at": str(found.now)})
    elif found.low is not None and found.now - found.low_at >= GRACE_US:
        batch.leaving[position] = [each.name for each in found.partitions if each.upper <= found.low]
    return found


def remove(batch: PostgresBatch, schema: str, names: list[str]) -> Talk[int]:
    """Detach partitions concurrently and drop them; returns their number. Needs its own connection, no transaction.

    Finishes what an earlier run left unfinished. A partition whose lock is not free is left for the next round.
    """
    yield SendCalls("patience", script="SET lock_timeout = '1s'")
    parent = f'"{schema}".timed_records'
    count = 0
    for name in names:
        found = yield from look(batch)
        one = next((each for each in found.partitions if each.name == name), None)
        if one is None or found.low is None or one.upper > found.low:
            continue
        table = f'"{schema}"."{name}"'
        if one.state in ("attached", "leaving"):
            how = "CONCURRENTLY" if one.state == "attached" else "FINALIZE"
            script = f"ALTER TABLE {parent} DETACH PARTITION {table} {how}"
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
