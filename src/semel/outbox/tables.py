"""The tables of an outbox: the protocol for relays and operators, and the doctor's check."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol, TypeAlias, get_args

import msgspec

from semel.core.relay_flow import OutboxRow, RowFailure
from semel.errors import SemelError, StoreUnknown, UsageError
from semel.observe.doctor import Finding
from semel.observe.formatting import plural
from semel.windows import exact_text

__all__ = [
    "COLUMNS",
    "FOREVER",
    "KEEP_US",
    "STATES",
    "Entry",
    "OutboxCounts",
    "Rows",
    "State",
    "examine",
    "row_of",
    "rows_for",
]

State: TypeAlias = Literal["pending", "published", "dead", "dropped"]
STATES: tuple[State, ...] = get_args(State)
"""States by their number in the table."""
COLUMNS = (
    "seq, id, created_at, attempts, aggregate_type, aggregate_id, event_type, source, subject, destination,"
    " content_type, traceparent, headers, payload"
)
KEEP_US = 7 * 86_400_000_000
"""The default retention of settled rows."""
FOREVER = 2**63 - 1
"""The next attempt of a dead row: never."""
ENTRY_COLUMNS = f"{COLUMNS}, state, not_before, next_at, settled_at, name, error"


class Entry(msgspec.Struct, frozen=True):
    """A row as operators see it."""

    row: OutboxRow
    state: State
    not_before: int | None
    next_at: int
    settled_at: int | None
    name: str | None
    error: str | None


class OutboxCounts(msgspec.Struct, frozen=True):
    """Counts of an outbox."""

    pending: int
    dead: int
    oldest_age_s: float
    """The age of the oldest pending row."""


class Rows(Protocol):
    """The outbox of a relay. Not for two tasks at once. Raises `StoreError`."""

    name: str

    async def open(self) -> None:
        """Connect, and create missing tables."""
        ...

    async def close(self) -> None:
        """Release all locks, so that another relay continues; idempotent."""
        ...

    async def share(self) -> bool:
        """Take or release shards, so that each relay has the same number. Returns whether it has any."""
        ...

    async def take(self, rows_max: int, bytes_max: int) -> list[OutboxRow]:
        """Return due rows of our shards, oldest first. It finds every row, even one that was committed late."""
        ...

    async def settle(self, published: Sequence[str], failures: Sequence[RowFailure], keep_us: int) -> None:
        """Write the results of rows. Rows that were settled meanwhile stay unchanged.

        Published rows stay for `keep_us`, and at least for the writer's window.
        """
        ...

    async def wait(self, wait_s: float) -> None:
        """Wait until something may have been written, or the time is over."""
        ...

    async def clean(self, rows_max: int) -> int:
        """Remove settled rows after their retention and the longest window. Returns their number."""
        ...

    async def counts(self) -> OutboxCounts:
        """Count the remaining rows."""
        ...

    async def entries(self, state: State | None, after: int, rows_max: int) -> list[Entry]:
        """Rows with a greater number than `after`, in their order."""
        ...

    async def entry(self, message_id: str) -> Entry | None:
        """One row."""
        ...

    async def retry(self, message_ids: Sequence[str] | None) -> int:
        """Retry dead rows from the first attempt; `None`: all of them. Returns their number."""
        ...

    async def drop(self, message_ids: Sequence[str]) -> int:
        """Drop unpublished rows; later rows continue. Returns their number."""
        ...


def row_of(values: Sequence[Any]) -> OutboxRow:
    """Build a row from the values of `COLUMNS`."""
    seq, message_id, created_at, attempts, kind, identity = values[:6]
    event_type, source, subject, destination, content_type, traceparent, headers, payload = values[6:]
    return OutboxRow(
        seq,
        message_id,
        created_at,
        attempts,
        None if kind is None else (kind, identity),
        event_type,
        source,
        subject,
        destination,
        content_type,
        traceparent,
        {} if headers == "{}" else msgspec.json.decode(headers, type=dict[str, str]),
        payload,
    )


def entry_of(values: Sequence[Any]) -> Entry:
    """Build an entry from the values of `ENTRY_COLUMNS`."""
    *row, state, not_before, next_at, settled_at, name, error = values
    return Entry(row_of(row), STATES[state], not_before, next_at, settled_at, name, error)


def rows_for(url: str) -> Rows:
    """Return the outbox in the database of a store URL, not yet connected."""
    scheme = url.partition(":")[0]
    if scheme in ("postgresql", "postgres"):
        from semel.outbox.postgres import PostgresRows
        from semel.stores.postgres import from_url as postgres_store

        return PostgresRows(postgres_store(url))
    if scheme == "sqlite":
        from semel.outbox.sqlite import SqliteRows
        from semel.stores.sqlite import from_url as sqlite_store

        return SqliteRows(sqlite_store(url))
    if ":" not in url:
        raise UsageError(f"{url!r} is not a URL; write postgresql://host/database or sqlite:///app.db")
    raise StoreUnknown(
        f"no outbox in {scheme}:; it lives in the database of your transactions: postgresql:, sqlite:"
    )


STALLED_S = 300.0
"""As in the alert: a working relay has published older messages."""
LOOK_MAX = 500
"""How many of the oldest messages are checked for failures."""


async def examine(url: str) -> list[Finding]:
    """Yield the problems of a store's outbox; none if the store cannot have one. Changes no row."""
    try:
        rows = rows_for(url)
    except SemelError:
        return []
    try:
        await rows.open()
        try:
            counts = await rows.counts()
            waiting = await rows.entries("pending", 0, LOOK_MAX)
            dead = await rows.entries("dead", 0, LOOK_MAX)
        finally:
            await rows.close()
    except SemelError as error:
        return [Finding("outbox", "error", str(error), "check that this user may read the outbox")]
    return list(_findings(counts, waiting, dead))


def _findings(counts: OutboxCounts, waiting: list[Entry], dead: list[Entry]) -> Iterator[Finding]:
    now = time.time_ns() // 1000
    due = [now - max(each.row.created_at, each.not_before or 0) for each in waiting]
    age_us = max((each for each in due if each >= 0), default=0)  # delayed messages do not count
    stalled = age_us > STALLED_S * 1e6
    age = exact_text(age_us // 10**6 * 10**6) if age_us >= 10**6 else "less than 1s"
    what = f"{plural(counts.pending, 'message waits', 'messages wait')}, the oldest of them due for {age}"
    yield Finding(
        "outbox",
        "warning" if stalled else "ok",
        what if counts.pending else "no message waits to be published",
        "check that a relay runs: semel relay --to BROKER" if stalled else "",
    )
    failing = [each for each in waiting if each.row.attempts]
    if failing:
        worst = max(failing, key=lambda each: each.row.attempts)
        yield Finding(
            "outbox",
            "warning",
            f"{plural(len(failing), 'message fails', 'messages fail')} to be published; {worst.row.id} did"
            f" {plural(worst.row.attempts, 'time')}:"
            f" {worst.error or 'no reason was kept'}",
            f"fix the error; semel outbox show {worst.row.id}",
        )
    if dead:
        behind = {each.row.aggregate for each in dead} & {each.row.aggregate for each in waiting} - {None}
        held = f", and {plural(len(behind), 'aggregate waits', 'aggregates wait')} behind" if behind else ""
        yield Finding(
            "outbox",
            "error",
            f"{plural(counts.dead, 'message was', 'messages were')} given up{held}: {dead[0].row.id}:"
            f" {dead[0].error or 'no reason was kept'}",
            "semel outbox list --dead, then semel outbox retry --all or semel outbox drop ID",
        )
