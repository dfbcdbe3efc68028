"""Gather the callers who wait at the same time into one round trip.

Nobody waits for company: an idle caller goes straight to the store, and what arrives while the store
works forms the next batch. A command once queued is executed; giving up ends only the wait, and a claim
that nobody waits for any more is released with its attempt given back.

==================  =================================================================================
`Direct`            for stores that answer at once (memory): nothing to gather
`Coalescer`         for stores that block: one flusher thread serves threads and event loops alike
`LoopCoalescer`     for stores that are native to an event loop: sends at the end of the tick
==================  =================================================================================
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Lock, Thread
from typing import Any, Protocol, TypeAlias

from semel.core.commands import Answer, Claim, Granted, Item, Renew, Settle
from semel.core.folding import Fold
from semel.core.ports import AsyncStore, Store
from semel.errors import StoreClosed, StoreUnavailable
from semel.forks import restart_after_fork
from semel.types import Unavailable

__all__ = ["BATCH_MAX", "Channel", "Coalescer", "Direct", "LoopCoalescer", "channel_for"]

BATCH_MAX = 500
"""The knee of the curve on every store we measured: larger batches gain nothing and wait longer."""
IDLE_S = 2.0
"""A flusher with nothing to do for this long ends; the next caller starts another."""

Callback: TypeAlias = Callable[[list[Answer]], None]


class Channel(Protocol):
    """How a client reaches its store. Answers are by position; an unreachable store is `Unavailable`."""

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Wait for the answers, in a thread."""
        ...

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Wait for the answers, in an event loop."""
        ...

    def post(self, items: Sequence[Item], done: Callback, /) -> None:
        """Have the items executed; `done` is called with the answers, in whichever thread has them."""
        ...

    def close(self) -> None:
        """Send what is queued, then stop. Idempotent."""
        ...


def channel_for(store: Store | AsyncStore) -> "Channel":
    """The channel that fits a store's powers."""
    if isinstance(store, Store):
        return Direct(store) if store.capabilities.instant else Coalescer(store)
    return LoopCoalescer(store)


def give_back(claim: Claim, granted: Granted) -> Settle:
    """Release a claim whose handler never started: as if it had not been made."""
    return Settle(
        claim.id, claim.owner, granted.fence, "released", lease_us=claim.lease_us, count_attempt=False
    )


def _unreachable(items: Sequence[Item], error: StoreUnavailable) -> list[Answer]:
    return [Unavailable(error)] * len(items)


class Direct:
    """No gathering: the store answers at once."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Straight through."""
        try:
            return self._store.send(items)
        except StoreUnavailable as error:
            return _unreachable(items, error)

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Straight through: it never waits."""
        return self.send(items)

    def post(self, items: Sequence[Item], done: Callback, /) -> None:
        """Straight through."""
        done(self.send(items))

    def close(self) -> None:
        """Nothing is queued."""


class Call:
    """One caller's items under way. `finish` is called once, with all answers or an error."""

    __slots__ = ("abandoned", "answers", "error", "finish", "items", "left")

    def __init__(self, items: Sequence[Item], finish: Callable[["Call"], None]) -> None:
        self.items = items
        self.answers: list[Answer] = [None] * len(items)
        self.left = len(items)
        self.error: BaseException | None = None
        self.finish = finish
        self.abandoned = False

    def result(self) -> list[Answer]:
        """The answers, or the error that struck the whole batch."""
        if self.error is not None:
            raise self.error
        return self.answers

    def unwanted(self) -> list[Settle]:
        """What gives back the claims that were granted to a caller who has left."""
        return [
            give_back(item, answer)
            for item, answer in zip(self.items, self.answers, strict=True)
            if isinstance(item, Claim) and isinstance(answer, Granted)
        ]


Taker: TypeAlias = tuple[Call, int]


class Queue:
    """Entries waiting for the store: what ends or keeps claims goes before what makes new ones."""

    def __init__(self) -> None:
        self._urgent: deque[tuple[Item, Taker]] = deque()
        self._others: deque[tuple[Item, Taker]] = deque()

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def add(self, call: Call) -> None:
        """Queue a caller's items."""
        for at, item in enumerate(call.items):
            queue = self._urgent if isinstance(item, Settle | Renew) else self._others
            queue.append((item, (call, at)))

    def take(self) -> Fold[Taker]:
        """The next batch, folded; what cannot go with it goes first into the one after."""
        entries: list[tuple[Item, Taker]] = []
        for queue in (self._urgent, self._others):
            entries += [queue.popleft() for _ in range(min(len(queue), BATCH_MAX - len(entries)))]
        fold = Fold(entries)
        for item, taker in reversed(fold.later):
            (self._urgent if isinstance(item, Settle | Renew) else self._others).appendleft((item, taker))
        return fold


