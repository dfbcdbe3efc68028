"""Gather calls that wait at the same time into one round trip.

No call waits for others: while the store is idle a call goes straight to it, and calls that arrive while the
store works form the next batch. A queued command is always executed: cancelling ends only the wait, and a claim
without a waiter is released, and its attempt does not count.

==================  =================================================================================
`Direct`            for stores that answer at once (memory): nothing to gather
`Coalescer`         for stores that block: one flusher thread serves threads and event loops alike
`LoopCoalescer`     for stores that are native to an event loop: a single item goes at once if the store can start it
                    and is idle; other items go at the end of the tick
==================  =================================================================================
"""

import atexit
import sys
import time
from collections.abc import Callable, Sequence
from threading import Condition, Lock, Thread, current_thread
from typing import Any
from weakref import WeakSet

from semel.core.commands import Answer, Item
from semel.core.protocols import AsyncStore, StartsSingles, Store
from semel.errors import StoreClosed, StoreUnavailable
from semel.runtime.process import asyncio, restart_after_fork
from semel.runtime.prompt_future import PromptFuture
from semel.runtime.send_queue import (
    BATCH_MAX,
    Callback,
    Channel,
    LoopCall,
    OnPostedTime,
    OnStoreTime,
    PendingCall,
    SendQueue,
    closed_error,
    finisher,
    give_back,
    give_back_granted,
    redo,
    refuse,
    require_all,
    resolve,
    spread,
    undo,
    unreachable,
)
from semel.types import Unavailable

__all__ = ["BATCH_MAX", "Channel", "Coalescer", "Direct", "LoopCoalescer", "channel_for", "give_back"]

IDLE_S = 2.0
"""A flusher that is idle for this long ends; the next call starts another."""
EXIT_WAIT_S = 1.0
"""How long the exit of the program waits for the release of claims after an interrupt."""


def channel_for(store: Store | AsyncStore) -> Channel:
    """Return the channel that fits a store's capabilities."""
    if isinstance(store, Store):
        return Direct(store) if store.capabilities.instant else Coalescer(store)
    return LoopCoalescer(store)


