"""A member of a consumer group that writes outputs and offsets in one transaction.

All calls of one member are in one thread, and a transaction begins and ends within one call: no rebalance callback
runs while one is open. Offsets carry the generation of the group in which the records were received, so the
broker refuses offsets and outputs of a member that has lost its partitions and does not know it yet.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from time import monotonic, time
from typing import Any, TypeAlias

import msgspec
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from semel.brokers.kafka.client import CLIENT_LOG, Offsets
from semel.brokers.kafka.options import KafkaOptions
from semel.brokers.kafka.source import CALL_S, KafkaSource, RecordPosition, topics_of
from semel.errors import Fenced, SourceRefused, SourceUnavailable, UsageError

__all__ = [
    "CommittedKeys",
    "PartitionBatch",
    "ProducedMessage",
    "TransactionOptions",
    "TransactionResult",
    "Transactor",
    "Where",
]

Where: TypeAlias = tuple[str, int]
"""A partition of the consumed topic."""

ASK_S = 30.0
READ_MAX_S = 120.0
"""How long to wait for open transactions of dead workers, which hide later records until the broker ends them."""
PRUNE_FROM = 10_000
"""Old marks are dropped only above this number per partition."""


class CommittedKeys:
    """The marks of the assigned partitions: read when one is assigned, then kept up to date."""

    def __init__(self, client: Mapping[str, Any], topic: str) -> None:
        self._client = client
        self.topic = topic
        self._at_ms: dict[Where, dict[str, int]] = {}
        """When each key was committed, for each partition."""
        self._prune_at: dict[Where, int] = {}

    def __contains__(self, where: Where) -> bool:
        return where in self._at_ms

    def has(self, where: Where, key: str, window_us: int) -> bool:
        """Whether the key is committed; a mark counts for as long as a record would."""
        at_ms = self._at_ms.get(where, {}).get(key)
        return at_ms is not None and _now_ms() - at_ms < window_us // 1000

    def add(self, where: Where, key: str, window_us: int) -> None:
        """Add a committed mark."""
        marks = self._at_ms.get(where)
        if marks is None:  # revoked meanwhile; its next owner reads it
            return
        marks[key] = now_ms = _now_ms()
        if len(marks) >= self._prune_at.get(where, PRUNE_FROM):
            kept = {each: at for each, at in marks.items() if now_ms - at < window_us // 1000}
            self._at_ms[where] = kept
            self._prune_at[where] = max(PRUNE_FROM, 2 * len(kept))

    def drop(self, where: Where) -> None:
        """Drop the marks of a revoked partition."""
        self._at_ms.pop(where, None)
        self._prune_at.pop(where, None)

    def read(self, partitions: Collection[Where]) -> None:
        """Read the marks of partitions that delivered their first record. Blocks. Raises `SourceUnavailable`.

        Not before that record: only then the previous owner's offsets and marks are final.
        """
        ends = self._ends({number for _, number in partitions})
        found: dict[int, dict[str, int]] = {number: {} for number in ends}
        left = {number for number, end in ends.items() if end}
        reader = self._consumer("read_committed")
        try:
            reader.assign([TopicPartition(self.topic, number, OFFSET_BEGINNING) for number in left])
            give_up_at = monotonic() + READ_MAX_S
            while left:
                if monotonic() > give_up_at:
                    raise SourceUnavailable(f"{self.topic} could not be read to its end in {READ_MAX_S:g} s")
                for message in reader.consume(1000, 1.0):
                    number, error = message.partition(), message.error()
                    if error is None:
                        _take(found[number], message)
                    elif error.code() != KafkaError._PARTITION_EOF:
                        raise SourceUnavailable(str(error))
                    elif message.offset() >= ends[number]:  # stops earlier: an open transaction is in the way
                        left.discard(number)
        finally:
            reader.close()
        for where in partitions:
            self._at_ms[where] = dict(found[where[1]])

    def _ends(self, numbers: Collection[int]) -> dict[int, int]:
        """Return the end of each partition, including open transactions; 0: it is empty."""
        looker = self._consumer("read_uncommitted")
        try:
            ends = {}
            for number in numbers:
                low, high = looker.get_watermark_offsets(TopicPartition(self.topic, number), timeout=ASK_S)
                ends[number] = high if high > low else 0
            return ends
        finally:
            looker.close()

    def _consumer(self, isolation: str) -> Any:
        return Consumer(
            {
                **self._client,
                "group.id": f"{self.topic}.marks",  # required by the client; no group is joined
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": isolation,
            },
            logger=CLIENT_LOG,
        )


def _take(marks: dict[str, int], message: Any) -> None:
    key = (message.key() or b"").decode("utf-8", "replace")
    if message.value() is None:  # a tombstone: an operator wants it to run again
        marks.pop(key, None)
    else:
        marks[key] = message.timestamp()[1]


def _now_ms() -> int:
    return round(time() * 1000)


REPEAT_S = 30.0
"""How long a call is retried before the broker counts as unavailable."""
_FENCED = {
    KafkaError._FENCED,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
}


_OWN_FAULT = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.INVALID_RECORD,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
}
"""Errors of a single message; other errors concern the transaction."""


class TransactionOptions(KafkaOptions, frozen=True, kw_only=True):
    """Options in the URL."""

    transactional_id: str = ""
    """The id of this one instance, never shared: of two with the same id the older is fenced. By default a new one for
    each process; an instance with a stable id (a pod's ordinal) at its start ends an earlier open transaction."""
    transaction_s: float = 10.0
    """The timeout after which the broker aborts a dead instance's transaction, which blocks readers until then."""


class ProducedMessage(msgspec.Struct, frozen=True):
    """A message to be produced in a transaction."""

    number: int
    """The number of its record within the batch."""
    topic: str
    key: bytes | None
    body: bytes | None
    headers: Sequence[tuple[str, bytes]] = ()
    partition: int = -1


class PartitionBatch(msgspec.Struct, frozen=True):
    """The part of one partition in a transaction: the position after its records, and their outputs."""

    where: Where
    offsets: Offsets
    position: int
    sends: Sequence[ProducedMessage]


class TransactionResult(msgspec.Struct, frozen=True):
    """The result of a transaction. `aborted`: the reason; empty if it is committed."""

    committed: Collection[Where] = ()
    aborted: str = ""
    refused: dict[int, BaseException] = msgspec.field(default_factory=dict[int, BaseException])
    """Refused messages, by the number of their record."""


class Transactor(KafkaSource):
    """One member of a consumer group, with a transactional producer of its own."""

    def __init__(self, servers: str, options: TransactionOptions, output: str, marks: str = "") -> None:
        super().__init__(servers, options)
        self._output = output
        self.marks: CommittedKeys | None = CommittedKeys(options.client(servers), marks) if marks else None
        self.transactional_id: str = (
            options.transactional_id or f"semel-{options.group}-{os.urandom(16).hex()}"
        )
        self._transaction_s = options.transaction_s
        self._writer: Any = None
        self._group: Any = None
        """The group as of our latest assignment: member and generation."""
        self._is_leaving = False
        self._early: list[Message] = []
        """Received records that wait until their partition's marks are read."""
        self._held: frozenset[Where] = frozenset()
        self._committing: Collection[Where] = ()
        """The parts of a commit without an answer; the call is retried until there is one."""
        self._aborting = False

    def _join(self) -> None:
        """End an open transaction of an earlier instance with our id, then join the group."""
        if self._writer is None:
            self._prepare()
        super()._join()

    def _prepare(self) -> None:
        writer = Producer(
            {
                **self._options.client(self._servers),
                "transactional.id": self.transactional_id,
                "transaction.timeout.ms": round(self._transaction_s * 1000),
                "enable.idempotence": True,
                "linger.ms": 5,
            },
            logger=CLIENT_LOG,
        )
        self._check_topics(writer)
        self._steadily(writer.init_transactions)
        self._writer = writer

    def _check_topics(self, writer: Any) -> None:
        """Check that all topics exist, before the first transaction. Raises `UsageError`."""
        marks = self.marks.topic if self.marks is not None else ""
        needed = {name for name in (*self._topics, self._output, marks) if name}
        known = topics_of(writer, needed)
        if marks:
            most = max(len(known[name].partitions) for name in self._topics)
            have = len(known[marks].partitions)
            if have < most:
                raise UsageError(
                    f"{marks} has {have} partitions and needs {most}: a mark lies beside its event"
                )

    # --- in the thread: rebalances ---

    def _on_assign(self, consumer: Any, partitions: Sequence[TopicPartition]) -> None:
        self._note_group(consumer)
        super()._on_assign(consumer, partitions)

    def _on_revoke(self, consumer: Any, partitions: Sequence[TopicPartition]) -> None:
        if not self._is_leaving:
            self._note_group(consumer)
        super()._on_revoke(consumer, partitions)

    def _leave(self) -> None:
        """Leave the group, and end the producer. The broker ends a transaction whose end is not known."""
        self._is_leaving = True  # a call to the client while it closes would block for ever
        try:
            super()._leave()
        finally:
            self._is_leaving = False
            self._writer = None

    def _note_group(self, consumer: Any) -> None:
        """Store our identity in the group. Not later: an expelled member has no name, and is not checked."""
        group = consumer.consumer_group_metadata()
        if consumer.memberid():
            self._group = group

    def _let_go(self, partitions: Sequence[TopicPartition]) -> None:
        super()._let_go(partitions)
        gone = {(each.topic, each.partition) for each in partitions}
        self._early = [each for each in self._early if (each.topic(), each.partition()) not in gone]
        if self.marks is not None:
            for where in gone:
                self.marks.drop(where)

    # --- deliveries ---

    def ours(self, place: RecordPosition) -> bool:
        """Whether the partition's assignment is still that of the record."""
        return self._offsets.get(place.where) is place.offsets

    def _consume(self, limit: int, wait_s: float) -> list[Message]:
        found = self._early or super()._consume(limit, wait_s)
        if self.marks is not None:
            self._early = found
            places = {(each.topic() or "", each.partition() or 0) for each in found if each.error() is None}
            unread = [where for where in places if where in self._offsets and where not in self.marks]
            if unread:
                self.marks.read(unread)
            self._early = []
        return found

    async def hold(self, partitions: frozenset[Where]) -> None:
        """Pause these partitions and resume the others."""
        if partitions != self._held:
            await self._in_thread(self._hold, partitions)

    def _hold(self, partitions: frozenset[Where]) -> None:
        ours = {(each.topic, each.partition) for each in self._consumer.assignment()}
        self._consumer.resume([TopicPartition(*where) for where in (self._held - partitions) & ours])
        self._consumer.pause([TopicPartition(*where) for where in partitions & ours])
        self._held = partitions

    def _look_in(self) -> None:
        super()._look_in()
        held, self._held = self._held, frozenset()
        self._hold(held)

    async def look_in(self) -> None:
        """Poll the group."""
        await self._in_thread(self._look_in)

    # --- transactions ---

    async def transact(self, parts: Sequence[PartitionBatch]) -> TransactionResult:
        """Produce, move the offsets and commit, without the parts of revoked partitions.

        Raises `SourceUnavailable` if its end is not known: call it again with the same parts.
        Raises `Fenced` if another instance has our id, `SourceRefused` for permanent errors.
        """
        return await self._in_thread(self._transact, parts)

    def _transact(self, parts: Sequence[PartitionBatch]) -> TransactionResult:
        refused: dict[int, BaseException] = {}
        try:
            if self._aborting:
                return self._abort("its end is not known", refused)
            if not self._committing:
                ours = [part for part in parts if self._offsets.get(part.where) is part.offsets]
                if not ours or self._group is None:
                    return TransactionResult()
                self._fill(ours, refused)
                self._committing = [part.where for part in ours]
            self._steadily(self._writer.commit_transaction)
        except _Abort as reason:
            self._committing = ()
            return self._abort(str(reason), refused)
        committed, self._committing = self._committing, ()
        return TransactionResult(committed)

    def _fill(self, parts: Sequence[PartitionBatch], refused: dict[int, BaseException]) -> None:
        """Begin, and add all outputs and offsets."""
        self._steadily(self._writer.begin_transaction, None)
        for part in parts:
            for send in part.sends:
                self._send(send, refused)
        try:
            left = self._writer.flush(self._transaction_s)
        except (KafkaException, SystemError) as error:  # a fatal error, raised during a delivery report
            raise _Abort(str(error)) from error  # the abort reports it
        if left or refused:
            raise _Abort("not everything could be produced")
        positions = [TopicPartition(*part.where, part.position) for part in parts]
        self._steadily(
            lambda wait_s: self._writer.send_offsets_to_transaction(positions, self._group, wait_s)
        )

    def _send(self, send: ProducedMessage, refused: dict[int, BaseException]) -> None:
        def on_delivery(error: KafkaError | None, _message: Message) -> None:
            if error is not None and error.code() in _OWN_FAULT:
                refused[send.number] = KafkaException(error)

        while True:
            try:
                self._writer.produce(
                    send.topic, send.body, send.key, send.partition, on_delivery, headers=list(send.headers)
                )
            except BufferError:  # its queue is full
                self._writer.poll(0.1)
            except KafkaException as exception:
                if exception.args[0].code() not in _OWN_FAULT:
                    raise _Abort(str(exception)) from exception
                refused[send.number] = exception
                return
            else:
                return

    def _abort(self, reason: str, refused: dict[int, BaseException]) -> TransactionResult:
        refused = dict(refused)  # purged messages were not refused
        self._aborting = True
        self._steadily(self._writer.abort_transaction)
        self._aborting = False
        return TransactionResult(aborted=reason, refused=refused)

    def _steadily(self, call: Callable[..., Any], wait_s: float | None = CALL_S) -> None:
        """Retry a call until it is done, must abort, is refused, or the broker is unavailable."""
        give_up_at = monotonic() + REPEAT_S
        while True:
            try:
                call(*(() if wait_s is None else (wait_s,)))
            except KafkaException as exception:
                error: KafkaError = exception.args[0]
                if error.txn_requires_abort():
                    raise _Abort(str(error)) from exception
                if error.code() in _FENCED:
                    raise Fenced(
                        f"another instance took over the transactional id {self.transactional_id}, or a"
                        f" transaction lasted longer than {self._transaction_s:g} s: {error.str()}"
                    ) from exception
                if not error.retriable():
                    raise SourceRefused(f"{self.name} refuses the transaction: {error.str()}") from exception
                if monotonic() >= give_up_at:
                    raise SourceUnavailable(str(error)) from exception
            else:
                return


class _Abort(Exception):
    """The transaction cannot be committed, and must be aborted."""
