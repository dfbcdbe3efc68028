"""Keys that are committed, kept in a compacted topic: written in the transaction that has their outputs.

They close the one gap of transaction mode. A worker that dies after its commit and before it could say so to the
store leaves a key that looks unfinished; a later copy of the event would run. The mark says that it is done.

A mark lies in the partition with the number of the event's own. So whoever has the partition has its marks, and
nobody else writes them.
"""

from collections.abc import Collection, Mapping
from time import monotonic, time
from typing import Any, TypeAlias

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from semel.brokers.kafka_client import CLIENT_LOG
from semel.errors import SourceUnavailable

__all__ = ["CommittedKeys", "Where"]

Where: TypeAlias = tuple[str, int]
"""A partition of the topic that is consumed."""

ASK_S = 30.0
READ_MAX_S = 120.0
"""A transaction that a dead worker left open hides what comes behind it until the broker ends it."""
PRUNE_FROM = 10_000
"""Below so many marks of a partition there is nothing to be won by dropping old ones."""


class CommittedKeys:
    """The marks of the partitions that are ours: read whole when one is assigned, kept up from then on."""

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
        """A mark of ours is committed."""
        marks = self._at_ms.get(where)
        if marks is None:  # revoked meanwhile; its next owner reads it
            return
        marks[key] = now_ms = _now_ms()
        if len(marks) >= self._prune_at.get(where, PRUNE_FROM):
            kept = {each: at for each, at in marks.items() if now_ms - at < window_us // 1000}
            self._at_ms[where] = kept
            self._prune_at[where] = max(PRUNE_FROM, 2 * len(kept))

    def drop(self, where: Where) -> None:
        """The partition is not ours any more."""
        self._at_ms.pop(where, None)
        self._prune_at.pop(where, None)

    def read(self, partitions: Collection[Where]) -> None:
        """Read the marks of partitions that delivered their first record to us: blocks. `SourceUnavailable`.

        Not before that record: only then are the offsets of the owner before us settled, and with them its marks.
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
                    elif error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - its public name
                        raise SourceUnavailable(str(error))
                    elif message.offset() >= ends[number]:  # earlier ends: something undecided is in the way
                        left.discard(number)
        finally:
            reader.close()
        for where in partitions:
            self._at_ms[where] = dict(found[where[1]])

    def _ends(self, numbers: Collection[int]) -> dict[int, int]:
        """Where each partition ends, whether decided or not; 0: it is empty."""
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
                "group.id": f"{self.topic}.marks",  # asked for by the client; no group is joined
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": isolation,
            },
            logger=CLIENT_LOG,
        )


def _take(marks: dict[str, int], message: Any) -> None:
    key = (message.key() or b"").decode("utf-8", "replace")
    if message.value() is None:  # a tombstone: somebody wants it to run again
        marks.pop(key, None)
    else:
        marks[key] = message.timestamp()[1]


def _now_ms() -> int:
    return round(time() * 1000)
