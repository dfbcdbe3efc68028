"""The relay: takes messages out of an outbox, publishes them until `stop()`, and reports them to hooks."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

from semel.core.backoff import backoff_s
from semel.core.commands import Command
from semel.core.relay_flow import (
    NotPublished,
    OutboxRow,
    PublishRows,
    RelayResult,
    Retrying,
    RowFailure,
    Sent,
    SettleRows,
    Taken,
    TakeRows,
    relay_step,
)
from semel.errors import PolicyInvalid, SinkUnavailable, StoreUnavailable, UsageError
from semel.observe import events
from semel.observe.events import Hook, Hooks
from semel.observe.limited_log import OutageLog
from semel.outbox.sinks import Sink, sink_for
from semel.outbox.tables import OutboxCounts, Rows, rows_for
from semel.runtime.generators import adrive
from semel.windows import Duration, duration_us

__all__ = ["Relay", "Totals"]

POLL_S = 1.0
"""The longest wait: a missed notification costs this much time, never a message."""
SHARE_S = 1.0
CLEAN_S = COUNT_S = 60.0
CLEAN_ROWS = 1000
BYTES_MAX = 8 * 1024 * 1024
"""The most bytes of payloads in memory."""
ROWS_MAX = 10_000
PAUSES_MAX = 10_000
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.1, 5.0
DRAIN_S = 30.0
"""How long to wait for a broker's answers after `stop()`; unconfirmed messages are published again."""
CONSUMER = "relay"
SOURCE = "outbox"

_log = logging.getLogger("semel")


class Totals(Struct):
    """Counts of a relay since its start."""

    published: int = 0
    refused: int = 0
    """Attempts that failed."""
    died: int = 0
    cleaned: int = 0


