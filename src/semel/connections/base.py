"""What a caller's connection is to semel, and how a talk is carried out on it.

A talk is a generator that yields statements and is sent their rows. It is written once and runs on blocking
and on awaited drivers alike. Statements take their parameters by position, each once and in order: `$1`, `$2`
for PostgreSQL, `?` for SQLite; parameters and answers are text, numbers, bytes and `None`, which every driver
passes alike.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeVar

from semel.errors import NoTransaction
from semel.runtime.generators import adrive, drive

__all__ = [
    "AsyncCallerConnection",
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


class Statement(NamedTuple):
    """One statement to execute in the caller's transaction."""

    text: str
    parameters: tuple[str | int | bytes | None, ...] = ()


class PauseStep(NamedTuple):
    """Time to let pass before the talk goes on."""

    wait_s: float


Talk: TypeAlias = Generator[Statement | PauseStep, list[Row], T]
"""What is said on a handle. An error of the driver is thrown into it, so that it may tell what it means."""


class CallerConnection(ABC):
    """A connection of the caller's that blocks. It joins the caller's transaction and never ends it."""

    awaits: ClassVar[bool] = False
    dialect: Dialect

    @abstractmethod
    def require_transaction(self) -> None:
        """Raise `NoTransaction` where none is open and the driver will not open one by itself."""

    @abstractmethod
    def execute(self, statement: Statement) -> list[Row]:
        """The rows of one statement, untouched by the caller's row factories. Errors are the driver's."""

    @abstractmethod
    def savepoint(self) -> AbstractContextManager[Any]:
        """A block whose effects are undone when it raises, made by the driver's own means."""

    def pause(self, wait_s: float) -> None:
        """Let time pass."""
        time.sleep(wait_s)

    def run(self, talk: Talk[T]) -> T:
        """Carry out a talk in the caller's transaction."""
        return drive(talk, self._perform)

    def _perform(self, step: Statement | PauseStep) -> list[Row]:
        if not isinstance(step, PauseStep):
            return self.execute(step)
        self.pause(step.wait_s)
        return []


class AsyncCallerConnection(ABC):
    """A connection of the caller's whose calls are awaited."""

    awaits: ClassVar[bool] = True
    dialect: Dialect

    @abstractmethod
    async def require_transaction(self) -> None:
        """Raise `NoTransaction` where none is open and the driver will not open one by itself."""

    @abstractmethod
    async def execute(self, statement: Statement) -> list[Row]:
        """The rows of one statement, untouched by the caller's row factories. Errors are the driver's."""

    @abstractmethod
    def savepoint(self) -> AbstractAsyncContextManager[Any]:
        """A block whose effects are undone when it raises, made by the driver's own means."""

    async def run(self, talk: Talk[T]) -> T:
        """Carry out a talk in the caller's transaction."""
        return await adrive(talk, self._perform)

    async def _perform(self, step: Statement | PauseStep) -> list[Row]:
        if not isinstance(step, PauseStep):
            return await self.execute(step)
        await asyncio.sleep(step.wait_s)
        return []


def code_of(error: BaseException | None) -> str | int | None:
    """How the database itself called an error, whoever wrapped it: an SQLSTATE, or SQLite's extended code."""
    while error is not None:
        for name in ("sqlstate", "pgcode", "sqlite_errorcode"):
            code: str | int | None = getattr(error, name, None)
            if code is not None:
                return code
        error = getattr(error, "orig", None) or error.__cause__
    return None


def no_transaction(what: str) -> NoTransaction:
    """The error for a handle on which every statement would be committed by itself."""
    return NoTransaction(
        f"no transaction is open and the driver will open none, so nothing would hold mark and effect together; {what}"
    )
