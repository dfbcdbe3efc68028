"""Records in PostgreSQL. What is said to the server is in `queries`."""

import asyncio  # sync: import time
import logging
from collections.abc import Callable, Sequence
from functools import partial

# sync: from threading import Lock
from typing import Any, TypeVar, Unpack

import psycopg

from semel.clock import Clock
from semel.core.commands import Answer, Item
from semel.core.protocols import Listener
from semel.errors import StoreError
from semel.runtime.generators import adrive
from semel.runtime.process import restart_after_fork
from semel.stores.postgres.base import EXTEND, REPEATS_MAX, PostgresStoreBase, error_as_rows, pause_s
from semel.stores.postgres.batch import PostgresBatch, SendCalls, Stage, Talk, stages
from semel.stores.postgres.errors import is_cut, is_unplaced, to_store_error
from semel.stores.postgres.notifications import AsyncServerListener
from semel.stores.postgres.pool_async import AsyncPostgresConnection, AsyncPostgresPool
from semel.stores.postgres.queries import say
from semel.stores.postgres.schema import has_tables, prepare
from semel.stores.postgres.settings import PostgresOptions, PostgresTarget
from semel.stores.postgres.single import SingleCall

# sync: from semel.stores.postgres.store_async import AsyncPostgresStore

__all__ = ["AsyncPostgresStore"]

T = TypeVar("T")

_log = logging.getLogger("semel")


