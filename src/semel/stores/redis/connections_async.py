"""Connections to Redis or Valkey, and the pools that keep them."""

import asyncio  # sync: drop
import time
from collections.abc import Callable  # sync: drop
from contextlib import suppress
from threading import Lock  # sync: from threading import Event, Lock
from typing import Any

from redis.asyncio import connection as driver  # sync: from redis import connection as driver
from redis.asyncio.retry import Retry  # sync: from redis.retry import Retry
from redis.backoff import NoBackoff

from semel.errors import StoreClosed
from semel.stores.redis import marks
from semel.stores.redis.base import RedisState, link_options
from semel.stores.redis.calls import Address, RedisCall
from semel.stores.redis.errors import BROKEN, as_message
from semel.stores.redis.listener import AsyncRedisListener
from semel.stores.redis.replies import SingleReplies  # sync: drop

__all__ = ["AsyncRedisConnection", "AsyncRedisPool", "AsyncRedisPools"]

IDLE_MAX = 8
"""The most idle connections kept for one node."""
STALE_S = 0.2
"""A connection that was idle for this long is checked before use: the server may have closed it."""
LINES_BYTES = 64 * 1024
"""How many bytes of line replies are read at once."""


class AsyncRedisConnection:
    """One connection. Used by one caller at a time."""

    def __init__(self, core: RedisState, address: Address) -> None:
        kind: Any = driver.SSLConnection if core.place.tls else driver.Connection
        options = link_options(core, address)
        options["socket_timeout"] = None  # sync: drop
        self.connection: Any = kind(**options, retry=Retry(NoBackoff(), 0))
        self.address = address
        self.used_at: float = 0.0
        self._answer_s = core.options.answer_s  # sync: drop
        self._replies: SingleReplies | None = None  # sync: drop

    async def send(self, packed: bytes) -> None:
        """Send bytes. Raises the driver's error."""
        await self.connection.send_packed_command([packed], check_health=False)

    async def read(self) -> Any:
        """Read a reply; an error reply is returned as a value. Raises the driver's error if the connection breaks."""
        try:
            return await self.connection.read_response(disable_decoding=True)
        except Exception as error:
            message = as_message(error)
            if message is None:
                raise
            return message

    def ask(self, packed: bytes, done: Callable[[Any], None]) -> None:  # sync: drop
        """Send one call; `done` gets its reply, or an error as a value."""
        if self._replies is None:
            loop = asyncio.get_running_loop()
            self._replies = SingleReplies(self.connection._writer.transport, loop, self._answer_s)
        self._replies.ask(packed, done)

    @property  # sync: drop
    def is_lost(self) -> bool:
        """Whether the connection is known to have ended: the driver itself notices that only when it reads."""
        connection = self.connection
        if not connection.is_connected or connection._reader.at_eof() or connection._writer.is_closing():
            return True
        return self._replies is not None and self._replies.is_lost

    async def read_lines(self, calls: list[RedisCall]) -> list[list[bytes]]:
        """Read the replies of commands that reply with one line each; no other replies may be pending."""
        data = b""
        read = self.connection._reader.read  # sync: read = self.connection._sock.recv
        while marks.missing_lines(data, calls) > 0:
            more = await read(LINES_BYTES)
            if not more:
                raise ConnectionError("the server closed the connection")
            data += more
        return marks.split_lines(data, calls)

    async def is_stale(self) -> bool:
        """Whether an idle connection has something to read: that means its end."""
        try:
            return bool(await self.connection.can_read())
        except BROKEN:
            return True

    async def close(self, *, nowait: bool = True) -> None:  # sync: def close(self) -> None:
        """Close the connection; callable from any thread or task."""
        if self._replies is not None:  # sync: drop
            self._replies.end(ConnectionError("the connection was closed"))
        with suppress(*BROKEN, RuntimeError):  # the connections of a closed event loop are already gone
            await self.connection.disconnect(nowait=nowait)  # sync: self.connection.disconnect()