def spread(fold: Fold[Taker], answers: Sequence[Answer], error: BaseException | None) -> list[Call]:
    """Hand the answers to their takers; returns the calls that now have all of theirs."""
    finished: list[Call] = []

    def give(taker: Taker, answer: Answer) -> None:
        call, at = taker
        call.answers[at] = answer
        call.left -= 1
        if not call.left:
            finished.append(call)

    for taker, answer in fold.ready:
        give(taker, answer)
    for slot, answer in zip(fold.slots, answers, strict=True):
        for taker, view in slot.takers:
            if error is not None:
                taker[0].error = error
            give(taker, answer if view is None or error is not None else view(answer))
    return finished


class Coalescer:
    """One flusher thread for a store that blocks. Thread-safe, and usable from any event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.after_fork()
        restart_after_fork(self)

    def after_fork(self) -> None:
        """A child starts with nothing queued and no flusher."""
        self._gate = Lock()
        self._wake = Condition(Lock())
        self._queue = Queue()
        self._flusher: Thread | None = None
        self._closed = False

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Straight to the store when nobody else is there, else with everybody's next batch."""
        if not self._queue and len(items) <= BATCH_MAX and self._gate.acquire(blocking=False):
            return self._straight(items)
        arrived = Lock()
        arrived.acquire()
        call = Call(items, lambda _call: arrived.release())
        self._enqueue(call)
        try:
            arrived.acquire()
        except BaseException:
            self._abandon(call)
            raise
        return call.result()

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Queue the items and await the flusher; one hop into the loop per batch, not per caller."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        call = LoopCall(items, loop, future)
        self._enqueue(call)
        try:
            await future
        except BaseException:
            self._abandon(call)
            raise
        return call.result()

    def post(self, items: Sequence[Item], done: Callback, /) -> None:
        """Queue the items; `done` runs in the flusher's thread, and not at all if the store refuses them."""

        def finish(call: Call) -> None:
            if call.error is None:
                done(call.answers)
            else:
                done(_unreachable(call.items, StoreUnavailable(str(call.error))))

        self._enqueue(Call(items, finish))

    def close(self) -> None:
        """Let the flusher send what is queued, and wait for its end."""
        with self._wake:
            self._closed = True
            flusher = self._flusher
            self._wake.notify()
        if flusher is not None:
            flusher.join()

    def _straight(self, items: Sequence[Item]) -> list[Answer]:
        """Send under the gate, which the caller holds."""
        try:
            return self._store.send(items)
        except StoreUnavailable as error:
            return _unreachable(items, error)
        except Exception:
            raise
        except BaseException:
            # Interrupted in mid-air: the claims may be ours. Ask again with the same owner, then give back.
            self._reclaim([item for item in items if isinstance(item, Claim)])
            raise
        finally:
            self._gate.release()
            if self._queue:
                with self._wake:
                    self._wake.notify()

    def _enqueue(self, call: Call) -> None:
        with self._wake:
            if self._closed:
                raise StoreClosed(f"{self._store.name} is closed; open a new client")
            if not call.items:
                call.finish(call)
                return
            self._queue.add(call)
            if self._flusher is None:
                self._flusher = Thread(target=self._flush, name="semel-flusher", daemon=True)
                self._flusher.start()
            else:
                self._wake.notify()

    def _flush(self) -> None:
        while True:
            with self._wake:
                while not self._queue:
                    if self._closed or not self._wake.wait(IDLE_S):
                        if self._queue:
                            continue
                        self._flusher = None
                        return
            with self._gate:
                with self._wake:
                    fold = self._queue.take()
                answers, error = self._attempt([slot.item for slot in fold.slots])
            self._deliver(spread(fold, answers, error))

    def _attempt(self, items: list[Item]) -> tuple[Sequence[Answer], BaseException | None]:
        try:
            return self._store.send(items), None
        except StoreUnavailable as error:
            return _unreachable(items, error), None
        except Exception as error:  # noqa: BLE001 - it belongs to the callers, not to the flusher
            return [None] * len(items), error

    def _deliver(self, calls: list[Call]) -> None:
        loops: dict[Any, list[LoopCall]] = {}
        for call in calls:
            if call.abandoned:
                self._release(call)
            elif isinstance(call, LoopCall):
                loops.setdefault(call.loop, []).append(call)
            else:
                call.finish(call)
        for loop, theirs in loops.items():
            try:
                loop.call_soon_threadsafe(_resolve, theirs, self)
            except RuntimeError:  # that loop is closed: nobody waits there any more
                for call in theirs:
                    self._release(call)

    def _abandon(self, call: Call) -> None:
        """Nobody waits for this call any more."""
        with self._wake:
            call.abandoned = True
            finished = not call.left
        if finished:
            self._release(call)

    def _release(self, call: Call) -> None:
        if (given_back := call.unwanted()) and not self._closed:
            self.post(given_back, lambda _answers: None)

    def _reclaim(self, claims: list[Claim]) -> None:
        if claims and not self._closed:
            call = Call(claims, lambda _call: None)
            call.abandoned = True
            self._enqueue(call)


