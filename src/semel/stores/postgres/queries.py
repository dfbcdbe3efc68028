"""The statements of a batch: generators that yield statements and receive their rows.

No I/O here, so sync and async send the same statements. There is one statement for all claims of a stage, one for
all settles, and so on, each committed on its own.
"""

from collections.abc import Callable, Container, Sequence
from typing import Any

from msgspec.structs import replace

from semel.core.commands import Answer, Claim, Forget, Granted, Known, Lookup, RecordItem, Renew, Settle
from semel.core.ids import digest
from semel.core.machine import decide, mark_record, standing
from semel.errors import KeyInvalid, RecordCorrupt, StoreUnavailable, UsageError
from semel.stores.postgres import encoding
from semel.stores.postgres.batch import (
    BIGINT,
    RACES_MAX,
    PostgresBatch,
    SendCalls,
    Stage,
    Talk,
    number_consumers,
    read_consumers,
)
from semel.stores.postgres.calendar import FUTURE_US
from semel.stores.postgres.encoding import Row
from semel.stores.postgres.marks import find_marks, forget_marks, marks
from semel.stores.rows import QUARANTINE, SLIDING, has_extras, pack_steps
from semel.types import Absent, Busy, Completed, Forgotten, Id, Late, Lost, Mismatch, Record, Renewed, Unknown

RACED_RETRY_S = 0.005
LOST, WRITTEN, ALREADY, ALREADY_OTHERWISE, DEFERRED = 0, 1, 2, 3, 8
"""The verdicts of the statement `settle`. Already otherwise: with another value."""


def talk_of(batch: PostgresBatch, stage: Stage) -> Talk[None]:
    """Return the talk of one stage, which stores the answers in the batch. A stage may be started again."""
    return TALKS[stage.kind](batch, stage.positions)


# --- claims -------------------------------------------------------------------------------------


def claims(batch: PostgresBatch, positions: Sequence[int]) -> Talk[None]:
    """Grant claims, or answer duplicates: one statement, and another only for keys that raced with other callers."""
    yield from number_consumers(
        batch, {batch.items[at].id[:2] for at in positions}, timed=positions[0] in batch.id_times
    )
    waiting = {batch.digests[position]: position for position in positions}
    deferred: list[int] = []
    for _ in range(RACES_MAX):
        order = [waiting[each] for each in sorted(waiting)]
        for row in (yield batch.ask("claim", order, _claim_parameters(batch, order))):
            position = waiting.pop(row[1])
            answer = _CLAIM_ANSWERS[row[0]](row)
            if answer is None:
                deferred.append(position)
            else:
                batch.answers[position] = answer
        if not waiting:
            break
    for position in waiting.values():
        batch.answers[position] = Busy(RACED_RETRY_S)
    if deferred:
        yield from reserve_and_decide(batch, deferred)


def _claim_parameters(batch: PostgresBatch, order: Sequence[int]) -> dict[str, Any]:
    items: list[Claim] = [batch.items[position] for position in order]
    consumers = batch.consumers
    return {
        "now": batch.now,
        "digests": encoding.uuids([batch.digests[position] for position in order]),
        "owners": encoding.byteas([item.owner for item in items]),
        "leases": encoding.bigints([item.lease_us for item in items]),
        "windows": encoding.bigints([item.window_us for item in items]),
        "fingerprints": encoding.byteas([item.fingerprint for item in items]),
        "types": encoding.texts([encoding.storable(item.event_type) or None for item in items]),
        "event_times": encoding.bigints([_event_time(item) for item in items]),
        "flags": encoding.smallints(
            [(QUARANTINE if item.quarantine else 0) | (SLIDING if item.sliding else 0) for item in items]
        ),
        "consumers": encoding.integers([consumers[item.id[:2]] for item in items]),
        "keys": encoding.texts([batch.key_of(item, needed=item.quarantine) for item in items]),
        "refreshes": encoding.smallints([int(item.refresh) for item in items]),
    }


def _event_time(item: Claim) -> int | None:
    """Return the event's own time if the claim may be refused for it, else `None`."""
    if not item.refuse_late or item.event_time_us is None:
        return None
    return min(max(item.event_time_us, BIGINT.start), BIGINT.stop - 1)


