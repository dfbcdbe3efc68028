"""Wait for another attempt to end: woken by the store's notification, by polling, or by the lease's end.

Callers in one process that wait for the same record share one wait: one of them polls, all wake together,
and their next claims fold into one.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from threading import Lock, RLock
from typing import Any

from semel.core.protocols import Capabilities, Listener
from semel.runtime.process import asyncio, restart_after_fork
from semel.types import Id

__all__ = ["Waiter", "Watches"]

POLL_FIRST_S = 0.005
POLL_MAX_S = 0.25
POLL_GROWTH = 1.5
AFTER_LEASE_S = 0.001
"""Added to the lease's end, so that the following claim finds the lease ended."""


class RecordWaiters:
    """All callers in this process that wait for one record."""

    def __init__(self) -> None:
        self.lock: Any = (
            RLock()
        )  # a waiter may be collected, and wake the others, while its own thread is in here
        self.changes: int = 0
        self.watches: int = 0
        self.poll_s: float = POLL_FIRST_S
        self.poller: int = 0
        """The id of the waiter that polls for all; 0: none yet."""
        self.bells: dict[int, Lock] = {}
        """Locks that wake the sleeping threads, by id."""
        self.futures: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        """Futures that wake the sleeping tasks."""

    def wake(self) -> None:
        """Wake all waiters: the record may have changed."""
        with self.lock:
            self.changes += 1
            bells, self.bells = self.bells, {}
            futures, self.futures = self.futures, {}
        for bell in bells.values():
            bell.release()
        loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for future, loop in futures.items():
            loops.setdefault(loop, []).append(future)
        for loop, theirs in loops.items():
            with suppress(RuntimeError):  # a closed loop, and its waiters with it
                loop.call_soon_threadsafe(_set, theirs)


def _set(futures: "Iterable[asyncio.Future[None]]") -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


class Waiter:
    """One caller that waits for a record. It never misses a change after its creation."""

    __slots__ = ("_leave", "deadline", "left", "room", "seen")

    def __init__(self, room: RecordWaiters, deadline: float, leave: Callable[["Waiter"], None]) -> None:
        self.room: RecordWaiters = room
        self.seen: int = room.changes
        self.deadline: float = deadline
        self.left: bool = True
        """Whether the caller has left, or has not entered yet."""
        self._leave = leave

    def leave(self) -> None:
        """Stop listening; idempotent."""
        if not self.left:
            self._leave(self)

    def __del__(self) -> None:
        if hasattr(self, "_leave"):  # a caller that was interrupted while waiting leaves too
            self.leave()

    def has_changed(self) -> bool:
        """Whether the record changed since the last call."""
        seen, self.seen = self.seen, self.room.changes
        return seen != self.seen


class Watches:
    """All waits of a client. `polling` and `notifications` can be switched off, each to test the other."""

    polling: bool = True
    notifications: bool = True

    def __init__(
        self,
        capabilities: Capabilities,
        subscribe: Callable[[Listener], Callable[[], None]],
        steady_s: Callable[[], float],
    ) -> None:
        self._capabilities = capabilities
        self._subscribe = subscribe
        self._steady_s = steady_s
        self._unsubscribe: Callable[[], None] | None = None
        self.after_fork()
        restart_after_fork(self)

    def after_fork(self) -> None:
        """Drop the parent's waiters."""
        self._lock = RLock()  # a watch may be collected while its own thread is in here
        self._listening = Lock()
        self._rooms: dict[Id, RecordWaiters] = {}

    def enter(self, record_id: Id, wait_s: float) -> Waiter:
        """Add a waiter for a record; it sees all changes from now on."""
        if self._unsubscribe is None:
            self._listen()
        with self._lock:
            room = self._rooms.get(record_id) or RecordWaiters()
            watch = Waiter(room, self._steady_s() + wait_s, partial(self._leave, record_id))
            # No call from here on: Ctrl-C finds either no waiter here, or one that leaves when it is collected.
            self._rooms[record_id] = room
            room.watches += 1
            watch.left = False
            return watch

    def _listen(self) -> None:
        # Under a lock of its own: the store takes its lock in here, and a waiter may be collected under that one.
        with self._listening:
            if self._unsubscribe is None:
                self._unsubscribe = self._subscribe(self._on_notification)

    def _leave(self, record_id: Id, watch: Waiter) -> None:
        with self._lock:
            room, last = watch.room, self._rooms.get(record_id) is watch.room and watch.room.watches == 1
            if watch.left:
                return
            if last:
                del self._rooms[record_id]
            room.watches -= 1
            watch.left = True
        if room.poller == id(watch):
            room.poller = 0
            room.wake()  # one of the others must poll from now on

    def sleep(self, watch: Waiter, retry_after_s: float) -> bool:
        """Wait for a change, the next poll or the lease's end. Returns `False` if the time to wait is over."""
        if watch.has_changed():
            return True
        now = self._steady_s()
        if now >= watch.deadline:
            return False
        room, bell = watch.room, Lock()
        bell.acquire()
        with room.lock:
            if watch.seen != room.changes:
                return watch.has_changed()
            room.bells[id(bell)] = bell
        try:
            bell.acquire(timeout=self._until(watch, now, retry_after_s) - now)
        finally:
            room.bells.pop(id(bell), None)
        watch.has_changed()
        return True

    async def asleep(self, watch: Waiter, retry_after_s: float) -> bool:
        """Do the same in an event loop."""
        if watch.has_changed():
            return True
        now = self._steady_s()
        if now >= watch.deadline:
            return False
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        room = watch.room
        with room.lock:
            if watch.seen != room.changes:
                return watch.has_changed()
            room.futures[future] = loop
        timer = loop.call_later(self._until(watch, now, retry_after_s) - now, _set, (future,))
        try:
            await future
        finally:
            timer.cancel()
            room.futures.pop(future, None)
        watch.has_changed()
        return True

    def close(self) -> None:
        """Stop listening to the store, and wake all waiters."""
        with self._listening:
            unsubscribe, self._unsubscribe = self._unsubscribe, None
        with self._lock:
            rooms = list(self._rooms.values())
        if unsubscribe is not None:
            unsubscribe()
        for room in rooms:
            room.wake()

    def _on_notification(self, record_id: Id) -> None:
        room = self._rooms.get(record_id) if self.notifications else None
        if room is not None:
            room.wake()

    def _until(self, watch: Waiter, now: float, retry_after_s: float) -> float:
        until = min(watch.deadline, now + retry_after_s + AFTER_LEASE_S)
        notified_of_all = self._capabilities.notifies and not self._capabilities.shared
        if not self.polling or notified_of_all:
            return until
        room = watch.room
        with room.lock:
            if room.poller not in (0, id(watch)):
                return until
            room.poller = id(watch)
            poll_s, room.poll_s = room.poll_s, min(POLL_MAX_S, room.poll_s * POLL_GROWTH)
        return min(until, now + poll_s)
