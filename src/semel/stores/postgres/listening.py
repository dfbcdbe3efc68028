"""One connection that listens for what other processes change: a thread, or a task in an event loop.

It starts with the first watch and begins anew when the server goes away. Being entered among the listeners takes
a lock that the ends of claims share: one that did not see the entry, and so tells nobody, is over by then, and
whoever waits is sent to look again. Where the lock cannot be had at once it is done without. Whoever waits polls
as well, so a notification that is missed costs time, never an event.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from threading import Event, Lock, Thread

import psycopg

from semel.stores.postgres.lines import CONTEXT, AsyncLine, PostgresConnection
from semel.stores.postgres.settings import PostgresTarget
from semel.stores.postgres.statements import channel_of
from semel.stores.postgres.watching import ChangeListeners

__all__ = ["LoopListener", "ThreadListener"]

RETRY_S = 1.0
HEAR_S = 0.5
"""How often a listening thread looks whether it is to end."""

_log = logging.getLogger("semel")


class ThreadListener:
    """A thread that listens."""

    def __init__(self, place: PostgresTarget, statements: Mapping[str, str], ears: ChangeListeners) -> None:
        self._place = place
        self._statements = statements
        self._ears = ears
        self._lock = Lock()
        self._thread: Thread | None = None
        self._ended = Event()

    def start(self) -> None:
        """Begin to listen, soon."""
        with self._lock:
            if self._thread is None and not self._ended.is_set():
                self._thread = Thread(target=self._run, name="semel-listener", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End it, and wait for that."""
        self._ended.set()
        thread = self._thread
        if thread is not None:
            thread.join()

    def abandon(self) -> None:
        """In a forked child: the thread and its connection are the parent's."""
        self._ended = Event()
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                with PostgresConnection.connect(**self._place.parameters(), context=CONTEXT) as line:
                    self._hear(line)
            except psycopg.Error as error:
                _log.debug("listening to %s failed: %s", self._place.name, error)
                self._ended.wait(RETRY_S)

    def _hear(self, line: PostgresConnection) -> None:
        line.wait_s = self._place.wait_s
        line.execute(f'LISTEN "{channel_of(self._place.schema)}"')
        try:
            with line.transaction():
                line.execute(self._statements["lock_listeners"], prepare=False)
                line.execute(self._statements["listen"])
        except psycopg.errors.LockNotAvailable:
            line.execute(self._statements["listen"])
        self._ears.look_again()
        while not self._ended.is_set():
            for notify in line.notifies(timeout=HEAR_S):
                self._ears.heard(notify.payload)
                if self._ended.is_set():
                    break
        with suppress(psycopg.Error):
            line.execute(self._statements["unlisten"])


class LoopListener:
    """A task that listens, in one event loop."""

    def __init__(
        self, place: PostgresTarget, statements: Mapping[str, str], ears: ChangeListeners, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._place = place
        self._statements = statements
        self._ears = ears
        self.loop = loop
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to listen, soon."""
        if self._task is None or self._task.done():
            self._task = self.loop.create_task(self._run(), name="semel-listener")

    async def close(self) -> None:
        """End it, and wait for that."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def drop(self) -> None:
        """End it from outside its loop, where that still runs."""
        task, self._task = self._task, None
        if task is not None:
            with suppress(RuntimeError):  # the loop is closed, and the task with it
                self.loop.call_soon_threadsafe(task.cancel)

    async def _run(self) -> None:
        while True:
            try:
                async with await AsyncLine.connect(**self._place.parameters(), context=CONTEXT) as line:
                    await self._hear(line)
            except psycopg.Error as error:
                _log.debug("listening to %s failed: %s", self._place.name, error)
                await asyncio.sleep(RETRY_S)

    async def _hear(self, line: AsyncLine) -> None:
        line.wait_s = self._place.wait_s
        await line.execute(f'LISTEN "{channel_of(self._place.schema)}"')
        try:
            await self._enter(line)
            self._ears.look_again()
            while True:
                async for notify in line.notifies(timeout=self._place.wait_s / 2):
                    self._ears.heard(notify.payload)
        finally:
            with suppress(psycopg.Error):
                await line.execute(self._statements["unlisten"])

    async def _enter(self, line: AsyncLine) -> None:
        try:
            async with line.transaction():
                await line.execute(self._statements["lock_listeners"], prepare=False)
                await line.execute(self._statements["listen"])
        except psycopg.errors.LockNotAvailable:
            await line.execute(self._statements["listen"])
