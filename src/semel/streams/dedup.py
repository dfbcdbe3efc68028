"""Deduplicate a Kafka topic on Kafka itself: the loop around group, index and transactions.

The truth is the marks topic. A batch's outputs, marks and offsets commit in one transaction; only then its marks go
into the local index. So a process may die anywhere: before the commit the batch is received again, and after it the
index is behind and reads what it lacks from the topic.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Event as Flag
from time import monotonic
from types import TracebackType
from typing import Any, Literal, Self

from msgspec.structs import replace

from semel.brokers.kafka.options import place_of
from semel.errors import SourceUnavailable, UsageError
from semel.observe.formatting import plural
from semel.observe.limited_log import LimitedLog
from semel.runtime.urls import parse_url
from semel.streams.batches import DedupBatch, Destinations, RecordOutput, RecordReading
from semel.streams.contract import PartitionContract
from semel.streams.index import MarkIndexes
from semel.streams.mark_format import unpack_mark
from semel.streams.marks_reader import MarksReader
from semel.streams.member import GroupMember, StreamOptions, StreamPartition
from semel.streams.progress import DedupCounters, DedupProgress
from semel.streams.reading import key_reader, now_us, time_reader_for
from semel.streams.topics import TopicFacts, TopicPlan, prepare_topics
from semel.streams.writer import TransactionWriter, WriteResult
from semel.windows import Duration, window_us

__all__ = ["BATCH", "Dedup", "target_topic"]

_log = LimitedLog(logging.getLogger("semel.streams"))

BATCH = 4000
"""Records of one transaction: each transaction waits for the brokers several times."""
RESTORE_RECORDS = 200
"""Records of the marks topic that are read at once; each may hold a thousand marks."""
RESTORE_WAIT_S = 0.05
TRIES_QUIET = 3
RETRY_S = 0.5
"""How long to wait after a transaction that could not be made, while the group is polled."""


class Dedup:
    """Passes the first record of each key within a window, for all instances of a group together.

    `source`: `kafka://host:9092/topic?group=name`; `to`: the output topic, by name or URL. Without it the caller writes
    its own outputs: `commit(batch, outputs)`. `key`: a path in the JSON body, `header:NAME`, `record:key` or a function
    of the record; by default the id in the headers. `time`: the event's own time, a path, `header:NAME` or
    `record:timestamp`; by default events are timed by their arrival here. `state`: the folder of the local index; by
    default a temporary one. `repartitioned`: the source is the topic of a `Repartition`.
    """

    def __init__(  # noqa: PLR0913 - one for each option of the command
        self,
        source: str,
        to: str = "",
        *,
        key: str | Callable[[Any], object] | None = None,
        window: Duration = "24h",
        time: str | None = None,
        late: Literal["pass", "drop"] = "pass",
        late_to: str = "",
        duplicates_to: str = "",
        mismatches_to: str = "",
        marks: str = "",
        state: str | Path | None = None,
        batch: int = BATCH,
        repartitioned: bool = False,
    ) -> None:
        self._servers, self._options = place_of(source, StreamOptions)
        options = self._options
        if "," in options.topic or options.topic.startswith("^"):
            raise UsageError(
                "dedup reads one topic: its partitions are those of its marks; start one for each topic"
            )
        self.window_us: int = window_us(window)
        if not self.window_us:
            raise UsageError("the window is off, so nothing would be remembered; give a duration such as 24h")
        if late not in ("pass", "drop"):
            raise UsageError(f"late is {late!r}; it must be pass or drop, or name a topic with late_to")
        self._reading = RecordReading(
            key_of=key_reader(key),
            time_of=time_reader_for(time),
            window_us=self.window_us,
            skip_empty=options.tombstones == "skip",
        )
        self._state = None if state is None else Path(state)
        self._batch = batch
        self._repartitioned = repartitioned
        self._contract: PartitionContract | None = None
        self._client = options.client(self._servers)
        self._to = Destinations(
            group=options.group,
            output=target_topic(to, self._servers),
            duplicates=target_topic(duplicates_to, self._servers),
            mismatches=target_topic(mismatches_to, self._servers),
            late=target_topic(late_to, self._servers),
            pass_late=late == "pass",
            marks=marks or f"{options.topic}.{options.group}.marks",
            dead=options.dead or f"{options.topic}.dead",
        )
        outputs = (self._to.output, self._to.duplicates, self._to.mismatches, self._to.late)
        if options.topic in outputs:
            raise UsageError(f"{options.topic} is the source and an output: it would never end")
        self.plan: TopicPlan = TopicPlan(
            source=options.topic,
            marks=self._to.marks,
            outputs=tuple(dict.fromkeys(each for each in outputs if each)),
            dead=self._to.dead,
            window_us=self.window_us,
            event_time=self._reading.time_of is not None,
        )
        self.counts: DedupCounters = DedupCounters()
        self.facts: TopicFacts | None = None
        self._member: GroupMember | None = None
        self._stop = Flag()
        self._until_idle = False
        self._pending: DedupBatch | None = None
        self._refused: dict[tuple[int, int], str] = {}
        """Records that a topic does not accept, by partition and offset: they become dead letters."""
        self._retry_at = 0.0
        self._tries = 0

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._options.group

    @property
    def name(self) -> str:
        """Topic and group, without credentials."""
        return f"kafka://{self._servers}/{self._options.topic}?group={self._options.group}"

    # --- opening and closing ---

    def check(self) -> TopicFacts:
        """Check the topics without changing anything. Raises `UsageError` with what to do."""
        return prepare_topics(self._client, self.plan, dry_run=True)

    def open(self) -> Self:
        """Check or create the topics, and join the group. Raises `UsageError` with what to do."""
        facts = prepare_topics(self._client, self.plan)
        self.facts = facts
        for line in facts.warnings:
            _log.warning("%s", line)
        counts = facts.partitions
        same = not self._repartitioned and counts.get(self._to.output) == counts[self.plan.source]
        self._destinations = replace(self._to, same_partition=same)
        if not self._repartitioned:
            self._contract = PartitionContract(counts[self.plan.source])
        self._indexes = self._open_indexes()
        self._reader = MarksReader(self._client, self._to.marks)
        options = self._options
        instance = options.instance or os.urandom(16).hex()
        self._writer = TransactionWriter(
            self._client,
            f"semel-dedup-{options.group}-{options.topic}-{instance}",
            options.transaction_s,
            facts.batch_bytes_max,
        )
        self._member = GroupMember(self._servers, options, on_gone=self._let_go)
        return self

    def _open_indexes(self) -> MarkIndexes:
        from semel.streams.rocks import RocksIndexes

        return RocksIndexes(self._state, self.window_us)

    def close(self) -> None:
        """Leave the group and close the index. The next owner gets the records that were received and not committed."""
        member, self._member = self._member, None
        if member is None:
            return
        member.close()
        for partition in list(member.partitions.values()):
            self._let_go(partition)
        self._writer.close()
        self._reader.close()
        self._indexes.close()

    def __enter__(self) -> Self:
        return self.open() if self._member is None else self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the way of a partition ---

    def _let_go(self, partition: StreamPartition) -> None:
        self._reader.drop(partition.number)
        index, partition.index = partition.index, None
        if index is not None:
            index.close()

    def _bring_in(self, member: GroupMember) -> None:
        """Bring arrived partitions nearer to being read: committed offset, then the marks' end, then the marks."""
        for partition in member.find_committed():
            try:
                self._look_for_marks(member, partition)
            except SourceUnavailable as error:
                partition.asked_at = monotonic()
                _log.info("%s: %s", self.name, error)
        if self._reader.reads:
            for chunk in self._reader.read(RESTORE_RECORDS, RESTORE_WAIT_S):
                partition_ = member.partitions.get(chunk.partition)
                if partition_ is None or partition_.state != "restoring":
                    continue
                self._add_to_index(partition_, chunk.marks, max(chunk.offset, partition_.index.offset))
                self.counts.restored += len(chunk.marks)
                if chunk.done:
                    member.activate(partition_)

    def _look_for_marks(self, member: GroupMember, partition: StreamPartition) -> None:
        """Compare the index with the end of the marks as it is now: the committed offset was final before."""
        assert self.facts is not None
        if partition.number >= self.facts.partitions[self.plan.marks]:
            raise UsageError(
                f"{self.plan.source} got more partitions while it was read, and {self.plan.marks} has none for them;"
                " start it again: it says what to do"
            )
        low, high = self._reader.bounds(partition.number)
        if partition.index is None:
            partition.index = self._indexes.open(partition.number, self.facts.marks_id, low, high)
        if partition.index.offset >= high:
            member.activate(partition)
            return
        partition.state = "restoring"
        partition.restored_from, partition.restored_to = partition.index.offset, high
        self._reader.begin(partition.number, partition.index.offset, high)

    def _add_to_index(self, partition: StreamPartition, marks: Mapping[bytes, bytes], offset: int) -> None:
        clock_us = partition.index.latest_us
        if marks:
            clock_us = max(clock_us, unpack_mark(max(marks.values())).at_us)
        if self._reading.time_of is None:
            clock_us = max(clock_us, now_us())
        partition.index.add(marks, offset, clock_us - self.window_us)

    # --- batches ---

    def receive(self, wait_s: float = 1.0) -> DedupBatch:
        """Return the next records, sorted; empty if there are none. Commit each batch before the next call.

        Raises `SourceRefused` or `Fenced` if repeating cannot help.
        """
        member = self._require_member()
        if self._pending is not None:
            raise UsageError("the last batch is not committed; call commit(batch) before receive()")
        if not self._is_writable():
            member.wait(min(wait_s, RETRY_S))
            return DedupBatch([])
        self._bring_in(member)
        restoring = any(each.state != "active" for each in member.partitions.values())
        found = member.receive(self._batch, 0.0 if restoring else wait_s)
        parts = [
            self._reading.sort(partition, records, self._refused) for partition, records in found.items()
        ]
        if self._contract is not None:
            for records in found.values():
                if (warning := self._contract.look(records)) is not None:
                    _log.warning("%s: %s", self.name, warning)
        batch = DedupBatch(parts)
        if parts:
            self._pending = batch
        elif member.unreachable:
            self._report_outage(member)
        return batch

    def _is_writable(self) -> bool:
        """Whether a transaction can begin. Makes the producer, which ends what an earlier one has left open."""
        if monotonic() < self._retry_at:
            return False
        if not self._writer.is_ready:
            try:
                self._writer.renew()
            except SourceUnavailable as error:
                _log.warning("%s: %s", self.name, error)
                self._retry_at = monotonic() + RETRY_S
                return False
        return True

    def _report_outage(self, member: GroupMember) -> None:
        try:
            member.check_reachable()
        except SourceUnavailable as error:
            _log.warning("%s does not answer: %s; trying again", self.name, error)

    def commit(self, batch: DedupBatch, outputs: Iterable[RecordOutput] | None = None) -> bool:
        """Write the batch, its marks and its offsets in one transaction; then add the marks to the index.

        `outputs`: written instead of the first records. Returns `False` if the transaction was not committed, as far as
        is known: the same records are received again, unless another instance has them now. Nothing is lost or doubled.
        """
        member = self._require_member()
        if batch is not self._pending and batch.parts:
            raise UsageError("commit() takes the batch of the last receive()")
        self._pending = None
        if not batch.parts:
            return True
        made = None if outputs is None else list(outputs)
        result = self._transact(member, batch, made)
        if not result.committed:
            self._go_back(member, batch, result)
            return False
        self._note_committed(batch, result)
        return True

    def _transact(
        self, member: GroupMember, batch: DedupBatch, outputs: list[RecordOutput] | None
    ) -> WriteResult:
        positions = {(self._options.topic, each.partition.number): each.position for each in batch.parts}
        return self._writer.transact(self._destinations.fill(batch, outputs), positions, member.group)

    def _go_back(self, member: GroupMember, batch: DedupBatch, result: WriteResult) -> None:
        """Forget the batch. Its partitions arrive again: if it was committed after all, that is found then."""
        self.counts.aborts += 1
        self._tries += 1
        level = (
            logging.WARNING if self._tries >= TRIES_QUIET else logging.INFO
        )  # a rebalance causes one or two
        _log.log(level, "%s: a transaction is repeated: %s", self.name, result.reason)
        for tag, reason in result.refused:
            if tag is None:
                raise UsageError(f"an output of the caller is refused: {reason}")
            self._refused[tag.partition(), tag.offset()] = reason
        member.rewind([each.partition for each in batch.parts])
        self._retry_at = 0.0 if result.refused else monotonic() + RETRY_S

    def _note_committed(self, batch: DedupBatch, result: WriteResult) -> None:
        """Add the committed marks to the index. A crash before this leaves it behind, and it catches up."""
        counts = self.counts
        counts.transactions += 1
        self._tries = 0
        for each in batch.parts:
            found, partition = each.sorted, each.partition
            if found.marks:
                self._add_to_index(partition, found.marks, result.marks_end[partition.number])
            passes_late = self._to.pass_late and not self._to.late
            counts.received += each.records
            counts.passed += len(found.firsts) + (len(found.late) if passes_late else 0)
            counts.duplicates += len(found.duplicates)
            counts.mismatches += len(found.mismatches)
            counts.late += len(found.late)
            counts.dead_lettered += len(each.bad)
            counts.skipped += each.skipped
            if self._refused:
                for bad in each.bad:
                    self._refused.pop((partition.number, bad.record.offset()), None)
            for bad in each.bad:
                _log.warning("a record is put into %s: %s", self._to.dead, bad.error)
            if found.mismatches:
                _log.warning(
                    "%s: known keys came with another body, which is not passed: the first of them in partition"
                    " %d, offset %d",
                    plural(len(found.mismatches), "record"), partition.number, found.mismatches[0].offset(),
                )  # fmt: skip

    # --- the loop ---

    def run(
        self, *, until_idle: bool = False, on_step: Callable[[], object] = lambda: None, wait_s: float = 0.5
    ) -> None:
        """Pass records on until `stop()` is called; with `until_idle` until nothing is left to read."""
        self._until_idle = self._until_idle or until_idle
        with self:
            while not self._stop.is_set():
                batch = self.receive(wait_s)
                if batch.parts:
                    self.commit(batch)
                elif self._until_idle and self._require_member().caught_up:
                    break
                on_step()

    def stop(self) -> None:
        """Make `run` return after its batch. May be called from a signal handler or another thread."""
        self._stop.set()

    def stop_when_idle(self) -> None:
        """Make `run` return when nothing is left to read."""
        self._until_idle = True

    def progress(self) -> DedupProgress:
        """Return where it is. Call it in the thread of the loop."""
        partitions = list(self._member.partitions.values()) if self._member is not None else []
        restoring = [each for each in partitions if each.state == "restoring"]
        return DedupProgress(
            counts=self.counts,
            partitions=len(partitions),
            restoring=sum(each.state != "active" for each in partitions),
            restore_left=sum(max(0, each.restored_to - each.index.offset) for each in restoring),
            restore_total=sum(each.restored_to - each.restored_from for each in restoring),
            lag=0 if self._member is None else self._member.lag(),
            index_bytes=sum(each.index.size_bytes() for each in partitions if each.index is not None),
        )

    def _require_member(self) -> GroupMember:
        if self._member is None:
            raise UsageError("it is not open; use it in a with block, or call open()")
        return self._member


def target_topic(target: str, servers: str) -> str:
    """Return the topic of a name or a URL. Raises `UsageError` for another cluster: a transaction spans one."""
    if "://" not in target:
        return target
    parts = parse_url(target)
    topic = parts.path.strip("/")
    if not target.startswith("kafka:") or not topic or "/" in topic:
        raise UsageError(f"{target!r} names no topic; write it like kafka://{servers}/topic")
    if parts.query:
        raise UsageError(
            "the options of the connection are those of --from; leave them out of the other URLs"
        )
    if parts.netloc and parts.netloc != servers:
        raise UsageError(
            f"{parts.netloc} is not {servers}: output, marks and offsets commit in one transaction, which one cluster"
            " has; write the same hosts, or mirror the output"
        )
    return topic