class Direct:
    """Sends without gathering: the store answers at once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._closed = False
        self.on_store_time: OnStoreTime | None = None
        self.on_posted_time: OnPostedTime | None = None

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Call the store directly."""
        if self._closed:
            refuse(self._store, items)
        try:
            return self._store.send(items)
        except StoreUnavailable as error:
            return unreachable(items, error)
        except Exception:
            raise
        except BaseException:
            redo(self, items)
            raise

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Call the store directly; it never waits."""
        if self.on_store_time is None:
            return self.send(items)
        began = time.perf_counter()
        try:
            return self.send(items)
        finally:
            self.on_store_time(time.perf_counter() - began)

    def post(self, items: Sequence[Item], done: Callback, /) -> None:
        """Call the store directly."""
        began = time.perf_counter()
        answers = self.send(items)
        if self.on_posted_time is not None:
            self.on_posted_time(items, time.perf_counter() - began)
        done(answers)

    def close(self) -> None:
        """Refuse new items; nothing is queued."""
        self._closed = True


class Coalescer:
    """One flusher thread for a store that blocks. Thread-safe, and usable from any event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.on_store_time: OnStoreTime | None = None
        self.on_posted_time: OnPostedTime | None = None
        self.before_send: Callable[[], None] | None = None
        """Called by `send`, which blocks its thread, inside a running event loop."""
        self.after_fork()
        restart_after_fork(self)
        _coalescers.add(self)

    def after_fork(self) -> None:
        """Start a child with an empty queue and no flusher."""
        self._gate = Lock()
        # Entered as a lock, never as a condition: the latter's `with` is Python, and Ctrl-C can strike inside it.
        self._lock = Lock()
        self._wake = Condition(self._lock)
        self._queue = SendQueue()
        self._flusher: Thread | None = None
        self._idle = False
        """Whether the flusher waits for work."""
        self._closed = False

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Send directly if the store is idle, else with the next batch."""
        if (
            self.before_send is not None
            and "asyncio" in sys.modules
            and asyncio._get_running_loop() is not None  # one call in C, and none of ours outside a loop
        ):
            self.before_send()
        if self._closed:
            refuse(self._store, items)
            return self._straight(items)
        if len(items) > BATCH_MAX:
            return self._in_parts(items)
        queue = self._queue  # its two ends are read here: `len(queue)` would be one more call for each send
        if not queue.urgent and not queue.others and not self._gate.locked():
            return self._straight(items)
        arrived = Lock()
        arrived.acquire()
        call = PendingCall(items, lambda _call: arrived.release())
        try:
            self._enqueue(call)
            arrived.acquire()
        except BaseException:
            self._abandon(call)
            raise
        return self._result(call)

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Queue the items and await the flusher; one hop into the loop per batch, not per caller."""
        if not items:
            return []
        loop = asyncio.get_running_loop()
        call = LoopCall(items, loop, loop.create_future())
        self._enqueue(call)
        try:
            await call.future
        except BaseException:
            self._abandon(call)
            raise
        if self.on_store_time is not None:
            self.on_store_time(call.store_s)
        return self._result(call)

    def post(self, items: Sequence[Item], done: Callback, /) -> None:
        """Queue the items; `done` runs in the flusher's thread."""
        if items:
            self._enqueue(PendingCall(items, finisher(done, self.on_posted_time)))
        else:
            done([])

    def close(self, wait_s: float | None = None) -> None:
        """Let the flusher send what is queued, and wait for its end."""
        with self._lock:
            self._closed = True
            flusher = self._flusher
            self._wake.notify()
        if flusher is not None:
            flusher.join(wait_s)

    def _in_parts(self, items: Sequence[Item]) -> list[Answer]:
        """Send more items than fit a batch one batch after the other, so that other callers get their turn."""
        answers: list[Answer] = []
        try:
            for at in range(0, len(items), BATCH_MAX):
                answers += self.send(items[at : at + BATCH_MAX])
        except BaseException:
            give_back_granted(self, items[: len(answers)], answers)
            raise
        return answers

    def _straight(self, items: Sequence[Item]) -> list[Answer]:
        # `with` and not acquire(): Ctrl-C cannot strike between taking the lock and the block that frees it.
        with self._gate:
            if self._closed:
                refuse(self._store, items)
            try:
                answers = self._store.send(items)
                return answers if len(answers) == len(items) else require_all(answers, items)
            except StoreUnavailable as error:
                return unreachable(items, error)
            except Exception:
                raise
            except BaseException:
                redo(self, items)
                raise

    def _result(self, call: PendingCall) -> list[Answer]:
        """Return the answers. If one of its batches failed, release the claims that the others were granted."""
        if call.error is not None:
            undo(self, call)
            raise call.error
        return call.answers

    def _enqueue(self, call: PendingCall) -> None:
        with self._lock:
            if self._closed and current_thread() is not self._flusher:
                raise closed_error(self._store)
            self._queue.add(call)
            if self._flusher is None:
                self._start()
            elif self._idle:
                self._wake.notify()
                self._idle = (
                    False  # one notification is enough, and each further one would cost more than the queue
                )

    def _start(self) -> None:
        flusher = Thread(target=self._flush, name="semel-flusher", daemon=True)
        self._flusher = flusher
        try:
            flusher.start()
        except BaseException:
            if flusher.ident is None:  # no thread could be had; the next caller tries again
                self._flusher = None
            raise

    def _flush(self) -> None:
        while self._await_work():
            with self._gate:
                with self._lock:
                    fold = self._queue.take()
                began = time.perf_counter()
                answers, error = self._attempt([slot.item for slot in fold.slots])
                took_s = time.perf_counter() - began
            self._deliver(spread(fold, answers, error, took_s))

    def _await_work(self) -> bool:
        """Wait until something is queued. Returns `False` if the flusher must end."""
        with self._lock:
            while not self._queue:
                self._idle = True
                if (self._closed or not self._wake.wait(IDLE_S)) and not self._queue:
                    if self._flusher is current_thread():
                        self._flusher = None
                    return False
            return True

    def _attempt(self, items: list[Item]) -> tuple[Sequence[Answer], BaseException | None]:
        try:
            return require_all(self._store.send(items), items), None
        except StoreUnavailable as error:
            return unreachable(items, error), None
        except BaseException as error:  # noqa: BLE001 - it belongs to the callers, not to the flusher
            return [None] * len(items), error

    def _deliver(self, calls: list[PendingCall]) -> None:
        loops: dict[Any, list[LoopCall]] = {}
        for call in calls:
            if call.abandoned:
                undo(self, call)
            elif isinstance(call, LoopCall):
                loops.setdefault(call.loop, []).append(call)
            else:
                call.finish(call)
        for loop, theirs in loops.items():
            try:
                loop.call_soon_threadsafe(resolve, theirs, self)
            except RuntimeError:  # that loop is closed, and has no waiters
                for call in theirs:
                    undo(self, call)

    def _abandon(self, call: PendingCall) -> None:
        """Undo a call whose caller has stopped waiting."""
        with self._lock:
            call.abandoned = True
            finished = not call.left
        if finished:
            undo(self, call)


