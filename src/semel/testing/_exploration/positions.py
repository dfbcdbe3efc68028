"""Positions of flows: a generator cannot be copied, so a position is all that its flow was answered so far.

A flow is deterministic, so equal answers lead to equal positions. Each position is reached once by a replay, and then
found again by its answer.
"""

from collections.abc import Callable, Generator, Hashable
from typing import Any

from msgspec.structs import replace

from semel.core.commands import Claim, Granted, Known, Lookup, Marked, Page, Settle
from semel.types import Busy, Completed, Record, Unavailable, Unknown


class Position:
    """Where a flow stands: the command that it waits for, or the outcome that it returned."""

    __slots__ = ("answer", "before", "claim", "command", "granted", "index", "next", "outcome", "over", "program", "seen_fence")  # fmt: skip # noqa: E501

    def __init__(self, program: "Program", index: int, before: "Position | None", answer: Any) -> None:
        self.program = program
        self.index = index
        self.before = before
        self.answer = answer
        self.command: Any = None
        self.outcome: Any = None
        self.next: dict[Hashable, Position] = {}
        self.claim: Claim | None = None
        """The last claim that the flow sent."""
        self.granted: Granted | None = None
        self.seen_fence = 0
        """The fence of the record that the flow looked up."""
        self.over = False
        """Whether its claim is settled."""
        if before is not None:
            self._follow(before, answer)

    def _follow(self, before: "Position", answer: Any) -> None:
        sent = type(before.command)
        self.claim = before.command if sent is Claim else before.claim
        self.granted = answer if type(answer) is Granted else before.granted
        self.seen_fence = answer.fence if sent is Lookup and type(answer) is Record else before.seen_fence
        self.over = before.over or (sent is Settle and type(answer) is not Unavailable)


class Program:
    """A flow that is begun again and again, always the same way."""

    def __init__(
        self, number: int, positions: list[Position], begin: Callable[[], Generator[Any, Any, Any]]
    ) -> None:
        self.number = number
        self._positions = positions
        self._begin = begin
        self.root = self._reach(None, None)

    def after(self, position: Position, answer: Any) -> Position:
        """Return the position after this answer."""
        key = _key(answer)
        found = position.next.get(key)
        if found is None:
            found = position.next[key] = self._reach(position, answer)
        return found

    def _reach(self, before: Position | None, answer: Any) -> Position:
        position = Position(self, len(self._positions), before, answer)
        self._positions.append(position)
        answers: list[Any] = []
        at: Position | None = position
        while at is not None:
            answers.append(at.answer)
            at = at.before
        flow = self._begin()
        try:
            for each in reversed(answers):
                position.command = flow.send(each)
        except StopIteration as end:
            position.command, position.outcome = None, end.value
        return position


def plain(answer: Any) -> Any:
    """Return the answer without what no flow decides by: times, kept errors, and who else owns a record."""
    match answer:
        case Granted():
            return replace(answer, lease_until_us=0, first_seen_us=0)
        case Busy():
            return Busy(1.0, answer.recoverable)
        case Known():
            return replace(answer, rest_us=0, settled_at_us=0, first_seen_us=0)
        case Completed():
            return replace(answer, at_us=0)
        case Unknown():
            return replace(answer, since_us=0)
        case Record():
            return replace(answer, owner=b"", lease_until_us=0, settled_at_us=0, errors=())
        case Page():
            return Page(
                [replace(record, owner=b"", lease_until_us=0, errors=()) for record in answer.records]
            )
        case _:
            return answer


def _key(answer: Any) -> Hashable:
    if type(answer) is Page:
        return tuple(answer.records)
    if type(answer) is Marked:
        return tuple(answer.firsts)
    return answer  # type: ignore[no-any-return]
