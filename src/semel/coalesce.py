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
import atexit
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Condition, Lock, Thread, current_thread
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet

from semel.core.commands import Answer, Claim, Granted, Item, Renew, Settle
from semel.core.folding import Fold
from semel.core.ports import AsyncStore, Store
from semel.errors import StoreClosed, StoreError, StoreUnavailable
from semel.forks import restart_after_fork
from semel.types import Unavailable

__all__ = [
    "BATCH_MAX",
    "Channel",
    "Coalescer",
    "Direct",
    "LoopCoalescer",
    "channel_for",
    "give_back",
    "recall",
]

_log = logging.getLogger("semel")

BATCH_MAX = 500
"""The knee of the curve on every store we measured: larger batches gain nothing and wait longer."""
IDLE_S = 2.0
"""A flusher with nothing to do for this long ends; the next caller starts another."""
EXIT_WAIT_S = 1.0
"""How long the end of the program waits for claims that an interrupt gave back."""

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


def recall(channel: Channel, claims: Sequence[Claim]) -> None:
    """Undo claims that were interrupted in mid-air: ask again with their owners, and give back what is ours."""

    def back(answers: list[Answer]) -> None:
        _post(channel, _granted(claims, answers))

    _post(channel, claims, back)


def _redo(channel: Channel, items: Sequence[Item]) -> None:
    """Interrupted in mid-air: what ends or keeps a claim is said again, what makes one is undone."""
    _post(channel, [item for item in items if isinstance(item, Settle | Renew)])
    recall(channel, [item for item in items if isinstance(item, Claim)])


def _post(channel: Channel, items: Sequence[Item], done: Callback = lambda _answers: None) -> None:
    if items:
        with suppress(StoreError):  # closed: the leases will end by themselves
            channel.post(items, done)


def _granted(items: Sequence[Item], answers: Sequence[Answer]) -> list[Settle]:
    """What gives back the claims among the items that were granted."""
    return [
        give_back(item, answer)
        for item, answer in zip(items, answers, strict=True)
        if isinstance(item, Claim) and isinstance(answer, Granted)
    ]


def _unreachable(items: Sequence[Item], error: StoreUnavailable) -> list[Answer]:
    return [Unavailable(error)] * len(items)


def _refuse(store: Store | AsyncStore, items: Sequence[Item]) -> None:
    """After `close` only the ends of claims are let through: the store may still take them."""
    if not all(isinstance(item, Settle) for item in items):
        raise StoreClosed(f"this client of {store.name} is closed; open a new one")


class Direct:
    """No gathering: the store answers at once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._closed = False

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Straight through."""
        if self._closed:
            _refuse(self._store, items)
        try:
            return self._store.send(items)
        except StoreUnavailable as error:
            return _unreachable(items, error)
        except Exception:
            raise
        except BaseException:
            _redo(self, items)
            raise

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Straight through: it never waits."""
        return self.send(items)

    def post(self, items: Sequence[Item], done: Callback, /) -> None:
        """Straight through."""
        done(self.send(items))

    def close(self) -> None:
        """Nothing is queued; take nothing new."""
        self._closed = True


class Call:
    """One caller's items under way. `finish` is called once, with all answers or an error."""

    __slots__ = ("abandoned", "answers", "error", "finish", "items", "left")

    def __init__(self, items: Sequence[Item], finish: Callable[["Call"], None]) -> None:
        self.items: Sequence[Item] = items
        self.answers: list[Answer] = [None] * len(items)
        self.left: int = len(items)
        self.error: BaseException | None = None
        self.finish: Callable[[Call], None] = finish
        self.abandoned: bool = False

    def unwanted(self) -> list[Settle]:
        """What gives back the claims that were granted to a caller who has left; empty the second time."""
        items, self.items = self.items, ()
        answers, self.answers = self.answers, []
        return _granted(items, answers)


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
            mine, trouble = answer, error
            if view is not None and error is None:
                try:
                    mine = view(answer)
                except Exception as strange:  # noqa: BLE001 - an answer of the wrong shape is its caller's trouble
                    trouble = strange
            if trouble is not None:
                taker[0].error = trouble
            give(taker, mine)
    return finished


