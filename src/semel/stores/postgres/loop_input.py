"""Notice the input of one connection in an event loop, with a limit of time. No task waits for it."""

import asyncio
from collections.abc import Callable

from psycopg.pq.abc import PGconn

__all__ = ["LoopInput"]


class LoopInput:
    """The input of a connection. The loop keeps watching the socket between calls, which is cheaper.

    The driver watches the same socket when it waits itself: call `stop` before that, and before the socket is closed.
    """

    def __init__(self, pgconn: PGconn) -> None:
        self._pgconn = pgconn
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop that watches the socket; `None`: none does."""
        self._socket = -1
        self._on_input: Callable[[], None] | None = None
        self._on_time: Callable[[], None] | None = None
        self._until = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    def expect(
        self,
        loop: asyncio.AbstractEventLoop,
        wait_s: float,
        on_input: Callable[[], None],
        on_time: Callable[[], None],
    ) -> None:
        """Call `on_input` whenever there is input, or `on_time` after `wait_s`, until `expect_nothing` is called."""
        self._on_input, self._on_time = on_input, on_time
        self._until = loop.time() + wait_s
        if self._loop is not loop:
            self._loop, self._socket = loop, self._pgconn.socket
            loop.add_reader(self._socket, self._notice)
        if (
            self._alarm is None
        ):  # one alarm for many calls: it looks again if another call is under way when it rings
            self._alarm = loop.call_at(self._until, self._check_time)

    def expect_nothing(self) -> None:
        """The answer is complete."""
        self._on_input = self._on_time = None

    def stop(self) -> None:
        """Stop watching the socket."""
        loop, self._loop = self._loop, None
        self._on_input = self._on_time = None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._socket)

    def finish(self) -> None:
        """Close the connection from outside its loop: in the loop if it still runs, in another thread, else now."""
        loop = self._loop
        if loop is not None and loop.is_running():
            loop.call_soon_threadsafe(self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        self.stop()
        self._pgconn.finish()

    def _notice(self) -> None:
        if self._on_input is not None:
            self._on_input()
        else:
            self.stop()  # the server has closed an idle connection; the pool finds out

    def _check_time(self) -> None:
        loop, self._alarm = self._loop, None
        if self._on_time is None or loop is None:
            return
        if loop.time() < self._until:
            self._alarm = loop.call_at(self._until, self._check_time)
        else:
            self._on_time()
