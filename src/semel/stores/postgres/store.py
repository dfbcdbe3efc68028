"""Records in PostgreSQL, for threads and for event loops. What is said to the server is in `talk`."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any, TypeVar, Unpack

import psycopg

from semel.clock import Clock
from semel.core.commands import Answer, Item, Mark
from semel.core.protocols import Capabilities, Listener
from semel.errors import StoreClosed, StoreError, StoreFull, StoreUnavailable
from semel.runtime.generators import adrive, drive
from semel.runtime.jitter import jitter
from semel.runtime.process import restart_after_fork
from semel.stores.postgres.batch import PostgresBatch, Scope, SendCalls, Stage, Talk, stages
from semel.stores.postgres.errors import is_cut, is_transient, is_unplaced, translated
from semel.stores.postgres.notifications import ChangeListeners, LoopListener, ThreadListener
from semel.stores.postgres.pool import PostgresConnection, PostgresPool
from semel.stores.postgres.pool_async import AsyncPostgresConnection, AsyncPostgresPool
from semel.stores.postgres.queries import say
from semel.stores.postgres.schema import SchemaState, has_tables, prepare, statements
from semel.stores.postgres.settings import PostgresOptions, PostgresTarget

__all__ = ["AsyncPostgresStore", "PostgresStore"]

T = TypeVar("T")
REPEATS_MAX = 20
"""How often a stage is begun again that the server has undone for the sake of others."""
PAUSE_MAX_S = 0.02
CLOCK_OFF_S = 2.0
"""By how much the server's clock may differ from ours without a word: it harms nothing, and explains a lot."""
EXTENDS_MAX = 3
EXTEND = Stage("extend", [])
"""Partitions are made ahead by whoever cleans; where nobody did for days, a claim that finds none has them made."""

_log = logging.getLogger("semel")


class _PostgresBase:
    """What both colours have in common: the place, what is known of it, and who listens."""

    batch_type: type[PostgresBatch] = PostgresBatch

    def __init__(self, place: PostgresTarget, clock: Clock | None) -> None:
        self.place = place
        self.name: str = place.name
        self.weaknesses: tuple[str, ...] = ()
        """What weakens the guarantee, as found by the start checks."""
        self.identity: str = ""
        """Which table of which database this is, once it is open."""
        self.clock = clock
        self.ears: ChangeListeners = ChangeListeners()
        self.consumers: dict[Scope, int] = {}
        self.kinds: dict[Scope, str] = {}
        self.statements: dict[str, str] = statements(place.schema)
        self.capabilities: Capabilities = self._powers(durable=True)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def _powers(self, *, durable: bool) -> Capabilities:
        return Capabilities(durable=durable, transactional=True, shared=True, notifies=True)

    def found(self, found: SchemaState) -> None:
        """Take over what the start checks found out."""
        for weakness in found.weaknesses:
            _log.warning("%s: %s", self.name, weakness)
        ahead_s = found.clock_us / 1e6 - time.time()
        if abs(ahead_s) > CLOCK_OFF_S:
            _log.info("%s: its clock is %+.1f s from ours; its own decides", self.name, ahead_s)
        self.weaknesses = found.weaknesses
        self.identity = found.identity
        self.capabilities = self._powers(durable=found.durable)

    def batch(self, items: Sequence[Item]) -> PostgresBatch:
        """The items as they are to be said."""
        now = None if self.clock is None else self.clock.now_us()
        place = self.place
        return self.batch_type(
            items,
            self.consumers,
            self.kinds,
            now=now,
            readable_keys=place.readable_keys,
            schema=place.schema,
            retention=place.retention,
        )

    def failed(self, batch: PostgresBatch, stage: Stage, rest: Sequence[Stage], error: StoreError) -> bool:
        """Answer what could not be said; `True`: the rest is worth trying. Raises where nothing was answered."""
        if not isinstance(error, StoreUnavailable):
            raise error
        lost = [stage] if isinstance(error, StoreFull) else [stage, *rest]
        if not isinstance(error, StoreFull) and not any(each is not None for each in batch.answers):
            raise error
        for each in lost:
            for position in each.positions:
                batch.refuse(position, error)
        return isinstance(error, StoreFull)

    def again(self, batch: PostgresBatch, stage: Stage, error: psycopg.Error, tries: int) -> bool:
        """Whether a stage that ended in an error is begun again: undone, cut off, or without partition."""
        if is_cut(error):
            batch.start_over()
            return not tries and _repeatable(batch, stage)
        if is_unplaced(error):
            return tries < EXTENDS_MAX
        return is_transient(error) and tries < REPEATS_MAX - 1

    def done(self, batch: PostgresBatch) -> list[Answer]:
        """The answers, after everybody in this process was told of what changed."""
        self.ears.tell(batch.changed)
        self.ears.note(batch.items, batch.answers)
        return batch.answers

    def closed_error(self) -> StoreClosed:
        """Used after `close`."""
        return StoreClosed(f"{self.name} is closed; open() it again to use it")


