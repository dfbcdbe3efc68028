"""One step of a relay, as a pure flow: take rows, publish them, settle what the broker has answered.

A process may die at any `yield`. A row is settled only after its broker confirmed it, so what a death leaves
behind is published again, under the same id; it is never lost.
"""

from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct, field

from semel.core.backoff import backoff_s
from semel.core.commands import Command, Flow

__all__ = [
    "NotPublished",
    "OutboxRow",
    "PublishRefused",
    "PublishRows",
    "Published",
    "RelayResult",
    "Retrying",
    "RowFailure",
    "Sent",
    "SettleRows",
    "TakeRows",
    "Taken",
    "relay_step",
    "waves",
]

US = 1_000_000
WAVES_MAX = 32
"""Of a sink that cannot keep an order within a batch; what is left waits for the next step."""


class OutboxRow(Struct, frozen=True, gc=False):
    """A message as it lies in the outbox."""

    seq: int
    id: str
    created_at: int
    attempts: int
    aggregate: tuple[str, str] | None
    """Type and id; `None`: it may be published in any order."""
    event_type: str
    source: str
    subject: str | None
    destination: str
    content_type: str
    traceparent: str | None
    headers: dict[str, str]
    payload: bytes


# --- what a sink answers for each row -----------------------------------------------------------


class Published(Struct, frozen=True, gc=False):
    """The broker has confirmed it."""


class PublishRefused(Struct, frozen=True, gc=False):
    """The broker, or the destination, has said no. It counts as an attempt."""

    reason: str
    of_message: bool = False
    """The message is what is wrong; others to the same destination may go on."""


class NotPublished(Struct, frozen=True, gc=False):
    """Not tried, or nothing is known about it: it stays as it is and is tried again."""

    reason: str = ""


Sent: TypeAlias = Published | PublishRefused | NotPublished


# --- commands -----------------------------------------------------------------------------------


class RowFailure(Struct, frozen=True, gc=False):
    """A row that did not go out, and what becomes of it."""

    id: str
    delay_us: int
    reason: str | None = None
    """`None`: it was not tried, because its destination is being left alone."""
    dead: bool = False
    passed: bool = False
    """Dead, and those behind it may go on."""
    pauses: str | None = None
    """The destination that is to be left alone as long."""


class Taken(Struct, frozen=True, gc=False):
    """Rows whose turn it is, oldest first, and the destinations that are left alone, with the time that is left."""

    rows: Sequence[OutboxRow]
    paused: dict[str, int] = field(default_factory=dict[str, int])


class TakeRows(Command[Taken], frozen=True, gc=False):
    """Rows that may be published now: none is behind one of its aggregate that waits or is dead."""


class PublishRows(Command[list[Sent]], frozen=True, gc=False):
    """Hand the rows to the broker and wait for what it says of each."""

    rows: Sequence[OutboxRow]


class SettleRows(Command[None], frozen=True, gc=False):
    """Remember what was confirmed, and when to try the others again."""

    published: Sequence[str]
    failures: Sequence[RowFailure]


# --- the step -----------------------------------------------------------------------------------


class Retrying(Struct, frozen=True, kw_only=True):
    """How often, and how long after each other, a row is tried."""

    attempts_max: int = 10
    first_s: float = 1.0
    max_s: float = 300.0
    skip: bool = False
    """A dead row does not stop its aggregate."""

    def delay_us(self, attempts: int) -> int:
        """How long to wait after this many attempts."""
        return round(backoff_s(attempts - 1, self.first_s, self.max_s) * US)


class RelayResult(Struct, frozen=True, gc=False):
    """What a step came to."""

    taken: int = 0
    published: int = 0
    refused: int = 0
    died: int = 0
    unsent: str | None = None
    """Why the broker could not be asked, if it could not."""


def relay_step(retrying: Retrying, *, ordered: bool) -> Flow[RelayResult]:
    """Take, publish, settle. Behind a row that did not go out, no other of its aggregate goes.

    `ordered`: the sink keeps to that rule within one batch by itself.
    """
    taken = yield from TakeRows()
    if not taken.rows:
        return RelayResult()
    tally = _Tally(retrying, dict(taken.paused))
    for wave in [taken.rows] if ordered else waves(taken.rows)[:WAVES_MAX]:
        due = tally.due(wave)
        if due:
            for row, sent in zip(due, (yield from PublishRows(due)), strict=True):
                tally.note(row, sent)
    if tally.published or tally.failures:
        yield from SettleRows(tally.published, tally.failures)
    refused = [each for each in tally.failures if each.reason is not None]
    died = sum(each.dead for each in refused)
    return RelayResult(len(taken.rows), len(tally.published), len(refused), died, tally.unsent)


class _Tally(Struct):
    """What is known, in the middle of a step."""

    retrying: Retrying
    paused: dict[str, int]
    stopped: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Aggregates of which a row did not go out."""
    published: list[str] = field(default_factory=list[str])
    failures: list[RowFailure] = field(default_factory=list[RowFailure])
    unsent: str | None = None

    def due(self, wave: Sequence[OutboxRow]) -> list[OutboxRow]:
        """The rows of a wave that may go; the first of an aggregate whose destination is left alone waits as long."""
        rows: list[OutboxRow] = []
        for row in wave:
            if row.aggregate in self.stopped:
                continue
            if row.destination in self.paused:
                self.failures.append(RowFailure(row.id, self.paused[row.destination]))
                self.stop(row)
            else:
                rows.append(row)
        return rows

    def note(self, row: OutboxRow, sent: Sent) -> None:
        """The broker's word on a row."""
        if isinstance(sent, Published):
            self.published.append(row.id)
            return
        self.stop(row)
        if isinstance(sent, NotPublished):
            self.unsent = self.unsent or sent.reason
            return
        failure = failure_of_row(row, sent, self.retrying)
        self.failures.append(failure)
        if failure.pauses is not None:
            self.paused[row.destination] = max(failure.delay_us, self.paused.get(row.destination, 0))

    def stop(self, row: OutboxRow) -> None:
        """Let nothing go that is behind this row."""
        if row.aggregate is not None:
            self.stopped.add(row.aggregate)


def failure_of_row(row: OutboxRow, refused: PublishRefused, retrying: Retrying) -> RowFailure:
    """What becomes of a row that was refused once more."""
    attempts = row.attempts + 1
    dead = attempts >= retrying.attempts_max
    return RowFailure(
        row.id,
        retrying.delay_us(attempts),
        refused.reason,
        dead=dead,
        passed=dead and retrying.skip,
        pauses=None if refused.of_message else row.destination,
    )


def waves(rows: Sequence[OutboxRow]) -> list[list[OutboxRow]]:
    """The rows in rounds: in each at most one of every aggregate, in their order."""
    made: list[list[OutboxRow]] = []
    depth: dict[tuple[str, str], int] = {}
    for row in rows:
        at = 0
        if row.aggregate is not None:
            at = depth.get(row.aggregate, 0)
            depth[row.aggregate] = at + 1
        if at == len(made):
            made.append([])
        made[at].append(row)
    return made
