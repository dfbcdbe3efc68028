"""Look whether producers keep the contract: an event and its copies are in one partition."""

from collections.abc import Iterable
from typing import Any
from zlib import crc32

__all__ = ["LOOKED_MAX", "PartitionContract", "murmur2"]

LOOKED_MAX = 2000
"""So many records are looked at, at the start."""
KNOWN_RATIO = 0.9
"""If fewer records lie where one of the two usual partitioners puts them, a partitioner of their own is at work."""


class PartitionContract:
    """Counts records without a message key, and those that only one of the usual partitioners puts where they are."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._looked = self._keyless = self._java = self._librdkafka = self._either = 0
        self._warned = False

    def look(self, records: Iterable[Any]) -> str | None:
        """Look at records; returns a warning the first time that there is one."""
        if self._warned or self._looked >= LOOKED_MAX or self._partitions == 1:
            return None
        for record in records:
            self._looked += 1
            key, partition = record.key(), record.partition()
            if not key:
                self._keyless += 1
                continue
            java = (murmur2(key) & 0x7FFFFFFF) % self._partitions == partition
            other = crc32(key) % self._partitions == partition
            self._java += java and not other
            self._librdkafka += other and not java
            self._either += java and other
            if self._looked >= LOOKED_MAX:
                break
        warning = self._warning()
        self._warned = warning is not None
        return warning

    def _warning(self) -> str | None:
        if self._keyless:
            return (
                f"{self._keyless:,} of {self._looked:,} records have no message key: producers spread them"
                " over the partitions, and copies in other partitions pass. Send each event with its id as the"
                " message key, or use --repartition"
            )
        keyed = self._looked - self._keyless
        if (
            self._java
            and self._librdkafka
            and self._java + self._librdkafka + self._either > KNOWN_RATIO * keyed
        ):
            return (
                "producers use two partitioners (Java's murmur2 and librdkafka's consistent_random): copies from"
                " different clients lie in different partitions, and pass. Set partitioner=murmur2_random in"
                " librdkafka's clients, or use --repartition"
            )
        return None


def murmur2(data: bytes) -> int:
    """Return the hash by which Java's clients choose a partition, as an unsigned number of 32 bits."""
    length, mask, multiplier = len(data), 0xFFFFFFFF, 0x5BD1E995
    found = (0x9747B28C ^ length) & mask
    whole = length & ~3
    for at in range(0, whole, 4):
        part = int.from_bytes(data[at : at + 4], "little") * multiplier & mask
        part = (part ^ part >> 24) * multiplier & mask
        found = (found * multiplier & mask) ^ part
    rest = data[whole:]
    if rest:
        found = (found ^ int.from_bytes(rest, "little")) * multiplier & mask
    found = (found ^ found >> 13) * multiplier & mask
    return found ^ found >> 15