class LoopCall(Call):
    """A call whose waiter sits in an event loop."""

    __slots__ = ("future", "loop")

    def __init__(self, items: Sequence[Item], loop: Any, future: "asyncio.Future[None]") -> None:
        super().__init__(items, lambda _call: None)
        self.loop = loop
        self.future = future


def _resolve(calls: list[LoopCall], channel: Any) -> None:
    """In the loop: wake the waiters; what a waiter no longer wants is given back."""
    for call in calls:
        if call.future.done():
            channel._release(call)  # noqa: SLF001 - the two are one mechanism, split by the thread they run in
        else:
            call.future.set_result(None)


class LoopCoalescer:
    """For a store that is native to the event loop: no thread, no task per caller."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self.after_fork()
        restart_after_fork(self)

    def after_fork(self) -> None:
        """A child starts with nothing queued; its loop is its own."""
        self._queue = Queue()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def send(self, _items: Sequence[Item], /) -> list[Answer]:
        """Not for threads: this store lives in an event loop."""
        raise StoreClosed(f"{self._store.name} is asynchronous; use semel.aopen()")

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Queue the items; they leave at the end of this tick, or with the next batch."""
        loop = asyncio.get_running_loop()
        call = LoopCall(items, loop, loop.create_future())
        self._enqueue(call)
        try:
            await call.future
        except BaseException:
            call.abandoned = True
            if not call.left:
                self._release(call)
            raise
        return call.result()

    def post(self, items: Sequence[Item], done: Callback, /) -> None:
        """Queue the items; `done` runs in the loop."""

        def finish(call: Call) -> None:
            error = call.error
            done(call.answers if error is None else _unreachable(call.items, StoreUnavailable(str(error))))

        self._enqueue(Call(items, finish))

    def close(self) -> None:
        """Take nothing new; what is queued is still sent."""
        self._closed = True

    async def aclose(self) -> None:
        """Take nothing new, and wait until what is queued is sent."""
        self._closed = True
        if self._task is not None:
            await asyncio.shield(self._task)

    def _enqueue(self, call: Call) -> None:
        if self._closed:
            raise StoreClosed(f"{self._store.name} is closed; open a new client")
        if not call.items:
            if isinstance(call, LoopCall):
                call.future.set_result(None)
            else:
                call.finish(call)
            return
        self._queue.add(call)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._flush())

    async def _flush(self) -> None:
        try:
            while self._queue:
                fold = self._queue.take()
                items = [slot.item for slot in fold.slots]
                error: BaseException | None = None
                try:
                    answers: Sequence[Answer] = await self._store.asend(items)
                except StoreUnavailable as unreachable:
                    answers = _unreachable(items, unreachable)
                except Exception as strange:  # noqa: BLE001 - it belongs to the callers
                    answers, error = [None] * len(items), strange
                for call in spread(fold, answers, error):
                    if call.abandoned:
                        self._release(call)
                    elif isinstance(call, LoopCall):
                        _resolve([call], self)
                    else:
                        call.finish(call)
        finally:
            self._task = None

    def _release(self, call: Call) -> None:
        if (given_back := call.unwanted()) and not self._closed:
            self.post(given_back, lambda _answers: None)
