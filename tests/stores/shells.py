"""What the tests of every store on a server share: a clock that ticks, and an async store for callers that block."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from semel.core.commands import Answer, Item
from semel.core.protocols import AsyncStore, Listener
from semel.testing import ManualClock

T = TypeVar("T")


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


def ticking(clock: ManualClock) -> Ticking:
    """The one that goes with this clock: stores at the same place must share it."""
    return _ticking.setdefault(clock, Ticking(clock))


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
