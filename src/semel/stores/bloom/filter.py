"""A Bloom filter with rotating generations: it forgets ids that are older than its window, and no younger ones."""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from math import ceil, log1p
from operator import index
from pathlib import Path
from struct import Struct as Form
from threading import Lock

import msgspec
import rbloom
from msgspec import Struct

from semel.clock import Clock, SystemClock
from semel.errors import PolicyInvalid, StoreRefused
from semel.runtime.process import restart_after_fork
from semel.stores.tiered.protocols import Fullness
from semel.windows import Duration, duration_us

__all__ = ["Bloom", "BloomLayout", "Damaged", "layout", "load", "look", "save"]

CAPACITY_MAX = 10**10
"""About 22 GB of bits; a larger number is probably a mistake."""
ERROR_MIN, ERROR_MAX = 1e-9, 0.1
"""Above the maximum more than every tenth new id is looked up in vain, so a filter saves nothing; at 0.5 it would have
no hash left."""
STEPS_MAX = 32


class BloomLayout(Struct, frozen=True, kw_only=True):
    """A window divided into steps. A generation holds the ids of one step; a window and one more step are kept.

    So an added id is found for a whole window, and forgotten within one step after it.
    """

    capacity: int
    window_us: int
    error_rate: float
    steps: int

    @property
    def step_us(self) -> int:
        """How long ids are added to one generation."""
        return -(-self.window_us // self.steps)

    @property
    def generations(self) -> int:
        """How many generations are searched."""
        return self.steps + 1

    @property
    def generation_capacity(self) -> int:
        """The capacity of one generation, in ids."""
        return ceil(self.capacity / self.steps)

    @property
    def generation_error_rate(self) -> float:
        """The error rate of one generation; all together have the configured error rate."""
        return self.error_rate / self.generations

    def number(self, now_us: int) -> int:
        """Return the number of the generation at this time."""
        return now_us // self.step_us


def layout(capacity: int, window: Duration, error_rate: float, steps: int) -> BloomLayout:
    """Check the settings and return their layout. Raises `PolicyInvalid`, which says what to change."""
    if type(capacity) is not int or not 1 <= capacity <= CAPACITY_MAX:
        raise PolicyInvalid(
            f"capacity is {capacity!r}; it is the number of ids per window, 1 to {CAPACITY_MAX:,}"
        )
    if not ERROR_MIN <= error_rate <= ERROR_MAX:
        raise PolicyInvalid(
            f"error_rate is {error_rate!r}; it is the share of new ids that look known, {ERROR_MIN} to {ERROR_MAX}"
        )
    if type(steps) is not int or not 1 <= steps <= STEPS_MAX:
        raise PolicyInvalid(f"steps is {steps!r}; a window has 1 to {STEPS_MAX} steps")
    window_us = duration_us(window)
    if window_us < steps:
        raise PolicyInvalid(f"a window of {window!r} is too short for {steps} steps; make it longer")
    return BloomLayout(capacity=capacity, window_us=window_us, error_rate=float(error_rate), steps=steps)


MAGIC = b"semelblm"
VERSION = 1
_HEAD = Form(">8sHI32s")
"""Magic, version, length of the description, checksum of that length and of all bytes that follow."""
_LENGTH = Form(">I")
_RBLOOM_HEAD = 8
"""The bytes that rbloom saves begin with the number of hashes."""


class Damaged(Exception):
    """The file was written by semel, but its content has changed."""


class _FilterSettings(msgspec.Struct):
    layout: BloomLayout
    generations: list[tuple[int, int]]
    """Number and length of each generation."""


def save(path: Path, layout: BloomLayout, generations: dict[int, bytes]) -> None:
    """Write a new file beside the old one, sync it to disk, and only then replace the old one."""
    described = msgspec.json.encode(
        _FilterSettings(layout, [(number, len(bits)) for number, bits in generations.items()])
    )
    checksum = sha256(_LENGTH.pack(len(described)) + described)
    for bits in generations.values():
        checksum.update(bits)
    beside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with beside.open("xb") as file:
            file.write(_HEAD.pack(MAGIC, VERSION, len(described), checksum.digest()))
            file.write(described)
            for bits in generations.values():
                file.write(bits)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        with suppress(FileNotFoundError):
            beside.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: Path, layout: BloomLayout) -> dict[int, bytes]:
    """Return the generations by number; none without a file. Raises `Damaged`, or `StoreRefused` for a foreign file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StoreRefused(f"{path} cannot be read: {error}") from error
    if content and not content.startswith(MAGIC[: len(content)]):
        raise StoreRefused(f"{path} is not a filter of semel; it is not changed. Name another path")
    if len(content) < _HEAD.size:
        raise Damaged(f"{path} is cut short")
    _, version, length, checksum = _HEAD.unpack_from(content)
    if version != VERSION:
        raise StoreRefused(f"{path} was written by another version of semel; remove it, or name another path")
    body = memoryview(content)[_HEAD.size :]
    found_sum = sha256(_LENGTH.pack(length))
    found_sum.update(body)
    if found_sum.digest() != checksum:
        raise Damaged(f"{path} has a wrong checksum")
    about = msgspec.json.decode(bytes(body[:length]), type=_FilterSettings)
    if about.layout != layout:
        raise StoreRefused(
            f"{path} holds a filter with other settings ({_shorten(about.layout)}, not {_shorten(layout)}); remove it,"
            " or name another path"
        )
    found: dict[int, bytes] = {}
    at = length
    for number, size in about.generations:
        found[number] = bytes(body[at : at + size])
        at += size
    return found


def look(bits: bytes) -> tuple[float, int]:
    """Return the share of bits that are set, and the number of hashes."""
    body = bits[_RBLOOM_HEAD:]
    return int.from_bytes(body).bit_count() / (8 * len(body)), int.from_bytes(bits[:_RBLOOM_HEAD], "little")


def _shorten(layout: BloomLayout) -> str:
    return (
        f"capacity {layout.capacity}, window {layout.window_us / 1e6:g} s, error_rate {layout.error_rate},"
        f" steps {layout.steps}"
    )


DIGEST_BYTES = 16
FULL = 0.98
"""A generation with this share of its capacity counts as full: its number of distinct ids is only an estimate."""
ROOM_BEYOND = 10_000
"""How many ids are added at once to a filter that is over its capacity."""

_log = logging.getLogger("semel")


class Bloom:
    """Holds the ids of one window in about two bytes each. Answers "no" for ids it never saw, "maybe" for all others.

    `capacity`: the number of ids per window; `error_rate`: the share of unseen ids that get a "maybe", while the
    filter is within its capacity. With a `path` it is loaded at `open` and saved at `close`; one process per file.
    Ids that were not saved, or cannot be loaded, are unknown: that only costs speed.
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
        """Whether the file was damaged, so that the filter began empty."""
        self._clock = clock or SystemClock()
        self._generations: dict[int, rbloom.Bloom] = {}
        """Generations by number, oldest first."""
        self._added = 0
        """How many ids were added to the newest generation, perhaps some of them twice."""
        self._loaded = path is None
        self.after_fork()
        restart_after_fork(self)

    def after_fork(self) -> None:
        """Replace the lock: another thread of the parent may have held it."""
        self._lock = Lock()

    def open(self) -> None:
        """Load the saved filter; idempotent. Raises `StoreRefused` for a file that is not of this filter."""
        with self._lock:
            if not self._loaded:
                self._load()

    def _load(self) -> None:
        assert self.path is not None
        try:
            saved = load(self.path, self.layout)
        except Damaged as error:
            self.damaged = True
            _log.warning("%s; the filter begins empty, which costs speed until it has seen more", error)
            saved = {}
        for number, bits in sorted(saved.items()):
            self._generations[number] = rbloom.Bloom.load_bytes(bits, index)
            self._added = _count(self._generations[number])
        self._loaded = True

    def close(self) -> None:
        """Save the filter, if it has a path and was loaded; idempotent."""
        if self.path is not None and self._loaded:
            self.save()

    def save(self) -> None:
        """Replace the file as a whole, or leave it unchanged. Raises `PolicyInvalid` without a path."""
        if self.path is None:
            raise PolicyInvalid("this filter has no path to save to; give it one")
        with self._lock:
            self._rotate()
            saved = {number: each.save_bytes() for number, each in self._generations.items()}
        save(self.path, self.layout, saved)

    def add_many(self, digests: Sequence[bytes], /) -> None:
        """Add 16-byte digests."""
        numbers = _numbers(digests)
        with self._lock:
            while numbers:
                room = self._room()
                self._rotate().update(numbers[:room])
                self._added += min(room, len(numbers))
                numbers = numbers[room:]

    def maybe_many(self, digests: Sequence[bytes], /) -> list[bool]:
        """Return for each digest: `False` if it was not added within the window."""
        numbers = _numbers(digests)
        with self._lock:
            self._rotate()
            found = [False] * len(numbers)
            for each in filter(None, reversed(self._generations.values())):
                found = [was or number in each for was, number in zip(found, numbers, strict=True)]
        return found

    def fullness(self) -> Fullness:
        """Return how full it is; reads every bit."""
        with self._lock:
            self._rotate()
            generations = list(self._generations.values())
            looked = [look(each.save_bytes()) for each in generations]
        right, ids = 1.0, 0.0
        for each, (fill, hashes) in zip(generations, looked, strict=True):
            bits = each.size_in_bits
            right *= 1.0 - fill**hashes
            ids -= (
                bits / hashes * log1p(-min(fill, 1 - 1 / bits))
            )  # with every bit set, the number is unknown
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
        """Return how many ids fit into the newest generation. If it is full, the next one begins ahead of time.

        So the error rate also holds if all ids of a window come at once: they are in as many generations as usual,
        and are remembered for longer, which does no harm.
        """
        self._rotate()
        capacity = self.layout.generation_capacity
        if self._added >= capacity:
            number, newest = next(reversed(self._generations.items()))
            self._added = _count(newest)  # a repeated id takes no room
            if self._added >= capacity * FULL:
                if number - self._now() >= self.layout.steps:
                    return ROOM_BEYOND  # over capacity: the error rate grows, not the memory
                self._begin(number + 1)
        return max(1, capacity - self._added)

    def _now(self) -> int:
        return self.layout.number(self._clock.now_us())

    def _rotate(self) -> rbloom.Bloom:
        """Drop generations that are older than the window; returns the current one."""
        if not self._loaded:
            self._load()
        number, generations = self._now(), self._generations
        for old in [each for each in generations if each < number - self.layout.steps]:
            del generations[old]
        newest = next(reversed(generations), None)
        if newest is None or newest < number:  # if the clock steps back, the newest generation stays
            return self._begin(number)
        return generations[newest]

    def _begin(self, number: int) -> rbloom.Bloom:
        self._added = 0
        begun = self._generations[number] = rbloom.Bloom(
            self.layout.generation_capacity, self.layout.generation_error_rate, index
        )
        return begun


def _count(generation: rbloom.Bloom) -> int:
    """Return about how many ids it has; with every bit set the number is unknown."""
    return round(min(generation.approx_items, generation.size_in_bits))


def _numbers(digests: Sequence[bytes]) -> list[int]:
    """Return the digests as hashes for rbloom. Python's own hashes differ in each process."""
    read = int.from_bytes
    if not set(map(len, digests)) <= {DIGEST_BYTES}:
        raise PolicyInvalid(f"a filter takes digests of {DIGEST_BYTES} bytes; see semel.core.ids.digest")
    return [read(each, "big", signed=True) for each in digests]
