"""Code that all inboxes share: statements, outcomes of deliveries, and retries of transactions."""

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from semel import codec
from semel.client.items import ItemBuilder
from semel.connections import AsyncCallerConnection, CallerConnection, Talk, code_of
from semel.core import ids
from semel.core.backoff import backoff_s
from semel.errors import (
    LateEvent,
    ModeMismatch,
    NoTransaction,
    OutcomeUnknown,
    PayloadMismatch,
    StillRunning,
    StoreUnavailable,
    UsageError,
    WrongDatabase,
)
from semel.runtime.jitter import jitter
from semel.types import Busy, Delivery, Done, Errored, Late, Mismatch, Outcome, Unknown

__all__ = [
    "InboxBase",
    "InboxStatements",
    "PartitionMissing",
    "Tell",
    "Value",
    "Windows",
    "aretry",
    "is_undone",
    "retry",
]

ATTEMPT_BYTES = 16
Windows: TypeAlias = Mapping[tuple[str, str, str], int]
Tell: TypeAlias = Callable[[Sequence[str], Sequence[bool | Outcome[Any]], str], None]
"""Called with the keys, whether each was new (or its outcome, if it was not marked), and their event type."""


class PartitionMissing(StoreUnavailable):
    """There is no partition for the time inside an id: nobody has created partitions for days."""


class Value(NamedTuple):
    """The value stored with a mark; `None`: nothing."""

    encoded: bytes | None


class InboxStatements(ABC):
    """The statements of one inbox. It has its consumer and its attempt, and no state of marks."""

    def __init__(self, plan: ItemBuilder) -> None:
        self.tenant: str = plan.tenant
        self.consumer: str = plan.consumer
        self.lock_wait_s: float = plan.policy.lock_wait_s
        self.attempt: bytes = os.urandom(ATTEMPT_BYTES)
        """The owner of the marks; it distinguishes them from those of other attempts."""

    @property
    def wait_ms(self) -> int:
        """The lock timeout; never 0, which would mean for ever."""
        return max(1, round(self.lock_wait_s * 1000))

    def may_read_settings(self, _handle: CallerConnection | AsyncCallerConnection) -> bool:
        """Whether a first use may read the settings on the caller's connection."""
        return False

    def read_settings(self) -> Talk[Windows | None]:
        """Return the stored windows, read on the caller's connection; `None`: the store must be opened first."""
        yield from ()
        return None

    def make_partitions(self) -> None:
        """Create the partitions that `first_many` has missed. Raises `PartitionMissing`."""
        raise PartitionMissing("this inbox has no partitions")

    async def amake_partitions(self) -> None:
        """The same for event loops."""
        self.make_partitions()

    @abstractmethod
    def first_many(
        self, keys: Sequence[str], event_type: str, window_us: int, fingerprint: bytes | None = None
    ) -> Talk[list[bool]]:
        """Mark distinct keys, all or none. Returns which of them were new.

        Raises `PayloadMismatch` if a stored fingerprint differs; a fingerprint goes with a single key. Raises
        `LateEvent` for an id that is too old to be looked up, and `PartitionMissing`: call `make_partitions`.
        """

    @abstractmethod
    def unmark(self, keys: Sequence[str]) -> Talk[None]:
        """Remove marks that this inbox made in the open transaction."""

    @abstractmethod
    def store(self, key: str, encoded: bytes) -> Talk[None]:
        """Store a value with the mark. Raises `UsageError` if there is no mark."""

    @abstractmethod
    def replay(self, key: str) -> Talk[Value | None]:
        """Return the value stored with the mark; `None` if there is no mark."""

    @abstractmethod
    def committed(self, key: str) -> bool:
        """Whether the mark of this attempt is committed, as seen from outside the transaction."""

    @abstractmethod
    async def acommitted(self, key: str) -> bool:
        """The same for event loops."""

    def mismatch(self, key: str) -> PayloadMismatch:
        """Return the error for a key that was used with another payload."""
        return PayloadMismatch(f"{key} was marked with another payload: each event needs a key of its own")

    def not_marked(self, key: str) -> UsageError:
        """Return the error for a value without a mark."""
        return UsageError(f"{key!r} is not marked; call first({key!r}) before store()")


T = TypeVar("T")
UNDONE: frozenset[str | int | None] = frozenset(("40001", "40P01", 517))
"""Serialisation failure and deadlock in PostgreSQL; in SQLite, a write after a stale read."""
TRIES_MAX = 10
PAUSE_MIN_S, PAUSE_MAX_S = 0.005, 0.5


