"""Connections to the server: how they are made, how long they are waited for, and who uses which.

A pool connects when a connection is asked for and none is idle, so that a server that is back is used at once. It
has no threads or tasks of its own.
"""

import asyncio  # sync: drop
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from threading import Lock  # sync: from threading import Lock, Semaphore
from typing import Any

import psycopg
from psycopg.generators import execute
from psycopg.pq import Format, TransactionStatus
from psycopg.pq.abc import PGresult

from semel.errors import StoreUnavailable
from semel.stores.postgres import encoding
from semel.stores.postgres.pool_base import (
    CANCEL_S,
    CHECK_S,
    CONTEXT,
    LEFT_TO_THE_PARENT,
    NoAnswer,
    is_idle,
    is_usable,
    only_result,
    wait_for_input_async,
    within,
)

__all__ = ["AsyncPostgresConnection", "AsyncPostgresPool"]


class AsyncPostgresConnection(psycopg.AsyncConnection[encoding.Row]):
    """A connection that does not wait forever."""

    wait_s: float = 10.0

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._prepared_here: set[str] = set()

    async def wait(self, gen: Any, interval: float = CHECK_S, **more: Any) -> Any:  # type: ignore[override]
        """Wait for the server, at most `wait_s` for the next sign of life, unless the caller says how long."""
        if more:
            return await super().wait(gen, interval, **more)
        try:
            return await super().wait(within(gen, self.wait_s), interval=CHECK_S)
        except NoAnswer:
            self.pgconn.finish()
            raise

    async def ask(self, name: str, text: str, parameters: Sequence[bytes | None]) -> PGresult:
        """The rows of one statement, committed. It is prepared by this connection's first call of that name.

        It goes past the driver's cursors, which cost more than the server does: parameters and rows are in the
        server's binary form. It waits, is cancelled and fails as `execute` does.
        """
        if name not in self._prepared_here:
            self.pgconn.send_prepare(name.encode(), text.encode())
            await self._read_result()
            self._prepared_here.add(name)
        formats = [Format.BINARY] * len(parameters)
        self.pgconn.send_query_prepared(name.encode(), parameters, formats, Format.BINARY)
        return await self._read_result()

    async def _read_result(self) -> PGresult:
        """Read the result of what was sent. Only at the end of all results is it committed."""
        pgconn = self.pgconn
        results: list[PGresult] = []
        try:
            if not pgconn.flush():
                await self._await_input()
                pgconn.consume_input()
                while not pgconn.is_busy():
                    result = pgconn.get_result()
                    if result is None:
                        return only_result(results)
                    results.append(result)
        except (asyncio.CancelledError, KeyboardInterrupt):  # sync: except KeyboardInterrupt:
            await self._cancel()
            raise
        return only_result(results + await self.wait(execute(pgconn)))  # too long to be sent or read at once

    async def _await_input(self) -> None:
        """Wait for the next sign of the server, at most `wait_s`."""
        if not await wait_for_input_async(self.pgconn.socket, self.wait_s):
            self.pgconn.finish()
            raise NoAnswer(f"no answer within {self.wait_s:g} s")

    async def _cancel(self) -> None:
        """Interrupted while the server works: stop it there, and read what it says, so that it can be used again."""
        if self.pgconn.transaction_status != TransactionStatus.ACTIVE:
            return
        try:
            await self.cancel_safe(timeout=CANCEL_S)
            await super().wait(within(execute(self.pgconn), CANCEL_S), interval=CHECK_S)
        except psycopg.Error:
            self.pgconn.finish()


class AsyncPostgresPool:
    """The connections of a store, at most `lines_max` at a time."""

    def __init__(self, parameters: Mapping[str, Any], *, lines_max: int, wait_s: float) -> None:
        self._parameters = parameters
        self._wait_s = wait_s
        self._room = asyncio.Semaphore(lines_max)  # sync: self._room = Semaphore(lines_max)
        self._lock = Lock()
        self._idle: list[AsyncPostgresConnection] = []
        self._closed = False

    @asynccontextmanager
    async def line(self) -> AsyncIterator[AsyncPostgresConnection]:
        """A connection outside any transaction; one that is no longer sound is not given out again."""
        line = await self.take()
        try:
            yield line
        finally:
            await self.give(line)

    async def take(self) -> AsyncPostgresConnection:
        """The same for callers that `give` it back themselves."""
        if not await self._acquire():  # sync: if not self._room.acquire(timeout=self._wait_s):
            raise StoreUnavailable(f"all connections were in use for {self._wait_s:g} s; raise pool_max")
        try:
            return await self._take_idle() or await self.connect()
        except BaseException:
            self._room.release()
            raise

    async def give(self, line: AsyncPostgresConnection) -> None:
        """Take back a connection, and keep it if it is sound."""
        try:
            await self._keep(line)
        finally:
            self._room.release()

    async def _acquire(self) -> bool:  # sync: drop
        if not self._room.locked():
            return await self._room.acquire()
        try:
            async with asyncio.timeout(self._wait_s):  # `wait_for` may lose the place when it is cancelled
                return await self._room.acquire()
        except TimeoutError:
            return False

    async def connect(self) -> AsyncPostgresConnection:
        """A new connection."""
        line = await AsyncPostgresConnection.connect(**self._parameters, context=CONTEXT)
        line.wait_s = self._wait_s
        return line

    async def aclose(self) -> None:
        """Close what is idle, and the others when they come back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for line in idle:
            await line.close()

    def abandon(self) -> None:
        """In a forked child: the connections are the parent's, neither to be used nor to be closed."""
        LEFT_TO_THE_PARENT.extend(self._idle)
        self._idle = []

    def drop(self) -> None:  # sync: drop
        """The loop is gone: close the sockets without it. One that is in use goes on, and is closed by its user."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for line in idle:
            line.pgconn.finish()

    async def _take_idle(self) -> AsyncPostgresConnection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                line = self._idle.pop()
            if is_usable(line):
                return line
            await line.close()

    async def _keep(self, line: AsyncPostgresConnection) -> None:
        if line.pgconn.transaction_status not in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN):
            with suppress(psycopg.Error):
                await line.rollback()
        with self._lock:
            if not self._closed and is_idle(line):
                self._idle.append(line)
                return
        await line.close()
