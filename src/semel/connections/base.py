"""The caller's connection, and how a dialogue of statements runs on it.

A dialogue is a generator that yields statements and receives their rows. It is written once and runs on blocking
and on async drivers. Statements take their parameters by position, each once and in order: `$1`, `$2`
for PostgreSQL, `?` for SQLite; parameters and answers are text, numbers, bytes and `None`, which every driver
passes alike.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Generator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from semel.errors import NoTransaction
from semel.runtime.generators import adrive, drive

__all__ = [
    "Address",
    "AsyncCallerConnection",
    "AsyncpgConnection",
    "AwaitedConnection",
    "BlockingConnection",
    "CallerConnection",
    "Dialect",
    "PauseStep",
    "Row",
    "Statement",
    "Talk",
    "code_of",
    "no_transaction",
]

T = TypeVar("T")
Row: TypeAlias = tuple[Any, ...]
Dialect: TypeAlias = Literal["postgresql", "sqlite"]
Address: TypeAlias = tuple[str, int, str]
"""Host, port and database of a server."""


class Statement(NamedTuple):
    """One statement to execute in the caller's transaction."""

    text: str
    parameters: tuple[str | int | bytes | None, ...] = ()


class PauseStep(NamedTuple):
    """A pause before the next statement."""

    wait_s: float


Talk: TypeAlias = Generator[Statement | PauseStep, list[Row], T]
"""A dialogue on a connection. Errors of the driver are thrown into it, so that it can handle them."""


class CallerConnection(ABC):
    """A blocking connection of the caller. It joins the caller's transaction and never ends it."""

    awaits: ClassVar[bool] = False
    dialect: Dialect

    @abstractmethod
    def require_transaction(self) -> None:
        """Raise `NoTransaction` if none is open and the driver will not open one."""

    @abstractmethod
    def execute(self, statement: Statement) -> list[Row]:
        """Return the rows of one statement, without the caller's row factories. Raises the driver's errors."""

    @abstractmethod
    def savepoint(self) -> AbstractContextManager[Any]:
        """Open a block whose effects are undone if it raises, by the driver's own means."""

    @property
    def address(self) -> Address | None:
        """Host, port and database that the connection was opened with; `None` if the driver does not say."""
        return None

    def pause(self, wait_s: float) -> None:
        """Sleep."""
        time.sleep(wait_s)

    def run(self, talk: Talk[T]) -> T:
        """Run a dialogue in the caller's transaction."""
        return drive(talk, self._perform)

    def _perform(self, step: Statement | PauseStep) -> list[Row]:
        if not isinstance(step, PauseStep):
            return self.execute(step)
        self.pause(step.wait_s)
        return []


class AsyncCallerConnection(ABC):
    """An async connection of the caller."""

    awaits: ClassVar[bool] = True
    dialect: Dialect

    @abstractmethod
    async def require_transaction(self) -> None:
        """Raise `NoTransaction` if none is open and the driver will not open one."""

    @abstractmethod
    async def execute(self, statement: Statement) -> list[Row]:
        """Return the rows of one statement, without the caller's row factories. Raises the driver's errors."""

    @abstractmethod
    def savepoint(self) -> AbstractAsyncContextManager[Any]:
        """Open a block whose effects are undone if it raises, by the driver's own means."""

    @property
    def address(self) -> Address | None:
        """Host, port and database that the connection was opened with; `None` if the driver does not say."""
        return None

    async def run(self, talk: Talk[T]) -> T:
        """Run a dialogue in the caller's transaction."""
        return await adrive(talk, self._perform)

    async def _perform(self, step: Statement | PauseStep) -> list[Row]:
        if not isinstance(step, PauseStep):
            return await self.execute(step)
        await asyncio.sleep(step.wait_s)
        return []


def code_of(error: BaseException | None) -> str | int | None:
    """Return the database's error code below any wrapper: an SQLSTATE, or SQLite's extended code."""
    while error is not None:
        for name in ("sqlstate", "pgcode", "sqlite_errorcode"):
            code: str | int | None = getattr(error, name, None)
            if code is not None:
                return code
        error = getattr(error, "orig", None) or error.__cause__
    return None


def no_transaction(what: str) -> NoTransaction:
    """Return the error for a connection that would commit every statement by itself."""
    return NoTransaction(
        f"no transaction is open and the driver will open none, so mark and effect would not commit together; {what}"
    )


class BlockingConnection(Protocol):
    """A connection or session that blocks: sqlite3, psycopg, SQLAlchemy, Django."""

    def commit(self) -> None:
        """End the transaction."""


class AwaitedConnection(Protocol):
    """A connection or session for an event loop: aiosqlite, psycopg, SQLAlchemy."""

    def commit(self) -> Awaitable[None]:
        """End the transaction."""


class AsyncpgConnection(Protocol):
    """A connection of asyncpg, whose transactions are blocks."""

    def is_in_transaction(self) -> bool:
        """Tell whether a transaction is open."""