def _repeatable(batch: PostgresBatch, stage: Stage) -> bool:
    """Whether saying it twice is harmless: all but marks carry an owner or a fence."""
    return not any(isinstance(batch.items[position], Mark) for position in stage.positions)


def answered(ask: SendCalls, error: psycopg.Error) -> list[Any]:
    """The error as a row, where the talk has asked for that; otherwise it goes on its way."""
    if error.sqlstate in ask.told:
        return [(error.sqlstate,)]
    raise error


class PostgresStore(_PostgresBase):
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
        self._lines: PostgresPool | None = None
        self._listener: ThreadListener | None = None
        self._closed = False
        self._lock = Lock()
        restart_after_fork(self)

    def twin(self) -> "AsyncPostgresStore":
        """The same store for an event loop, not yet connected."""
        return AsyncPostgresStore._at(self.place, self.clock)

    # --- the port ---

    def open(self) -> None:
        """Connect, run the start checks, bring the schema up to date; idempotent."""
        self._closed = False
        self._opened()

    def exists(self) -> bool:
        """Whether semel's tables are there; unlike `open`, makes none."""
        lines = PostgresPool(self.place.parameters(), lines_max=1, wait_s=self.place.wait_s)
        try:
            with lines.line() as line:
                return self._converse(line, has_tables())
        except psycopg.Error as error:
            raise translated(error, self.name) from error
        finally:
            lines.close()

    def close(self) -> None:
        """Let go of all connections; idempotent, from any thread. Calls under way end with their own."""
        self._closed = True
        with self._lock:
            lines, self._lines = self._lines, None
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        if lines is not None:
            lines.close()

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Carry out the items: one statement and one commit for each kind of item among them.

        Raises `StoreUnavailable` when the server cannot be reached; repeating the same items is then safe
        for all but marks.
        """
        lines = self._opened()
        batch = self.batch(items)
        if batch.unknown():
            self._stage(lines, batch, Stage("meet", []))
        plan = stages(batch)
        for number, stage in enumerate(plan):
            try:
                self._stage(lines, batch, stage)
            except StoreError as error:
                if not self.failed(batch, stage, plan[number + 1 :], error):
                    break
        if batch.leaving:
            self._remove(lines, batch)
        return self.done(batch)

    def converse(self, talk: Talk[T]) -> T:
        """Carry out a talk on a connection of the store's own; a transaction that it leaves open is rolled back."""
        try:
            with self._opened().line() as line:
                return self._converse(line, talk)
        except psycopg.Error as error:
            raise translated(error, self.name) from error

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Tell `listener` of changes made through this object, and of others' where somebody here met `Busy`."""
        stop = self.ears.add(listener)
        if not self.place.pooler and not self._closed:
            with self._lock:
                if self._listener is None:
                    self._listener = ThreadListener(self.place, self.statements, self.ears)
            self._listener.start()
        return stop

    # --- inside ---

    def _opened(self) -> PostgresPool:
        lines = self._lines
        if lines is not None:
            return lines
        if self._closed:
            raise self.closed_error()
        with self._lock:
            if self._lines is not None:
                return self._lines
            lines = PostgresPool(
                self.place.parameters(), lines_max=self.place.pool_max, wait_s=self.place.wait_s
            )
            try:
                with lines.line() as line:
                    self.found(self._converse(line, prepare(self.name, self.place.schema)))
            except psycopg.Error as error:
                lines.close()
                raise translated(error, self.name) from error
            except BaseException:
                lines.close()
                raise
            self.consumers.clear()
            self.kinds.clear()
            self._lines = lines
            return lines

    def _stage(self, lines: PostgresPool, batch: PostgresBatch, stage: Stage) -> None:
        """Say one stage, again where the server undid it, or where it was cut off and may be said again."""
        for tries in range(REPEATS_MAX):
            try:
                with lines.line() as line:
                    self._converse(line, say(batch, stage))
                    return
            except psycopg.Error as error:
                if not self.again(batch, stage, error, tries):
                    raise translated(error, self.name) from error
                if is_unplaced(error):
                    self._stage(lines, batch, EXTEND)
                time.sleep(_pause(tries))

    def _remove(self, lines: PostgresPool, batch: PostgresBatch) -> None:
        """Remove partitions, on a connection of its own; what cannot be done now is left for the next round."""
        try:
            with lines.connect() as line:
                self._converse(line, say(batch, Stage("remove", list(batch.leaving))))
        except psycopg.Error as error:
            _log.warning("%s: partitions were not removed: %s", self.name, translated(error, self.name))

    def _converse(self, line: PostgresConnection, talk: Talk[T]) -> T:
        return drive(talk, partial(self._query, line))

    def _query(self, line: PostgresConnection, ask: SendCalls) -> list[Any]:
        try:
            if ask.script:
                line.execute(ask.script, prepare=False)
                return []
            cursor = line.execute(self.statements[ask.name], ask.parameters or None, binary=True)
            return cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            return answered(ask, error)

    def after_fork(self) -> None:
        """The connections are the parent's; the child makes its own."""
        self._lock = Lock()
        self.ears.after_fork()
        if self._lines is not None:
            self._lines.abandon()
            self._lines = None
        if self._listener is not None:
            self._listener.abandon()
            self._listener = None


