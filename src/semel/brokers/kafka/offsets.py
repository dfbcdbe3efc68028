"""Find the offset of a partition to commit: the first one that is not done, and never one beyond it."""

from collections import OrderedDict

__all__ = ["Offsets"]


class Offsets:
    """The unfinished deliveries of one partition, in order. O(1) per call."""

    __slots__ = ("_in_hand",)

    def __init__(self) -> None:
        self._in_hand: OrderedDict[int, bool] = OrderedDict()

    def add(self, offset: int) -> None:
        """Add a delivery. After a rewind it may be there already."""
        self._in_hand.setdefault(offset, False)

    def complete(self, offset: int) -> int | None:
        """Mark a delivery as done; returns the offset to commit, if it has changed.

        The committed offset is the next one to read. Compacted topics and transactions leave gaps: only offsets that
        were delivered count.
        """
        if offset not in self._in_hand:
            return None
        self._in_hand[offset] = True
        position = None
        while self._in_hand:
            first, finished = next(iter(self._in_hand.items()))
            if not finished:
                break
            self._in_hand.popitem(last=False)
            position = first + 1
        return position

    def __len__(self) -> int:
        return len(self._in_hand)
