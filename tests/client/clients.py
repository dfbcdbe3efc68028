"""The one table of clients that these tests run on, and the stores that strike them."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import wraps
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

import semel
from semel.clock import SystemClock
from semel.core.commands import Answer, Claim, Item, Settle
from semel.core.protocols import AsyncStore, Capabilities, Listener, Store, StoreWrapper
from semel.errors import StoreUnavailable
from semel.stores.memory.store import MemoryStore
from semel.stores.sqlite import SqliteStore

GUARD_S = 60.0
"""How long a test waits for something that must happen: reached only when it fails."""


class Hasty(SystemClock):
    """The computer's clock, for a store: a test makes time pass without waiting for it."""

    def __init__(self) -> None:
        self._ahead_us = 0

    def now_us(self) -> int:
        return super().now_us() + self._ahead_us

    def steady_s(self) -> float:
        return super().steady_s() + self._ahead_us / 1e6

    def skip(self, s: float) -> None:
        self._ahead_us += round(s * 1e6)


class Spy(StoreWrapper):
    """A store that notes what it is sent, and strikes where it is told to."""

    def __init__(self, store: Store, *, instant: bool | None = None) -> None:
        super().__init__(store)
        self._instant = instant
        self._lock = Lock()
        self.batches: list[list[Item]] = []
        self.claims_answered = 0
        self.before: Callable[[list[Item]], None] = lambda _items: None
        self.after: Callable[[list[Item]], None] = lambda _items: None

    @property
    def capabilities(self) -> Capabilities:
        given = super().capabilities
        return given if self._instant is None else replace(given, instant=self._instant)

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        with self._lock:
            self.batches.append(list(items))
        self.before(list(items))
        answers = self._store.send(items)
        with self._lock:
            self.claims_answered += sum(isinstance(item, Claim) for item in items)
        self.after(list(items))
        return answers

    def sent(self, kind: type) -> list[Any]:
        """All items of a kind so far."""
        with self._lock:
            return [item for batch in self.batches for item in batch if isinstance(item, kind)]

    def clear(self) -> None:
        with self._lock:
            self.batches.clear()


class Native:
    """The same in an event loop, without a thread: what a networked store will be."""

    def __init__(self, spy: Spy) -> None:
        self.spy = spy
        self.opened = 0
        self.pace: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0)

    @property
    def name(self) -> str:
        return "native:"

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.spy.capabilities, instant=False)

    async def aopen(self) -> None:
        await asyncio.sleep(0)
        self.opened += 1

    async def aclose(self) -> None:
        await asyncio.sleep(0)

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        await self.pace()
        answers = self.spy.send(items)
        await self.pace()
        return answers

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        return self.spy.watch(listener)


def down(kind: type = object) -> Callable[[list[Item]], None]:
    """Strike every batch that has such an item."""

    def strike(items: list[Item]) -> None:
        if any(isinstance(item, kind) for item in items):
            raise StoreUnavailable("out of reach")

    return strike


class Gate:
    """A handler that holds its claim until the test lets it go."""

    def __init__(self) -> None:
        self.entered = Event()
        self.opened = Event()
        self.ran = 0
        self._lock = Lock()

    def pass_(self, value: Any = "value") -> Any:
        with self._lock:
            self.ran += 1
        self.entered.set()
        assert self.opened.wait(GUARD_S)
        return value

    async def apass(self, value: Any = "value") -> Any:
        with self._lock:
            self.ran += 1
        self.entered.set()
        await happens(self.opened)
        return value


