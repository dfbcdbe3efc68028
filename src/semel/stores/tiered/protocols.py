"""The protocols of a cache in front of the truth and of a filter, and the copies that a cache holds."""

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from msgspec import Struct

from semel.core.backoff import backoff_s

__all__ = [
    "SEEN",
    "AsyncCache",
    "Breaker",
    "Cache",
    "Copy",
    "CopyWrite",
    "Counts",
    "Filter",
    "Fullness",
    "Stamp",
]

Counts: TypeAlias = Mapping[str, int]
"""How often things happened since the last report to the cache, by name."""


class Copy(Struct, frozen=True, gc=False, array_like=True):
    """A copy of the truth's answer for a key: done, or (with fence 0) marked. No other answer is copied."""

    kind: Literal["done", "seen"]
    fence: int = 0
    settled_at: int = 0
    first_seen: int = 0
    value: bytes | None = None
    fingerprint: bytes | None = None
    """The copy answers claims with this fingerprint. With another one, the truth must decide."""


SEEN = Copy("seen")
"""The copy of a mark."""


class Stamp(Struct, frozen=True, gc=False):
    """The state of the cache before the truth was asked. Each copy of the truth's answer carries it."""

    epoch: bytes
    """Changes when a key is forgotten, and when the cache may have lost what was written to it."""
    at_us: int
    """The time of the cache's clock, or a little earlier."""


class CopyWrite(Struct, frozen=True, gc=False):
    """A copy to write, unless the cache has forgotten a key since the stamp, or the copy has expired."""

    digest: bytes
    copy: Copy
    stamp: Stamp
    rest_us: int
    """How long the copy may live, from the stamp on."""


@runtime_checkable
class Cache(Protocol):
    """A blocking cache. Every method except `stamp` raises a `StoreError` if the cache is unavailable."""

    @property
    def name(self) -> str:
        """The name in errors and logs; never contains a password."""
        ...

    @property
    def shared(self) -> bool:
        """Whether all processes see the same copies, so that a forgotten key is forgotten for all."""
        ...

    def open(self) -> None:
        """Connect; idempotent."""
        ...

    def close(self) -> None:
        """Close all connections; idempotent."""
        ...

    def look(self, digests: Sequence[bytes], counts: Counts) -> list[Copy | None]:
        """Return the valid copies of these keys, and add `counts` to the stored counts. One round trip."""
        ...

    def stamp(self, digest: bytes) -> Stamp | None:
        """Return the last known state of the cache, without I/O; `None`: unknown, so no copy can be written."""
        ...

    def put(self, puts: Sequence[CopyWrite], counts: Counts) -> int:
        """Write the copies that are still valid; returns how many. One round trip."""
        ...

    def invalidate(self, digests: Sequence[tuple[bytes, int]]) -> None:
        """Drop these copies, and refuse pending copies of the same keys with a smaller fence."""
        ...

    def clear(self) -> None:
        """Drop all copies, and refuse all pending ones."""
        ...

    def read_counts(self) -> dict[str, int]:
        """Return the sums of all counts that were ever reported."""
        ...


@runtime_checkable
class AsyncCache(Protocol):
    """The same cache for an event loop."""

    @property
    def name(self) -> str:
        """The name in errors and logs; never contains a password."""
        ...

    @property
    def shared(self) -> bool:
        """Whether all processes see the same copies, so that a forgotten key is forgotten for all."""
        ...

    async def aopen(self) -> None:
        """Connect; idempotent."""
        ...

    async def aclose(self) -> None:
        """Close all connections; idempotent."""
        ...

    async def look(self, digests: Sequence[bytes], counts: Counts) -> list[Copy | None]:
        """Return the valid copies of these keys, and add `counts` to the stored counts. One round trip."""
        ...

    def stamp(self, digest: bytes) -> Stamp | None:
        """Return the last known state of the cache, without I/O; `None`: unknown, so no copy can be written."""
        ...

    async def put(self, puts: Sequence[CopyWrite], counts: Counts) -> int:
        """Write the copies that are still valid; returns how many. One round trip."""
        ...

    async def invalidate(self, digests: Sequence[tuple[bytes, int]]) -> None:
        """Drop these copies, and refuse pending copies of the same keys with a smaller fence."""
        ...

    async def clear(self) -> None:
        """Drop all copies, and refuse all pending ones."""
        ...

    async def read_counts(self) -> dict[str, int]:
        """Return the sums of all counts that were ever reported."""
        ...


class Fullness(Struct, frozen=True, kw_only=True):
    """How full a filter is, and its error rate."""

    ids: int
    """About how many ids it holds."""
    capacity: int
    """For how many ids per window it was created."""
    fill_ratio: float
    """The share of bits that are set, in its fullest generation; at capacity it is one half."""
    false_positive_ratio: float
    """The current chance that it answers "maybe" for an id that it never saw."""
    bytes_used: int
    generations: int

    @property
    def saturated(self) -> bool:
        """Whether it holds more ids than its capacity."""
        return self.fill_ratio > SATURATED


SATURATED = 0.52
"""At capacity half of the bits are set; this is enough above one half to rule out chance."""


@runtime_checkable
class Filter(Protocol):
    """A set that errs in one direction: "no" means that the id was never added, "maybe" means nothing.

    Ids are 16-byte digests (`semel.core.ids.digest`). A filter alone never decides the answer to a delivery.
    """

    @property
    def instant(self) -> bool:
        """Whether it answers without I/O, so that an event loop may call it."""
        ...

    def open(self) -> None:
        """Load or connect; idempotent."""
        ...

    def close(self) -> None:
        """Save or disconnect; idempotent."""
        ...

    def add_many(self, digests: Sequence[bytes], /) -> None:
        """Add the ids."""
        ...

    def maybe_many(self, digests: Sequence[bytes], /) -> list[bool]:
        """Return for each id: `False` if it was not added within the window, `True` if it may have been."""
        ...

    def fullness(self) -> Fullness:
        """Return how full it is; reads every bit."""
        ...


PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 15.0


class Breaker:
    """Decides whether to call the cache. After a failure it pauses, longer each time."""

    def __init__(self, steady_s: Callable[[], float]) -> None:
        self._steady_s = steady_s
        self._failures = 0
        self._until = 0.0
        self.after_fork()

    def after_fork(self) -> None:
        """Replace the lock: another thread of the parent may have held it."""
        self._lock = Lock()

    @property
    def is_open(self) -> bool:
        """Whether the cache is skipped because of failures."""
        return self._failures > 0

    def allows(self) -> bool:
        """Whether to call the cache. After the pause one caller tries; the others skip it until that call ends."""
        if not self._failures:
            return True
        with self._lock:
            if self._steady_s() < self._until:
                return False
            self._pause()
            return True

    def record_failure(self) -> bool:
        """Note that the cache did not answer; returns whether it is the first failure in a row."""
        with self._lock:
            self._failures += 1
            self._pause()
            return self._failures == 1

    def record_success(self) -> None:
        """Note that the cache answered."""
        if self._failures:
            with self._lock:
                self._failures = 0

    def _pause(self) -> None:
        self._until = self._steady_s() + backoff_s(self._failures - 1, PAUSE_FIRST_S, PAUSE_MAX_S)
