"""Call a broker. While it does not answer: wait, longer each time; report at once, then once a minute."""

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

from semel.brokers.source import Source
from semel.core.backoff import backoff_s
from semel.errors import SourceUnavailable
from semel.observe.limited_log import OutageLog
from semel.runtime.process import asyncio

__all__ = [
    "NOTICE_S",
    "OUTAGE_MAX_S",
    "RECEIVE_WAIT_S",
    "STOP_AWAY_S",
    "STOP_SILENT_S",
    "SourceLink",
    "outage_pause_s",
]

_log = logging.getLogger("semel.runner")

T = TypeVar("T")

RECEIVE_WAIT_S = 0.5
"""The longest wait of one receive."""
OUTAGE_FIRST_S = 0.5
OUTAGE_MAX_S = 15.0
SILENCE_S = 5.0
"""A broker that has not answered a call for this time is away: that is reported, and the call continues. A receive
takes a second; opening a Kafka topic that is missing takes three. Time in which this process itself did not run does
not count."""
NOTICE_S = 0.05
"""How often a running call checks for a stop, and a stop for a broker that does not answer."""
RECEIVE_GRACE_S = 1.2
"""How long a receive may take when a stop comes: messages of a cancelled one are redelivered only after their deadline.
"""
CANCEL_S = 0.2
"""How long a cancelled call has to close its resources."""
STOP_SILENCE_S = 1.0
"""During a stop, a broker that answers none of its calls for this time is away. It redelivers what it did not confirm,
and a record says what was done. Time in which this process itself did not run does not count."""
LAST_S = 0.1
"""How long a stop waits for an answer of a broker that is away, and as long again for its close."""
STOP_AWAY_S = NOTICE_S + CANCEL_S + 2 * (LAST_S + NOTICE_S) + LAST_S
"""The longest stop while the broker is away, after the last handler: notice it, cancel the receive; then the dead
letters, the acks and the close."""
NO_ANSWER = "no answer before the stop"
CLOSE_S = 1.0
"""How long a stop waits until the broker confirms the close. It is sent at once, and everything else is confirmed."""
STOP_SILENT_S = max(RECEIVE_GRACE_S, STOP_SILENCE_S) + STOP_AWAY_S
"""The longest stop if the broker falls silent in the same moment, after the last handler: a receive or an answer that
nobody confirms, and then the stop of a broker that is away."""


def outage_pause_s(tries: int) -> float:
    """Return how long to wait after this number of calls without an answer."""
    return backoff_s(tries, OUTAGE_FIRST_S, OUTAGE_MAX_S)


class Patience:
    """Counts how long a stop has waited. A pause of this process counts as two looks at most."""

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._looked_at: float | None = None

    def renew(self) -> None:
        """Begin again: the broker has answered."""
        self._waited_s, self._looked_at = 0.0, None

    def waited_s(self) -> float:
        """Look, and return the time since the first look."""
        now = monotonic()
        if self._looked_at is not None:
            self._waited_s += min(now - self._looked_at, 2 * NOTICE_S)
        self._looked_at = now
        return self._waited_s