async def in_thread(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Await what blocks, in a thread of its own: a pool would hold up the fifth of fifty callers."""
    ended: Future[Any] = Future()

    ended.set_running_or_notify_cancel()  # whoever awaits may leave; the call goes on

    def call() -> None:
        try:
            ended.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever awaits
            ended.set_exception(error)

    Thread(target=call, daemon=True).start()
    return await asyncio.wrap_future(ended)


async def happens(event: Event) -> None:
    """Wait for a thread's event without holding up the loop."""
    assert await in_thread(event.wait, GUARD_S), "it never happened"


class Either:
    """A client of either colour behind awaited verbs: what blocks runs in a thread."""

    def __init__(self, inner: semel.Semel | semel.AsyncSemel) -> None:
        self.inner: Any = inner
        self.sync = isinstance(inner, semel.Semel)

    def handler(self, fn: Callable[..., Any]) -> Any:
        """A plain function in the client's colour."""
        if self.sync or inspect.iscoroutinefunction(fn):
            return fn

        @wraps(fn)
        async def handler(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        return handler

    def held(self, gate: Gate) -> Any:
        """A handler that waits at the gate."""
        return gate.pass_ if self.sync else gate.apass

    async def _do(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.sync:
            return await in_thread(verb, *args, **kwargs)
        return await verb(*args, **kwargs)

    async def run(self, key: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await self._do(self.inner.run, key, self.handler(fn), *args, **kwargs)

    async def run_many(self, deliveries: Any, fn: Callable[..., Any], **kwargs: Any) -> Any:
        return await self._do(self.inner.run_many, deliveries, self.handler(fn), **kwargs)

    async def sweep(self, fn: Callable[..., Any], **kwargs: Any) -> Any:
        return await self._do(self.inner.sweep, self.handler(fn), **kwargs)

    async def records(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        if verb != "list":
            return await self._do(getattr(self.inner.records, verb), *args, **kwargs)
        listed = self.inner.records.list(*args, **kwargs)
        return list(listed) if self.sync else [record async for record in listed]

    async def windows(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        return await self._do(getattr(self.inner.windows, verb), *args, **kwargs)

    async def within(self, claim: Any, block: Callable[[], Any]) -> None:
        """`with claim:` around the block."""
        if self.sync:

            def enter() -> None:
                with claim:
                    block()

            await in_thread(enter)
        else:
            async with claim:
                block()

    def using(self, **policy: Any) -> "Either":
        return Either(self.inner.using(semel.Policy(**policy)))

    def __getattr__(self, verb: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._do(getattr(self.inner, verb), *args, **kwargs)

        return call

    @property
    def kept(self) -> dict[bytes, Any]:
        """The claims that its keepers hold."""
        runtime = self.inner._runtime
        held = dict(runtime.keeper.kept)
        for desk in runtime._loop_states.values():
            held |= desk.keeper.kept
        return held

    @property
    def rooms(self) -> dict[Any, Any]:
        """The records that somebody waits for."""
        rooms: dict[Any, Any] = self.inner._runtime.watches._rooms
        return rooms


class Kind(NamedTuple):
    """A store and a colour."""

    store: str
    colour: str

    def __str__(self) -> str:
        return f"{self.store}-{self.colour}"


KINDS = [
    Kind("memory", "sync"),
    Kind("sqlite", "sync"),
    Kind("memory", "async"),
    Kind("sqlite", "async"),
    Kind("native", "async"),
]


only_sync = pytest.mark.parametrize(
    "place", [kind for kind in KINDS if kind.colour == "sync"], indirect=True, ids=str
)
only_async = pytest.mark.parametrize(
    "place", [kind for kind in KINDS if kind.colour == "async"], indirect=True, ids=str
)
only_sqlite = pytest.mark.parametrize(
    "place", [kind for kind in KINDS if kind.store == "sqlite"], indirect=True, ids=str
)


class Place:
    """Where one test's clients live: `open` makes another client of the same store."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        self.path = folder / "semel.db"
        self.clock = Hasty()
        self.spy = Spy(self._store())
        self.native = Native(self.spy)
        self.opened: list[Either] = []

    def _store(self) -> Store:
        if self.kind.store == "sqlite":
            return SqliteStore(self.path, synchronous="NORMAL", clock=self.clock)
        return MemoryStore(clock=self.clock)

    def open(
        self, *, store: Store | AsyncStore | None = None, consumer: str = "billing", **options: Any
    ) -> Either:
        if store is None:
            store = self.native if self.kind.store == "native" else self.spy
        door: Any = semel.open if self.kind.colour == "sync" else semel.aopen
        client = Either(door(store, consumer=consumer, **options))
        self.opened.append(client)
        return client

    def elsewhere(self) -> Store:
        """Another object on the same file, as another process has it."""
        return SqliteStore(self.path, synchronous="NORMAL")

    def record(self, key: str, consumer: str = "billing") -> semel.Record | None:
        """What the store holds, whoever asks."""
        from semel.core.commands import Lookup

        answer = self.spy._store.send([Lookup(("", consumer, key))])[0]
        return answer if isinstance(answer, semel.Record) else None

    def owners(self) -> set[bytes]:
        return {item.owner for item in self.spy.sent(Claim)}

    def settles(self, to: str) -> list[Settle]:
        return [item for item in self.spy.sent(Settle) if item.to == to]
