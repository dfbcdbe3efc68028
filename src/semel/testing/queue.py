"""An in-process at-least-once queue for tests of handlers and runners: it behaves like a broker's."""

import asyncio
from collections.abc import Sequence
from itertools import count
from time import monotonic
from typing import Any

import msgspec
from msgspec.structs import replace

from semel.brokers.source import Arrival, DeadLetterInfo
from semel.errors import SourceUnavailable

__all__ = ["Queue", "QueueSource"]


class Queued(msgspec.Struct, eq=False):
    """A message in the queue."""

    position: str
    headers: dict[str, str]
    body: bytes
    lane: str
    visible_at: float = 0.0
    deliveries: int = 0
    holder: object = None


class Queue:
    """Holds messages until they are acknowledged, and redelivers each when its deadline passes without an ack."""

    def __init__(self, *, deadline_s: float = 30.0, redelivers: bool = True) -> None:
        self.deadline_s: float = deadline_s
        self.redelivers: bool = redelivers
        self.dead: list[tuple[Queued, DeadLetterInfo]] = []
        self.acked: list[str] = []
        self.away: bool = False
        """Set to `True` to make the queue unreachable."""
        self._waiting: list[Queued] = []
        self._numbers = count(1)

    def send(self, body: bytes, headers: dict[str, str] | None = None, lane: str = "") -> None:
        """Put a message at the end."""
        self._waiting.append(Queued(str(next(self._numbers)), dict(headers or {}), body, lane))

    def __len__(self) -> int:
        """Return how many messages are not acknowledged."""
        return len(self._waiting)

    def __contains__(self, message: Queued) -> bool:
        """Whether the message is not acknowledged."""
        return message in self._waiting

    def visible(self, limit: int) -> list[Queued]:
        """Return the first messages that may be delivered now."""
        return [each for each in self._waiting if each.visible_at <= monotonic()][:limit]

    def remove(self, message: Queued) -> None:
        """Remove an acknowledged message."""
        self._waiting.remove(message)
        self.acked.append(message.position)

    def source(self) -> "QueueSource":
        """Return a consumer of this queue."""
        return QueueSource(self)


class QueueSource:
    """One consumer of a `Queue`."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.name: str = "queue"
        self.deadline_s: float | None = queue.deadline_s
        self.redelivers: bool = queue.redelivers

    async def open(self) -> None:
        """Check that the queue can be reached."""
        self._reach()

    def _reach(self) -> None:
        if self._queue.away:
            raise SourceUnavailable("the queue is away")

    async def receive(self, limit: int, wait_s: float) -> Sequence[Arrival]:
        """Return the visible messages in order; wait up to `wait_s` for the first."""
        until = monotonic() + wait_s
        while True:
            self._reach()
            found = self._queue.visible(limit)
            if found or monotonic() >= until:
                return [self._deliver(each) for each in found]
            await asyncio.sleep(0.002)

    def _deliver(self, message: Queued) -> Arrival:
        message.visible_at = monotonic() + self._queue.deadline_s
        message.deliveries += 1
        message.holder = handle = _QueueReceipt(message)
        return Arrival(
            headers=message.headers,
            body=message.body,
            position=message.position,
            transport="queue",
            lane=message.lane,
            deliveries=message.deliveries,
            handle=handle,
        )

    async def ack(self, arrivals: Sequence[Arrival]) -> None:
        """Remove the messages, except those delivered to another consumer meanwhile."""
        self._reach()
        for arrival in arrivals:
            message = self._mine(arrival)
            if message is not None:
                self._queue.remove(message)

    async def nack(self, arrivals: Sequence[Arrival], delay_s: float) -> None:
        """Make the messages visible again after the delay."""
        self._reach()
        for arrival in arrivals:
            message = self._mine(arrival)
            if message is not None:
                message.visible_at = monotonic() + delay_s
                message.holder = None

    async def extend(self, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        """Extend the deadlines; return the messages that this consumer no longer holds."""
        self._reach()
        lost = []
        for arrival in arrivals:
            message = self._mine(arrival)
            if message is None:
                lost.append(arrival)
            else:
                message.visible_at = monotonic() + self._queue.deadline_s
        return lost

    async def dead_letter(self, arrival: Arrival, letter: DeadLetterInfo) -> None:
        """Append a copy to the dead letters."""
        self._reach()
        self._queue.dead.append((replace(arrival.handle.message, body=arrival.body), letter))

    async def close(self) -> None:
        """Do nothing: unacknowledged messages are redelivered after their deadline."""

    def _mine(self, arrival: Arrival) -> Queued | None:
        message: Queued = arrival.handle.message
        held: Any = message.holder
        return message if held is arrival.handle and message in self._queue else None


class _QueueReceipt(msgspec.Struct, eq=False):
    message: Queued
