"""What a store must be: five methods, the same in both colours, and an honest list of its powers."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from msgspec import Struct

from semel.core.commands import Answer, Item
from semel.types import Id

Listener: TypeAlias = Callable[[Id], None]
"""Told the id of a record that was settled, released or forgotten; must not block."""


class Capabilities(Struct, frozen=True, kw_only=True):
    """What a store can promise; picks its contract tests, refuses bad pairs, fills the docs table."""

    durable: bool
    """An answered write survives the death of every process."""
    exact: bool = True
    """Its answers are facts, not guesses."""
    fenced: bool = True
    """Writes after a claim act only while fence and owner match."""
    transactional: bool = False
    """The caller's own transaction can hold its records: an inbox is possible."""
    single_writer: bool = False
    """One open transaction keeps out every other writer: beside the caller's own, nothing can be written."""
    shared: bool = False
    """Other processes see the same records."""
    notifies: bool = False
    """`watch` tells of changes made through this object."""
    instant: bool = False
    """`send` never waits, so callers are not gathered into batches."""
    audits: bool = False
    """Whoever is behind it writes the audit of what its callers do: they write none themselves."""


@runtime_checkable
class Store(Protocol):
    """A store that blocks. Thread-safe; `open` after a fork starts afresh.

    `send` raises `StoreUnavailable` when no answer can be had, or answers single items with
    `Unavailable`. Either way a caller repeats the same item, with the same owner.
    """

    @property
    def name(self) -> str:
        """How it is called in errors and logs; never holds a password."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can promise, as configured."""
        ...

    def open(self) -> None:
        """Connect and run the start checks; idempotent."""
        ...

    def close(self) -> None:
        """Let go of everything; idempotent, and safe while another thread is inside `send`."""
        ...

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Carry out the items, in order, in as few round trips as it takes; answers by position."""
        ...

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Tell `listener` of changes until the returned function is called; a no-op without `notifies`."""
        ...


@runtime_checkable
class HasAsyncTwin(Protocol):
    """A store that blocks and has a native async twin: one that lives behind a network."""

    def twin(self) -> "AsyncStore":
        """The same store for an event loop, not yet connected."""
        ...


@runtime_checkable
class AsyncStore(Protocol):
    """The same store for an event loop, natively: no thread pool."""

    @property
    def name(self) -> str:
        """How it is called in errors and logs; never holds a password."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can promise, as configured."""
        ...

    async def aopen(self) -> None:
        """Connect and run the start checks; idempotent."""
        ...

    async def aclose(self) -> None:
        """Let go of everything; idempotent."""
        ...

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Carry out the items, in order, in as few round trips as it takes; answers by position."""
        ...

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Tell `listener` of changes until the returned function is called; a no-op without `notifies`."""
        ...
