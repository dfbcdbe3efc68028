"""Every kind of handle on a transaction, behind one interface, so that each scenario is written once.

Methods are awaited. Those of the kinds that block never suspend, so they are run without an event loop.
"""

import contextlib
import inspect
import os
import sqlite3
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine
from typing import Any, ClassVar, TypeVar, cast
from urllib.parse import urlsplit

import aiosqlite
import asyncpg  # type: ignore[import-untyped]
import psycopg
import sqlalchemy
from sqlalchemy import Connection, create_engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from semel.core import ids
from tests.django_connections import connection_to, forget

T = TypeVar("T")

DAY_US = 86_400 * 1_000_000
BASE_US = int(os.environ.setdefault("SEMEL_TEST_BASE_US", str(time.time_ns() // 1000)))
"""The same in the processes that a test starts."""
ANY_IDS = "any-inbox"
"""A kind of ids: every text is one. Its time lies one to three days back, in one of several partitions."""
cast("dict[str, Any]", ids.KINDS)[ANY_IDS] = lambda key: (
    BASE_US - DAY_US - zlib.crc32(key.encode("utf-8", "replace")) * DAY_US // 2**31
)

RC, RR, SERIALIZABLE = "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"


def run(work: Coroutine[Any, Any, T], *, sync: bool) -> T:
    """The result of a scenario. A blocking one is driven by hand: some drivers refuse to work inside a loop."""
    if not sync:
        import asyncio

        return asyncio.run(work)
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("a blocking handle suspended")


async def had(thing: Any) -> Any:
    """What a verb of either colour comes to."""
    return await thing if inspect.isawaitable(thing) else thing


class Kind(ABC):
    """A connection of one kind to the database of a test."""

    name: ClassVar[str]
    sync: ClassVar[bool] = True
    dialect: ClassVar[str] = "postgresql"
    ids: ClassVar[str | None] = None
    """The kind of ids that the consumer declares."""
    handle: Any
    """What is given to `inbox`."""

    def __init__(self, url: str, *, autocommit: bool = False) -> None:
        self.url = url
        self.autocommit = autocommit

    @property
    def path(self) -> str:
        """The file of an SQLite URL."""
        return self.url.removeprefix("sqlite:///")

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    async def begin(self, isolation: str = "") -> None:
        """Most drivers open the transaction by themselves."""
        if isolation:
            await self.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}")

    @abstractmethod
    async def commit(self) -> None: ...

    @abstractmethod
    async def rollback(self) -> None: ...

    @abstractmethod
    async def execute(self, statement: str) -> list[tuple[Any, ...]]: ...

    @contextlib.asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Undone when it raises."""
        await self.execute("SAVEPOINT theirs")
        try:
            yield
        except BaseException:
            await self.execute("ROLLBACK TO SAVEPOINT theirs")
            raise
        await self.execute("RELEASE SAVEPOINT theirs")


class Psycopg(Kind):
    name = "psycopg"
    handle: psycopg.Connection[Any]

    async def open(self) -> None:
        self.handle = psycopg.connect(self.url, autocommit=self.autocommit)

    async def close(self) -> None:
        self.handle.close()

    async def commit(self) -> None:
        self.handle.commit()

    async def rollback(self) -> None:
        self.handle.rollback()

    async def execute(self, statement: str) -> list[tuple[Any, ...]]:
        cursor = self.handle.execute(statement)
        return cursor.fetchall() if cursor.description else []


class PsycopgBlock(Psycopg):
    """In autocommit mode, with `transaction()`."""

    name = "psycopg-block"

    async def open(self) -> None:
        self.handle = psycopg.connect(self.url, autocommit=True)
        self._block: Any = None

    async def begin(self, isolation: str = "") -> None:
        if self.autocommit:
            return
        self._block = self.handle.transaction()
        self._block.__enter__()
        await super().begin(isolation)

    async def commit(self) -> None:
        block, self._block = self._block, None
        block.__exit__(None, None, None)

    async def rollback(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(psycopg.Rollback, psycopg.Rollback(), None)


class PsycopgAsync(Kind):
    name = "psycopg-async"
    sync = False
    handle: psycopg.AsyncConnection[Any]

    async def open(self) -> None:
        self.handle = await psycopg.AsyncConnection.connect(self.url, autocommit=self.autocommit)

    async def close(self) -> None:
        await self.handle.close()

    async def commit(self) -> None:
        await self.handle.commit()

    async def rollback(self) -> None:
        await self.handle.rollback()

    async def execute(self, statement: str) -> list[tuple[Any, ...]]:
        cursor = await self.handle.execute(statement)
        return await cursor.fetchall() if cursor.description else []


class Asyncpg(Kind):
    name = "asyncpg"
    sync = False

    async def open(self) -> None:
        self.handle = await asyncpg.connect(self.url)
        self._transaction: Any = None

    async def close(self) -> None:
        await self.handle.close()

    async def begin(self, isolation: str = "") -> None:
        if not self.autocommit:
            self._transaction = self.handle.transaction(isolation=isolation.lower().replace(" ", "_") or None)
            await self._transaction.start()

    async def commit(self) -> None:
        await self._transaction.commit()

    async def rollback(self) -> None:
        if self._transaction is not None:
            await self._transaction.rollback()
            self._transaction = None

    async def execute(self, statement: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in await self.handle.fetch(statement)]


class AsyncpgPool(Asyncpg):
    """A connection that a pool lends."""

    name = "asyncpg-pool"

    async def open(self) -> None:
        self._pool = await asyncpg.create_pool(self.url, min_size=1, max_size=1)
        self.handle = await self._pool.acquire()
        self._transaction = None

    async def close(self) -> None:
        await self._pool.release(self.handle)
        await self._pool.close()


class Sqlite(Kind):
    name = "sqlite3"
    dialect = "sqlite"
    handle: sqlite3.Connection

    async def open(self) -> None:
        self.handle = sqlite3.connect(self.path, isolation_level=None if self.autocommit else "DEFERRED")

    async def close(self) -> None:
        self.handle.close()

    async def commit(self) -> None:
        self.handle.commit()

    async def rollback(self) -> None:
        self.handle.rollback()

    async def execute(self, statement: str) -> list[tuple[Any, ...]]:
        return self.handle.execute(statement).fetchall()


class Aiosqlite(Kind):
    name = "aiosqlite"
    sync = False
    dialect = "sqlite"
    handle: aiosqlite.Connection

    async def open(self) -> None:
        self.handle = await aiosqlite.connect(
            self.path, isolation_level=None if self.autocommit else "DEFERRED"
        )

    async def close(self) -> None:
        await self.handle.close()

    async def commit(self) -> None:
        await self.handle.commit()

    async def rollback(self) -> None:
        await self.handle.rollback()

    async def execute(self, statement: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in await self.handle.execute_fetchall(statement)]


# --- SQLAlchemy ---------------------------------------------------------------------------------


class AlchemyConnection(Kind):
    name = "sqlalchemy-connection"
    driver: ClassVar[str] = "postgresql+psycopg"
    handle: Any

    def _engine_url(self) -> str:
        parts = urlsplit(self.url)
        return f"{self.driver}://{parts.netloc}{parts.path}"

    def _options(self) -> dict[str, Any]:
        level = {"isolation_level": "AUTOCOMMIT"} if self.autocommit else {}
        return {"poolclass": NullPool, **level}

    async def open(self) -> None:
        self._engine = create_engine(self._engine_url(), **self._options())
        self.handle = self._made()

    def _made(self) -> Connection | Session:
        return self._engine.connect()

    async def close(self) -> None:
        self.handle.close()
        self._engine.dispose()

    async def begin(self, isolation: str = "") -> None:
        if isolation:
            self.handle.execution_options(isolation_level=isolation)

    async def commit(self) -> None:
        self.handle.commit()

    async def rollback(self) -> None:
        self.handle.rollback()

    async def execute(self, statement: str) -> list[tuple[Any, ...]]:
        result = self.handle.execute(sqlalchemy.text(statement))
        return [tuple(row) for row in result] if result.returns_rows else []

    @contextlib.asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        with self.handle.begin_nested():
            yield


class AlchemySession(AlchemyConnection):
    name = "sqlalchemy-session"

    def _made(self) -> Session:
        return Session(self._engine)

    async def begin(self, isolation: str = "") -> None:
        if isolation:
            self.handle.connection(execution_options={"isolation_level": isolation})


class AlchemySqlite(AlchemyConnection):
    name = "sqlalchemy-connection-sqlite"
    driver = "sqlite"
    dialect = "sqlite"

    def _engine_url(self) -> str:
        return f"{self.driver}:///{self.path}"


class AlchemySessionSqlite(AlchemySqlite):
    name = "sqlalchemy-session-sqlite"

    def _made(self) -> Session:
        return Session(self._engine)


class AlchemyAsync(AlchemyConnection):
    name = "sqlalchemy-async-asyncpg"
    driver = "postgresql+asyncpg"
    sync = False

    async def open(self) -> None:
        self._async_engine = create_async_engine(self._engine_url(), **self._options())
        self.handle = await self._amade()

    async def _amade(self) -> AsyncConnection | AsyncSession:
        return await self._async_engine.connect()

    async def close(self) -> None:
        await self.handle.close()
        await self._async_engine.dispose()

    async def begin(self, isolation: str = "") -> None:
        if isolation:
            await self.handle.execution_options(isolation_level=isolation)

    async def commit(self) -> None:
        await self.handle.commit()

    async def rollback(self) -> None:
        await self.handle.rollback()

    async def execute(self, statement: str) -> list[tuple[Any, ...]]:
        result = await self.handle.execute(sqlalchemy.text(statement))
        return [tuple(row) for row in result] if result.returns_rows else []

    @contextlib.asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        async with self.handle.begin_nested():
            yield


class AlchemyAsyncPsycopg(AlchemyAsync):
    name = "sqlalchemy-async-psycopg"
    driver = "postgresql+psycopg"


class AlchemyAsyncSession(AlchemyAsync):
    name = "sqlalchemy-async-session"

    async def _amade(self) -> AsyncSession:
        return AsyncSession(self._async_engine)

    async def begin(self, isolation: str = "") -> None:
        if isolation:
            await self.handle.connection(execution_options={"isolation_level": isolation})


class AlchemyAsyncSqlite(AlchemyAsync):
    name = "sqlalchemy-async-aiosqlite"
    driver = "sqlite+aiosqlite"
    dialect = "sqlite"

    def _engine_url(self) -> str:
        return f"{self.driver}:///{self.path}"


class AlchemyAsyncSessionSqlite(AlchemyAsyncSqlite):
    name = "sqlalchemy-async-session-aiosqlite"

    async def _amade(self) -> AsyncSession:
        return AsyncSession(self._async_engine)


# --- Django -------------------------------------------------------------------------------------


class Django(Kind):
    name = "django"
    handle: Any

    def _settings(self) -> dict[str, Any]:
        parts = urlsplit(self.url)
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts.path[1:],
            "USER": parts.username,
            "HOST": parts.hostname,
            "PORT": parts.port,
        }

    async def open(self) -> None:
        self.handle = connection_to(f"at{id(self)}", self._settings())
        self._atomic: Any = None

    async def close(self) -> None:
        forget(self.handle)

    async def begin(self, isolation: str = "") -> None:
        from django.db import transaction  # type: ignore[import-untyped]

        if self.autocommit:
            return
        self._atomic = transaction.atomic(using=self.handle.alias)
        self._atomic.__enter__()
        await super().begin(isolation)

    async def commit(self) -> None:
        atomic, self._atomic = self._atomic, None
        atomic.__exit__(None, None, None)

    async def rollback(self) -> None:
        atomic, self._atomic = self._atomic, None
        if atomic is not None:
            self.handle.set_rollback(True)
            atomic.__exit__(None, None, None)

    async def execute(self, statement: str) -> list[tuple[Any, ...]]:
        with self.handle.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []

    @contextlib.asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        from django.db import transaction

        with transaction.atomic(using=self.handle.alias):
            yield


class DjangoSqlite(Django):
    name = "django-sqlite"
    dialect = "sqlite"

    def _settings(self) -> dict[str, Any]:
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": self.path}


# --- declared ids: on PostgreSQL the records are in partitions ----------------------------------------


class PsycopgTimed(Psycopg):
    name = "psycopg-timed"
    ids = ANY_IDS


class AsyncpgTimed(Asyncpg):
    name = "asyncpg-timed"
    ids = ANY_IDS


class SqliteTimed(Sqlite):
    name = "sqlite-timed"
    ids = ANY_IDS


KINDS: dict[str, type[Kind]] = {
    kind.name: kind
    for kind in (
        Psycopg, PsycopgBlock, PsycopgAsync, Asyncpg, AsyncpgPool, Sqlite, Aiosqlite, AlchemyConnection,
        AlchemySession, AlchemySqlite, AlchemySessionSqlite, AlchemyAsync, AlchemyAsyncPsycopg,
        AlchemyAsyncSession, AlchemyAsyncSqlite, AlchemyAsyncSessionSqlite, Django, DjangoSqlite,
        PsycopgTimed, AsyncpgTimed, SqliteTimed,
    )
}  # fmt: skip
