"""A Bloom filter whose generations rotate, so that it forgets what is older than its window and nothing younger."""

import logging
import os
from collections.abc import Sequence
from math import log1p
from operator import index
from pathlib import Path
from threading import Lock

import rbloom

from semel.clock import Clock, SystemClock
from semel.errors import PolicyInvalid
from semel.forks import restart_after_fork
from semel.stores.bloom import files
from semel.stores.bloom.settings import BloomLayout, layout
from semel.stores.tiered.ports import Fullness
from semel.windows import Duration

__all__ = ["Bloom"]

DIGEST_BYTES = 16
FULL = 0.98
"""A generation with so much of its share is full: how many distinct ids it has is only estimated."""
ROOM_BEYOND = 10_000
"""Ids that are put in at once into a filter that has more than it was made for."""

_log = logging.getLogger("semel")


class Bloom:
    """Ids of one window in about two bytes each. Says "no" of what it never saw, and "maybe" of all else.

    `capacity`: how many ids a window brings; `error_rate`: the share of ids it never saw that it calls "maybe", while
    it holds no more than that. With a `path` it is loaded at `open` and saved at `close`, one process per file. What
    was not saved, or does not load, is simply not known: that costs speed and nothing else.
    """

    instant: bool = True

    def __init__(
        self,
        *,
        capacity: int,
        window: Duration = "24h",
        error_rate: float = 0.001,
        steps: int = 3,
        path: str | os.PathLike[str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.layout: BloomLayout = layout(capacity, window, error_rate, steps)
        self.path: Path | None = None if path is None else Path(path)
        self.damaged: bool = False
        """Whether the file did not load as it was saved, so that the filter began empty."""
        self._clock = clock or SystemClock()
        self._generations: dict[int, rbloom.Bloom] = {}
        """By number, oldest first."""
        self._added = 0
        """Ids that the newest was given, some of them perhaps twice."""
        self._loaded = path is None
        self.after_fork()
        restart_after_fork(self)

    def after_fork(self) -> None:
        """Another thread of the parent may have held the lock."""
        self._lock = Lock()

    def open(self) -> None:
        """Load what was saved; idempotent. Raises `StoreRefused` for a file that is not this filter's."""
        with self._lock:
            if not self._loaded:
                self._load()

    def _load(self) -> None:
        assert self.path is not None
        try:
            saved = files.load(self.path, self.layout)
        except files.Damaged as error:
            self.damaged = True
            _log.warning("%s; the filter begins empty, which costs speed until it has seen more", error)
            saved = {}
        for number, bits in sorted(saved.items()):
            self._generations[number] = rbloom.Bloom.load_bytes(bits, index)
            self._added = _count(self._generations[number])
        self._loaded = True

    def close(self) -> None:
        """Save, where there is a path and anything was done; idempotent."""
        if self.path is not None and self._loaded:
            self.save()

    def save(self) -> None:
        """Write the file anew, all of it or nothing."""
        if self.path is None:
            raise PolicyInvalid("this filter has no path to be saved at; give it one")
        with self._lock:
            self._rotate()
            saved = {number: each.save_bytes() for number, each in self._generations.items()}
        files.save(self.path, self.layout, saved)

    def add_many(self, digests: Sequence[bytes], /) -> None:
        """Put 16-byte digests in."""
        numbers = _numbers(digests)
        with self._lock:
            while numbers:
                room = self._room()
                self._rotate().update(numbers[:room])
                self._added += min(room, len(numbers))
                numbers = numbers[room:]

    def maybe_many(self, digests: Sequence[bytes], /) -> list[bool]:
        """For each: `False` if it was not put in within the window."""
        numbers = _numbers(digests)
        with self._lock:
            self._rotate()
            found = [False] * len(numbers)
            for each in filter(None, reversed(self._generations.values())):
                found = [was or number in each for was, number in zip(found, numbers, strict=True)]
        return found

    def fullness(self) -> Fullness:
        """How full it is; every bit is looked at."""
        with self._lock:
            self._rotate()
            generations = list(self._generations.values())
            looked = [files.look(each.save_bytes()) for each in generations]
        right, ids = 1.0, 0.0
        for each, (fill, hashes) in zip(generations, looked, strict=True):
            bits = each.size_in_bits
            right *= 1.0 - fill**hashes
            ids -= (
                bits / hashes * log1p(-min(fill, 1 - 1 / bits))
            )  # with every bit set, nobody can tell how many
        fullest = max((fill for fill, _ in looked), default=0.0)
        return Fullness(
            ids=round(ids),
            capacity=self.layout.capacity,
            fill_ratio=fullest,
            false_positive_ratio=1.0 - right,
            bytes_used=sum(each.size_in_bits for each in generations) // 8,
            generations=len(generations),
        )

    def _room(self) -> int:
        """How many ids the newest generation takes. One that is full makes room for the next, ahead of its time.

        So the error rate holds also where a window's ids come at once: they lie in as many generations as otherwise,
        and are remembered for longer, which harms nothing.
        """
        self._rotate()
        capacity = self.layout.generation_capacity
        if self._added >= capacity:
            number, newest = next(reversed(self._generations.items()))
            self._added = _count(newest)  # the same id again takes no room
            if self._added >= capacity * FULL:
                if number - self._now() >= self.layout.steps:
                    return ROOM_BEYOND  # more ids than were asked for: the error rate gives, not the memory
                self._begin(number + 1)
        return max(1, capacity - self._added)

    def _now(self) -> int:
        return self.layout.number(self._clock.now_us())

    def _rotate(self) -> rbloom.Bloom:
        """The generation that takes ids now; those that are older than the window are let go."""
        if not self._loaded:
            self._load()
        number, generations = self._now(), self._generations
        for old in [each for each in generations if each < number - self.layout.steps]:
            del generations[old]
        newest = next(reversed(generations), None)
        if newest is None or newest < number:  # a clock that steps back makes nothing older
            return self._begin(number)
        return generations[newest]

    def _begin(self, number: int) -> rbloom.Bloom:
        self._added = 0
        begun = self._generations[number] = rbloom.Bloom(
            self.layout.generation_capacity, self.layout.generation_error_rate, index
        )
        return begun


def _count(generation: rbloom.Bloom) -> int:
    """How many ids it has, roughly; with every bit set nobody can tell."""
    return round(min(generation.approx_items, generation.size_in_bits))


def _numbers(digests: Sequence[bytes]) -> list[int]:
    """The digests as the numbers that rbloom takes for hashes: ours, since Python's own differ in each process."""
    read = int.from_bytes
    if not set(map(len, digests)) <= {DIGEST_BYTES}:
        raise PolicyInvalid(f"a filter takes digests of {DIGEST_BYTES} bytes; see semel.digests.digest")
    return [read(each, "big", signed=True) for each in digests]
