"""Read the reply to one call by a callback of the event loop: no task and no stream in between.

The driver connects, and reads all other replies. `SingleReplies` stands between the transport and the driver's own
protocol; it passes everything on, except for the reply that it waits for.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from hiredis import HiredisError, Reader

from semel.stores.redis.errors import ServerError

__all__ = ["SingleReplies"]

BUFFER_BYTES = 64 * 1024
"""How much is read at once; longer replies take several turns."""


class SingleReplies(asyncio.BufferedProtocol):
    """The protocol of one connection."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop, wait_s: float) -> None:
        self._transport = transport
        self._driver: Any = transport.get_protocol()
        self._loop = loop
        self._wait_s = wait_s
        self._reader = Reader(replyError=ServerError)
        self._buffer = bytearray(BUFFER_BYTES)
        self._done: Callable[[Any], None] | None = None
        self._until = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self.is_lost: bool = False
        """Whether the server has closed the connection."""
        transport.set_protocol(self)

    def ask(self, packed: bytes, done: Callable[[Any], None]) -> None:
        """Send a call. `done` gets its reply, or the error: of the server, or of the connection."""
        self._done = done
        self._until = self._loop.time() + self._wait_s
        if (
            self._alarm is None
        ):  # one alarm for many calls: it looks again if another call is under way when it rings
            self._alarm = self._loop.call_at(self._until, self._check_time)
        self._transport.write(packed)

    def end(self, error: Exception) -> None:
        """Answer the call under way, if there is one, with an error of the connection."""
        self.is_lost = True
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        done, self._done = self._done, None
        if done is not None:
            done(error)

    def _check_time(self) -> None:
        self._alarm = None
        if self._done is None:
            return
        if self._loop.time() < self._until:
            self._alarm = self._loop.call_at(self._until, self._check_time)
        else:
            self.end(TimeoutError(f"no answer within {self._wait_s:g} s"))

    # --- called by the transport ---

    def get_buffer(self, _size: int) -> bytearray:
        """Return the buffer for the next data; one buffer for all, as a new one for each reply costs more."""
        return self._buffer

    def buffer_updated(self, size: int) -> None:
        """Read the reply that is waited for; leave all other data to the driver."""
        if self._done is None:
            self._driver.data_received(bytes(memoryview(self._buffer)[:size]))
            return
        try:
            self._reader.feed(self._buffer, 0, size)  # type: ignore[arg-type]  # it takes any buffer
            reply = self._reader.gets()
        except HiredisError as error:
            self.end(ConnectionError(str(error)))
            return
        if reply is not False:  # it is whole
            done, self._done = self._done, None
            done(reply)

    def eof_received(self) -> Any:
        """Note the end of the connection."""
        self.end(ConnectionError("the server closed the connection"))
        return self._driver.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        """Note the end of the connection."""
        self.end(error or ConnectionError("the connection was closed"))
        self._driver.connection_lost(error)

    def pause_writing(self) -> None:
        """Leave it to the driver."""
        self._driver.pause_writing()

    def resume_writing(self) -> None:
        """Leave it to the driver."""
        self._driver.resume_writing()
