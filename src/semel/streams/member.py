"""One member of a consumer group: partitions that come and go, records, positions. All calls block, in one thread."""

import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from time import monotonic
from typing import Any, Literal

import msgspec
from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from semel.brokers.kafka.client import CLIENT_LOG, ClientErrors, error_of
from semel.brokers.kafka.options import KafkaOptions
from semel.errors import SourceRefused

__all__ = ["GroupMember", "StreamOptions", "StreamPartition"]

_log = logging.getLogger("semel.streams")

COMMITTED_S = 2.0
COMMITTED_BUSY_S = 0.2
"""How long to wait for a committed offset that is not final yet, while other partitions have records."""
AGAIN_S = 0.5
"""How soon to ask for it again."""
FILL_S = 0.005
"""How long a batch may wait for more records than the first."""
_PARTITION_OF: Callable[[Any], int] = Message.partition  # type: ignore[assignment] # a record has one


class StreamOptions(KafkaOptions, frozen=True, kw_only=True):
    """Options in the URL of a source."""

    transaction_s: float = 10.0
    """The timeout after which the brokers abort a dead instance's transaction, which holds readers back until then."""


class StreamPartition(msgspec.Struct, eq=False):
    """An assigned partition. A reassigned one is a new object."""

    number: int
    state: Literal["arrived", "restoring", "active"] = "arrived"
    """`arrived`: its committed offset is not known; `restoring`: its index lacks marks; `active`: it is read."""
    committed: int = -1
    """The committed offset; -1: there is none."""
    first: int = -1
    """The first offset that was received."""
    position: int = -1
    """The next offset to be read."""
    resumed: bool = False
    """Whether it was active before, in this assignment."""
    ended: bool = False
    """Whether it was read to its end."""
    asked_at: float = 0.0
    index: Any = None
    restored_from: int = 0
    restored_to: int = 0


