"""Kafka: consumer groups, and offsets that never pass a record that is not done.

A log does not take single messages back: a message to retry stays in memory, and the committed offset stays
before it. The client's calls block, so they have a thread of their own; rebalance callbacks run in that thread.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, TypeVar
from urllib.parse import quote_from_bytes, unquote_to_bytes

import msgspec
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from semel.brokers.dead_letters import DeadLetter, headers_of
from semel.brokers.kafka.client import CLIENT_LOG, ClientErrors, Offsets, error_of
from semel.brokers.kafka.options import KafkaOptions, place_of
from semel.brokers.kafka.sending import CONFIRM_S, PATTERN, DeadTopics, Sender
from semel.brokers.source import Arrival, DeadLetterInfo
from semel.errors import MessageTooLarge, SourceRefused, SourceUnavailable, UsageError
from semel.runtime.process import asyncio
from semel.runtime.tasks import DaemonThread

__all__ = ["CALL_S", "KafkaSource", "RecordPosition", "from_url", "topics_of"]

_log = logging.getLogger("semel.kafka")

T = TypeVar("T")

CHECK_IN_S = 9.0
"""A third of this is the longest time between polls while nothing is received."""
CALL_S = 10.0
"""How long one call may block before it is repeated."""
REACH_S = 1.0
"""How long unreachable brokers have to answer before that is reported. Connecting continues meanwhile."""
NEW_TOPIC_S = 3.0
"""How long a topic may take from its creation until every broker knows it."""
LOOK_AGAIN_S = 0.2
REMOVED = "semel-dead-removed"
"""The header of a record that marks a dead letter as removed: a log cannot delete."""
RECORD_KEY = "semel-kafka-key"
"""The header under which `look` returns the key of a record, percent-encoded."""


def from_url(url: str) -> "KafkaSource":
    """Return the source of a URL such as `kafka://host:9092/orders?group=billing`; several hosts with commas."""
    return KafkaSource(*place_of(url, KafkaOptions))


def topics_of(client: Any, needed: Collection[str]) -> dict[str, Any]:
    """Return the brokers' metadata of topics; waits a little for one that was just created. Blocks.

    Raises `SourceRefused` for a missing topic.
    """
    give_up_at = monotonic() + NEW_TOPIC_S
    while True:
        known: dict[str, Any] = client.list_topics(timeout=CALL_S).topics
        missing = set(needed) - known.keys()
        if not missing:
            return known
        if monotonic() >= give_up_at:
            raise SourceRefused(f"there is no topic {min(missing)}; create it first")
        sleep(LOOK_AGAIN_S)


class KafkaSource:
    """One member of a consumer group."""

    keeps_acked: bool = True
    redelivers: bool = False

    def __init__(self, servers: str, options: KafkaOptions) -> None:
        self._servers = servers
        self._options = options
        self._topics = options.topic.split(",")
        self._dead_topics = DeadTopics(options.client(servers), self._topics, options.dead)
        self._consumer: Any = None
        self._sender: Sender | None = None
        self._thread: DaemonThread | None = None
        self._errors = ClientErrors()
        self._subscribed = False
        self._polled_at = 0.0
        self.deadline_s: float = min(CHECK_IN_S, options.poll_s / 2)
        self._offsets: dict[tuple[str, int], Offsets] = {}
        """Offsets of assigned partitions; a reassigned partition gets new ones."""
        self._ready: dict[tuple[str, int], int] = {}
        """Positions to commit: a running rebalance refuses commits for a while."""
        self._joined = False
        self._read_up: set[tuple[str, int]] = set()
        """Partitions that were received to their end, as far as we know."""

    @property
    def name(self) -> str:
        """Topic and group, without credentials."""
        return f"kafka://{self._servers}/{self._options.topic}?group={self._options.group}"

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        if self._thread is None:
            raise SourceUnavailable("not open")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)
        except KafkaException as error:
            raise error_of(self.name, error.args[0]) from error

    async def open(self) -> None:
        """Join the group. The client reconnects by itself and stays the same member."""
        await self.visit()
        await self._in_thread(self._join)

    async def visit(self) -> None:
        """Prepare for dead letters only: joining the group would take partitions from workers."""
        if self._thread is None:
            self._thread = DaemonThread("semel-kafka")

    def _join(self) -> None:
        """Subscribe as soon as a broker answers: the client itself would wait silently."""
        if self._consumer is None:
            self._errors = ClientErrors()
            self._consumer = Consumer(self._member(), logger=CLIENT_LOG)
        self._check_reachable(poll=not self._subscribed)
        if not self._subscribed:
            self._dead_topics.make_at_start()
            self._consumer.subscribe(
                self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )
            self._subscribed = True

    def _check_reachable(self, *, poll: bool = False) -> None:
        """Raise if no broker answers. `poll`: first poll for the client's errors, if no message can come."""
        try:
            self._consumer.list_topics(self._topics[0].lstrip(PATTERN), timeout=REACH_S)
        except KafkaException as error:
            if poll:
                self._consumer.poll(0)
            self._errors.check(self.name)
            raise self._errors.unavailable(error) from error
        self._errors.brokers_down = False

    def _member(self) -> dict[str, Any]:
        """Return the configuration of this member of the group."""
        options = self._options
        config = options.member(self._servers, self._errors)
        if any(name.startswith(PATTERN) for name in self._topics):
            config["topic.blacklist"] = self._dead_topics.names
            config["topic.metadata.refresh.interval.ms"] = round(options.refresh_s * 1000)
        return config

    # --- in the thread: rebalances ---

    def _on_assign(self, consumer: Any, partitions: Sequence[TopicPartition]) -> None:
        self._joined = True
        for each in partitions:
            self._offsets[each.topic, each.partition] = Offsets()
            self._read_up.discard((each.topic, each.partition))
        self._dead_topics.expect(each.topic for each in partitions)
        consumer.incremental_assign(partitions)
        consumer.resume(partitions)  # a partition that is lost while paused would come back paused

    def _on_revoke(self, consumer: Any, partitions: Sequence[TopicPartition]) -> None:
        """Release partitions. Running handlers finish under their claims; others find the keys done or busy."""
        self._commit(consumer)
        self._let_go(partitions)
        consumer.incremental_unassign(partitions)

    def _on_lost(self, _consumer: Any, partitions: Sequence[TopicPartition]) -> None:
        self._let_go(partitions)

    def _let_go(self, partitions: Sequence[TopicPartition]) -> None:
        for each in partitions:
            self._offsets.pop((each.topic, each.partition), None)
            self._ready.pop((each.topic, each.partition), None)
            self._read_up.discard((each.topic, each.partition))

    # --- deliveries ---

    @property
    def caught_up(self) -> bool:
        """Whether nothing is left to receive: joining the group and the first fetch take a while."""
        return self._joined and self._offsets.keys() <= self._read_up

    async def receive(self, limit: int, wait_s: float) -> Sequence[Arrival]:
        """Return messages: waits for the first, and takes those that are ready."""
        messages = await self._in_thread(self._consume, limit, wait_s)
        return [arrival for message in messages if (arrival := self._arrival(message)) is not None]

    def _consume(self, limit: int, wait_s: float) -> list[Message]:
        self._polled_at = monotonic()
        self._commit(self._consumer)
        self._dead_topics.make_missing()
        found: list[Message] = self._consumer.consume(1, wait_s)
        self._errors.check(self.name)
        if found and limit > 1:
            found += self._consumer.consume(limit - 1, 0.0)
        if not found and self._errors.brokers_down:
            self._check_reachable()
        known = [message for message in found if not _says(message, KafkaError.UNKNOWN_TOPIC_OR_PART)]
        if len(known) < len(found):  # one broker does not know it; it may be new
            topics_of(self._consumer, [name for name in self._topics if not name.startswith(PATTERN)])
        return known

    async def ping(self) -> None:
        """Return when a broker has answered. Raises `SourceUnavailable`."""
        await self._in_thread(self._check_reachable)

    def _arrival(self, message: Message) -> Arrival | None:
        error = message.error()
        if error is not None:
            if _says(message, KafkaError._PARTITION_EOF):
                self._read_up.add((_not_none(message.topic()), _not_none(message.partition())))
                return None
            problem = error_of(self.name, error)
            if isinstance(problem, SourceRefused):
                raise problem
            _log.info("%s", error)
            return None
        where = (_not_none(message.topic()), _not_none(message.partition()))
        offset = _not_none(message.offset())
        offsets = self._offsets.get(where)
        if offsets is None:  # revoked between the poll and here
            return None
        self._read_up.discard(where)
        offsets.add(offset)
        if message.value() is None and self._options.tombstones == "skip":
            self._complete(where, offset)
            return None
        key = message.key()
        lane = f"{where[0]}/{where[1]}"
        if self._options.lane == "key" and key is not None:
            lane += f"/{key!r}"
        return Arrival(
            headers=_pairs(message),
            body=message.value(),
            position=f"{where[0]}/{where[1]}/{offset}",
            transport="kafka",
            lane=lane,
            handle=RecordPosition(where, offset, offsets, message.key()),
        )

    async def ack(self, arrivals: Sequence[Arrival]) -> None:
        """Commit up to the first unfinished record."""
        for arrival in arrivals:
            place: RecordPosition = arrival.handle
            if self._offsets.get(place.where) is place.offsets:
                self._complete(place.where, place.offset)
        if self._ready:
            await self._in_thread(self._commit, self._consumer)

    def _complete(self, where: tuple[str, int], offset: int) -> None:
        position = self._offsets[where].complete(offset)
        if position is not None:
            self._ready[where] = position

    def _commit(self, consumer: Any) -> None:
        """Commit ready positions; refused ones stay for the next turn."""
        ready = dict(self._ready)
        if not ready or self._errors.brokers_down or consumer is None:
            return
        try:
            consumer.commit(
                offsets=[TopicPartition(*where, position) for where, position in ready.items()],
                asynchronous=False,
            )
        except KafkaException as refused:
            problem = error_of(self.name, refused.args[0])
            if isinstance(problem, SourceRefused):
                raise problem from refused
            _log.info("%s: to be committed again: %s", self.name, refused)
            return
        for where, position in ready.items():
            if self._ready.get(where) == position:
                del self._ready[where]

    async def nack(self, arrivals: Sequence[Arrival], delay_s: float) -> None:
        """Do nothing: uncommitted records go to the next owner of the partition."""

    async def extend(self, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        """Return deliveries of revoked partitions, and poll while nothing is received."""
        if monotonic() - self._polled_at > self.deadline_s / 3:
            await self._in_thread(self._look_in)
        return [each for each in arrivals if self._offsets.get(each.handle.where) is not each.handle.offsets]

    def _look_in(self) -> None:
        """Poll without taking messages, to stay in the group and to run rebalance callbacks."""
        assigned = self._consumer.assignment()
        self._consumer.pause(assigned)
        self._polled_at = monotonic()
        found = self._consumer.consume(1, 0.0)
        for message in found:  # a new partition delivers before it could be paused
            if _says(message, KafkaError._PARTITION_EOF):
                self._read_up.add((_not_none(message.topic()), _not_none(message.partition())))
            if message.error() is None:
                where = TopicPartition(
                    _not_none(message.topic()), _not_none(message.partition()), _not_none(message.offset())
                )
                self._consumer.seek(where)
        self._consumer.resume(self._consumer.assignment())

    # --- dead letters ---

    async def dead_letter(self, arrival: Arrival, letter: DeadLetterInfo) -> None:
        """Produce a copy with its information to the dead-letter topic."""
        topic = arrival.handle.where[0]
        headers = [*arrival.headers, *((name, value.encode()) for name, value in headers_of(letter).items())]
        await self._in_thread(self._write_letter, topic, arrival.handle.key, arrival.body, headers)

    def _write_letter(
        self, topic: str, key: bytes | None, body: bytes | None, headers: list[tuple[str, bytes]]
    ) -> None:
        self._dead_topics.make_missing()
        try:
            self._produce(self.dead_letter_name(topic), key, body, headers)
        except MessageTooLarge:
            raise
        except SourceUnavailable:
            self._dead_topics.suspect(topic)
            raise

    def dead_letter_name(self, topic: str) -> str:
        """Where the dead letters of a topic go."""
        return self._dead_topics.name_for(topic)

    @property
    def _topic(self) -> str:
        """Return the topic whose dead letters are read. Raises `UsageError` for a pattern."""
        topic = self._topics[0]
        if topic.startswith(PATTERN):
            raise UsageError(f"{topic} is a pattern; name one topic")
        return topic

    def _produce(
        self, topic: str, key: bytes | None, body: bytes | None, headers: list[tuple[str, bytes]]
    ) -> None:
        if self._sender is None:
            self._sender = Sender(self._options.client(self._servers))
        self._sender.send(topic, key, body, headers)

    async def look(self, limit: int) -> Sequence[DeadLetter]:
        """Return the oldest dead letters that were not removed."""
        return await self._in_thread(self._read_letters, limit)

    def _read_letters(self, limit: int) -> list[DeadLetter]:
        config = self._options.client(self._servers) | {"group.id": f"{self._options.group}.dlq"}
        config |= {"enable.auto.commit": False, "enable.partition.eof": True}
        reader = Consumer(config, logger=CLIENT_LOG)
        try:
            left = self._assign_all(reader, self.dead_letter_name(self._topic))
            found: dict[str, DeadLetter] = {}
            while left:
                for message in reader.consume(500, 1.0):
                    if message.error() is not None:
                        if _says(message, KafkaError._PARTITION_EOF):
                            left.discard(_not_none(message.partition()))
                        continue
                    where, offset = _not_none(message.partition()), _not_none(message.offset())
                    headers = {name: _text(value) for name, value in _pairs(message)}
                    if REMOVED in headers:
                        found.pop(headers[REMOVED], None)
                    else:
                        id_ = f"{where}/{offset}"
                        if (key := message.key()) is not None:
                            headers[RECORD_KEY] = quote_from_bytes(key)
                        found[id_] = DeadLetter.from_message(id_, headers, message.value())
            return list(found.values())[:limit]
        finally:
            reader.close()

    def _assign_all(self, reader: Any, topic: str) -> set[int]:
        """Assign all partitions of a topic from the beginning, and return them."""
        known = reader.list_topics(topic, timeout=CONFIRM_S).topics[topic]
        reader.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in known.partitions])
        return set(known.partitions)

    async def republish(self, headers: Mapping[str, str], body: bytes | None) -> None:
        """Produce a message to the topic itself, with the key of its record. Without a body it is a tombstone."""
        own = dict(headers)
        key = own.pop(RECORD_KEY, None)
        encoded = [(name, value.encode()) for name, value in own.items()]
        await self._in_thread(
            self._produce, self._topic, None if key is None else unquote_to_bytes(key), body, encoded
        )

    async def remove(self, dead: DeadLetter) -> None:
        """Mark a dead letter as removed."""
        await self._in_thread(
            self._produce, self.dead_letter_name(self._topic), None, b"", [(REMOVED, dead.id.encode())]
        )

    async def close(self) -> None:
        """Leave the group, so that others have the partitions at once.

        The thread leaves also if this is cancelled, and however long its present call takes.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            await thread.finish(self._leave)

    def _leave(self) -> None:
        """Leave the group and end the clients, in their own thread.

        The garbage collector must not end a client: where it does, in the event loop or in a callback of that client,
        it may wait for itself for ever.
        """
        consumer, self._consumer = self._consumer, None
        try:
            self._commit(consumer)
        finally:
            if consumer is not None:
                # It may raise SystemError after a callback of a failed transaction; it has left the group by then.
                with suppress(SystemError):
                    consumer.close()
            self._sender = None
            self._offsets.clear()
            self._read_up.clear()
            self._joined = self._subscribed = False


class RecordPosition(msgspec.Struct, frozen=True, eq=False):
    """The position of a delivery, and the assignment of its partition."""

    where: tuple[str, int]
    offset: int
    offsets: Offsets
    key: bytes | None


def _pairs(message: Message) -> Sequence[tuple[str, Any]]:
    headers: Any = message.headers()  # typed as a mapping too, which only producers give
    return headers or ()


def _says(message: Message, code: int) -> bool:
    error = message.error()
    return error is not None and error.code() == code


def _not_none(value: T | None) -> T:
    assert value is not None  # of a message without an error
    return value


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")