def _to_granted(row: Row) -> Granted:
    return Granted(row[2], row[3], row[4], row[5])


_CLAIM_ANSWERS: dict[int, Callable[[Row], Answer]] = {
    0: _to_granted,
    1: lambda row: Known("done", row[6], row[2], row[4] or 0, row[5], row[7]),
    2: lambda row: Known("failed", row[6], row[2], row[4] or 0, row[5], row[7]),
    3: lambda row: Busy(row[4] / 1e6, bool(row[3])),
    5: lambda _row: Mismatch(),
    6: lambda row: Late(row[4] / 1e6),
    7: lambda row: Unknown(row[4] or 0),
    8: lambda _row: None,
}
"""The answers for the verdicts of the statement `claim`; `None`: decide under a lock."""


# --- settles and renewals -----------------------------------------------------------------------


def settles(batch: PostgresBatch, positions: Sequence[int]) -> Talk[None]:
    """Settle claims: one statement. Records that are missing or have a journal are decided under a lock."""
    chosen = sorted(positions, key=batch.digests.__getitem__)
    items: list[Settle] = [batch.items[position] for position in chosen]
    rows = yield batch.ask(
        "settle",
        chosen,
        {
            "now": batch.now,
            "digests": encoding.uuids([batch.digests[position] for position in chosen]),
            "owners": encoding.byteas([item.owner for item in items]),
            "fences": encoding.bigints([item.fence for item in items]),
            "ends": encoding.smallints([encoding.GOALS[item.to] for item in items]),
            "values": encoding.byteas([item.value for item in items]),
            "windows": encoding.bigints([item.window_us for item in items]),
            "delays": encoding.bigints([item.delay_us for item in items]),
            "gives": encoding.smallints(
                [int(item.to == "released" and not item.count_attempt) for item in items]
            ),
            "errors": encoding.texts([encoding.error_text(item.error) for item in items]),
        },
    )
    deferred: list[int] = []
    changed: list[Id] = []
    for number, verdict, at, _, _ in rows:
        position = chosen[number - 1]
        if verdict == WRITTEN:
            batch.answers[position] = Completed(at_us=at)
            changed.append(batch.items[position].id)
        elif verdict in (ALREADY, ALREADY_OTHERWISE):
            batch.answers[position] = Completed(already=True, at_us=at or 0, kept=verdict == ALREADY)
        elif verdict == DEFERRED:
            deferred.append(position)
        else:
            batch.answers[position] = Lost()
    _all_written(rows, len(changed))
    batch.changed += changed
    if deferred:
        yield from reserve_and_decide(batch, deferred)


def renewals(batch: PostgresBatch, positions: Sequence[int]) -> Talk[None]:
    """Extend leases: one statement."""
    chosen = sorted(positions, key=batch.digests.__getitem__)
    items: list[Renew] = [batch.items[position] for position in chosen]
    rows = yield batch.ask(
        "renew",
        chosen,
        {
            "now": batch.now,
            "digests": encoding.uuids([batch.digests[position] for position in chosen]),
            "owners": encoding.byteas([item.owner for item in items]),
            "fences": encoding.bigints([item.fence for item in items]),
            "leases": encoding.bigints([item.lease_us for item in items]),
        },
    )
    for position in chosen:
        batch.answers[position] = Lost()
    for number, lease_until, _ in rows:
        batch.answers[chosen[number - 1]] = Renewed(lease_until)
    _all_written(rows, len(rows))


def _all_written(rows: list[Row], count: int) -> None:
    """Raise `StoreUnavailable` if the update did not find all rows that we hold locked."""
    if rows and rows[0][3 if len(rows[0]) > 3 else 2] != count:  # noqa: PLR2004 - the column of the count
        raise StoreUnavailable("the server did not write all that it had locked; try again")


# --- lookups ------------------------------------------------------------------------------------


def lookups(batch: PostgresBatch, positions: Sequence[int]) -> Talk[None]:
    """Read records without locking them: one statement."""
    for number, now, mark, *columns in (yield from _look(batch, positions)):
        position = positions[number - 1]
        item: Lookup = batch.items[position]
        try:
            if columns[0] is None:
                batch.answers[position] = _look_at_mark(item.id, mark, now)
            else:
                batch.answers[position] = decide(encoding.from_row(tuple(columns), item.id), item, now)[0]
        except RecordCorrupt as error:
            batch.refuse(position, error)