class Coalescer:
    """One flusher thread for a store that blocks. Thread-safe, and usable from any event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.after_fork()
        restart_after_fork(self)
        _coalescers.add(self)

    def after_fork(self) -> None:
        """A child starts with nothing queued and no flusher."""
        self._gate = Lock()
        # Entered as a lock, never as a condition: the latter's `with` is Python, and Ctrl-C can strike inside it.
        self._lock = Lock()
        self._wake = Condition(self._lock)
        self._queue = Queue()
        self._flusher: Thread | None = None
        self._closed = False

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Straight to the store when nobody else is there, else with everybody's next batch."""
        if (not self._queue and not self._gate.locked() and len(items) <= BATCH_MAX) or self._closed:
            return self._straight(items)
        arrived = Lock()
        arrived.acquire()
        call = Call(items, lambda _call: arrived.release())
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
        future: asyncio.Future[None] = loop.create_future()
        call = LoopCall(items, loop, future)
        self._enqueue(call)
        try:
            await future
        except BaseException:
            self._abandon(call)
            raise
        return self._result(call)

    def post(self, items: Sequence[Item], done: Callback, /) -> None:
        """Queue the items; `done` runs in the flusher's thread."""
        if not items:
            done([])
            return
        self._enqueue(Call(items, _finisher(done)))

    def close(self, wait_s: float | None = None) -> None:
        """Let the flusher send what is queued, and wait for its end."""
        with self._lock:
            self._closed = True
            flusher = self._flusher
            self._wake.notify()
        if flusher is not None:
            flusher.join(wait_s)

    def _straight(self, items: Sequence[Item]) -> list[Answer]:
        # `with` and not acquire(): Ctrl-C cannot strike between taking the gate and the promise to open it.
        with self._gate:
            if self._closed:
                _refuse(self._store, items)
            try:
                return self._store.send(items)
            except StoreUnavailable as error:
                return _unreachable(items, error)
            except Exception:
                raise
            except BaseException:
                _redo(self, items)
                raise

    def _result(self, call: Call) -> list[Answer]:
        """The answers. An error that struck one of its batches gives back what the others were granted."""
        if call.error is not None:
            self._release(call)
            raise call.error
        return call.answers

    def _enqueue(self, call: Call) -> None:
        with self._lock:
            if self._closed and current_thread() is not self._flusher:
                raise StoreClosed(f"this client of {self._store.name} is closed; open a new one")
            self._queue.add(call)
            if self._flusher is None:
                self._start()
            else:
                self._wake.notify()

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
                answers, error = self._attempt([slot.item for slot in fold.slots])
            self._deliver(spread(fold, answers, error))

    def _await_work(self) -> bool:
        """Wait until something is queued; `False` when the flusher is to end."""
        with self._lock:
            while not self._queue:
                if (self._closed or not self._wake.wait(IDLE_S)) and not self._queue:
                    if self._flusher is current_thread():
                        self._flusher = None
                    return False
            return True

    def _attempt(self, items: list[Item]) -> tuple[Sequence[Answer], BaseException | None]:
        try:
            return _whole(self._store.send(items), items), None
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
        with self._lock:
            call.abandoned = True
            finished = not call.left
        if finished:
            self._release(call)

    def _release(self, call: Call) -> None:
        _post(self, call.unwanted())


def _finisher(done: Callback) -> Callable[[Call], None]:
    """Hand a call's answers to `done`. Its errors end here: whoever delivers has others to serve."""

    def finish(call: Call) -> None:
        error = call.error
        try:
            done(call.answers if error is None else _unreachable(call.items, StoreUnavailable(str(error))))
        except Exception:
            _log.exception("the answers of a store could not be handed on")

    return finish


def _whole(answers: list[Answer], items: Sequence[Item]) -> list[Answer]:
    if len(answers) != len(items):
        raise StoreError(f"the store gave {len(answers)} answers to {len(items)} items")
    return answers


_coalescers: "WeakSet[Coalescer]" = WeakSet()


def _drain() -> None:
    """At the end of the program: what an interrupt gave back is still under way."""
    for coalescer in list(_coalescers):
        coalescer.close(EXIT_WAIT_S)


atexit.register(_drain)


class LoopCall(Call):
    """A call whose waiter sits in an event loop."""

    __slots__ = ("future", "loop")

    def __init__(self, items: Sequence[Item], loop: Any, future: "asyncio.Future[None]") -> None:
        super().__init__(items, lambda _call: None)
        self.loop: Any = loop
        self.future: asyncio.Future[None] = future


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
        if not items:
            return []
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
        if call.error is not None:
            self._release(call)
            raise call.error
        return call.answers

    def post(self, items: Sequence[Item], done: Callback, /) -> None:
        """Queue the items; `done` runs in the loop."""
        if not items:
            done([])
            return
        self._enqueue(Call(items, _finisher(done)))

    def close(self) -> None:
        """Take nothing new; what is queued is still sent."""
        self._closed = True

    async def aclose(self) -> None:
        """Take nothing new, and wait until what is queued is sent."""
        self._closed = True
        if self._flushing():
            assert self._task is not None
            await asyncio.wait([self._task])

    def _enqueue(self, call: Call) -> None:
        if self._closed and not self._flushing():
            _refuse(self._store, call.items)
        elif self._closed and not call.abandoned:
            raise StoreClosed(f"this client of {self._store.name} is closed; open a new one")
        self._queue.add(call)
        if not self._flushing():
            self._task = asyncio.get_running_loop().create_task(self._flush(), name="semel-flusher")

    def _flushing(self) -> bool:
        """Whether the flusher is under way, in this loop: one that an earlier loop left behind is not."""
        return self._task is not None and self._task.get_loop() is asyncio.get_running_loop()

    async def _flush(self) -> None:
        try:
            while self._queue:
                fold = self._queue.take()
                answers, error = await self._attempt([slot.item for slot in fold.slots])
                for call in spread(fold, answers, error):
                    if call.abandoned:
                        self._release(call)
                    elif isinstance(call, LoopCall):
                        _resolve([call], self)
                    else:
                        call.finish(call)
        finally:
            self._task = None

    async def _attempt(self, items: list[Item]) -> tuple[Sequence[Answer], BaseException | None]:
        try:
            return _whole(await self._store.asend(items), items), None
        except StoreUnavailable as error:
            return _unreachable(items, error), None
        except Exception as error:  # noqa: BLE001 - it belongs to the callers, not to the flusher
            return [None] * len(items), error
        except asyncio.CancelledError:
            # The loop is closing. Nobody may be left waiting, and no claim held that nobody waits for.
            return _unreachable(items, StoreUnavailable("the event loop is closing")), None

    def _release(self, call: Call) -> None:
        _post(self, call.unwanted())
