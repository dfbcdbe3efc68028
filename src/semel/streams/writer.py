"""Write outputs, marks and offsets in one Kafka transaction. All calls block.

A transaction begins and ends within one call, between two polls of the group: no rebalance callback runs while it is
open. Its offsets carry the group's generation, so the brokers refuse those of a member that has lost its partitions.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from semel.brokers.kafka.client import CLIENT_LOG
from semel.brokers.kafka.sending import BYTES_MAX
from semel.errors import Fenced, SourceRefused, SourceUnavailable
from semel.streams.mark_format import ENTRY_BYTES, MARKS_MAX, records_of_marks

__all__ = [
    "Produce",
    "RecordRefused",
    "TransactionRecords",
    "TransactionWriter",
    "WriteResult",
    "timestamp_ms_of",
]

_log = logging.getLogger("semel.streams")

CALL_S = 10.0
INIT_S = 10.0
FENCED_MAX = 5
"""After it was fenced so often without a commit in between, another instance has the same id."""
FLUSH_S = 0.2
STALLED_S = 2.0
"""If nothing more is written for so long, the records are asked for their own results in the next transaction."""
BATCH_OVERHEAD_BYTES = 1000
_OWN_FAULT = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_TIMESTAMP, KafkaError.INVALID_RECORD}
"""Errors of single records: the others of the transaction can go without them."""
_FENCED = {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}
_UNKNOWN_END = {*_FENCED, KafkaError._FATAL, KafkaError._STATE, KafkaError._TIMED_OUT}
"""After these a new producer finds out how the transaction ended."""
_FOR_GOOD = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError._UNKNOWN_TOPIC,
}
"""Errors of topics: repeating the transaction cannot help."""

Produce: TypeAlias = Callable[..., None]
"""`produce(tag, topic, value, key, partition, headers, timestamp_ms)`; the tag names the record if it is refused."""


class RecordRefused(NamedTuple):
    """A record that its topic does not accept."""

    tag: Any
    reason: str


class WriteResult(NamedTuple):
    """The end of a transaction."""

    committed: bool
    marks_end: Mapping[int, int] = {}
    """The offset behind the last mark of each partition, if it is committed."""
    refused: Sequence[RecordRefused] = ()
    reason: str = ""


class TransactionRecords:
    """Takes the records of one transaction."""

    def __init__(self, producer: Any, *, careful: bool, marks_max: int) -> None:
        self.refused: list[RecordRefused] = []
        self.for_good: list[str] = []
        """Why the transaction can never succeed."""
        self.marks_end: dict[int, int] = {}
        """The offset behind the last mark that was written, by partition."""
        self._producer = producer
        self._careful = careful
        self._marks_max = marks_max

    def produce(
        self, tag: Any, topic: str, value: Any, key: Any, partition: int, headers: Any, timestamp_ms: int
    ) -> None:
        """Produce a record; the tag names it if it is refused."""
        on_delivery = _watch(tag, self.refused, self.for_good) if self._careful else None
        while True:
            try:
                self._producer.produce(
                    topic,
                    value,
                    key,
                    partition,
                    on_delivery,
                    timestamp=timestamp_ms,
                    headers=headers,
                )
            except BufferError:  # its queue is full
                self._producer.poll(0.05)
            except KafkaException as exception:
                if exception.args[0].code() not in _OWN_FAULT:
                    raise
                self.refused.append(RecordRefused(tag, exception.args[0].str()))
                return
            else:
                return

    def pass_on(self, records: Sequence[Any], topic: str, partition: int) -> None:
        """Produce records as they came, into another topic."""
        produce = self._producer.produce
        for record in records:
            at_ms = timestamp_ms_of(record)
            if not self._careful:
                try:  # by position: names cost a third of the call
                    produce(
                        topic, record.value(), record.key(), partition, None, None, at_ms, record.headers()
                    )
                except (BufferError, KafkaException):
                    pass  # again below, where each is told apart
                else:
                    continue
            self.produce(record, topic, record.value(), record.key(), partition, record.headers(), at_ms)

    def produce_marks(self, topic: str, partition: int, marks: Mapping[bytes, bytes]) -> None:
        """Produce packed marks, and note the offset behind them."""
        for key, value in records_of_marks(marks, self._marks_max):
            while True:
                try:
                    self._producer.produce(topic, value, key, partition, self._note_end)
                except BufferError:
                    self._producer.poll(0.05)
                else:
                    break

    def _note_end(self, error: Any, record: Any) -> None:
        if error is None:
            number = record.partition()
            self.marks_end[number] = max(self.marks_end.get(number, 0), record.offset() + 1)
        elif self._careful:
            _watch(None, self.refused, self.for_good)(error, record)


class TransactionWriter:
    """A transactional producer, replaced by a new one when the end of a transaction is not known."""

    def __init__(
        self, client: Mapping[str, Any], transactional_id: str, transaction_s: float, batch_bytes_max: int
    ) -> None:
        self.transactional_id: str = transactional_id
        self._transaction_s = transaction_s
        self._config = {
            **client,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": round(transaction_s * 1000),
            "enable.idempotence": True,
            "linger.ms": 5,
            "compression.type": "lz4",
            "partitioner": "murmur2_random",  # Java's own
            "message.max.bytes": BYTES_MAX,  # the topic's limit decides about one record
            "batch.size": max(1, min(1_000_000, batch_bytes_max - BATCH_OVERHEAD_BYTES)),
            "queue.buffering.max.messages": 1_000_000,
        }
        self._producer: Any = None
        self._fenced = 0
        self._careful = False
        """Whether to ask for each record's own result: the last transaction was refused for one of them."""
        self._marks_max = max(1, min(MARKS_MAX, (batch_bytes_max - BATCH_OVERHEAD_BYTES) // ENTRY_BYTES))

    @property
    def is_ready(self) -> bool:
        """Whether the end of every earlier transaction is known."""
        return self._producer is not None

    def renew(self) -> None:
        """Make a new producer with the same id: the brokers end what an earlier one has left open.

        They complete a commit that they have begun, and abort everything else. Raises `SourceUnavailable` without an
        answer, `Fenced` if another instance does the same.
        """
        if self._fenced > FENCED_MAX:
            raise Fenced(
                f"another instance took over the transactional id {self.transactional_id} again and again: give each"
                " instance its own --instance"
            )
        producer = Producer(self._config, logger=CLIENT_LOG)
        try:
            producer.init_transactions(INIT_S)
        except KafkaException as exception:
            error: KafkaError = exception.args[0]
            if error.retriable() or error.code() in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT):
                raise SourceUnavailable(f"no transaction can begin: {error.str()}") from exception
            raise SourceRefused(f"no transaction can begin: {error.str()}") from exception
        self._producer = producer

    def transact(
        self,
        fill: Callable[[TransactionRecords], None],
        positions: Mapping[tuple[str, int], int],
        group: Any,
    ) -> WriteResult:
        """Produce what `fill` hands over, move the offsets and commit.

        If the result is not committed, nothing of it is visible, or its end is not known: read the committed offsets
        and the marks again before anything else.
        """
        producer = self._producer
        records = TransactionRecords(producer, careful=self._careful, marks_max=self._marks_max)
        refused = records.refused
        try:
            producer.begin_transaction()
            fill(records)
            producer.send_offsets_to_transaction(
                [TopicPartition(*where, offset) for where, offset in positions.items()], group, CALL_S
            )
            left = self._flush(producer, records)
        except (
            KafkaException,
            SystemError,
        ) as error:  # SystemError: a fatal one, raised during a delivery report
            return self._abort(records, error)
        if left or refused:
            return self._abort(
                records, f"{left} records were not written" if left else "records were refused"
            )
        try:
            self._commit(producer)
        except KafkaException as error:
            return self._recover(error, records)
        self._fenced, self._careful = 0, False
        return WriteResult(committed=True, marks_end=records.marks_end)

    def _commit(self, producer: Any) -> None:
        """Commit; seconds, because the client must not be made to resume a commit that it gave up at once."""
        producer.commit_transaction(max(CALL_S, self._transaction_s))

    def _flush(self, producer: Any, records: TransactionRecords) -> int:
        """Wait until everything is written; returns how many records are not.

        After a refused record the client writes nothing more. Which one it was is known only if it was asked for.
        """
        give_up_at = monotonic() + self._transaction_s
        stalled_at, before = monotonic() + STALLED_S, -1
        while True:
            left: int = producer.flush(FLUSH_S)
            now = monotonic()
            if left != before:
                stalled_at, before = now + STALLED_S, left
            stalls = not self._careful and now >= stalled_at
            if not left or records.refused or records.for_good or stalls or now >= give_up_at:
                return left

    def _recover(self, exception: KafkaException, records: TransactionRecords) -> WriteResult:
        """After a failed commit: abort if the client knows that nothing was committed, else let the next one ask."""
        error: KafkaError = exception.args[0]
        if error.txn_requires_abort():
            return self._abort(records, exception)
        self._forget(error)
        if not (error.retriable() or error.fatal() or error.code() in _UNKNOWN_END):
            raise SourceRefused(f"the transaction is refused: {error.str()}") from exception
        return WriteResult(committed=False, refused=tuple(records.refused), reason=error.str())

    def _abort(self, records: TransactionRecords, reason: BaseException | str) -> WriteResult:
        """Abort a transaction whose commit was not sent, or is known to have failed."""
        if records.for_good:
            raise SourceRefused(records.for_good[0])
        found = tuple(records.refused)  # those purged by the abort were not refused
        self._careful = True
        give_up_at = monotonic() + CALL_S
        while True:
            try:
                self._producer.abort_transaction(CALL_S)
            except KafkaException as exception:
                if exception.args[0].retriable() and monotonic() < give_up_at:
                    continue
                self._forget(exception.args[0])
            break
        return WriteResult(committed=False, refused=found, reason=str(reason))

    def _forget(self, error: KafkaError) -> None:
        """Give the producer up; what it has left open is ended by the next one."""
        self._fenced += error.code() in _FENCED
        self._careful = True
        self._producer = None

    def close(self) -> None:
        """End the producer."""
        self._producer = None


def _watch(tag: Any, refused: list[RecordRefused], for_good: list[str]) -> Callable[[Any, Any], None]:
    def on_delivery(error: Any, record: Any) -> None:
        if error is not None and error.code() in _OWN_FAULT:
            refused.append(RecordRefused(tag, error.str()))
        elif error is not None and error.code() in _FOR_GOOD:
            for_good.append(
                f"{record.topic()} refuses records: {error.str()}; check that it exists, and the rights"
            )

    return on_delivery


def timestamp_ms_of(record: Any) -> int:
    """Return the time of a record, 0 if it has none."""
    kind, at_ms = record.timestamp()
    return at_ms if kind and at_ms > 0 else 0