def _look(batch: PostgresBatch, positions: Sequence[int]) -> Talk[list[Row]]:
    rows = yield batch.ask(
        "lookup",
        positions,
        {"now": batch.now, "digests": encoding.uuids([batch.digests[position] for position in positions])},
    )
    return (yield from find_marks(batch, positions, rows))


def _look_at_mark(record_id: Id, expires_at: int | None, now: int) -> Record | Absent:
    if expires_at is None or expires_at <= now:
        return Absent()
    return mark_record(record_id, expires_at)


# --- decided in Python, under locks ------------------------------------------------------------------


def lock_and_decide(batch: PostgresBatch, positions: Sequence[int]) -> Talk[None]:
    """Lock the records in the order of their digests, decide in Python, write the changes: one transaction."""
    places = {batch.digests[position]: position for position in positions}
    order = [places[each] for each in sorted(places)]
    yield SendCalls("begin")
    yield batch.ask(
        "lock", order, {"digests": encoding.uuids([batch.digests[position] for position in order])}
    )
    yield from _decide(batch, positions)


def reserve_and_decide(batch: PostgresBatch, positions: Sequence[int]) -> Talk[None]:
    """As `lock_and_decide`, for items that may create a record: rows are reserved for records that do not exist yet."""
    yield from number_consumers(
        batch, {batch.items[at].id[:2] for at in positions}, timed=positions[0] in batch.id_times
    )
    chosen = sorted(positions, key=batch.digests.__getitem__)
    yield SendCalls("begin")
    outside = (yield from _outside(batch, chosen)) if chosen[0] in batch.id_times else set[int]()
    inside = [position for position in chosen if position not in outside]
    if inside:
        yield batch.ask(
            "reserve",
            inside,
            {
                "digests": encoding.uuids([batch.digests[position] for position in inside]),
                "consumers": encoding.integers([batch.consumers[batch.items[at].id[:2]] for at in inside]),
            },
        )
    written = yield from _decide(batch, chosen, outside, commit=False)
    unused = [at for at in inside if batch.digests[at] not in written]
    if unused:
        yield batch.ask(
            "unreserve", unused, {"digests": encoding.uuids([batch.digests[at] for at in unused])}
        )
    yield SendCalls("commit")


def _outside(batch: PostgresBatch, positions: Sequence[int]) -> Talk[set[int]]:
    """Return the positions of ids that are too old or too new for a new record, as the statement `claim` does."""
    ((now, low, live),) = yield SendCalls("edge", {"now": batch.now})
    return {
        at
        for at in positions
        if not (low or 0) <= batch.id_times[at] <= now + FUTURE_US
        or now - batch.id_times[at] > (live or 0) - _span(batch.items[at])
    }


def _span(item: RecordItem) -> int:
    return item.window_us if isinstance(item, Claim) else 0


def _decide(
    batch: PostgresBatch, positions: Sequence[int], outside: Container[int] = (), *, commit: bool = True
) -> Talk[set[bytes]]:
    """Answer the items by the machine; returns the digests of the written records.

    `outside`: positions for which no record can be created. If they have none, a claim is `Late`, and nothing is
    written for a completion, whose duplicates will be late too.
    """
    changes: list[tuple[int, Record | None, Record]] = []
    unmarked: list[bytes] = []
    changed: list[Id] = []
    for number, now, mark, *columns in (yield from _look(batch, positions)):
        position = positions[number - 1]
        item: RecordItem = batch.items[position]
        if columns[0] is None and isinstance(item, Forget):
            live = mark is not None and mark > now
            batch.answers[position] = Forgotten(now) if live else Absent()
            if live:
                unmarked.append(batch.digests[position])
                changed.append(item.id)
            continue
        try:
            stored = None if columns[0] is None else encoding.from_row(tuple(columns), item.id)
            if position in outside and isinstance(item, Claim) and _is_absent(stored, now):
                batch.answers[position] = Late((now - batch.id_times[position]) / 1e6)
                continue
            batch.answers[position], record = decide(stored, item, now)
            if record is not None:
                changes.append((position, stored, encoding.fit(record)))
                if not isinstance(item, Claim | Renew):
                    changed.append(item.id)
        except (RecordCorrupt, KeyInvalid) as error:
            batch.refuse(position, error)
    if unmarked:
        yield from forget_marks(batch, unmarked)
    if changes:
        yield from _write(batch, changes)
    if changed:
        yield SendCalls("tell", {"digests": encoding.uuids([digest(record_id) for record_id in changed])})
    if commit:
        yield SendCalls("commit")
    batch.changed += changed
    return {batch.digests[position] for position, _, _ in changes}


