"""Records in PostgreSQL: the pool, the stages and their retries. The statements are in `queries`."""

import asyncio  # sync: import time
import logging
from collections.abc import Callable, Sequence
from functools import partial

# sync: from threading import Lock
from typing import Any, TypeVar, Unpack

import psycopg

from semel.clock import Clock
from semel.core.commands import Answer, Item
from semel.core.protocols import Listener, OnAnswer  # sync: from semel.core.protocols import Listener
from semel.errors import StoreError
from semel.runtime.generators import adrive
from semel.runtime.process import restart_after_fork
from semel.runtime.tasks import resolve_future  # sync: drop
from semel.stores.postgres.base import EXTEND, REPEATS_MAX, PostgresStoreBase, error_as_rows, pause_s
from semel.stores.postgres.batch import PostgresBatch, SendCalls, Stage, Talk, stages
from semel.stores.postgres.errors import is_cut, is_unplaced, to_store_error
from semel.stores.postgres.notifications import AsyncServerListener
from semel.stores.postgres.pool_async import AsyncPostgresConnection, AsyncPostgresPool
from semel.stores.postgres.queries import talk_of
from semel.stores.postgres.schema import has_tables, prepare
from semel.stores.postgres.settings import PostgresOptions, PostgresTarget
from semel.stores.postgres.single import SingleCall
from semel.stores.postgres.started import StartedStatement  # sync: drop

# sync: from semel.stores.postgres.store_async import AsyncPostgresStore

__all__ = ["AsyncPostgresStore"]

T = TypeVar("T")

_log = logging.getLogger("semel")


