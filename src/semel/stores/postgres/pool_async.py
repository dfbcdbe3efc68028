"""Connections to the server, with a limit on every wait, and the pool that hands them out.

A pool connects when a caller needs a connection and none is idle, so that a server that is back is used at once. It
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
from semel.stores.postgres.loop_input import LoopInput  # sync: drop
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
        self.input: LoopInput = LoopInput(self.pgconn)  # sync: drop

    async def wait(self, gen: Any, interval: float = CHECK_S, **more: Any) -> Any:  # type: ignore[override]
        """Wait for the server, at most `wait_s` for its next input, unless the caller passes a limit."""
        self.input.stop()  # sync: drop
        if more:
            return await super().wait(gen, interval, **more)
        try:
            return await super().wait(within(gen, self.wait_s), interval=CHECK_S)
        except NoAnswer:
            self.pgconn.finish()
            raise

    async def ask(self, name: str, text: str, parameters: Sequence[bytes | None]) -> PGresult:
        """Execute one statement and commit; returns its rows. The first call with a name prepares the statement.

        It bypasses the driver's cursors, which cost more than the server does: parameters and rows are in the
        server's binary form. Waiting, cancellation and errors are as in `execute`.
        """
        if name not in self._prepared_here:
            self.pgconn.send_prepare(name.encode(), text.encode())
            await self._read_result()
            self._prepared_here.add(name)
        formats = [Format.BINARY] * len(parameters)
        self.pgconn.send_query_prepared(name.encode(), parameters, formats, Format.BINARY)
        return await self._read_result()

    async def _read_result(self) -> PGresult:
        """Read the result of the statement. It is committed only when all results have been read."""
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
            await self.cancel_statement()
            raise
        return await self.read_rest(results)  # too long to be sent or read at once

    async def read_rest(self, results: list[PGresult]) -> PGresult:
        """Send and read the rest of a statement, by the driver."""
        return only_result(results + await self.wait(execute(self.pgconn)))

    def is_prepared(self, name: str) -> bool:  # sync: drop
        """Whether `ask` has prepared this statement."""
        return name in self._prepared_here

    async def _await_input(self) -> None:
        """Wait for the next input from the server, at most `wait_s`."""
        self.input.stop()  # sync: drop
        if not await wait_for_input_async(self.pgconn.socket, self.wait_s):
            self.pgconn.finish()
            raise NoAnswer(f"no answer within {self.wait_s:g} s")

    async def close(self) -> None:  # sync: drop
        """Close the connection."""
        self.input.stop()  # before the socket is closed: its number may be given to another one
        await super().close()

    async def cancel_statement(self) -> None:
        """Cancel a statement after an interrupt, and read its result, so that the connection can be used again."""
        self.input.stop()  # sync: drop
        if self.pgconn.transaction_status != TransactionStatus.ACTIVE:
            return
        try:
            await self.cancel_safe(timeout=CANCEL_S)
            await super().wait(within(execute(self.pgconn), CANCEL_S), interval=CHECK_S)
        except psycopg.Error:
            self.pgconn.finish()


class AsyncPostgresPool:
    """The connections of a store, at most `connections_max` at a time."""

    def __init__(self, parameters: Mapping[str, Any], *, connections_max: int, wait_s: float) -> None:
        self._parameters = parameters
        self._wait_s = wait_s
        self._room = asyncio.Semaphore(connections_max)  # sync: self._room = Semaphore(connections_max)
        self._lock = Lock()
        self._idle: list[AsyncPostgresConnection] = []
        self._closed = False

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncPostgresConnection]:
        """Lend a connection outside any transaction; a broken connection is not lent again."""
        connection = await self.take()
        try:
            yield connection
        finally:
            await self.give(connection)

    async def take(self) -> AsyncPostgresConnection:
        """Lend a connection to a caller that returns it by `give`."""
        if not await self._acquire():  # sync: if not self._room.acquire(timeout=self._wait_s):
            raise StoreUnavailable(f"all connections were in use for {self._wait_s:g} s; raise pool_max")
        try:
            return await self._take_idle() or await self.connect()
        except BaseException:
            self._room.release()
            raise

    async def give(self, connection: AsyncPostgresConnection) -> None:
        """Take back a connection, and keep it if it is usable."""
        try:
            await self._keep(connection)
        finally:
            self._room.release()

    def take_idle(self) -> AsyncPostgresConnection | None:  # sync: drop
        """Lend an idle connection to a caller that returns it by `keep_idle` or `give`; `None`: there is none."""
        if not self._idle or self._room.locked():
            return None
        with suppress(StopIteration):  # it does not wait: there is room
            self._room.acquire().send(None)
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None and is_usable(connection):
            return connection
        if connection is not None:
            self._idle.append(connection)  # `take` finds out, and closes it
        self._room.release()
        return None

    def keep_idle(self, connection: AsyncPostgresConnection) -> bool:  # sync: drop
        """Take back a connection that is usable. `False`: it is not, or the pool is closed; use `give`."""
        with self._lock:
            if self._closed or not is_idle(connection):
                return False
            self._idle.append(connection)
        self._room.release()
        return True

    async def _acquire(self) -> bool:  # sync: drop
        if not self._room.locked():
            return await self._room.acquire()
        try:
            async with asyncio.timeout(self._wait_s):  # `wait_for` may lose the slot when it is cancelled
                return await self._room.acquire()
        except TimeoutError:
            return False

    async def connect(self) -> AsyncPostgresConnection:
        """Open a new connection."""
        connection = await AsyncPostgresConnection.connect(**self._parameters, context=CONTEXT)
        connection.wait_s = self._wait_s
        return connection

    async def aclose(self) -> None:
        """Close the idle connections now, and the others when they come back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            await connection.close()

    def abandon(self) -> None:
        """Drop the connections in a forked child: they are the parent's, so neither use nor close them."""
        LEFT_TO_THE_PARENT.extend(self._idle)
        self._idle = []

    def drop(self) -> None:  # sync: drop
        """Close the idle sockets without their loop, which has ended. A connection in use is closed by its user."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.input.finish()

    async def _take_idle(self) -> AsyncPostgresConnection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if is_usable(connection):
                return connection
            await connection.close()

    async def _keep(self, connection: AsyncPostgresConnection) -> None:
        if connection.pgconn.transaction_status not in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN):
            with suppress(psycopg.Error):
                await connection.rollback()
        with self._lock:
            if not self._closed and is_idle(connection):
                self._idle.append(connection)
                return
        await connection.close()
