"""PostgreSQL stores for tests: each folder has a schema of its own, and time may be the test's."""

import asyncio
import threading
import time
import zlib
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from semel import ids
from semel.clock import Clock
from semel.core.commands import Admit, Answer, Item, RecordItem
from semel.core.ports import AsyncStore, Capabilities, Listener
from semel.stores.postgres import AsyncPostgresStore, PostgresStore
from semel.stores.postgres.batch import Batch
from semel.stores.postgres.urls import from_url
from semel.testing import ManualClock
from semel.testing.clock import START_US
from tests.services import postgres

T = TypeVar("T")

CAPABILITIES = Capabilities(durable=True, transactional=True, shared=True, notifies=True)


class Ticking:
    """A manual clock whose time goes forward with each call, as a server's does."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last_us = 0
        self._offset_us = 0

    def now_us(self) -> int:
        with self._lock:
            now = self._clock.now_us() + self._offset_us
            if now <= self._last_us:
                self._offset_us += self._last_us + 1 - now
                now = self._last_us + 1
            self._last_us = now
            return now

    def steady_s(self) -> float:
        return self._clock.steady_s()


_ticking: WeakKeyDictionary[ManualClock, Ticking] = WeakKeyDictionary()


def make(folder: Path, clock: Clock | None = None, **options: Any) -> PostgresStore:
    """A store for this folder. A manual clock is used; any other leaves the time to the server."""
    store = from_url(postgres.place(folder))
    if isinstance(clock, ManualClock):
        store.clock = _ticking.setdefault(clock, Ticking(clock))
    return store


DAY_US = 86_400 * 1_000_000
ANY_IDS = {"any-manual": START_US, "any-real": time.time_ns() // 1000}
"""Kinds of ids for tests: every text is one. Its time lies one to three days back, in one of several partitions."""


def _any_reader(base_us: int) -> Callable[[str], int]:
    return lambda key: base_us - DAY_US - zlib.crc32(key.encode("utf-8", "replace")) * DAY_US // 2**31


cast("dict[str, Any]", ids.KINDS).update({kind: _any_reader(base) for kind, base in ANY_IDS.items()})


def make_timed(folder: Path, clock: Clock | None = None) -> PostgresStore:
    """A store in which every consumer has ids with a time, so that all records are in partitions."""
    store = make(folder, clock)
    kind = "any-manual" if isinstance(clock, ManualClock) else "any-real"
    store.open()
    store.send([Admit("", "", "lease", kind)])
    postgres.execute(
        postgres.place(folder),
        f"ALTER TABLE {store.place.schema}.consumers ALTER COLUMN ids SET DEFAULT '{kind}'",
    )
    store.close()
    return _lenient(store)


class Lenient(Batch):
    """Lets partitions hold what must not go with them, so that every statement is seen to work there too."""

    @staticmethod
    def must_stay(item: RecordItem) -> bool:
        return False


def _lenient(store: PostgresStore) -> PostgresStore:
    def twin() -> AsyncPostgresStore:
        made = PostgresStore.twin(store)
        made.batch_type = Lenient
        return made

    store.batch_type = Lenient
    store.twin = twin  # type: ignore[method-assign]
    return store


class InLoop:
    """An async store for callers that block: it lives in an event loop in a thread of its own."""

    def __init__(self, store: AsyncStore) -> None:
        self.inner = store
        self.name = store.name
        self.capabilities = store.capabilities
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        if self._loop is None:
            loop = self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=loop.run_forever)
            self._thread.start()
        self._wait(self.inner.aopen())

    def close(self) -> None:
        if self._loop is None or self._thread is None:
            return
        self._wait(self.inner.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = None

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        return self._wait(self.inner.asend(items))

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        async def begin() -> Callable[[], None]:
            return self.inner.watch(listener)

        return self._wait(begin())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


def make_in_loop(folder: Path, clock: Clock | None = None) -> InLoop:
    """The async twin, for callers that block."""
    return InLoop(make(folder, clock).twin())