class AsyncPostgresStore(PostgresStoreBase):
    """A store in one schema of a PostgreSQL database. Its name is `postgresql://host/database`, without secrets.

    It opens at most `pool_max` connections; no call waits longer than `wait_s` for input from the server.
    `pooler=True` works behind a transaction pooler: nothing is prepared, and waiters poll instead of listening.
    `readable_keys=False` stores only digests of keys, except for journaled and quarantined claims, which an operator
    must be able to name. `durable_claims=False` does not wait until a plain claim is on disk; completions are waited
    for. `partition_step` is how much time a partition of records with declared ids holds, and
    `partition_live` how long it is kept (see the how-to on retention). `clock` replaces the server's clock, for
    tests only.
    """

    def __init__(self, url: str, *, clock: Clock | None = None, **options: Unpack[PostgresOptions]) -> None:
        super().__init__(PostgresTarget.of(url, **options), clock)
        # sync: self._made_with = (url, options)
        self._pool: AsyncPostgresPool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # sync: drop
        self._opening = asyncio.Lock()  # sync: self._opening = Lock()
        self._listener = AsyncServerListener(self.place, self.statements, self.changes)
        self._closed = False
        restart_after_fork(self)

    # sync: def twin(self) -> AsyncPostgresStore:
    # sync:     """Return the same store for an event loop, not yet connected."""
    # sync:     url, options = self._made_with
    # sync:     return AsyncPostgresStore(url, clock=self.clock, **options)

    # --- the port ---

    async def aopen(self) -> None:
        """Connect, run the start checks, bring the schema up to date; idempotent."""
        self._closed = False
        self._listener.open()
        await self._open_pool()

    async def aexists(self) -> bool:
        """Whether semel's tables exist; unlike `aopen`, creates none."""
        pool = AsyncPostgresPool(self.place.parameters(), connections_max=1, wait_s=self.place.wait_s)
        try:
            async with pool.connection() as connection:
                return await self._converse(connection, has_tables())
        except psycopg.Error as error:
            raise to_store_error(error, self.name) from error
        finally:
            await pool.aclose()

    async def aclose(self) -> None:
        """Close all connections; idempotent. Running calls finish on theirs."""
        self._closed = True
        self._enter_loop()  # sync: drop
        async with self._opening:
            pool, self._pool = self._pool, None
        await self._listener.aclose()
        if pool is not None:
            await pool.aclose()

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Execute the items: one statement and one commit for each kind of item.

        Raises `StoreUnavailable` if the server cannot be reached; repeating the same items is then safe
        for all but marks.
        """
        if len(items) == 1:  # sync: drop
            future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            started = self._start(items[0], partial(resolve_future, future))
            if started is not None:
                try:
                    return [await future]
                except asyncio.CancelledError:
                    await started.cancel()
                    raise
        pool = await self._open_pool()
        call = self.single(items)
        if call is None:
            return await self._send_all(pool, items)
        try:
            answer = await self._ask(pool, call)
        except psycopg.Error as error:
            return await self._finish_single(pool, items, error)
        return (
            await self._finish_single(pool, items, None)
            if answer is None
            else self.report_answer(call, answer)
        )

    def start(self, item: Item, done: OnAnswer, /) -> bool:  # sync: drop
        """Send one plain item now, on an idle connection; `done` gets its answer. `False`: nothing was sent."""
        return self._start(item, done) is not None

    async def aconverse(self, talk: Talk[T]) -> T:
        """Run a talk on a connection of the store; a transaction that it leaves open is rolled back."""
        try:
            async with (await self._open_pool()).connection() as connection:
                return await self._converse(connection, talk)
        except psycopg.Error as error:
            raise to_store_error(error, self.name) from error

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Call `listener` for changes made through this object, and for others' changes of keys that were `Busy` here.

        Returns a function that stops it.
        """
        stop = self.changes.add(listener)
        self._listener.start()
        return stop

    # --- inside ---

    def _start(self, item: Item, done: OnAnswer) -> StartedStatement | None:  # sync: drop
        loop, pool = asyncio.get_running_loop(), self._pool
        if pool is None or self._loop is not loop:
            return None
        call = self.single((item,))
        connection = None if call is None else pool.take_idle()
        if call is None or connection is None:
            return None
        started = StartedStatement(pool, call, done, self.report_answer, self._finish_single)
        if started.start(connection, loop):
            return started
        pool.keep_idle(connection)
        return None

    async def _ask(self, pool: AsyncPostgresPool, call: SingleCall) -> Answer:
        """Return the answer of the statement for one plain item; `None`: not decided."""
        connection = await pool.take()
        try:
            result = await connection.ask(call.name, self.statements[call.name], call.parameters)
        finally:
            await pool.give(connection)
        return call.read_answer(result)

    async def _finish_single(
        self, pool: AsyncPostgresPool, items: Sequence[Item], error: psycopg.Error | None
    ) -> list[Answer]:
        """Carry out an item that its single statement has not decided, or whose statement raised this error."""
        if error is None or not is_cut(error):
            # The error comes again there, and is handled like every other.
            return await self._send_all(pool, items)
        self.forget_consumers()
        await asyncio.sleep(pause_s(0))
        return await self._send_all(pool, items, tries=1)

    async def _send_all(self, pool: AsyncPostgresPool, items: Sequence[Item], tries: int = 0) -> list[Answer]:
        """Execute the items by the statements for many. `tries`: how often the connection was lost already."""
        batch = self.batch(items)
        if not tries and batch.unknown():
            await self._stage(pool, batch, Stage("read_consumers", []))
        plan = stages(batch)
        for number, stage in enumerate(plan):
            try:
                await self._stage(pool, batch, stage, tries)
            except StoreError as error:
                if not self.refuse_stages(batch, stage, plan[number + 1 :], error):
                    break
        if batch.leaving:
            await self._remove(pool, batch)
        return self.finish(batch)

    async def _open_pool(self) -> AsyncPostgresPool:
        self._enter_loop()  # sync: drop
        pool = self._pool
        if pool is not None:
            return pool
        async with self._opening:
            if self._pool is not None:
                return self._pool
            if self._closed:
                raise self.closed_error()
            pool = AsyncPostgresPool(
                self.place.parameters(), connections_max=self.place.pool_max, wait_s=self.place.wait_s
            )
            try:
                async with pool.connection() as connection:
                    self.apply_state(await self._converse(connection, prepare(self.name, self.place.schema)))
            except psycopg.Error as error:
                await pool.aclose()
                raise to_store_error(error, self.name) from error
            except BaseException:
                await pool.aclose()
                raise
            self.forget_consumers()
            self._pool = pool
            self._listener.start()  # sync: drop
            return pool

    def _enter_loop(self) -> None:  # sync: drop
        """Drop the connections of another loop, which may have ended or run in another thread."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        pool, self._pool = self._pool, None
        self._loop, self._opening = loop, asyncio.Lock()
        self._listener.drop()
        if pool is not None:
            pool.drop()

    async def _stage(
        self, pool: AsyncPostgresPool, batch: PostgresBatch, stage: Stage, tries_made: int = 0
    ) -> None:
        """Execute one stage; retry it if the server rolled it back, or if it was cut off and may be repeated."""
        for tries in range(tries_made, REPEATS_MAX):
            try:
                async with pool.connection() as connection:
                    await self._converse(connection, talk_of(batch, stage))
                    return
            except psycopg.Error as error:
                if not self.may_retry(batch, stage, error, tries):
                    raise to_store_error(error, self.name) from error
                if is_unplaced(error):
                    await self._stage(pool, batch, EXTEND)
                await asyncio.sleep(pause_s(tries))

    async def _remove(self, pool: AsyncPostgresPool, batch: PostgresBatch) -> None:
        """Remove partitions, on a separate connection; those that cannot be removed now are left for the next round."""
        try:
            async with await pool.connect() as connection:
                await self._converse(connection, talk_of(batch, Stage("remove", list(batch.leaving))))
        except psycopg.Error as error:
            _log.warning("%s: partitions were not removed: %s", self.name, to_store_error(error, self.name))

    async def _converse(self, connection: AsyncPostgresConnection, talk: Talk[T]) -> T:
        return await adrive(talk, partial(self._query, connection))

    async def _query(self, connection: AsyncPostgresConnection, ask: SendCalls) -> list[Any]:
        try:
            if ask.script:
                await connection.execute(ask.script, prepare=False)
                return []
            cursor = await connection.execute(self.statements[ask.name], ask.parameters or None, binary=True)
            return await cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            return error_as_rows(ask, error)

    def after_fork(self) -> None:
        """Drop the connections in a forked child: they are the parent's; the child opens its own."""
        self._opening = asyncio.Lock()  # sync: self._opening = Lock()
        self._loop = None  # sync: drop
        self.changes.after_fork()
        self._listener.after_fork()
        if self._pool is not None:
            self._pool.abandon()
            self._pool = None
