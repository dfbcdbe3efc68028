"""One step of a relay, as a pure flow: take rows, publish them, settle them by the broker's answers.

A process may die at any `yield`. A row is settled only after its broker confirmed it, so a crash means that it
is published again, with the same id; it is never lost.
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
"""The most rounds for a sink without order within a batch; the rest waits for the next step."""


class OutboxRow(Struct, frozen=True, gc=False):
    """A message in the outbox."""

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
    """The broker or the destination refused it. It counts as an attempt."""

    reason: str
    of_message: bool = False
    """Whether only the message is wrong; others to the same destination may continue."""


class NotPublished(Struct, frozen=True, gc=False):
    """Not tried, or without an answer: it stays unchanged and is retried."""

    reason: str = ""


Sent: TypeAlias = Published | PublishRefused | NotPublished


# --- commands -----------------------------------------------------------------------------------


class RowFailure(Struct, frozen=True, gc=False):
    """A row that was not published, and its next state."""

    id: str
    delay_us: int
    reason: str | None = None
    """`None`: it was not tried, because its destination is paused."""
    dead: bool = False
    passed: bool = False
    """Dead, and later rows may continue."""
    pauses: str | None = None
    """The destination to pause for that time."""


class Taken(Struct, frozen=True, gc=False):
    """Due rows, oldest first, and the paused destinations with the remaining time."""

    rows: Sequence[OutboxRow]
    paused: dict[str, int] = field(default_factory=dict[str, int])


class TakeRows(Command[Taken], frozen=True, gc=False):
    """Take rows that may be published now: none is behind a waiting or dead row of its aggregate."""


class PublishRows(Command[list[Sent]], frozen=True, gc=False):
    """Publish the rows and wait for the broker's answer to each."""

    rows: Sequence[OutboxRow]


class SettleRows(Command[None], frozen=True, gc=False):
    """Record confirmed rows, and the next attempt of the others."""

    published: Sequence[str]
    failures: Sequence[RowFailure]


# --- the step -----------------------------------------------------------------------------------


class Retrying(Struct, frozen=True, kw_only=True):
    """How often a row is tried, and the delays."""

    attempts_max: int = 10
    """After so many failed attempts the row is dead; `semel outbox retry` starts anew."""
    first_s: float = 1.0
    """The delay after the first failure; it doubles with each further one."""
    max_s: float = 300.0
    """The longest delay."""
    skip: bool = False
    """Whether rows may pass a dead row of their aggregate."""

    def delay_us(self, attempts: int) -> int:
        """How long to wait after this many attempts."""
        return round(backoff_s(attempts - 1, self.first_s, self.max_s) * US)


class RelayResult(Struct, frozen=True, gc=False):
    """The result of a step."""

    taken: int = 0
    published: int = 0
    refused: int = 0
    died: int = 0
    unsent: str | None = None
    """Why the broker was unavailable, if it was."""


def relay_step(retrying: Retrying, *, ordered: bool) -> Flow[RelayResult]:
    """Take, publish, settle. A row that was not published blocks the later rows of its aggregate.

    `ordered`: the sink ensures that within one batch.
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
    """The state of a running step."""

    retrying: Retrying
    paused: dict[str, int]
    stopped: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Blocked aggregates: a row of them was not published."""
    published: list[str] = field(default_factory=list[str])
    failures: list[RowFailure] = field(default_factory=list[RowFailure])
    unsent: str | None = None

    def due(self, wave: Sequence[OutboxRow]) -> list[OutboxRow]:
        """Return the rows of a wave to publish; the first of an aggregate whose destination is paused waits as long."""
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
        """Note the broker's answer to a row."""
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
        """Block the later rows of this row's aggregate."""
        if row.aggregate is not None:
            self.stopped.add(row.aggregate)


def failure_of_row(row: OutboxRow, refused: PublishRefused, retrying: Retrying) -> RowFailure:
    """Return the next state of a row that was refused."""
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
    """Split the rows into rounds: in each at most one row per aggregate, in order."""
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
