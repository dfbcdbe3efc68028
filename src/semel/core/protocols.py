"""The protocol of a store: five methods, the same for sync and async, and its capabilities."""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

from msgspec import Struct

from semel.core.commands import Answer, Item
from semel.errors import PolicyInvalid
from semel.types import Id
from semel.windows import WINDOW_MAX_S, exact_text

OnAnswer: TypeAlias = Callable[[Answer, Exception | None], None]
"""Called once, with the answer to an item or with the error that `asend` would raise."""

Listener: TypeAlias = Callable[[Id], None]
"""Called with the id of a record that was settled, released or forgotten; must not block."""


class Capabilities(Struct, frozen=True, kw_only=True):
    """The guarantees of a store; they select its contract tests, refuse bad pairs, and fill the docs table."""

    durable: bool
    """A confirmed write survives the end of every process."""
    exact: bool = True
    """Its answers are facts, not guesses."""
    fenced: bool = True
    """Writes after a claim act only while fence and owner match."""
    transactional: bool = False
    """The caller's own transaction can hold its records: an inbox is possible."""
    single_writer: bool = False
    """One open transaction blocks every other writer."""
    shared: bool = False
    """Other processes see the same records."""
    notifies: bool = False
    """`watch` reports changes made through this object."""
    instant: bool = False
    """`send` never waits, so calls are not batched."""
    audits: bool = False
    """The server writes the audit of its callers' actions: they write none."""
    endless: bool = False
    """It keeps records without end, and for more than 90 days: only `forget` or an operator removes one."""

    refreshes: bool = False
    """It starts windows again at each sighting, if a claim or mark asks for it."""

    def check_window(self, window_us: int, store: str, *, refresh: bool = False) -> None:
        """Raise `PolicyInvalid` for a window that a store of this name cannot promise to keep.

        `refresh`: it has to start again at each sighting.
        """
        if refresh and not self.refreshes:
            raise PolicyInvalid(
                f"{store} cannot start a window again at each sighting; leave out Policy.refresh_on_sight"
            )
        if window_us > WINDOW_MAX_S * 10**6 and not self.endless:
            raise PolicyInvalid(
                f"{store} cannot promise a window of {exact_text(window_us)}: it may lose records, or has no room for"
                " ever more of them; use sqlite:, postgresql:, or redis: with an append-only file and noeviction,"
                " or a window of 90d at most"
            )


@runtime_checkable
class Store(Protocol):
    """A blocking store. Thread-safe; `open` after a fork starts with new connections.

    `send` raises `StoreUnavailable` if the store does not answer, or answers single items with
    `Unavailable`. Either way a caller repeats the same item, with the same owner.
    """

    @property
    def name(self) -> str:
        """The name in errors and logs; never contains a password."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Its guarantees, as configured."""
        ...

    def open(self) -> None:
        """Connect and run the start checks; idempotent."""
        ...

    def close(self) -> None:
        """Close all connections; idempotent, and safe while another thread is inside `send`."""
        ...

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Execute the items, in order, in as few round trips as possible; returns answers by position."""
        ...

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Call `listener` on changes until the returned function is called; a no-op without `notifies`."""
        ...


@runtime_checkable
class HasAsyncTwin(Protocol):
    """A blocking store with a native async twin: one behind a network."""

    def twin(self) -> "AsyncStore":
        """Return the same store for an event loop, not yet connected."""
        ...


@runtime_checkable
class AsyncStore(Protocol):
    """The same store for an event loop, natively: no thread pool."""

    @property
    def name(self) -> str:
        """The name in errors and logs; never contains a password."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Its guarantees, as configured."""
        ...

    async def aopen(self) -> None:
        """Connect and run the start checks; idempotent."""
        ...

    async def aclose(self) -> None:
        """Close all connections; idempotent."""
        ...

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Execute the items, in order, in as few round trips as possible; returns answers by position."""
        ...

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Call `listener` on changes until the returned function is called; a no-op without `notifies`."""
        ...


@runtime_checkable
class StartsSingles(Protocol):
    """An async store that can start one plain item without a task: a lone caller then waits for nothing else."""

    def start(self, item: Item, done: OnAnswer, /) -> bool:
        """Send the item now and call `done` later, from the loop. `False`: nothing was sent, use `asend`.

        The item is carried out even if its caller stops waiting.
        """
        ...


AnyStore: TypeAlias = Store | AsyncStore

WrappedStore = TypeVar("WrappedStore", bound=AnyStore)


class _Wrapper(Generic[WrappedStore]):
    def __init__(self, store: WrappedStore) -> None:
        self._store: WrappedStore = store

    @property
    def name(self) -> str:
        """The name of the wrapped store."""
        return self._store.name

    @property
    def capabilities(self) -> Capabilities:
        """The guarantees of the wrapped store."""
        return self._store.capabilities

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Watch the wrapped store."""
        return self._store.watch(listener)


class StoreWrapper(_Wrapper[Store]):
    """A store that passes everything on to another one; a subclass adds to its calls."""

    def open(self) -> None:
        """Open the wrapped store."""
        self._store.open()

    def close(self) -> None:
        """Close the wrapped store."""
        self._store.close()

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Send to the wrapped store."""
        return self._store.send(items)


class AsyncStoreWrapper(_Wrapper[AsyncStore]):
    """The same for an event loop."""

    async def aopen(self) -> None:
        """Open the wrapped store."""
        await self._store.aopen()

    async def aclose(self) -> None:
        """Close the wrapped store."""
        await self._store.aclose()

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Send to the wrapped store."""
        return await self._store.asend(items)
