"""Transactions that the database has undone for the sake of others: begun again, whole."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from semel.handles import code_of

__all__ = ["aretry", "is_undone", "retry"]

T = TypeVar("T")
UNDONE: frozenset[str | int | None] = frozenset(("40001", "40P01", 517))
"""Serialisation failure and deadlock in PostgreSQL; in SQLite, a write after a read that others overtook."""
TRIES_MAX = 10
PAUSE_MIN_S, PAUSE_MAX_S = 0.005, 0.5


def is_undone(error: BaseException) -> bool:
    """Whether the database asks for the whole transaction once more, by whichever driver it says so."""
    return code_of(error) in UNDONE


def retry(transaction: Callable[[], T], *, tries_max: int = TRIES_MAX) -> T:
    """Call `transaction` until the database does not undo it; it opens, commits and, on error, rolls back its own.

    Other errors are raised at once, and this one too after `tries_max`.
    """
    for tries in range(1, tries_max):
        try:
            return transaction()
        except Exception as error:
            if not is_undone(error):
                raise
        time.sleep(_pause_s(tries))
    return transaction()


async def aretry(transaction: Callable[[], Awaitable[T]], *, tries_max: int = TRIES_MAX) -> T:
    """The same, awaited."""
    for tries in range(1, tries_max):
        try:
            return await transaction()
        except Exception as error:
            if not is_undone(error):
                raise
        await asyncio.sleep(_pause_s(tries))
    return await transaction()


def _pause_s(tries: int) -> float:
    """Longer each time, and random, so that those who were in each other's way do not meet again."""
    return random.uniform(0, min(PAUSE_MAX_S, PAUSE_MIN_S * 2.0 ** min(tries, 16)))  # noqa: S311 - no secret hangs on it
