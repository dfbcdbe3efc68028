"""What a cache in front of the truth must be, in both colours, and what it holds: copies of committed facts."""

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from msgspec import Struct

from semel.core.backoff import backoff_s

__all__ = ["SEEN", "AsyncCache", "Breaker", "Cache", "Copy", "Counts", "Filter", "Fullness", "Put", "Stamp"]

Counts: TypeAlias = Mapping[str, int]
"""How often things happened since they were last told, by name."""


class Copy(Struct, frozen=True, gc=False, array_like=True):
    """What the truth said of a key: it is done, or (fence 0) it is marked. There is a copy of nothing else."""

    kind: Literal["done", "seen"]
    fence: int = 0
    settled_at: int = 0
    first_seen: int = 0
    value: bytes | None = None
    fingerprint: bytes | None = None
    """A claim with this one gets the same answer from the truth; with another, the truth must say."""


SEEN = Copy("seen")
"""The copy of a mark."""


class Stamp(Struct, frozen=True, gc=False):
    """What was known of the cache before the truth was asked; what a copy of the truth's answer must carry."""

    epoch: bytes
    """Changes when a key is forgotten, and with everything that makes a cache lose what it was told."""
    at_us: int
    """The cache's clock, or a little before it."""


class Put(Struct, frozen=True, gc=False):
    """A copy to be written, unless the cache has forgotten something since the stamp, or its time is over."""

    digest: bytes
    copy: Copy
    stamp: Stamp
    rest_us: int
    """How long it may live, counted from the stamp."""


@runtime_checkable
class Cache(Protocol):
    """A cache that blocks. Every method but `stamp` raises a `StoreError` when the cache is out of reach."""

    @property
    def name(self) -> str:
        """How it is called in errors and logs; never holds a password."""
        ...

    @property
    def shared(self) -> bool:
        """Whether every process sees the same copies, and so the same forgetting."""
        ...

    def open(self) -> None:
        """Connect; idempotent."""
        ...

    def close(self) -> None:
        """Let go of everything; idempotent."""
        ...

    def look(self, digests: Sequence[bytes], counts: Counts) -> list[Copy | None]:
        """The copies of these keys that are still good, in one round trip. `counts` are added up on the way."""
        ...

    def stamp(self, digest: bytes) -> Stamp | None:
        """What is known of the cache by now, without asking it; `None`: nothing, so nothing can be put."""
        ...

    def put(self, puts: Sequence[Put], counts: Counts) -> int:
        """Write the copies that are still true; how many were. One round trip."""
        ...

    def invalidate(self, digests: Sequence[tuple[bytes, int]]) -> None:
        """Drop these copies, and every copy of theirs with a smaller fence that is under way."""
        ...

    def clear(self) -> None:
        """Drop all copies, and all that are under way."""
        ...

    def read_counts(self) -> dict[str, int]:
        """Return the sums of all counts that were ever sent."""
        ...


@runtime_checkable
class AsyncCache(Protocol):
    """The same cache for an event loop."""

    @property
    def name(self) -> str:
        """How it is called in errors and logs; never holds a password."""
        ...

    @property
    def shared(self) -> bool:
        """Whether every process sees the same copies, and so the same forgetting."""
        ...

    async def aopen(self) -> None:
        """Connect; idempotent."""
        ...

    async def aclose(self) -> None:
        """Let go of everything; idempotent."""
        ...

    async def look(self, digests: Sequence[bytes], counts: Counts) -> list[Copy | None]:
        """The copies of these keys that are still good, in one round trip. `counts` are added up on the way."""
        ...

    def stamp(self, digest: bytes) -> Stamp | None:
        """What is known of the cache by now, without asking it; `None`: nothing, so nothing can be put."""
        ...

    async def put(self, puts: Sequence[Put], counts: Counts) -> int:
        """Write the copies that are still true; how many were. One round trip."""
        ...

    async def invalidate(self, digests: Sequence[tuple[bytes, int]]) -> None:
        """Drop these copies, and every copy of theirs with a smaller fence that is under way."""
        ...

    async def clear(self) -> None:
        """Drop all copies, and all that are under way."""
        ...

    async def read_counts(self) -> dict[str, int]:
        """Return the sums of all counts that were ever sent."""
        ...


class Fullness(Struct, frozen=True, kw_only=True):
    """How full a filter is, and what that costs."""

    ids: int
    """How many it holds, roughly."""
    capacity: int
    """How many it is made for, in one window."""
    fill_ratio: float
    """The share of bits that are set, in its fullest generation; at capacity it is one half."""
    false_positive_ratio: float
    """The chance that it says "maybe" to an id that it never saw, as it stands."""
    bytes_used: int
    generations: int

    @property
    def saturated(self) -> bool:
        """Whether more was put in than it is made for."""
        return self.fill_ratio > SATURATED


SATURATED = 0.52
"""Half of the bits are set at capacity; a little above it, chance is no longer the reason."""


@runtime_checkable
class Filter(Protocol):
    """A set that may be wrong in one direction: "no" means never put in here, "maybe" means nothing at all.

    Ids are 16-byte digests (`semel.core.ids.digest`). Nothing that a filter says is an answer to a delivery.
    """

    @property
    def instant(self) -> bool:
        """Whether it answers without I/O, so that an event loop may ask it."""
        ...

    def open(self) -> None:
        """Load or connect; idempotent."""
        ...

    def close(self) -> None:
        """Save or disconnect; idempotent."""
        ...

    def add_many(self, digests: Sequence[bytes], /) -> None:
        """Put them in."""
        ...

    def maybe_many(self, digests: Sequence[bytes], /) -> list[bool]:
        """For each: `False` if it was not put in within the window, `True` if it may have been."""
        ...

    def fullness(self) -> Fullness:
        """How full it is; takes a look at every bit."""
        ...


PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 15.0


class Breaker:
    """Says whether the cache is worth asking. After a failure: not for a while, longer each time."""

    def __init__(self, steady_s: Callable[[], float]) -> None:
        self._steady_s = steady_s
        self._failures = 0
        self._until = 0.0
        self.after_fork()

    def after_fork(self) -> None:
        """Another thread of the parent may have held the lock."""
        self._lock = Lock()

    @property
    def is_open(self) -> bool:
        """Whether the cache is being left alone."""
        return self._failures > 0

    def allows(self) -> bool:
        """Whether to ask. When the pause is over one caller tries, and the others wait for what comes of it."""
        if not self._failures:
            return True
        with self._lock:
            if self._steady_s() < self._until:
                return False
            self._pause()
            return True

    def note_failure(self) -> bool:
        """Note a call without an answer; returns whether it is the first in a row."""
        with self._lock:
            self._failures += 1
            self._pause()
            return self._failures == 1

    def note_success(self) -> None:
        """Note an answer of the cache."""
        if self._failures:
            with self._lock:
                self._failures = 0

    def _pause(self) -> None:
        self._until = self._steady_s() + backoff_s(self._failures - 1, PAUSE_FIRST_S, PAUSE_MAX_S)
