"""Marks: in the plain table, or in partitions by their arrival if their consumer declared its ids."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from semel.core.commands import Forget, Lookup, Mark, Marked
from semel.errors import StoreUnavailable
from semel.stores.postgres import encoding
from semel.stores.postgres.batch import RACES_MAX, PostgresBatch, SendCalls, Talk, number_consumers
from semel.stores.postgres.encoding import Packed, Row

__all__ = ["find_marks", "forget_marks", "marks"]

MARK_NEW, MARK_RACED = 1, 2
"""Verdicts of the statement `refresh_marks`."""
MarkRow: TypeAlias = tuple[bytes, int, int, int | None]
"""The digest of a key, the number of its consumer, its window, and the time inside it, if it is in a partition."""


def marks(batch: PostgresBatch, positions: Sequence[int]) -> Talk[None]:
    """Store the keys of all marks: one statement. Keys that it does not return were known before or meanwhile."""
    items: list[Mark] = [batch.items[position] for position in positions]
    yield from number_consumers(batch, {(item.tenant, item.consumer) for item in items})
    digests = [batch.marked[position] for position in positions]
    rows: list[MarkRow] = []
    for position, item, theirs in zip(positions, items, digests, strict=True):
        number = batch.consumers[item.tenant, item.consumer]
        times = batch.mark_times.get(position) or [None] * len(theirs)
        rows += [(each, number, item.window_us, at) for each, at in zip(theirs, times, strict=True)]
    rows.sort(key=_digest_of)
    firsts: set[bytes] = set()
    if items[0].refresh:
        firsts = yield from _refresh_marks(batch, rows)
    elif rows and positions[0] in batch.mark_times:
        firsts = yield from _mark_in_slot(batch, rows)
    elif rows:
        firsts = {row[0] for row in (yield SendCalls("mark", _mark_parameters(batch, rows)))}
    for position, theirs in zip(positions, digests, strict=True):
        batch.answers[position] = Marked([each in firsts for each in theirs])


def _digest_of(row: MarkRow) -> bytes:
    return row[0]


def _mark_in_slot(batch: PostgresBatch, rows: Sequence[MarkRow]) -> Talk[set[bytes]]:
    """Mark the keys in the current partition; returns those that no partition has. One statement, but at its end."""
    from semel.stores.postgres.partitions import LOCKED, make

    parameters = {**_mark_parameters(batch, rows), "times": encoding.bigints([row[3] for row in rows])}
    slot: Any = None
    for _ in range(RACES_MAX):
        found = yield SendCalls("mark_in_slot", parameters)
        if not found or found[0][0] is not None:
            return {row[0] for row in found}
        ((slot,),) = yield SendCalls("next_slot", {"now": batch.now}, expected_errors=frozenset((LOCKED,)))
        if slot is None:
            yield from make(batch, batch.schema)
    raise StoreUnavailable(
        "there is no partition for new marks; create partitions with: semel purge, as their owner"
        if slot is None
        else "running marks keep the next partition from its turn; try again"
    )


def _mark_parameters(batch: PostgresBatch, rows: Sequence[MarkRow]) -> dict[str, Packed | int | None]:
    return {
        "now": batch.now,
        "digests": encoding.uuids([row[0] for row in rows]),
        "consumers": encoding.integers([row[1] for row in rows]),
        "windows": encoding.bigints([row[2] for row in rows]),
    }


def _refresh_marks(batch: PostgresBatch, rows: Sequence[MarkRow]) -> Talk[set[bytes]]:
    """Mark the keys and start the windows of known ones again; returns the new ones. Repeated for keys that raced."""
    firsts: set[bytes] = set()
    for _ in range(RACES_MAX):
        if not rows:
            return firsts
        found = yield SendCalls("refresh_marks", _mark_parameters(batch, rows))
        if found and found[0][3] != sum(row[2] for row in found):
            raise StoreUnavailable("the server did not write all that it had locked; try again")
        firsts.update(row[0] for row in found if row[1] == MARK_NEW)
        raced = {row[0] for row in found if row[1] == MARK_RACED}
        rows = [row for row in rows if row[0] in raced]
    raise StoreUnavailable("the same keys are marked and removed at the same time; try again")


def find_marks(batch: PostgresBatch, positions: Sequence[int], rows: list[Row]) -> Talk[list[Row]]:
    """Fill marks in partitions into rows of the statement `lookup` that found no record; mostly there are none."""
    bare = {
        batch.digests[at]: number
        for number, row in enumerate(rows)
        if row[3] is None
        and isinstance(batch.items[at := positions[row[0] - 1]], Lookup | Forget)
        and batch.items[at].id[:2] in batch.kinds
    }
    if bare:
        for key, expires_at in (yield SendCalls("lookup_slots", {"digests": encoding.uuids(list(bare))})):
            row = rows[bare[key]]
            rows[bare[key]] = (*row[:2], expires_at, *row[3:])
    return rows


def forget_marks(batch: PostgresBatch, digests: list[bytes]) -> Talk[None]:
    """Remove marks, wherever they are."""
    yield SendCalls("forget_marks", {"digests": encoding.uuids(digests)})
    if batch.kinds:
        yield SendCalls("forget_slots", {"digests": encoding.uuids(digests)})
