"""Put a keyed topic in between: every copy of an event into the partition that its id says.

Each batch and its offsets commit in one transaction, so a record is in the keyed topic once for each time that it is
in the source. The dedup behind it removes the copies.
"""

import logging
import os
from collections.abc import Callable
from threading import Event as Flag
from time import monotonic
from typing import Any
from urllib.parse import urlencode

from msgspec.structs import replace

from semel.brokers.kafka.options import place_of
from semel.errors import KeyInvalid, KeyMissing, SourceUnavailable
from semel.observe.limited_log import LimitedLog
from semel.runtime.urls import option_texts, parse_url
from semel.streams.batches import BadRecord, Destinations
from semel.streams.mark_format import digest_of
from semel.streams.member import GroupMember, StreamOptions
from semel.streams.reading import key_reader
from semel.streams.topics import TopicFacts, TopicPlan, prepare_topics
from semel.streams.writer import TransactionRecords, TransactionWriter

__all__ = ["Repartition", "keyed_topic"]

_log = LimitedLog(logging.getLogger("semel.streams"))

BATCH = 4000
RETRY_S = 0.5
GROUP_SUFFIX = ".keyed"


def keyed_topic(source: str) -> str:
    """Return the name of the topic in between, for the URL of a source."""
    _, options = place_of(source, StreamOptions)
    return f"{options.topic}.{options.group}.keyed"


class Repartition:
    """Copies a topic into one whose partitions follow the events' ids; message keys, headers and times stay."""

    def __init__(
        self, source: str, key: str | Callable[[Any], object] | None = None, *, batch: int = BATCH
    ) -> None:
        self._servers, options = place_of(source, StreamOptions)
        self.keyed: str = keyed_topic(source)
        self._options: StreamOptions = replace(options, group=options.group + GROUP_SUFFIX)
        self._key_of = key_reader(key)
        self._batch = batch
        self._letters = Destinations(
            group=options.group, marks="", dead=options.dead or f"{options.topic}.dead"
        )
        self._plan = TopicPlan(source=options.topic, outputs=(self.keyed,), dead=self._letters.dead)
        self._source = source
        self._refused: dict[tuple[int, int], str] = {}
        self._stop = Flag()
        self._until_idle = False
        self.copied: int = 0

    def url_behind(self) -> str:
        """Return the URL of the topic in between, for the `Dedup` that reads it: the same group and options."""
        parts = parse_url(self._source)
        options = dict(option_texts(self._source), dead=self._letters.dead)
        options.pop("topic", None)
        return f"kafka://{parts.netloc}/{self.keyed}?{urlencode(options)}"

    def check(self) -> TopicFacts:
        """Check the topics without changing anything. Raises `UsageError` with what to do."""
        return prepare_topics(self._options.client(self._servers), self._plan, dry_run=True)

    def prepare(self) -> TopicFacts:
        """Check or create the topics."""
        return prepare_topics(self._options.client(self._servers), self._plan)

    def run(self, *, until_idle: bool = False) -> None:
        """Copy until `stop()` is called; with `until_idle` until nothing is left to read."""
        self._until_idle = self._until_idle or until_idle
        options = self._options
        client = options.client(self._servers)
        facts = self.prepare()
        instance = options.instance or os.urandom(16).hex()
        id_ = f"semel-dedup-{options.group}-{options.topic}-{instance}"
        writer = TransactionWriter(client, id_, options.transaction_s, facts.batch_bytes_max)
        member = GroupMember(self._servers, options)
        try:
            self._copy(member, writer, facts.partitions[self.keyed])
        finally:
            member.close()
            writer.close()

    def stop(self) -> None:
        """Make `run` return after its batch."""
        self._stop.set()

    def _copy(self, member: GroupMember, writer: TransactionWriter, partitions: int) -> None:
        retry_at = 0.0
        while not self._stop.is_set():
            if monotonic() < retry_at or not self._is_ready(writer):
                member.wait(RETRY_S)
                continue
            for partition in member.find_committed():
                member.activate(partition)
            found = member.receive(self._batch, RETRY_S)
            if not found:
                if self._until_idle and member.caught_up:
                    return
                continue
            positions = {(member.topic, each.number): each.position for each in found}
            records = [record for each in found.values() for record in each]
            result = writer.transact(self._fill(records, partitions), positions, member.group)
            if result.committed:
                self.copied += len(records)
                self._refused.clear()
                continue
            for tag, reason in result.refused:
                self._refused[tag.partition(), tag.offset()] = reason
            member.rewind(list(found))
            retry_at = 0.0 if result.refused else monotonic() + RETRY_S

    def _is_ready(self, writer: TransactionWriter) -> bool:
        if not writer.is_ready:
            try:
                writer.renew()
            except SourceUnavailable as error:
                _log.warning("%s: %s", self.keyed, error)
                return False
        return True

    def _fill(self, records: list[Any], partitions: int) -> Callable[[TransactionRecords], None]:
        def produce_all(to: TransactionRecords) -> None:
            produce = to.produce
            for record in records:
                refused = self._refused.get((record.partition(), record.offset()))
                if refused is not None:
                    self._letters.dead_letter(BadRecord(record, "refused", refused, bare=True), produce)
                    continue
                try:
                    digest = digest_of(self._key_of(record))
                except (KeyMissing, KeyInvalid) as error:
                    told = f"{type(error).__name__}: {error}"
                    self._letters.dead_letter(BadRecord(record, "no-key", told), produce)
                    continue
                number = int.from_bytes(digest[:8], "big") % partitions
                produce(
                    record, self.keyed, record.value(), record.key(), number, record.headers(),
                    max(0, record.timestamp()[1]),
                )  # fmt: skip

        return produce_all
