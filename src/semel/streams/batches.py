"""A batch of records on its way: what each of them is, and what is written for it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from semel.brokers.dead_letters import headers_of
from semel.brokers.source import DeadLetterInfo
from semel.errors import GiveUp, KeyInvalid, KeyMissing
from semel.runtime.process import worker_name
from semel.streams.mark_format import digest_of, print_of
from semel.streams.member import StreamPartition
from semel.streams.reading import KeyOf, TimeOfRecord, now_us, read_keys
from semel.streams.sorting import Candidates, Sorted, sort_events
from semel.streams.writer import Produce, TransactionRecords, timestamp_ms_of

__all__ = ["BadRecord", "DedupBatch", "Destinations", "RecordOutput", "RecordReading", "SortedPartition"]

KIND_HEADER = "semel-dedup"
"""The header of a copy in another topic than the output: `duplicate`, `mismatch` or `late`."""


class RecordOutput(msgspec.Struct, frozen=True):
    """A record to be written in the transaction of a batch."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes]] = ()
    partition: int = -1
    """-1: by the key, as Java's clients do."""
    timestamp_ms: int = 0


class BadRecord(msgspec.Struct, frozen=True):
    """A record that cannot be deduplicated, and why."""

    record: Any
    reason: Literal["no-key", "bad-time", "refused"]
    error: str
    bare: bool = False
    """Whether its body is left out of the dead letter: the topic does not accept it."""


class SortedPartition(msgspec.Struct, frozen=True):
    """The part of one partition in a batch."""

    partition: StreamPartition
    position: int
    """The offset behind its last record."""
    records: int
    sorted: Sorted
    bad: list[BadRecord]
    skipped: int


class DedupBatch(msgspec.Struct, frozen=True):
    """Records that were received together and are committed together."""

    parts: list[SortedPartition]

    def __len__(self) -> int:
        return sum(each.records for each in self.parts)

    def _all(self, name: str) -> list[Any]:
        return [record for each in self.parts for record in getattr(each.sorted, name)]

    @property
    def firsts(self) -> list[Any]:
        """Records whose key is new, in the order of their partitions."""
        return self._all("firsts")

    @property
    def duplicates(self) -> list[Any]:
        """Copies of records that were passed before, or that are among `firsts`."""
        return self._all("duplicates")

    @property
    def mismatches(self) -> list[Any]:
        """Records whose key is known with another body."""
        return self._all("mismatches")

    @property
    def late(self) -> list[Any]:
        """Records that are older than the window."""
        return self._all("late")


class RecordReading(msgspec.Struct, frozen=True, kw_only=True):
    """How records are read: their keys, their times, and what is left out."""

    key_of: KeyOf
    time_of: TimeOfRecord | None
    window_us: int
    skip_empty: bool

    def sort(
        self, partition: StreamPartition, records: Sequence[Any], refused: Mapping[tuple[int, int], str]
    ) -> SortedPartition:
        """Read, look up and sort the records of one partition."""
        index = partition.index
        arrival_us = max(now_us(), index.latest_us)  # never late, also if another instance's clock is ahead
        candidates = None if refused else self._read_all(records, arrival_us)
        bad: list[BadRecord] = []
        skipped = 0
        if candidates is None:
            candidates, bad, skipped = self._read_each(partition, records, arrival_us, refused)
        known = index.find(candidates.digests)
        found = sort_events(candidates, known, index.latest_us, self.window_us)
        return SortedPartition(partition, records[-1].offset() + 1, len(records), found, bad, skipped)

    def _read_all(self, records: Sequence[Any], arrival_us: int) -> Candidates | None:
        """Read records that are all as they should be, column by column; `None` if one of them is not."""
        values = [record.value() for record in records]
        if None in values:
            return None
        try:
            digests = [digest_of(key) for key in read_keys(self.key_of, records, values)]
            times = arrival_us if self.time_of is None else [self.time_of(record) for record in records]
        except (KeyMissing, KeyInvalid, GiveUp):
            return None
        return Candidates(records, digests, list(map(print_of, values)), times)

    def _read_each(
        self,
        partition: StreamPartition,
        records: Sequence[Any],
        arrival_us: int,
        refused: Mapping[tuple[int, int], str],
    ) -> tuple[Candidates, list[BadRecord], int]:
        """Read records one by one; returns with them the bad ones, and how many were left out."""
        readable: list[Any] = []
        digests: list[bytes] = []
        prints: list[bytes] = []
        times: list[int] = []
        bad: list[BadRecord] = []
        skipped = 0
        for record in records:
            value = record.value()
            if value is None and self.skip_empty:
                skipped += 1
                continue
            if (error := refused.get((partition.number, record.offset()))) is not None:
                bad.append(BadRecord(record, "refused", error, bare=True))
                continue
            try:
                digest = digest_of(self.key_of(record))
                at_us = arrival_us if self.time_of is None else self.time_of(record)
            except (KeyMissing, KeyInvalid) as problem:
                bad.append(BadRecord(record, "no-key", f"{type(problem).__name__}: {problem}"))
            except GiveUp as problem:
                bad.append(BadRecord(record, "bad-time", f"{type(problem).__name__}: {problem}"))
            else:
                readable.append(record)
                digests.append(digest)
                prints.append(print_of(value))
                times.append(at_us)
        return Candidates(readable, digests, prints, times), bad, skipped


