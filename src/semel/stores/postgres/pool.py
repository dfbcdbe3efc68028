"""Connections to the server: how they are made, how long they are waited for, and who uses which.

Both pools connect when a connection is asked for and none is idle, so that a server that is back is used at
once; none of them has threads or tasks of its own.
"""

import asyncio
import select
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from threading import Lock, Semaphore
from typing import Any, TypeVar

import psycopg
from psycopg.abc import AdaptContext
from psycopg.adapt import AdaptersMap, Dumper
from psycopg.pq import Format, TransactionStatus

from semel.errors import StoreUnavailable
from semel.stores.postgres import encoding

__all__ = ["AsyncLine", "AsyncLines", "PostgresConnection", "PostgresPool"]

T = TypeVar("T")
CHECK_S = 0.1
"""How often a wait for the server looks whether its time is over."""


class _PackedDumper(Dumper):
    """Arrays come packed already."""

    format = Format.BINARY

    def dump(self, obj: Any) -> bytes:
        return obj.data  # type: ignore[no-any-return]


class _Context:
    """The driver's adapters and ours."""

    def __init__(self) -> None:
        self.adapters = AdaptersMap(psycopg.adapters)
        for kind, oid in encoding.ARRAY_OIDS.items():
            self.adapters.register_dumper(
                kind, type(f"{kind.__name__}Dumper", (_PackedDumper,), {"oid": oid})
            )

    @property
    def connection(self) -> None:
        return None


CONTEXT: AdaptContext = _Context()


class NoAnswer(psycopg.OperationalError):
    """The server has not answered in time."""


def _within(talk: Generator[Any, Any, T], wait_s: float) -> Generator[Any, Any, T]:
    """The same talk, ended when nothing has come for `wait_s`. The driver reports each short wait in vain by 0."""
    give_up_at = time.monotonic() + wait_s
    try:
        wish = next(talk)
        while True:
            ready = yield wish
            if ready:
                give_up_at = time.monotonic() + wait_s
            elif time.monotonic() >= give_up_at:
                raise NoAnswer(f"no answer within {wait_s:g} s")
            wish = talk.send(ready)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


class PostgresConnection(psycopg.Connection[encoding.Row]):
    """A connection that does not wait forever."""

    wait_s: float = 10.0

    def wait(self, gen: Any, interval: float = CHECK_S, **more: Any) -> Any:  # type: ignore[override]
        """Wait for the server, at most `wait_s` for the next sign of life, unless the caller says how long."""
        if more:
            return super().wait(gen, interval, **more)
        try:
            return super().wait(_within(gen, self.wait_s), interval=CHECK_S)
        except NoAnswer:
            self.pgconn.finish()
            raise


class AsyncLine(psycopg.AsyncConnection[encoding.Row]):
    """The same for an event loop."""

    wait_s: float = 10.0

    async def wait(self, gen: Any, interval: float = CHECK_S, **more: Any) -> Any:  # type: ignore[override]
        """Wait for the server, at most `wait_s` for the next sign of life, unless the caller says how long."""
        if more:
            return await super().wait(gen, interval, **more)
        try:
            return await super().wait(_within(gen, self.wait_s), interval=CHECK_S)
        except NoAnswer:
            self.pgconn.finish()
            raise


def is_usable(line: "PostgresConnection | AsyncLine") -> bool:
    """Whether an idle connection may be used: nothing has come on it, as it does when the server goes away."""
    if line.closed or line.pgconn.transaction_status != TransactionStatus.IDLE:
        return False
    poll = select.poll()
    poll.register(line.pgconn.socket, select.POLLIN)
    return not poll.poll(0)


class PostgresPool:
    """The connections of a store for threads."""

    def __init__(self, parameters: Mapping[str, Any], *, lines_max: int, wait_s: float) -> None:
        self._parameters = parameters
        self._wait_s = wait_s
        self._room = Semaphore(lines_max)
        self._lock = Lock()
        self._idle: list[PostgresConnection] = []
        self._closed = False

    @contextmanager
    def line(self) -> Iterator[PostgresConnection]:
        """A connection outside any transaction; one that is no longer sound is not given out again."""
        if not self._room.acquire(timeout=self._wait_s):
            raise StoreUnavailable(f"all connections were in use for {self._wait_s:g} s; raise pool_max")
        try:
            line = self._take() or self.connect()
            try:
                yield line
            finally:
                self._give(line)
        finally:
            self._room.release()

    def connect(self) -> PostgresConnection:
        """A new connection."""
        line = PostgresConnection.connect(**self._parameters, context=CONTEXT)
        line.wait_s = self._wait_s
        return line

    def close(self) -> None:
        """Close what is idle, and the others when they come back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()

    def abandon(self) -> None:
        """In a forked child: the connections are the parent's, neither to be used nor to be closed."""
        _left_to_the_parent.extend(self._idle)
        self._idle = []

    def _take(self) -> PostgresConnection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                line = self._idle.pop()
            if is_usable(line):
                return line
            line.close()

    def _give(self, line: PostgresConnection) -> None:
        if line.pgconn.transaction_status not in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN):
            with suppress(psycopg.Error):
                line.rollback()
        with self._lock:
            if (
                not self._closed
                and not line.closed
                and line.pgconn.transaction_status == TransactionStatus.IDLE
            ):
                self._idle.append(line)
                return
        line.close()


class AsyncLines:
    """The connections of a store for one event loop."""

    def __init__(self, parameters: Mapping[str, Any], *, lines_max: int, wait_s: float) -> None:
        self._parameters = parameters
        self._wait_s = wait_s
        self._room = asyncio.Semaphore(lines_max)
        self._idle: list[AsyncLine] = []
        self._closed = False

    @asynccontextmanager
    async def line(self) -> AsyncIterator[AsyncLine]:
        """A connection outside any transaction; one that is no longer sound is not given out again."""
        try:
            async with asyncio.timeout(self._wait_s):  # `wait_for` may lose the place when it is cancelled
                await self._room.acquire()
        except TimeoutError:
            raise StoreUnavailable(
                f"all connections were in use for {self._wait_s:g} s; raise pool_max"
            ) from None
        try:
            line = await self._take() or await self.connect()
            try:
                yield line
            finally:
                await self._give(line)
        finally:
            self._room.release()

    async def connect(self) -> AsyncLine:
        """A new connection."""
        line = await AsyncLine.connect(**self._parameters, context=CONTEXT)
        line.wait_s = self._wait_s
        return line

    async def close(self) -> None:
        """Close what is idle, and the others when they come back."""
        self._closed = True
        idle, self._idle = self._idle, []
        for line in idle:
            await line.close()

    def abandon(self) -> None:
        """The loop is gone, or belongs to the parent of a fork: its connections are not touched."""
        _left_to_the_parent.extend(self._idle)
        self._idle = []

    def drop(self) -> None:
        """The loop is gone: close the sockets without it. One that is in use goes on, and is closed by its user."""
        self._closed = True
        for line in self._idle:
            line.pgconn.finish()
        self._idle = []

    async def _take(self) -> AsyncLine | None:
        while self._idle:
            line = self._idle.pop()
            if is_usable(line):
                return line
            await line.close()
        return None

    async def _give(self, line: AsyncLine) -> None:
        if line.pgconn.transaction_status not in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN):
            with suppress(psycopg.Error):
                await line.rollback()
        if not self._closed and not line.closed and line.pgconn.transaction_status == TransactionStatus.IDLE:
            self._idle.append(line)
        else:
            await line.close()


_left_to_the_parent: list[Any] = []
"""Connections that a fork copied: to collect one would close the parent's."""
