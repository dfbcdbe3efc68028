"""Send acks and nacks to the broker, in batches."""

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from time import monotonic
from typing import Any

from semel.brokers.outages import SourceLink
from semel.brokers.retry_queue import RunnerCounters
from semel.brokers.source import Arrival, Source
from semel.errors import SourceUnavailable
from semel.observe.formatting import plural
from semel.runtime.process import asyncio

__all__ = ["Answers"]

GATHER_S = 0.02
"""How long an ack waits for others while handlers run: a single ack costs as much as a handler."""


class Answers:
    """The acks and nacks of one runner. `spawn` starts a task that the runner waits for before it ends."""

    def __init__(
        self,
        source: Source,
        link: SourceLink,
        counts: RunnerCounters,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        *,
        batch: int,
        more_may_come: Callable[[], bool],
    ) -> None:
        self._source = source
        self._link = link
        self._counts = counts
        self._spawn = spawn
        self._batch = batch
        self._more_may_come = more_may_come
        self._acks: list[Arrival] = []
        self._acking: asyncio.Task[None] | None = None
        self._nacks: dict[float, list[Arrival]] = {}
        """Nacks by delay; sent in the next turn of the loop."""

    def ack(self, arrival: Arrival) -> None:
        """Queue an ack."""
        self._acks.append(arrival)
        if self._acking is None:
            self._acking = asyncio.create_task(self._send_acks())

    async def _send_acks(self) -> None:
        """Send the queued acks in one call, until the queue is empty."""
        try:
            while self._acks:
                if len(self._acks) < self._batch and self._more_may_come():
                    await asyncio.sleep(GATHER_S)
                acks, self._acks = self._acks, []
                started_at = monotonic()
                try:
                    await self._link.answer(partial(self._source.ack, acks))
                    self._counts.acked += len(acks)
                except SourceUnavailable as error:  # they are redelivered as duplicates
                    self._link.report(f"{plural(len(acks), 'ack')} failed: {error}", started_at)
        finally:
            self._acking = None

    def nack(self, arrivals: Sequence[Arrival], delay_s: float) -> None:
        """Queue nacks; a stop returns hundreds of messages with one call."""
        self._counts.returned += len(arrivals)
        gathered = self._nacks.setdefault(delay_s, [])
        if not gathered:
            self._spawn(self._send_nacks(delay_s))
        gathered.extend(arrivals)

    async def _send_nacks(self, delay_s: float) -> None:
        if not delay_s:
            await self._link.wait_for_last_receive()
        arrivals = self._nacks.pop(delay_s)
        started_at = monotonic()
        try:
            await self._link.answer(partial(self._source.nack, arrivals, delay_s))
        except SourceUnavailable as error:  # the broker redelivers them by itself
            self._link.report(f"{plural(len(arrivals), 'nack')} failed: {error}", started_at)

    @property
    def tasks(self) -> "set[asyncio.Task[None]]":
        """The task that sends acks, while there are any."""
        return set() if self._acking is None else {self._acking}