class GroupMember:
    """A consumer of one topic that hands out records of active partitions only."""

    def __init__(
        self,
        servers: str,
        options: StreamOptions,
        *,
        on_gone: Callable[[StreamPartition], None] = lambda _partition: None,
    ) -> None:
        self.topic: str = options.topic
        self.name: str = f"kafka://{servers}/{options.topic}?group={options.group}"
        self.partitions: dict[int, StreamPartition] = {}
        self.group: Any = None
        """The group as of the latest assignment: member and generation."""
        self.joined: bool = False
        self._options = options
        self._on_gone = on_gone
        self._errors = ClientErrors()
        self._is_leaving = False
        self._consumer: Any = Consumer(options.member(servers, self._errors), logger=CLIENT_LOG)
        self._consumer.subscribe(
            [options.topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    # --- rebalances, within `receive` and `close` ---

    def _on_assign(self, consumer: Any, assigned: Sequence[TopicPartition]) -> None:
        self._note_group(consumer)
        self.joined = True
        consumer.incremental_assign(assigned)
        if assigned:
            consumer.pause(assigned)
        for each in assigned:
            self.partitions[each.partition] = StreamPartition(each.partition)

    def _on_revoke(self, consumer: Any, revoked: Sequence[TopicPartition]) -> None:
        if not self._is_leaving:  # a call to the client while it closes would block for ever
            self._note_group(consumer)
        self._let_go(revoked)
        consumer.incremental_unassign(revoked)

    def _on_lost(self, _consumer: Any, lost: Sequence[TopicPartition]) -> None:
        _log.warning(
            "%s: the group gave %d partitions to others; nothing of them is written", self.name, len(lost)
        )
        self._let_go(lost)

    def _let_go(self, gone: Sequence[TopicPartition]) -> None:
        for each in gone:
            partition = self.partitions.pop(each.partition, None)
            if partition is not None:
                self._on_gone(partition)

    def _note_group(self, consumer: Any) -> None:
        """Store our identity in the group. Not later: an expelled member has no name, and is not checked."""
        group = consumer.consumer_group_metadata()
        if consumer.memberid():
            self.group = group

    # --- the way of a partition: arrived, restoring, active ---

    def find_committed(self) -> list[StreamPartition]:
        """Ask for the committed offsets of arrived partitions; returns those whose offset is final.

        A former owner's transaction that is not ended yet makes the client wait: such a partition is asked for again.
        """
        now = monotonic()
        busy = any(each.state != "arrived" for each in self.partitions.values())
        found = []
        for partition in sorted(self.partitions.values(), key=lambda each: each.asked_at):
            if partition.state != "arrived" or now - partition.asked_at < AGAIN_S:
                continue
            try:
                [answer] = self._consumer.committed(
                    [TopicPartition(self.topic, partition.number)], COMMITTED_BUSY_S if busy else COMMITTED_S
                )
            except KafkaException as error:
                problem = error_of(self.name, error.args[0])
                if isinstance(problem, SourceRefused):
                    raise problem from error
                partition.asked_at = monotonic()
                break
            if answer.error is not None:
                partition.asked_at = monotonic()
                continue
            partition.committed = answer.offset if answer.offset is not None and answer.offset >= 0 else -1
            found.append(partition)
        return found

    def activate(self, partition: StreamPartition) -> None:
        """Read a partition from its committed offset on."""
        place = TopicPartition(self.topic, partition.number)
        try:
            if partition.resumed:  # it may have been read before: go back, whatever the client holds already
                place.offset = self._start_of(partition)
                self._consumer.seek(place)
            self._consumer.resume([place])
        except KafkaException as error:  # it is being taken away
            _log.info("%s: partition %d: %s", self.name, partition.number, error)
            self.rewind([partition])
            partition.asked_at = monotonic()
            return
        partition.position = partition.committed
        partition.state, partition.ended, partition.resumed = "active", False, True

    def _start_of(self, partition: StreamPartition) -> int:
        """Return where to go on: at the committed offset, else where the reading began."""
        if partition.committed >= 0:
            return partition.committed
        if partition.first >= 0:
            return partition.first
        return OFFSET_BEGINNING if self._options.start == "earliest" else OFFSET_END

    def rewind(self, partitions: Sequence[StreamPartition]) -> None:
        """Let partitions arrive once more: records that were received and not committed are received again."""
        ours = [each for each in partitions if self.partitions.get(each.number) is each]
        if ours:
            self._consumer.pause([TopicPartition(self.topic, each.number) for each in ours])
        for each in ours:
            each.state, each.asked_at, each.ended = "arrived", 0.0, False

    def wait(self, wait_s: float) -> None:
        """Stay in the group while nothing can be committed. Every partition arrives once more afterwards."""
        self.rewind([each for each in self.partitions.values() if each.state == "active"])
        self.receive(1, wait_s)  # hands out nothing: no partition is active

    # --- records ---

    def receive(self, most: int, wait_s: float) -> dict[StreamPartition, list[Any]]:
        """Return the records that came, by partition and in order. Waits for the first at most `wait_s`."""
        found = self._consumer.consume(1, wait_s)
        if found and most > 1:
            found += self._consumer.consume(most - 1, FILL_S)
        self._errors.check(self.name)
        batch: dict[StreamPartition, list[Any]] = {}
        problems = [record for record in found if record.error() is not None]
        if problems:
            found = [record for record in found if record.error() is None]
        for number, group in groupby(found, _PARTITION_OF):
            partition = self.partitions.get(number)
            if partition is None or partition.state != "active":
                continue
            records = list(group)
            if records[0].offset() < partition.position:
                records = [record for record in records if record.offset() >= partition.position]
                if not records:
                    continue
            if partition.first < 0:
                partition.first = records[0].offset()
            partition.position, partition.ended = records[-1].offset() + 1, False
            batch.setdefault(partition, []).extend(records)
        for each in problems:
            self._note_error(each)
        return batch

    def _note_error(self, event: Any) -> None:
        error: KafkaError = event.error()
        if error.code() == KafkaError._PARTITION_EOF:
            partition = self.partitions.get(event.partition())
            if partition is not None and partition.state == "active":
                partition.ended = event.offset() >= partition.position  # else records came behind it
            return
        problem = error_of(self.name, error)
        if isinstance(problem, SourceRefused):
            raise problem
        _log.info("%s: %s", self.name, error)

    @property
    def unreachable(self) -> bool:
        """Whether the client found no broker at its last try."""
        return self._errors.brokers_down

    def check_reachable(self) -> None:
        """Ask a broker; raises `SourceUnavailable` without an answer."""
        try:
            self._consumer.list_topics(self.topic, timeout=1.0)
        except KafkaException as error:
            raise self._errors.unavailable(error) from error
        self._errors.brokers_down = False

    @property
    def caught_up(self) -> bool:
        """Whether every assigned partition was read to its end."""
        return self.joined and all(each.state == "active" and each.ended for each in self.partitions.values())

    def lag(self) -> int:
        """Return how many records are not read yet, as far as the client knows."""
        total = 0
        for partition in self.partitions.values():
            try:
                place = TopicPartition(self.topic, partition.number)
                bounds = self._consumer.get_watermark_offsets(place, cached=True)
            except KafkaException:
                continue
            if bounds is not None and bounds[1] >= 0:
                read = (
                    partition.position if partition.position >= 0 else max(0, partition.committed, bounds[0])
                )
                total += max(0, bounds[1] - read)
        return total

    def close(self) -> None:
        """Leave the group."""
        self._is_leaving = True
        self._consumer.close()