def is_undone(error: BaseException) -> bool:
    """Whether the database asks to retry the whole transaction, with any driver."""
    return code_of(error) in UNDONE


def retry(transaction: Callable[[], T], *, tries_max: int = TRIES_MAX) -> T:
    """Call `transaction` until the database does not undo it; it must open, commit and roll back its own transaction.

    Other errors are raised at once, and this one too after `tries_max`.
    """
    for tries in range(1, tries_max):
        try:
            return transaction()
        except Exception as error:
            if not is_undone(error):
                raise
        time.sleep(_pause_s(tries))
    return transaction()


async def aretry(transaction: Callable[[], Awaitable[T]], *, tries_max: int = TRIES_MAX) -> T:
    """The same for event loops."""
    for tries in range(1, tries_max):
        try:
            return await transaction()
        except Exception as error:
            if not is_undone(error):
                raise
        await asyncio.sleep(_pause_s(tries))
    return await transaction()


def _pause_s(tries: int) -> float:
    """Return a growing random pause, so that conflicting transactions do not collide again."""
    return jitter.uniform(0, backoff_s(tries, PAUSE_MIN_S, PAUSE_MAX_S))


class InboxBase:
    """Code that the sync and the async inbox share. It holds no state: after a rollback a key is new again."""

    def __init__(self, words: InboxStatements, plan: ItemBuilder, tell: Tell | None) -> None:
        self._words = words
        self._plan = plan
        self._tell = tell

    @staticmethod
    def _spread(new: Sequence[bool], first_at: Sequence[int], place_of: Sequence[int]) -> list[bool]:
        """Return which of the given keys are new; a later copy of a key is not."""
        return [new[place] and first_at[place] == at for at, place in enumerate(place_of)]

    def _report(self, keys: Sequence[str], firsts: Sequence[bool | Outcome[Any]], event_type: str) -> None:
        """Report marked keys to the client's hooks."""
        if self._tell is not None:
            self._tell(keys, firsts, self._type(event_type))

    def _report_batch(
        self, deliveries: Sequence[Delivery[Any]], outcomes: Sequence[Outcome[None]]
    ) -> Sequence[Outcome[None]]:
        """Report the outcomes of a batch, and return them."""
        if self._tell is not None:
            for delivery, outcome in zip(deliveries, outcomes, strict=True):
                first = not outcome.replayed if isinstance(outcome, Done) else outcome
                self._report((delivery.key,), (first,), delivery.event_type)
        return outcomes

    def _window_us(self, stored: Windows, event_type: str) -> int:
        return self._plan.window_us(stored, event_type)

    def _type(self, event_type: str) -> str:
        return event_type or self._plan.policy.event_type

    def _encode(self, value: Any) -> bytes:
        return codec.encode(value, bytes_max=self._plan.policy.value_bytes_max)

    @staticmethod
    def _done_outcome(found: Value | None) -> Done[Any] | None:
        if found is None:
            return None
        if found.encoded is None or found.encoded[:1] == b"x":
            return Done(None, replayed=True, kept=False, reason=codec.reason_in(found.encoded))
        return Done(codec.decode(found.encoded), replayed=True)


def by_type(deliveries: Sequence[Delivery[Any]]) -> dict[tuple[str, bytes | None], list[int]]:
    """Group the positions of the deliveries by event type and fingerprint; one statement marks a group."""
    places: dict[tuple[str, bytes | None], list[int]] = {}
    for place, delivery in enumerate(deliveries):
        places.setdefault((delivery.event_type, delivery.fingerprint), []).append(place)
    return places


def hash_fingerprint(fingerprint: bytes | None) -> bytes | None:
    """Return the fingerprint as stored in records."""
    return None if fingerprint is None else ids.fingerprint(fingerprint)


def is_for_all(error: Exception) -> bool:
    """Whether an error concerns the whole transaction."""
    return is_undone(error) or isinstance(
        error, NoTransaction | WrongDatabase | ModeMismatch | PartitionMissing
    )


def outcome_of(error: Exception) -> Outcome[None]:
    """Return the outcome of a delivery that could not run."""
    if isinstance(error, StillRunning):
        return Busy(error.retry_after_s)
    if isinstance(error, OutcomeUnknown):
        return Unknown(0, error)
    if isinstance(error, PayloadMismatch):
        return Mismatch()
    if isinstance(error, LateEvent):
        return Late(error.age_s)
    return Errored(error, attempt=1)