def _is_absent(stored: Record | None, now: int) -> bool:
    record = standing(stored, now)
    return record is None or record.state == "forgotten"


def _write(batch: PostgresBatch, changes: list[tuple[int, Record | None, Record]]) -> Talk[None]:
    rows = [(batch.digests[position], record) for position, _, record in changes]
    keys = [
        batch.key_of(batch.items[position], needed=record.quarantine or record.journal is not None)
        for position, _, record in changes
    ]
    yield batch.ask("write", [position for position, _, _ in changes], encoding.to_columns(rows, keys))
    extras = [(at, each) for at, _, each in changes if has_extras(each)]
    if extras:
        yield SendCalls(
            "write_extras",
            {
                "digests": encoding.uuids([batch.digests[at] for at, _ in extras]),
                "steps": encoding.byteas([pack_steps(each.steps) for _, each in extras]),
                "metas": encoding.byteas([each.meta for _, each in extras]),
                "anchors": encoding.bigints([each.anchor_us for _, each in extras]),
                "horizons": encoding.bigints(
                    [None if each.anchor_us is None else each.horizon_us for _, each in extras]
                ),
                "id_times": encoding.bigints([batch.id_times.get(at) for at, _ in extras]),
            },
        )
    journals = [(key, each.journal) for key, each in rows if each.journal is not None]
    if journals:
        yield SendCalls(
            "write_journal",
            {
                "digests": encoding.uuids([key for key, _ in journals]),
                "payloads": encoding.byteas([payload for _, payload in journals]),
            },
        )
    had = [(batch.digests[at], before, after) for at, before, after in changes if before is not None]
    bare = [key for key, before, after in had if has_extras(before) and not has_extras(after)]
    if bare:
        yield SendCalls("drop_extras", {"digests": encoding.uuids(bare)})
    over = [key for key, before, after in had if before.journal is not None and after.journal is None]
    if over:
        yield SendCalls("drop_journal", {"digests": encoding.uuids(over)})


# --- the rest ------------------------------------------------------------------------


def apart(batch: PostgresBatch, positions: Sequence[int]) -> Talk[None]:
    """Answer items that are not about single records."""
    from semel.stores.postgres.admin import answer

    for position in positions:
        try:
            batch.answers[position] = yield from answer(batch, position)
        except UnicodeEncodeError as error:
            batch.refuse(position, KeyInvalid(f"a name is not valid text: {error}"))
        except (RecordCorrupt, UsageError) as error:
            batch.refuse(position, error)


def removals(batch: PostgresBatch, positions: Sequence[int]) -> Talk[None]:
    """Remove the partitions that purges have found."""
    from semel.stores.postgres.partitions import remove

    for position in positions:
        count = yield from remove(batch, batch.schema, batch.leaving.pop(position, []))
        batch.answers[position] = replace(batch.answers[position], partitions=count)


def extend(batch: PostgresBatch, _positions: Sequence[int]) -> Talk[None]:
    """Create partitions for future ids, after a claim found none."""
    from semel.stores.postgres.partitions import make

    yield from make(batch, batch.schema)


TALKS: dict[str, Callable[[PostgresBatch, Sequence[int]], Talk[None]]] = {
    "claim": claims,
    "settle": settles,
    "renew": renewals,
    "lookup": lookups,
    "locked": lock_and_decide,
    "reserved": reserve_and_decide,
    "mark": marks,
    "refresh": marks,
    "apart": apart,
    "read_consumers": read_consumers,
    "remove": removals,
    "extend": extend,
}
