"""The protocol of the local index of marks: one for each partition, a copy of its part of the marks topic."""

from collections.abc import Mapping, Sequence
from typing import Protocol

__all__ = ["MarkIndex", "MarkIndexes"]


class MarkIndex(Protocol):
    """The marks of one partition. It may be behind the topic, never ahead of it."""

    @property
    def offset(self) -> int:
        """The offset of the marks topic up to which it is true."""
        ...

    @property
    def latest_us(self) -> int:
        """The latest time of all marks that it has seen; 0: none."""
        ...

    def find(self, digests: Sequence[bytes]) -> list[bytes | None]:
        """Return the packed mark of each digest. One that is over may be returned or not."""
        ...

    def add(self, marks: Mapping[bytes, bytes], offset: int, over_us: int) -> None:
        """Add committed marks, packed, together with the offset up to which it is now true.

        `over_us`: marks before this time are never asked for again, and may be dropped.
        """
        ...

    def size_bytes(self) -> int:
        """Return about how much disk it takes."""
        ...

    def close(self) -> None:
        """Close it; its files stay."""
        ...


class MarkIndexes(Protocol):
    """The indexes of one instance."""

    def open(self, partition: int, topic_id: str, low: int, high: int) -> MarkIndex:
        """Open the index of a partition, where its marks topic has the offsets from `low` to `high`.

        One of another topic, or of an offset that the topic no longer has, is removed: a new one starts at `low`.
        """
        ...

    def close(self) -> None:
        """Close the folder; the indexes must be closed before."""
        ...
