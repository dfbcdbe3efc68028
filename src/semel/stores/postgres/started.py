"""Single statements under way in an event loop without a task of their own."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import psycopg
from psycopg.pq import Format
from psycopg.pq.abc import PGresult

from semel.core.commands import Answer, Item
from semel.core.protocols import OnAnswer
from semel.runtime.tasks import answer_in_task
from semel.stores.postgres.pool_async import AsyncPostgresConnection, AsyncPostgresPool
from semel.stores.postgres.pool_base import NoAnswer, only_result
from semel.stores.postgres.single import SingleCall

__all__ = ["StartedStatement"]

FinishSingle: TypeAlias = Callable[
    [AsyncPostgresPool, Sequence[Item], psycopg.Error | None], Awaitable[list[Answer]]
]
"""Carries out an item that its single statement has not decided, or whose statement raised this error."""


class StartedStatement:
    """One prepared statement under way. What is not the plain case gets a task."""

    __slots__ = (
        "_call", "_connection", "_done", "_finish_single", "_pool", "_report", "_results", "_waits",
    )  # fmt: skip

    def __init__(
        self,
        pool: AsyncPostgresPool,
        call: SingleCall,
        done: OnAnswer,
        report: Callable[[SingleCall, Answer], list[Answer]],
        finish: FinishSingle,
    ) -> None:
        self._pool, self._call, self._done = pool, call, done
        self._report, self._finish_single = report, finish
        self._results: list[PGresult] = []
        self._waits = False
        """Whether the loop waits for input from the server; `False`: it is over, or a task has taken over."""

    def start(self, connection: AsyncPostgresConnection, loop: asyncio.AbstractEventLoop) -> bool:
        """Send the statement. `False`: it is not prepared on this connection."""
        call, pgconn = self._call, connection.pgconn
        if not connection.is_prepared(call.name):
            return False
        self._connection = connection
        try:
            pgconn.send_query_prepared(
                call.name.encode(), call.parameters, [Format.BINARY] * len(call.parameters), Format.BINARY
            )
            whole = not pgconn.flush()
        except psycopg.Error as error:
            answer_in_task(self._give_and_finish(error), self._done)
            return True
        if whole:
            self._waits = True
            connection.input.expect(loop, connection.wait_s, self._on_input, self._on_time)
        else:
            answer_in_task(self._read_long(), self._done)
        return True

    def _on_input(self) -> None:
        pgconn = self._connection.pgconn
        try:
            pgconn.consume_input()
            while not pgconn.is_busy():
                result = pgconn.get_result()
                if result is None:
                    self._waits = False
                    self._connection.input.expect_nothing()
                    self._end(only_result(self._results))
                    return
                self._results.append(result)
        except psycopg.Error as error:
            self._waits = False
            self._connection.input.stop()
            answer_in_task(self._give_and_finish(error), self._done)

    async def cancel(self) -> None:
        """Cancel the statement in the server, if the loop still waits for it; `done` is then not called."""
        if self._waits:
            self._waits = False
            try:
                await self._connection.cancel_statement()
            finally:
                await self._pool.give(self._connection)

    def _on_time(self) -> None:
        self._waits = False
        self._connection.input.stop()
        self._connection.pgconn.finish()
        error = NoAnswer(f"no answer within {self._connection.wait_s:g} s")
        answer_in_task(self._give_and_finish(error), self._done)

    def _end(self, result: PGresult) -> None:
        if not self._pool.keep_idle(self._connection):
            answer_in_task(self._give_and_read(result), self._done)
            return
        try:
            answer = self._call.read_answer(result)
            if answer is not None:
                self._report(self._call, answer)
        except Exception as error:  # noqa: BLE001 - it belongs to the caller, not to the loop
            self._done(None, error)
            return
        if answer is None:
            answer_in_task(self._finish(None), self._done)
        else:
            self._done(answer, None)

    async def _give_and_read(self, result: PGresult) -> list[Answer]:
        await self._pool.give(self._connection)
        answer = self._call.read_answer(result)
        return await self._finish(None) if answer is None else self._report(self._call, answer)

    async def _give_and_finish(self, error: psycopg.Error) -> list[Answer]:
        await self._pool.give(self._connection)
        return await self._finish(error)

    async def _read_long(self) -> list[Answer]:
        """Wait for a statement that is too long to be sent at once."""
        try:
            result = await self._connection.read_rest([])
        except psycopg.Error as error:
            return await self._give_and_finish(error)
        except BaseException:
            await self._pool.give(self._connection)
            raise
        return await self._give_and_read(result)

    async def _finish(self, error: psycopg.Error | None) -> list[Answer]:
        return await self._finish_single(self._pool, [self._call.item], error)