class AsyncPostgresStore(PostgresStoreBase):
    """A store in one schema of a PostgreSQL database. Its name: `postgresql://host/database`, without secrets.

    At most `pool_max` connections; no call waits longer than `wait_s` for a sign of the server. `pooler=True`
    works behind a transaction pooler: nothing is prepared, and waiters poll instead of listening.
    `readable_keys=False` keeps only digests of keys, except where somebody must be able to name the record:
    journaled and quarantined claims. `partition_step` and `partition_live` say how much time a partition of
    records with declared ids holds, and how long it is kept (see the how-to on retention). `clock` replaces the
    server's clock, for tests alone.
    """

    def __init__(self, url: str, *, clock: Clock | None = None, **options: Unpack[PostgresOptions]) -> None:
        super().__init__(PostgresTarget.of(url, **options), clock)
        # sync: self._made_with = (url, options)
        self._lines: AsyncPostgresPool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # sync: drop
        self._opening = asyncio.Lock()  # sync: self._opening = Lock()
        self._listener = AsyncServerListener(self.place, self.statements, self.ears)
        self._closed = False
        restart_after_fork(self)

    # sync: def twin(self) -> AsyncPostgresStore:
    # sync:     """The same store for an event loop, not yet connected."""
    # sync:     url, options = self._made_with
    # sync:     return AsyncPostgresStore(url, clock=self.clock, **options)

    # --- the port ---

    async def aopen(self) -> None:
        """Connect, run the start checks, bring the schema up to date; idempotent."""
        self._closed = False
        self._listener.open()
        await self._open_pool()

    async def aexists(self) -> bool:
        """Whether semel's tables are there; unlike `aopen`, makes none."""
        lines = AsyncPostgresPool(self.place.parameters(), lines_max=1, wait_s=self.place.wait_s)
        try:
            async with lines.line() as line:
                return await self._converse(line, has_tables())
        except psycopg.Error as error:
            raise to_store_error(error, self.name) from error
        finally:
            await lines.aclose()

    async def aclose(self) -> None:
        """Let go of all connections; idempotent. Calls under way end with their own."""
        self._closed = True
        self._enter_loop()  # sync: drop
        async with self._opening:
            lines, self._lines = self._lines, None
        await self._listener.aclose()
        if lines is not None:
            await lines.aclose()

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Carry out the items: one statement and one commit for each kind of item among them.

        Raises `StoreUnavailable` when the server cannot be reached; repeating the same items is then safe
        for all but marks.
        """
        lines = await self._open_pool()
        call = self.single(items)
        if call is None:
            return await self._send_all(lines, items)
        try:
            answer = await self._ask(lines, call)
        except psycopg.Error as error:
            if not is_cut(error):
                return await self._send_all(
                    lines, items
                )  # where it fails again, and is told as all errors are
            self.forget_consumers()
            await asyncio.sleep(pause_s(0))
            return await self._send_all(lines, items, tries=1)
        return await self._send_all(lines, items) if answer is None else self.report_answer(call, answer)

    async def aconverse(self, talk: Talk[T]) -> T:
        """Carry out a talk on a connection of the store's own; a transaction that it leaves open is rolled back."""
        try:
            async with (await self._open_pool()).line() as line:
                return await self._converse(line, talk)
        except psycopg.Error as error:
            raise to_store_error(error, self.name) from error

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Tell `listener` of changes made through this object, and of others' where somebody here met `Busy`."""
        stop = self.ears.add(listener)
        self._listener.start()
        return stop

    # --- inside ---

    async def _ask(self, lines: AsyncPostgresPool, call: SingleCall) -> Answer:
        """The answer of the statement for one plain item; `None`: it decides nothing."""
        line = await lines.take()
        try:
            result = await line.ask(call.name, self.statements[call.name], call.parameters)
        finally:
            await lines.give(line)
        return call.read_answer(result)

    async def _send_all(
        self, lines: AsyncPostgresPool, items: Sequence[Item], tries: int = 0
    ) -> list[Answer]:
        """Carry out the items by the statements for many. `tries`: how often they were cut off already."""
        batch = self.batch(items)
        if not tries and batch.unknown():
            await self._stage(lines, batch, Stage("meet", []))
        plan = stages(batch)
        for number, stage in enumerate(plan):
            try:
                await self._stage(lines, batch, stage, tries)
            except StoreError as error:
                if not self.answer_failed_stage(batch, stage, plan[number + 1 :], error):
                    break
        if batch.leaving:
            await self._remove(lines, batch)
        return self.finish_batch(batch)

    async def _open_pool(self) -> AsyncPostgresPool:
        self._enter_loop()  # sync: drop
        lines = self._lines
        if lines is not None:
            return lines
        async with self._opening:
            if self._lines is not None:
                return self._lines
            if self._closed:
                raise self.closed_error()
            lines = AsyncPostgresPool(
                self.place.parameters(), lines_max=self.place.pool_max, wait_s=self.place.wait_s
            )
            try:
                async with lines.line() as line:
                    self.apply_schema_state(await self._converse(line, prepare(self.name, self.place.schema)))
            except psycopg.Error as error:
                await lines.aclose()
                raise to_store_error(error, self.name) from error
            except BaseException:
                await lines.aclose()
                raise
            self.forget_consumers()
            self._lines = lines
            self._listener.start()  # sync: drop
            return lines

    def _enter_loop(self) -> None:  # sync: drop
        """Let go of what belongs to another loop, which may be over or go on in another thread."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        lines, self._lines = self._lines, None
        self._loop, self._opening = loop, asyncio.Lock()
        self._listener.drop()
        if lines is not None:
            lines.drop()

    async def _stage(
        self, lines: AsyncPostgresPool, batch: PostgresBatch, stage: Stage, tries_made: int = 0
    ) -> None:
        """Say one stage, again where the server undid it, or where it was cut off and may be said again."""
        for tries in range(tries_made, REPEATS_MAX):
            try:
                async with lines.line() as line:
                    await self._converse(line, say(batch, stage))
                    return
            except psycopg.Error as error:
                if not self.again(batch, stage, error, tries):
                    raise to_store_error(error, self.name) from error
                if is_unplaced(error):
                    await self._stage(lines, batch, EXTEND)
                await asyncio.sleep(pause_s(tries))

    async def _remove(self, lines: AsyncPostgresPool, batch: PostgresBatch) -> None:
        """Remove partitions, on a connection of its own; what cannot be done now is left for the next round."""
        try:
            async with await lines.connect() as line:
                await self._converse(line, say(batch, Stage("remove", list(batch.leaving))))
        except psycopg.Error as error:
            _log.warning("%s: partitions were not removed: %s", self.name, to_store_error(error, self.name))

    async def _converse(self, line: AsyncPostgresConnection, talk: Talk[T]) -> T:
        return await adrive(talk, partial(self._query, line))

    async def _query(self, line: AsyncPostgresConnection, ask: SendCalls) -> list[Any]:
        try:
            if ask.script:
                await line.execute(ask.script, prepare=False)
                return []
            cursor = await line.execute(self.statements[ask.name], ask.parameters or None, binary=True)
            return await cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            return error_as_rows(ask, error)

    def after_fork(self) -> None:
        """The connections are the parent's; the child makes its own."""
        self._opening = asyncio.Lock()  # sync: self._opening = Lock()
        self._loop = None  # sync: drop
        self.ears.after_fork()
        self._listener.after_fork()
        if self._lines is not None:
            self._lines.abandon()
            self._lines = None