class Destinations(msgspec.Struct, frozen=True, kw_only=True):
    """Where the records of a batch go."""

    group: str
    output: str = ""
    """Empty: nowhere; the caller writes what it makes of first events."""
    same_partition: bool = True
    """Whether the output has as many partitions as the source: a record then keeps the number of its own."""
    duplicates: str = ""
    mismatches: str = ""
    late: str = ""
    pass_late: bool = True
    marks: str
    dead: str

    def fill(
        self, batch: DedupBatch, outputs: Iterable[RecordOutput] | None
    ) -> Callable[[TransactionRecords], None]:
        """Return the function that produces a batch; `outputs` replace the records that would be passed."""

        def produce_all(to: TransactionRecords) -> None:
            for each in outputs or ():
                to.produce(
                    None,
                    each.topic,
                    each.value,
                    each.key,
                    each.partition,
                    list(each.headers),
                    each.timestamp_ms,
                )
            for part in batch.parts:
                if outputs is None:
                    self._pass(part, to)
                self._put_aside(part, to.produce)
                if part.sorted.marks:
                    to.produce_marks(self.marks, part.partition.number, part.sorted.marks)

        return produce_all

    def _pass(self, part: SortedPartition, to: TransactionRecords) -> None:
        """Produce what goes to the output, in the order of the source."""
        passed = part.sorted.firsts
        if part.sorted.late and self.pass_late and not self.late:
            passed = sorted([*passed, *part.sorted.late], key=lambda record: record.offset())
        if self.output:
            to.pass_on(passed, self.output, part.partition.number if self.same_partition else -1)

    def _put_aside(self, part: SortedPartition, produce: Produce) -> None:
        """Produce copies of what does not go to the output."""
        for kind, topic, records in (
            ("duplicate", self.duplicates, part.sorted.duplicates),
            ("mismatch", self.mismatches or self.duplicates, part.sorted.mismatches),
            ("late", self.late, part.sorted.late),
        ):
            for record in records if topic else ():
                headers = [*(record.headers() or ()), (KIND_HEADER, kind.encode())]
                produce(record, topic, record.value(), record.key(), -1, headers, timestamp_ms_of(record))
        for each in part.bad:
            self.dead_letter(each, produce)

    def dead_letter(self, bad: BadRecord, produce: Produce) -> None:
        """Produce the dead letter of a record: its headers say why it was given up."""
        record = bad.record
        where = f"{record.topic()}/{record.partition()}/{record.offset()}"
        letter = DeadLetterInfo(
            reason=bad.reason,
            consumer=self.group,
            error=bad.error,
            worker=worker_name(),
            at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            body_at=where if bad.bare else "",
        )
        told = [(name, value.encode()) for name, value in headers_of(letter).items()]
        headers = told if bad.bare else [*(record.headers() or ()), *told]
        key = None if bad.bare else record.key()
        produce(record, self.dead, None if bad.bare else record.value(), key, -1, headers, 0)
