"""Answer the broker for deliveries: acks that gather meanwhile go together, and so do messages given back at once."""

import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from semel.brokers.retry_queue import RunnerCounters
from semel.brokers.source import Arrival, Source
from semel.errors import SourceUnavailable
from semel.runtime.process import asyncio

__all__ = ["Answers"]

_log = logging.getLogger("semel.runner")

GATHER_S = 0.02
"""How long an ack waits for others to go with it, while handlers run: alone, it costs as much as a handler."""


class Answers:
    """The acks and nacks of one runner. `spawn` starts a task that the runner waits for before it ends."""

    def __init__(
        self,
        source: Source,
        counts: RunnerCounters,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        *,
        batch: int,
        more_may_come: Callable[[], bool],
    ) -> None:
        self._source = source
        self._counts = counts
        self._spawn = spawn
        self._batch = batch
        self._more_may_come = more_may_come
        self._acks: list[Arrival] = []
        self._acking: asyncio.Task[None] | None = None
        self._nacks: dict[float, list[Arrival]] = {}
        """By delay; they are sent in the next turn of the loop."""

    def ack(self, arrival: Arrival) -> None:
        """Have it acknowledged, with others."""
        self._acks.append(arrival)
        if self._acking is None:
            self._acking = asyncio.create_task(self._send_acks())

    async def _send_acks(self) -> None:
        """Acknowledge what has gathered, together; what gathers meanwhile goes next."""
        try:
            while self._acks:
                if len(self._acks) < self._batch and self._more_may_come():
                    await asyncio.sleep(GATHER_S)
                acks, self._acks = self._acks, []
                try:
                    await self._source.ack(acks)
                    self._counts.acked += len(acks)
                except SourceUnavailable as error:  # they come again, as duplicates
                    _log.warning("%s did not take %d acks: %s", self._source.name, len(acks), error)
        finally:
            self._acking = None

    def nack(self, arrivals: Sequence[Arrival], delay_s: float) -> None:
        """Have them delivered again. A stop gives back hundreds: one call for all, not one for each."""
        self._counts.returned += len(arrivals)
        gathered = self._nacks.setdefault(delay_s, [])
        if not gathered:
            self._spawn(self._send_nacks(delay_s))
        gathered.extend(arrivals)

    async def _send_nacks(self, delay_s: float) -> None:
        arrivals = self._nacks.pop(delay_s)
        try:
            await self._source.nack(arrivals, delay_s)
        except SourceUnavailable as error:  # the broker brings them back by itself
            _log.warning("%s did not take %d messages back: %s", self._source.name, len(arrivals), error)

    async def finish_acks(self, patience_s: float) -> None:
        """Wait for the acks that are under way."""
        if self._acking is not None:
            await asyncio.wait([self._acking], timeout=patience_s)