class SourceLink:
    """Calls a source until it answers. Reports its outages; a stop cancels waiting calls."""

    def __init__(self, source: Source, is_stopping: Callable[[], bool]) -> None:
        self._source = source
        self._is_stopping = is_stopping
        self._outage = OutageLog(_log, source.name)
        self._broken_off = self._given_up = self._stop_reported = False
        self._failed_at = self._answered_at = 0.0
        self._calls: dict[asyncio.Future[Any], float] = {}
        """Answers that the broker has not confirmed yet, with the times at which they were sent."""
        self._patience = Patience()
        self._asked: asyncio.Future[Any] | None = None

    @property
    def away(self) -> bool:
        """Whether the broker has not answered the latest call."""
        return self._outage.away or self._broken_off or self._given_up

    async def answer(self, call: Callable[[], Awaitable[T]]) -> T:
        """Send an answer to the broker: an ack, a nack, a dead letter.

        Raises `SourceUnavailable` if the broker has not confirmed it before a stop breaks it off; the broker is not
        called again after that.
        """
        if self._given_up:
            raise SourceUnavailable(NO_ANSWER)
        task: asyncio.Future[T] = asyncio.ensure_future(call())
        self._calls[task] = monotonic()
        silent = asyncio.get_running_loop().call_later(SILENCE_S, self._report_silence, task)
        try:
            await asyncio.wait([task])
        finally:
            silent.cancel()
            del self._calls[task]
            if not task.done():
                task.cancel()
                task.add_done_callback(_drop_result)
        if task.cancelled():
            raise SourceUnavailable(NO_ANSWER)
        self._patience.renew()
        return task.result()

    def break_off(self) -> None:
        """End answers that a stop has waited for long enough: shortly if the broker is away. Call it every `NOTICE_S`.

        A broker that answers one of several calls is not away, however slow it is.
        """
        if not self._calls:
            self._patience.renew()
            return
        if self.away:
            late = [task for task, sent_at in self._calls.items() if monotonic() - sent_at >= LAST_S]
        else:
            late = list(self._calls) if self._patience.waited_s() >= STOP_SILENCE_S else []
        for task in late:
            self._given_up = True
            task.cancel()

    async def ask(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """Return the answer; while the broker is unavailable, wait and reconnect. `None` if a stop comes first.

        Raises errors that a retry cannot fix, such as `SourceRefused`.
        """
        tries = 0
        while not self._is_stopping():
            started_at = monotonic()
            try:
                if tries and call != self._source.open:
                    await self._call(self._source.open)
                    self._answered_at = monotonic()
                answer = await self._call(call)
                if not answer and self._outage.away:
                    await self._ping()
            except SourceUnavailable as error:
                self.report(error, started_at)
                await self._pause(outage_pause_s(tries))
                tries += 1
            else:
                if answer:
                    self._answered_at = monotonic()
                if not self._is_stopping() and started_at > self._failed_at:
                    self._outage.end()
                return answer
        return None

    async def _ping(self) -> None:
        """Make sure that the broker has answered: some clients return nothing also without an answer."""
        ping = getattr(self._source, "ping", None)
        if ping is not None:
            await self._call(ping)

    def report(self, error: object, started_at: float) -> None:
        """Report a call without an answer, which started at this time.

        The outage ends with the answer to a call that started after this report. If the broker has answered another
        call since the start of this one, its outage is over, and is not reported again.
        """
        if started_at < self._answered_at:
            _log.info("%s: %s", self._source.name, error)
            return
        self._failed_at = monotonic()
        if not self._is_stopping():
            self._outage.report(error)
            return
        if not self._outage.away and not self._stop_reported:
            self._stop_reported = True
            _log.warning("%s: %s; it delivers again what it did not confirm", self._source.name, error)
        self._broken_off = True

    async def wait_for_last_receive(self) -> None:
        """During a stop, wait until the last receive has ended: it would get messages that are returned before."""
        if self._is_stopping() and self._asked is not None:
            await asyncio.wait([self._asked])

    async def close(self) -> None:
        """Close the source; waits only shortly for an unavailable broker."""
        with suppress(SourceUnavailable, TimeoutError):
            await asyncio.wait_for(self._source.close(), LAST_S if self.away else CLOSE_S)

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """Await one answer; `None` if a stop comes first."""
        task: asyncio.Future[T] = asyncio.ensure_future(call())
        self._asked = task
        started_at = looked_at = monotonic()
        silent_s = 0.0
        may_take_s = 0.0 if self.away or call == self._source.open else RECEIVE_GRACE_S
        try:
            while True:
                await asyncio.wait([task], timeout=NOTICE_S)
                if task.done():
                    return task.result()
                now = monotonic()
                silent_s += min(now - looked_at, 2 * NOTICE_S)
                looked_at = now
                if self._is_stopping():
                    if now - started_at >= may_take_s:
                        self._broken_off = True
                        return None
                elif silent_s >= SILENCE_S:
                    self._outage.report(f"no answer for {now - started_at:.0f} s")
        finally:
            if not task.done():
                task.cancel()
                task.add_done_callback(_drop_result)
                # It closes its own connection; no other code has it.
                await asyncio.wait([task], timeout=CANCEL_S)

    def _report_silence(self, task: "asyncio.Future[Any]") -> None:
        if not task.done():
            self.report(f"no answer for {SILENCE_S:.0f} s", self._calls[task])

    async def _pause(self, delay_s: float) -> None:
        until = monotonic() + delay_s
        while not self._is_stopping() and (left := until - monotonic()) > 0:
            await asyncio.sleep(min(left, NOTICE_S))


def _drop_result(task: "asyncio.Future[Any]") -> None:
    """Retrieve the error of a call without a waiter, so that it is not logged as never retrieved."""
    if not task.cancelled():
        task.exception()
