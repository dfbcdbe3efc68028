"""A value that is read in the background while somebody looks: pages show the last one and hardly wait for the next."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from semel.errors import SemelError
from semel.runtime.process import logging
from semel.server.problems import HttpProblem

__all__ = ["FIRST_S", "Refreshed", "pause_s"]

T = TypeVar("T")

SHARE = 0.05
"""The share of time for reading: a slow read is made seldom."""
PAUSE_MAX_S = 300.0
"""The longest pause between two reads, however long they take: somebody looks at a failure that may be new."""
FIRST_S = 2.0
"""How long a page waits for the first value, and for one in place of an old one: not at all if the last took longer."""
ACTION_S = 3.0
"""How long a page waits for a value that shows the result of an action."""
OLD_S = 20.0
"""A value that was due this long ago is old: nobody has looked since, and workers and failures may be others now."""


class Refreshed(Generic[T]):
    """The last value that `read` returned. `every_s`: the least time between two reads."""

    def __init__(self, read: Callable[[], Awaitable[T]], every_s: float) -> None:
        self._read = read
        self._every_s = every_s
        self._due = self._began = 0.0
        self._value: T | None = None
        self._task: asyncio.Task[None] | None = None
        self.took_s: float = 0.0
        """How long the last read took."""

    async def close(self) -> None:
        """Cancel a running read."""
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def expire(self) -> None:
        """Read it again when it is next asked for."""
        self._due = 0.0

    def last(self) -> T | None:
        """Return the last value, if there is one. Reads the next in the background if that is due."""
        if time.monotonic() >= self._due and not self.is_reading:
            self._began = time.monotonic()
            self._task = asyncio.get_running_loop().create_task(self._refresh())
        return self._value

    @property
    def is_reading(self) -> bool:
        """Whether a read is under way."""
        return self._task is not None and not self._task.done()

    async def first(self) -> T | None:
        """Return the last value; waits shortly for the first one, or for the next if nobody has looked for long."""
        is_old = time.monotonic() >= self._due + OLD_S
        if self.last() is None or (is_old and self.took_s < FIRST_S):
            await self._wait(FIRST_S)
        return self._value

    async def fresh(self) -> T | None:
        """Return a value that was read after this call, or the last one if that takes long."""
        if self.is_reading:  # it may have begun before the action whose result is wanted
            await self._wait(ACTION_S)
        self.expire()
        self.last()
        await self._wait(ACTION_S)
        return self._value

    async def _wait(self, longest_s: float) -> None:
        """Wait for the read under way, but not if it has already lasted this long: it may last far longer."""
        left_s = self._began + longest_s - time.monotonic()
        if self._task is not None and left_s > 0:
            await asyncio.wait((self._task,), timeout=left_s)

    async def _refresh(self) -> None:
        self._due = self._began + self._every_s
        try:
            self._value = await self._read()
        except (SemelError, HttpProblem):  # the last one stays, and says how old it is
            return
        except Exception:  # noqa: BLE001 - whatever it is, the page says how old its figures are
            logging.getLogger("semel").exception("the dashboard could not read what it shows")
            return
        now = time.monotonic()
        self.took_s = now - self._began
        self._due = max(self._due, now + pause_s(self.took_s))


def pause_s(took_s: float) -> float:
    """Return how long to wait after a read that took so long."""
    return min(PAUSE_MAX_S, took_s / SHARE)
