"""Clean up in the background of a service, as `semel purge --watch` does, in a thread or a task."""

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
"""Records removed in one batch: few enough that other callers do not wait long."""
EVERY_MIN_US = 100_000


class PurgeResult(Struct, frozen=True):
    """The result of one round of cleaning."""

    count: int = 0
    """How many records were removed."""
    partitions: int = 0
    """How many partitions were dropped with their records."""
    lag_s: float = 0.0
    """How long the oldest of those had been expired."""
    cleaner: str = ""
    """The other cleaner that was at work, which ended this round; empty: none."""

    def plus(self, purged: Purged) -> "PurgeResult":
        """Return the result with one more batch added."""
        return PurgeResult(
            self.count + purged.count,
            self.partitions + purged.partitions,
            max(self.lag_s, purged.lag_s),
            purged.cleaner,
        )


class _Purging(Protocol):
    def purge(self, *, limit: int = ..., dry_run: bool = ...) -> Purged: ...


class _Purges(Protocol):
    """A client, or another object with records to purge."""

    @property
    def records(self) -> _Purging: ...


class _AsyncPurging(Protocol):
    def purge(self, *, limit: int = ..., dry_run: bool = ...) -> Awaitable[Purged]: ...


class _AsyncPurges(Protocol):
    @property
    def records(self) -> _AsyncPurging: ...


def _log_failure(error: StoreError) -> None:
    logging.getLogger("semel").warning("cleaning up failed and will be retried: %s", error)


class _CleanerBase:
    def __init__(self, every: Duration, batch: int, done: Callable[[PurgeResult], None] | None) -> None:
        us = duration_us(every)
        if us < EVERY_MIN_US:
            raise PolicyInvalid(f"every={every!r} is too often; 100ms is the least")
        self._every_s = us / 1e6
        self._batch = batch
        self._done = done

    def _report(self, made: PurgeResult) -> None:
        """Log a round that removed something, and call `done`."""
        if made.count or made.partitions:
            logging.getLogger("semel").info(
                "removed %d expired records and %d partitions, the oldest %.0f s late",
                made.count,
                made.partitions,
                made.lag_s,
            )
        if self._done is not None:
            self._done(made)


class Cleaner(_CleanerBase):
    """Removes expired records at an interval, in a thread of its own; it also does the store's other upkeep.

    Any number of services may have one: on a shared store one at a time works, and the others try again later.
    A kill at any point leaves nothing to repair. Use it as a context manager, or `start()` and `close()`::

        with semel.open(url, consumer="billing") as once, semel.Cleaner(once, every="1m"):
            serve()

    It never changes the outcome of a delivery. If the store does not answer, the next round tries again.
    """

    def __init__(
        self,
        once: _Purges,
        *,
        every: Duration = EVERY,
        batch: int = PURGE_BATCH,
        done: Callable[[PurgeResult], None] | None = None,
    ) -> None:
        super().__init__(every, batch, done)
        self._once = once
        self._stop = Event()
        self._thread: Thread | None = None
        self._lock = Lock()
        restart_after_fork(self)

    def clean(self, progress: Callable[[PurgeResult], None] | None = None) -> PurgeResult:
        """Run one round: batch after batch, until nothing is left or another cleaner is at work."""
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
        """Start cleaning; idempotent."""
        with self._lock:
            if self._thread is None:
                self._stop.clear()
                self._thread = Thread(target=self._run, name="semel-cleaner", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop after the current batch; idempotent."""
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
        """Forget the parent's thread; a child that wants to clean starts its own."""
        self._lock = Lock()
        self._thread = None
        self._stop = Event()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                made = self.clean()
            except StoreError as error:
                _log_failure(error)
            else:
                self._report(made)
            self._stop.wait(self._every_s)


class AsyncCleaner(_CleanerBase):
    """The `Cleaner` for an event loop: a task, which `close()` ends and awaits."""

    def __init__(
        self,
        once: _AsyncPurges,
        *,
        every: Duration = EVERY,
        batch: int = PURGE_BATCH,
        done: Callable[[PurgeResult], None] | None = None,
    ) -> None:
        super().__init__(every, batch, done)
        self._once = once
        self._task: asyncio.Task[Any] | None = None

    async def clean(self, progress: Callable[[PurgeResult], None] | None = None) -> PurgeResult:
        """Run one round: batch after batch, until nothing is left or another cleaner is at work."""
        made = PurgeResult()
        while True:
            purged = await self._once.records.purge(limit=self._batch)
            made = made.plus(purged)
            if progress is not None:
                progress(made)
            if not purged.more:
                return made

    def start(self) -> None:
        """Start cleaning, in the running loop; idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="semel-cleaner")

    async def close(self) -> None:
        """Stop now; idempotent. The store may or may not execute the current batch."""
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
            try:
                made = await self.clean()
            except StoreError as error:
                _log_failure(error)
            else:
                self._report(made)
            await asyncio.sleep(self._every_s)