_coalescers: "WeakSet[Coalescer]" = WeakSet()


def _drain() -> None:
    """Send queued items at the exit of the program: releases after an interrupt may still be queued."""
    for coalescer in list(_coalescers):
        coalescer.close(EXIT_WAIT_S)


atexit.register(_drain)


class LoopCoalescer:
    """For a store that is native to the event loop: no thread, no task per caller."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self._start = store.start if isinstance(store, StartsSingles) else None
        self.on_store_time: OnStoreTime | None = None
        self.on_posted_time: OnPostedTime | None = None
        self.after_fork()
        restart_after_fork(self)

    def after_fork(self) -> None:
        """Start a child with an empty queue and no loop."""
        self._queue = SendQueue()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of the flusher task."""
        self._straight: LoopCall | None = None
        """The call that was sent past the queue and has no answer yet."""
        self._straight_ends: asyncio.Future[None] | None = None
        """Done when that call has its answer; for those who wait for it besides its caller."""
        self._closed = False

    def send(self, _items: Sequence[Item], /) -> list[Answer]:
        """Raise `StoreClosed`: this store belongs to an event loop."""
        raise StoreClosed(f"{self._store.name} is asynchronous; use semel.aopen()")

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Send a single item at once if the store is idle. Queue other items: they leave at the end of this tick."""
        if not items:
            return []
        loop = asyncio.get_running_loop()
        call: LoopCall | None = None
        if len(items) == 1 and self._start is not None and not self._is_busy(loop):
            call = self._go_straight(items, loop)
        if call is None:
            call = LoopCall(items, loop, loop.create_future())
            self._enqueue(call, loop)
        try:
            await call.future
        except BaseException as error:
            call.abandoned = True
            if not call.left:
                undo(self, call)
            elif call is self._straight and isinstance(error, asyncio.CancelledError) and _is_closing(loop):
                # The flusher, which a closing loop waits for, does not know this call.
                await self._await_straight(EXIT_WAIT_S)
            raise
        if self.on_store_time is not None:
            self.on_store_time(call.store_s)
        if call.error is not None:
            undo(self, call)
            raise call.error
        return call.answers

    def _is_busy(self, loop: "asyncio.AbstractEventLoop") -> bool:
        """Whether an item is queued or under way in this loop; what an earlier loop has left behind does not count."""
        queue, straight = self._queue, self._straight
        return bool(
            queue.urgent
            or queue.others
            or (self._task is not None and self._loop is loop)
            or (straight is not None and straight.loop is loop)
            or self._closed
        )

    def _go_straight(self, items: Sequence[Item], loop: "asyncio.AbstractEventLoop") -> LoopCall | None:
        """Start a single item past the queue. `None`: the store has not started it."""
        assert self._start is not None
        call = LoopCall(items, loop, PromptFuture(loop))
        began = time.perf_counter()

        def done(answer: Answer, error: Exception | None) -> None:
            if self._straight is call:
                self._straight = None
                if self._straight_ends is not None:
                    self._straight_ends.set_result(None)
                    self._straight_ends = None
            if isinstance(error, StoreUnavailable):
                answer, error = Unavailable(error), None
            call.answers[0], call.error, call.left = answer, error, 0
            call.store_s = time.perf_counter() - began
            if call.abandoned:
                undo(self, call)
            else:
                resolve([call], self)

        if not self._start(items[0], done):
            return None
        self._straight = call
        return call

    async def _await_straight(self, wait_s: float | None = None) -> None:
        """Wait until the call past the queue has its answer, and until that is undone if its caller has left."""
        loop, straight = asyncio.get_running_loop(), self._straight
        if straight is not None and straight.loop is loop:
            if self._straight_ends is None:
                self._straight_ends = loop.create_future()
            await asyncio.wait([self._straight_ends], timeout=wait_s)
        if self._task is not None and self._loop is loop:
            await asyncio.wait([self._task], timeout=wait_s)

    def mark(self, tenant: str, consumer: str, window_us: int, key: str) -> "asyncio.Future[Any]":
        """Queue one mark, cheaper than `asend`. Its result: whether it was the first, or `Unavailable`."""
        if self._closed:
            raise closed_error(self._store)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._queue.mark(tenant, consumer, window_us, key, future)
        self._ensure_flusher(loop)
        return future

    def post(self, items: Sequence[Item], done: Callback, /) -> None:
        """Queue the items; `done` runs in the loop."""
        if items:
            call = PendingCall(items, finisher(done, self.on_posted_time))
            self._enqueue(call, asyncio.get_running_loop())
        else:
            done([])

    def close(self) -> None:
        """Accept only items that end claims; queued items are still sent."""
        self._closed = True

    async def aclose(self) -> None:
        """Do the same, and wait until queued items are sent."""
        self._closed = True
        await self._await_straight()

    def _enqueue(self, call: PendingCall, loop: "asyncio.AbstractEventLoop") -> None:
        if self._closed:
            refuse(self._store, call.items)
        self._queue.add(call)
        self._ensure_flusher(loop)

    def _ensure_flusher(self, loop: "asyncio.AbstractEventLoop") -> None:
        """Start a flusher in this loop, unless it has one; a flusher of an earlier loop does not count."""
        if self._loop is not loop or self._task is None or self._task.done():
            self._loop, self._task = loop, loop.create_task(self._flush(), name="semel-flusher")

    async def _flush(self) -> None:
        me = asyncio.current_task()
        try:
            while self._queue:
                fold = self._queue.take()
                began = time.perf_counter()
                answers, error = await self._attempt([slot.item for slot in fold.slots])
                for call in spread(fold, answers, error, time.perf_counter() - began):
                    if call.abandoned:
                        undo(self, call)
                    elif isinstance(call, LoopCall):
                        resolve([call], self)
                    else:
                        call.finish(call)
        finally:
            if self._task is me:
                self._task = None

    async def _attempt(self, items: list[Item]) -> tuple[Sequence[Answer], BaseException | None]:
        try:
            return require_all(await self._store.asend(items), items), None
        except StoreUnavailable as error:
            return unreachable(items, error), None
        except Exception as error:  # noqa: BLE001 - it belongs to the callers, not to the flusher
            return [None] * len(items), error
        except asyncio.CancelledError:
            # The loop is closing. No caller may be left waiting, and no claim may stay held without a waiter.
            return unreachable(items, StoreUnavailable("the event loop is closing")), None


def _is_closing(loop: "asyncio.AbstractEventLoop") -> bool:
    """Whether all tasks of the loop are being cancelled, as at its end: no later task would be waited for."""
    return all(task.cancelling() for task in asyncio.all_tasks(loop))
