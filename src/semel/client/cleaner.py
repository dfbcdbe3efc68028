"""Clean up in the background of a service: what `semel purge --watch` does, in a thread or a task of its own."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any, Protocol, Self

from msgspec import Struct

from semel.core.commands import Purged
from semel.errors import PolicyInvalid, StoreError
from semel.runtime.process import asyncio, logging, restart_after_fork
from semel.windows import Duration, duration_us

__all__ = ["EVERY", "PURGE_BATCH", "AsyncCleaner", "Cleaner", "PurgeResult"]

EVERY = "1m"
PURGE_BATCH = 5000
"""Records removed at once: few enough that nobody waits long behind them."""
EVERY_MIN_US = 100_000


class PurgeResult(Struct, frozen=True):
    """What one round of cleaning came to."""

    count: int = 0
    """How many records were removed."""
    partitions: int = 0
    """How many partitions went, with all that was in them."""
    lag_s: float = 0.0
    """How long the oldest of those had been waiting for it."""
    cleaner: str = ""
    """Who else was at it, so that this round ended; empty: nobody."""

    def plus(self, purged: Purged) -> "PurgeResult":
        """The round after one more batch."""
        return PurgeResult(
            self.count + purged.count,
            self.partitions + purged.partitions,
            max(self.lag_s, purged.lag_s),
            purged.cleaner,
        )


class _Purging(Protocol):
    def purge(self, *, limit: int = ..., dry_run: bool = ...) -> Purged: ...


class _Purges(Protocol):
    """A client, or whatever else has records to purge."""

    @property
    def records(self) -> _Purging: ...


class _AsyncPurging(Protocol):
    def purge(self, *, limit: int = ..., dry_run: bool = ...) -> Awaitable[Purged]: ...


class _AsyncPurges(Protocol):
    @property
    def records(self) -> _AsyncPurging: ...


def _every_s(every: Duration) -> float:
    us = duration_us(every)
    if us < EVERY_MIN_US:
        raise PolicyInvalid(f"every={every!r} is too often; 100ms is the least")
    return us / 1e6


def _note(done: PurgeResult | None, error: BaseException | None) -> None:
    log = logging.getLogger("semel")
    if error is not None:
        log.warning("cleaning up failed, and is tried again: %s", error)
    elif done is not None and (done.count or done.partitions):
        log.info(
            "removed %d expired records and %d partitions, the oldest %.0f s late",
            done.count,
            done.partitions,
            done.lag_s,
        )


class Cleaner:
    """Removes what is over, every so often, in a thread of its own; a store's other upkeep goes with it.

    Any number of services may have one: on a shared store one at a time works, and the others come back later.
    Killed anywhere, it leaves nothing to repair. Use it as a context manager, or `start()` and `close()`::

        with semel.open(url, consumer="billing") as once, semel.Cleaner(once, every="1m"):
            serve()

    It never changes what a delivery is told. A store that gives no answer is asked again in the next round.
    """

    def __init__(
        self,
        once: _Purges,
        *,
        every: Duration = EVERY,
        batch: int = PURGE_BATCH,
        done: Callable[[PurgeResult], None] | None = None,
    ) -> None:
        self._once = once
        self._every_s = _every_s(every)
        self._batch = batch
        self._done = done
        self._stop = Event()
        self._thread: Thread | None = None
        self._lock = Lock()
        restart_after_fork(self)

    def clean(self, progress: Callable[[PurgeResult], None] | None = None) -> PurgeResult:
        """One round: batch after batch till nothing is left, or another cleaner turns out to be at it."""
        made = PurgeResult()
        while not self._stop.is_set():
            purged = self._once.records.purge(limit=self._batch)
            made = made.plus(purged)
            if progress is not None:
                progress(made)
            if not purged.more:
                break
        return made

    def start(self) -> None:
        """Begin to clean; idempotent."""
        with self._lock:
            if self._thread is None:
                self._stop.clear()
                self._thread = Thread(target=self._run, name="semel-cleaner", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End after the batch under way; idempotent."""
        self._stop.set()
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def after_fork(self) -> None:
        """The thread is the parent's; a child that wants to clean starts its own."""
        self._lock = Lock()
        self._thread = None
        self._stop = Event()

    def _run(self) -> None:
        while not self._stop.is_set():
            made: PurgeResult | None = None
            error: StoreError | None = None
            try:
                made = self.clean()
            except StoreError as raised:
                error = raised
            _note(made, error)
            if made is not None and self._done is not None:
                self._done(made)
            self._stop.wait(self._every_s)


class AsyncCleaner:
    """The same for an event loop: a task, ended and awaited by `close()`."""

    def __init__(
        self,
        once: _AsyncPurges,
        *,
        every: Duration = EVERY,
        batch: int = PURGE_BATCH,
        done: Callable[[PurgeResult], None] | None = None,
    ) -> None:
        self._once = once
        self._every_s = _every_s(every)
        self._batch = batch
        self._done = done
        self._task: asyncio.Task[Any] | None = None

    async def clean(self, progress: Callable[[PurgeResult], None] | None = None) -> PurgeResult:
        """One round: batch after batch till nothing is left, or another cleaner turns out to be at it."""
        made = PurgeResult()
        while True:
            purged = await self._once.records.purge(limit=self._batch)
            made = made.plus(purged)
            if progress is not None:
                progress(made)
            if not purged.more:
                return made

    def start(self) -> None:
        """Begin to clean, in the running loop; idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="semel-cleaner")

    async def close(self) -> None:
        """End now; idempotent. A batch under way is carried out or not, by the store."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self) -> None:
        while True:
            made: PurgeResult | None = None
            error: StoreError | None = None
            try:
                made = await self.clean()
            except StoreError as raised:
                error = raised
            _note(made, error)
            if made is not None and self._done is not None:
                self._done(made)
            await asyncio.sleep(self._every_s)