class Relay:
    """Publishes the messages of one outbox to one sink; any number of relays may run at once.

    `source`: a store URL (`postgresql:`, `sqlite:`), `sink`: a sink URL. `retrying`: how often to try a row, and
    whether a dead one blocks its aggregate. `keep`: how long published rows stay; never shorter than the
    writer's window and the longest stored window. Memory: `rows_max` rows of at most
    `bytes_max` of payload. `on_step` is called for each batch, `on_counts` every minute with the remaining work, and
    `hooks` with the events of each row.
    """

    def __init__(  # noqa: PLR0913 - each has a default
        self,
        source: str | Rows,
        sink: str | Sink,
        *,
        retrying: Retrying | None = None,
        rows_max: int = 500,
        bytes_max: int = BYTES_MAX,
        keep: Duration = "7d",
        poll_s: float = POLL_S,
        on_step: Callable[[RelayResult], None] | None = None,
        on_counts: Callable[[OutboxCounts], None] | None = None,
        hooks: Iterable[Hook] = (),
    ) -> None:
        if not 1 <= rows_max <= ROWS_MAX:
            raise PolicyInvalid(f"rows_max is {rows_max}; it must be between 1 and {ROWS_MAX:,}")
        self.rows: Rows = rows_for(source) if isinstance(source, str) else source
        self.sink: Sink = sink_for(sink) if isinstance(sink, str) else sink
        self.totals: Totals = Totals()
        self._retrying = retrying or Retrying()
        self._rows_max = min(rows_max, self.sink.batch_max)
        self._bytes_max = bytes_max
        self._keep_us = duration_us(keep)
        self._poll_s = poll_s
        self._on_step = on_step
        self._on_counts = on_counts
        listeners = tuple(hooks)
        self._reports = RowReports(listeners, self.sink.name) if listeners else None
        self._taken: Sequence[OutboxRow] = ()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._stop_asked = False
        self._pauses: dict[str, float] = {}
        self._failures = 0
        self._outage = OutageLog(_log, f"{self.rows.name} or {self.sink.name}")
        self._share_due = self._clean_due = self._count_due = 0.0
        self._rows_open = self._sink_open = False

    # --- from outside ---

    def run(self, *, until_empty: bool = False) -> Totals:
        """Publish until `stop()`, in an event loop of its own; `until_empty`: until no row is due."""
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            raise UsageError("an event loop is running here: await relay.arun(), or run() in a thread")
        return asyncio.run(self.arun(until_empty=until_empty))

    def stop(self) -> None:
        """Take no more rows, wait for the broker's answers, and end. Works from any thread or signal handler."""
        self._stop_asked = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stopping.set)

    async def arun(self, *, until_empty: bool = False) -> Totals:
        """Publish until `stop()`; `until_empty`: until no row is due.

        Retries while the database or the broker does not answer. Raises errors that a retry cannot fix.
        """
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        if self._stop_asked:
            self._stopping.set()
        try:
            while not self._stopping.is_set():
                try:
                    if await self._turn() and until_empty:
                        break
                except (StoreUnavailable, SinkUnavailable) as error:
                    await self._back_off(error)
        finally:
            await self._close()
            self._loop = None
        return self.totals

    # --- one turn ---

    async def _turn(self) -> bool:
        """Publish some rows, or wait for some. Returns `True` if there was nothing to do."""
        await self._interruptible(self._open())
        if self._stopping.is_set():
            return False
        now = time.monotonic()
        if now >= self._share_due:
            ours = await self.rows.share()
            self._share_due = now + SHARE_S
            if not ours:
                self._share_due = 0.0
                await self._interruptible(asyncio.sleep(self._poll_s / 4))
                return False
        if now >= self._clean_due:
            cleaned = await self.rows.clean(CLEAN_ROWS)
            self.totals.cleaned += cleaned
            self._clean_due = now if cleaned >= CLEAN_ROWS else now + CLEAN_S
        step = await adrive(relay_step(self._retrying, ordered=self.sink.ordered), self._perform)
        self._note(step)
        if step.unsent is not None and not step.published and not step.refused:
            if not self._stopping.is_set():
                raise SinkUnavailable(f"{self.sink.name}: {step.unsent}")
        else:
            self._failures = 0
            self._outage.end()
        if step.taken:
            return False
        await self._interruptible(self.rows.wait(self._poll_s))
        return True

    async def _perform(self, command: Command[Any]) -> Any:
        match command:
            case TakeRows():
                return await self._take()
            case PublishRows():
                return await self._publish(command)
            case SettleRows():
                now = time.monotonic()
                for failure in command.failures:
                    if failure.pauses is not None and len(self._pauses) < PAUSES_MAX:
                        until = now + failure.delay_us / 1e6
                        self._pauses[failure.pauses] = max(until, self._pauses.get(failure.pauses, 0.0))
                await self.rows.settle(command.published, command.failures, self._keep_us)
                if self._reports is not None:
                    self._reports.report(self._taken, command.published, command.failures)
                return None
            case _:
                raise TypeError(f"a relay does not know {command!r}")

    async def _take(self) -> Taken:
        now = time.monotonic()
        self._pauses = {where: until for where, until in self._pauses.items() if until > now}
        paused = {where: round((until - now) * 1e6) for where, until in self._pauses.items()}
        self._taken = await self.rows.take(self._rows_max, self._bytes_max)
        return Taken(self._taken, paused)

    async def _publish(self, command: PublishRows) -> list[Sent]:
        rows = command.rows
        if self._stopping.is_set():
            return [NotPublished("the relay is stopping")] * len(rows)
        task = asyncio.ensure_future(self.sink.publish(rows))
        try:
            await self._until_drained(task)
            return await task
        except SinkUnavailable as error:
            return [NotPublished(str(error))] * len(rows)
        except asyncio.CancelledError:
            if not task.cancelled() or not self._stopping.is_set():
                raise
            return [NotPublished("the relay is stopping")] * len(rows)
        finally:
            task.cancel()

    async def _until_drained(self, task: "asyncio.Future[Any]") -> None:
        """Wait for the broker; after `stop()` only for a limited time."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=DRAIN_S)
                task.cancel()
        finally:
            stopping.cancel()

    def _note(self, step: RelayResult) -> None:
        totals = self.totals
        totals.published += step.published
        totals.refused += step.refused
        totals.died += step.died
        if step.died:
            _log.warning("%s: %d messages are dead: semel outbox list --dead", self.rows.name, step.died)
        if self._on_step is not None and step.taken:
            self._on_step(step)

    # --- connections ---

    async def _open(self) -> None:
        if not self._rows_open:
            await self.rows.open()
            self._rows_open = True
            self._share_due = 0.0
        await self._count()  # also while the sink is unreachable: then the outbox grows
        if not self._sink_open:
            await self.sink.open()
            self._sink_open = True

    async def _count(self) -> None:
        now = time.monotonic()
        if self._on_counts is not None and now >= self._count_due:
            self._count_due = now + COUNT_S
            self._on_counts(await self.rows.counts())

    async def _back_off(self, error: Exception) -> None:
        """Reconnect after a growing delay."""
        delay_s = backoff_s(self._failures, BACKOFF_FIRST_S, BACKOFF_MAX_S)
        self._failures += 1
        self._outage.report(error)
        if isinstance(error, StoreUnavailable):
            await self._close_rows()
        else:
            await self._close_sink()
        await self._interruptible(asyncio.sleep(delay_s))

    async def _close(self) -> None:
        await self._close_sink()
        await self._close_rows()

    async def _close_rows(self) -> None:
        self._rows_open = False
        with suppress(StoreUnavailable):
            await self.rows.close()

    async def _close_sink(self) -> None:
        self._sink_open = False
        with suppress(SinkUnavailable):
            await self.sink.close()

    async def _interruptible(self, work: Coroutine[Any, Any, Any]) -> None:
        """Wait for the awaitable or for `stop()`."""
        task = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class RowReports:
    """Reports the rows of one relay: consumer `relay`, source `outbox`, the sink's kind as the handler.

    A row counts as received when the sink has answered for it, so a sink that is away counts nothing.
    """

    def __init__(self, hooks: Iterable[Hook], sink: str) -> None:
        self._hooks = Hooks(hooks)
        self._handler = sink.partition(":")[0]

    def report(
        self, rows: Sequence[OutboxRow], published: Sequence[str], failures: Sequence[RowFailure]
    ) -> None:
        """Report the settled ones of these rows."""
        done, failed = set(published), {each.id: each for each in failures if each.reason is not None}
        for row in rows:
            who = ("", CONSUMER, row.id, b"", self._handler, SOURCE)
            kind, failure = row.event_type, failed.get(row.id)
            if row.id not in done and failure is None:
                continue
            self._hooks(events.Received(*who, again=row.attempts > 0, event_type=kind))
            if failure is None:
                self._hooks(events.CompletedEvent(*who, event_type=kind))
            elif failure.dead:
                error = PublishFailed(failure.reason)
                self._hooks(events.FailedEvent(*who, error, row.attempts + 1, event_type=kind))
                self._hooks(events.DeadLettered(*who, "failed", row.attempts + 1, error, event_type=kind))
            else:
                error, delay_s = PublishFailed(failure.reason), failure.delay_us / 1e6
                self._hooks(events.Released(*who, error, delay_s, row.attempts + 1, event_type=kind))


class PublishFailed(Exception):
    """The sink refused a row. Only hooks get it; it is never raised."""