class AsyncRedisPool:
    """The connections of one store, and its listener. A closed pool is not used again."""

    def __init__(self, core: RedisState) -> None:
        self._core = core
        self._lock = Lock()
        self._idle: dict[Address, list[AsyncRedisConnection]] = {}
        self._busy: set[AsyncRedisConnection] = set()
        self._closed = False
        # sync: self._closing = Event()
        self.opening: asyncio.Lock = asyncio.Lock()  # sync: self.opening: Lock = Lock()
        self.listener: AsyncRedisListener = AsyncRedisListener(core, AsyncRedisConnection)

    async def pause(self, seconds: float) -> None:
        """Wait this long."""
        await asyncio.sleep(seconds)  # sync: self._closing.wait(seconds)

    async def take(self, address: Address) -> AsyncRedisConnection:
        """Return an idle connection, or a new one. Raises the driver's error if it cannot connect."""
        while True:
            with self._lock:
                self._check_open()
                idle = self._idle.get(address)
                if not idle:
                    break
                link = idle.pop()
                self._busy.add(link)
            if time.monotonic() - link.used_at < STALE_S or not await link.is_stale():
                return link
            await self.drop(link)
        link = AsyncRedisConnection(self._core, address)
        await link.connection.connect()
        with self._lock:
            self._busy.add(link)
        try:
            self._check_open()  # the pool may have been closed during the connect
        except StoreClosed:
            await self.drop(link)
            raise
        return link

    def take_idle(self, address: Address) -> AsyncRedisConnection | None:  # sync: drop
        """Return an idle connection that is not known to have ended; `None`: there is none."""
        with self._lock:
            idle = self._idle.get(address)
            if not idle or self._closed:
                return None
            link = idle[-1]
            if link.is_lost:
                link.used_at = 0.0  # so that `take` finds out, and drops it
                return None
            idle.pop()
            self._busy.add(link)
            return link

    def keep(self, link: AsyncRedisConnection) -> bool:
        """Keep a connection whose replies have all been read. Returns `False` if it has to be closed instead."""
        link.used_at = time.monotonic()
        with self._lock:
            self._busy.discard(link)
            idle = self._idle.setdefault(link.address, [])
            is_open = not self._core.closed and not self._closed
            if is_open and len(idle) < IDLE_MAX and link.connection.is_connected:
                idle.append(link)
                return True
        return False

    def _check_open(self) -> None:
        if self._core.closed or self._closed:
            raise self._core.closed_error()

    async def release(self, link: AsyncRedisConnection) -> None:
        """Give a connection back to the pool; all its replies must have been read."""
        if not self.keep(link):
            await link.close()

    async def drop(self, link: AsyncRedisConnection) -> None:
        """Close a connection and remove it from the pool."""
        with self._lock:
            self._busy.discard(link)
        await link.close()

    async def drop_all(self) -> None:
        """Close all connections, also those in use."""
        with self._lock:
            links = [*self._busy, *(link for idle in self._idle.values() for link in idle)]
            self._idle.clear()
        for link in links:
            await link.close(nowait=False)  # sync: link.close()
        await asyncio.sleep(0)  # sync: drop

    async def aclose(self) -> None:
        """Close the pool; safe while others use its connections."""
        self._closed = True
        # sync: self._closing.set()
        await self.drop_all()
        await self.listener.stop()


class AsyncRedisPools:
    """The current pool: one for each event loop, and a new one after `close`."""

    def __init__(self, core: RedisState) -> None:
        self._core = core
        self._pools: dict[Any, AsyncRedisPool] = {}

    def current(self) -> AsyncRedisPool:
        """Return the current pool."""
        loop = asyncio.get_running_loop()  # sync: loop = None
        pool = self._pools.get(loop)
        if pool is None:
            for each in [each for each in self._pools if each.is_closed()]:  # sync: drop
                del self._pools[each]
            pool = self._pools.setdefault(loop, AsyncRedisPool(self._core))
        return pool

    def pop(self) -> AsyncRedisPool:
        """Return the pool to close; later calls get a new one."""
        pool = self.current()
        self._pools.clear()
        return pool