class AsyncPostgresStore(_PostgresBase):
    """The same store for an event loop, natively. It follows its caller into another loop by connecting anew."""

    def __init__(self, url: str, *, clock: Clock | None = None, **options: Unpack[PostgresOptions]) -> None:
        self._begin(PostgresTarget.of(url, **options), clock)

    @classmethod
    def _at(cls, place: PostgresTarget, clock: Clock | None) -> "AsyncPostgresStore":
        made = cls.__new__(cls)
        made._begin(place, clock)
        return made

    def _begin(self, place: PostgresTarget, clock: Clock | None) -> None:
        super().__init__(place, clock)
        self._lines: AsyncPostgresPool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Lock | None = None
        self._listener: LoopListener | None = None
        self._closed = False
        restart_after_fork(self)

    # --- the port ---

    async def aopen(self) -> None:
        """Connect, run the start checks, bring the schema up to date; idempotent."""
        self._closed = False
        await self._opened()

    async def aclose(self) -> None:
        """Let go of all connections; idempotent."""
        self._closed = True
        if self._loop is not asyncio.get_running_loop():
            self._leave_loop()
            return
        lines, self._lines = self._lines, None
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()
        if lines is not None:
            await lines.close()

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Carry out the items: one statement and one commit for each kind of item among them.

        Raises `StoreUnavailable` when the server cannot be reached; repeating the same items is then safe
        for all but marks.
        """
        lines = await self._opened()
        batch = self.batch(items)
        if batch.unknown():
            await self._stage(lines, batch, Stage("meet", []))
        plan = stages(batch)
        for number, stage in enumerate(plan):
            try:
                await self._stage(lines, batch, stage)
            except StoreError as error:
                if not self.failed(batch, stage, plan[number + 1 :], error):
                    break
        if batch.leaving:
            await self._remove(lines, batch)
        return self.done(batch)

    async def aconverse(self, talk: Talk[T]) -> T:
        """Carry out a talk on a connection of the store's own; a transaction that it leaves open is rolled back."""
        try:
            async with (await self._opened()).line() as line:
                return await self._converse(line, talk)
        except psycopg.Error as error:
            raise translated(error, self.name) from error

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Tell `listener` of changes made through this object, and of others' where somebody here met `Busy`."""
        stop = self.ears.add(listener)
        self._listen()
        return stop

    # --- inside ---

    def _listen(self) -> None:
        """Have a task that hears the server's notifications, in the running loop."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # the next call from the loop comes back to it
        if self.place.pooler or self._closed or not self.ears.listeners:
            return
        if self._listener is None or self._listener.loop is not loop:
            self._listener = LoopListener(self.place, self.statements, self.ears, loop)
        self._listener.start()

    async def _opened(self) -> AsyncPostgresPool:
        loop = asyncio.get_running_loop()
        if self._loop is loop and self._lines is not None:
            return self._lines
        if self._closed:
            raise self.closed_error()
        if self._loop is not loop or self._opening is None:
            self._leave_loop()
            self._loop, self._opening = loop, asyncio.Lock()
        async with self._opening:
            if self._lines is not None:
                return self._lines
            lines = AsyncPostgresPool(
                self.place.parameters(), lines_max=self.place.pool_max, wait_s=self.place.wait_s
            )
            try:
                async with lines.line() as line:
                    self.found(await self._converse(line, prepare(self.name, self.place.schema)))
            except psycopg.Error as error:
                await lines.close()
                raise translated(error, self.name) from error
            except BaseException:
                await lines.close()
                raise
            self.consumers.clear()
            self.kinds.clear()
            self._lines = lines
            self._listen()
            return lines

    def _leave_loop(self) -> None:
        """Let go of what belongs to another loop, which may be over or go on in another thread."""
        lines, self._lines = self._lines, None
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.drop()
        if lines is not None:
            lines.drop()

    async def _stage(self, lines: AsyncPostgresPool, batch: PostgresBatch, stage: Stage) -> None:
        """Say one stage, again where the server undid it, or where it was cut off and may be said again."""
        for tries in range(REPEATS_MAX):
            try:
                async with lines.line() as line:
                    await self._converse(line, say(batch, stage))
                    return
            except psycopg.Error as error:
                if not self.again(batch, stage, error, tries):
                    raise translated(error, self.name) from error
                if is_unplaced(error):
                    await self._stage(lines, batch, EXTEND)
                await asyncio.sleep(_pause(tries))

    async def _remove(self, lines: AsyncPostgresPool, batch: PostgresBatch) -> None:
        """Remove partitions, on a connection of its own; what cannot be done now is left for the next round."""
        try:
            async with await lines.connect() as line:
                await self._converse(line, say(batch, Stage("remove", list(batch.leaving))))
        except psycopg.Error as error:
            _log.warning("%s: partitions were not removed: %s", self.name, translated(error, self.name))

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
            return answered(ask, error)

    def after_fork(self) -> None:
        """The connections are the parent's; the child makes its own."""
        self.ears.after_fork()
        if self._lines is not None:
            self._lines.abandon()
        self._lines = self._loop = self._opening = self._listener = None


def _pause(tries: int) -> float:
    return jitter.uniform(0, PAUSE_MAX_S) * (tries + 1)
