"""Where the deliveries of a chaos run come from: the conductor's own queue, or a broker."""

from collections.abc import Sequence
from typing import Protocol

from semel.testing.chaos.brokers import BrokerTopic
from semel.testing.chaos.messages import DeliveryAnswer, HandedMessage
from semel.testing.redelivery import RedeliveryQueue

__all__ = ["BrokerFeed", "Feed", "QueueFeed"]

RETRY_MAX_S = 0.2
"""A returned delivery comes back after this long at most."""


class Feed(Protocol):
    """Sends messages, and knows which are not acknowledged."""

    loses_acks: bool
    """Whether it can lose an acknowledgement."""

    @property
    def left(self) -> int:
        """How many messages are not acknowledged."""
        ...

    def send(self, messages: Sequence[tuple[str, str]]) -> None:
        """Send messages: key and body of each."""
        ...

    def deliveries_for(self, worker: int, limit: int, now: float) -> list[HandedMessage]:
        """Return deliveries to hand to a worker; none if a broker delivers."""
        ...

    def answer(self, worker: int, answered: DeliveryAnswer, now: float) -> None:
        """Carry out a worker's answer."""
        ...

    def lose_ack(self, key: str) -> None:
        """Lose the next acknowledgement of this key."""
        ...

    def abandon(self, worker: int) -> None:
        """Deliver the messages of a dead worker again."""
        ...

    def tick(self, now: float) -> None:
        """Make messages ready whose time has come."""
        ...


class QueueFeed:
    """The conductor's own queue: it redelivers what is not acknowledged in time."""

    loses_acks: bool = True

    def __init__(self, visibility_s: float) -> None:
        self._queue = RedeliveryQueue(visibility_s=visibility_s)
        self._bodies: dict[str, str] = {}
        self._counts: dict[int, int] = {}
        self._lost: set[str] = set()

    @property
    def left(self) -> int:
        """How many messages are not acknowledged."""
        return self._queue.left

    def send(self, messages: Sequence[tuple[str, str]]) -> None:
        """Put messages at the end of the queue."""
        self._bodies.update(messages)
        self._queue.add(key for key, _ in messages)

    def deliveries_for(self, worker: int, limit: int, now: float) -> list[HandedMessage]:
        """Take messages for a worker."""
        taken: list[HandedMessage] = []
        while len(taken) < limit and (number := self._queue.take(worker, now)) is not None:
            key = self._queue.events[number]
            self._counts[number] = self._counts.get(number, 0) + 1
            taken.append(HandedMessage(str(number), key, self._bodies[key], self._counts[number]))
        return taken

    def answer(self, worker: int, answered: DeliveryAnswer, now: float) -> None:
        """Acknowledge, return or extend deliveries."""
        for position in answered.positions:
            number = int(position)
            key = self._queue.events[number]
            if answered.how == "ack" and key in self._lost:
                self._lost.discard(key)
                self._queue.nack(number, now)
            elif answered.how == "ack":
                self._queue.ack(number)
            elif answered.how == "nack":
                self._queue.nack(number, now + min(answered.delay_s, RETRY_MAX_S))
            elif answered.how == "extend":
                self._queue.extend(number, worker, now)

    def lose_ack(self, key: str) -> None:
        """Lose the next acknowledgement of this key: the message is delivered again."""
        self._lost.add(key)

    def abandon(self, worker: int) -> None:
        """Deliver the messages of a dead worker again, at once."""
        self._queue.abandon(worker)

    def tick(self, now: float) -> None:
        """Make messages ready whose time has come."""
        self._queue.tick(now)


class BrokerFeed:
    """A topic or stream of a broker, which delivers to the workers itself."""

    loses_acks: bool = False

    def __init__(self, topic: BrokerTopic) -> None:
        self._topic = topic
        self._sent = 0
        self._acked: set[str] = set()
        self._acking: dict[int, set[str]] = {}

    @property
    def left(self) -> int:
        """How many published messages are not acknowledged."""
        return self._sent - len(self._acked)

    def send(self, messages: Sequence[tuple[str, str]]) -> None:
        """Publish messages."""
        self._topic.publish(messages)
        self._sent += len(messages)

    def deliveries_for(self, worker: int, limit: int, now: float) -> list[HandedMessage]:
        """Return nothing: the broker delivers."""
        del worker, limit, now
        return []

    def answer(self, worker: int, answered: DeliveryAnswer, now: float) -> None:
        """Count what the broker has confirmed."""
        del now
        if answered.how == "acking":
            self._acking.setdefault(worker, set()).update(answered.positions)
        elif answered.how == "ack":
            self._acked.update(answered.positions)
            self._acking.get(worker, set()).difference_update(answered.positions)

    def lose_ack(self, key: str) -> None:
        """Do nothing."""

    def abandon(self, worker: int) -> None:
        """Count what a dead worker was about to acknowledge: it is recorded, and may never be delivered again."""
        self._acked |= self._acking.pop(worker, set())

    def tick(self, now: float) -> None:
        """Do nothing: the broker has its own clock."""
