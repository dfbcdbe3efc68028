"""Which offset of a partition may be committed: the first one that is not done, and never one beyond it."""

from collections import OrderedDict

__all__ = ["Offsets"]


class Offsets:
    """The deliveries of one partition that are in hand, in order. O(1) for each."""

    __slots__ = ("_in_hand",)

    def __init__(self) -> None:
        self._in_hand: OrderedDict[int, bool] = OrderedDict()

    def add(self, offset: int) -> None:
        """A delivery is in hand. After a rewind it may be one that is already."""
        self._in_hand.setdefault(offset, False)

    def complete(self, offset: int) -> int | None:
        """A delivery is dealt with; returns what may be committed now, if that has changed.

        What is committed is the next offset to read. Compacted topics and transactions leave gaps: only offsets that
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
