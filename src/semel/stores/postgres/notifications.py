"""One connection that listens for what other processes change: a thread, or a task in an event loop.

It starts with the first watch and begins anew when the server goes away. Being entered among the listeners takes
a lock that the ends of claims share: one that did not see the entry, and so tells nobody, is over by then, and
whoever waits is sent to look again. Where the lock cannot be had at once it is done without. Whoever waits polls
as well, so a notification that is missed costs time, never an event.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from threading import Event, Lock, Thread

import psycopg

from semel.core.commands import Answer, Claim, Item
from semel.core.ids import DIGEST_BYTES, digest
from semel.core.protocols import Listener
from semel.runtime.tasks import end_tasks
from semel.stores.postgres.pool import PostgresConnection
from semel.stores.postgres.pool_async import AsyncPostgresConnection
from semel.stores.postgres.pool_base import CONTEXT
from semel.stores.postgres.schema import channel_of
from semel.stores.postgres.settings import PostgresTarget
from semel.types import Busy, Id

__all__ = ["AsyncServerListener", "ChangeListeners", "ServerListener"]

WAITED_MAX = 100_000
"""How many keys that were answered with `Busy` are remembered: a notification names only the digest."""


class ChangeListeners:
    """The listeners of a store, and the keys that somebody may be waiting for."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waited: OrderedDict[bytes, Id] = OrderedDict()
        self.listeners: tuple[Listener, ...] = ()

    def add(self, listener: Listener) -> Callable[[], None]:
        """Tell `listener` from now on; returns what ends it."""
        with self._lock:
            self.listeners = (*self.listeners, listener)

        def stop() -> None:
            with self._lock:
                self.listeners = tuple(each for each in self.listeners if each is not listener)

        return stop

    def note(self, items: Sequence[Item], answers: Sequence[Answer]) -> None:
        """Remember the keys that are busy: whoever asked may go on to wait for them."""
        for item, answer in zip(items, answers, strict=True):
            if isinstance(answer, Busy) and isinstance(item, Claim):
                key = digest(item.id)
                with self._lock:
                    self._waited[key] = item.id
                    self._waited.move_to_end(key)
                    if len(self._waited) > WAITED_MAX:
                        self._waited.popitem(last=False)

    def tell(self, changed: Iterable[Id]) -> None:
        """These records have changed."""
        for record_id in changed if self.listeners else ():
            for listener in self.listeners:
                listener(record_id)

    def on_payload(self, payload: str) -> None:
        """Notify the listeners of a notification's records: digests in hexadecimal, one after the other."""
        step = 2 * DIGEST_BYTES
        for start in range(0, len(payload), step):
            try:
                record_id = self._waited.get(bytes.fromhex(payload[start : start + step]))
            except ValueError:
                return  # somebody else uses the channel
            if record_id is not None:
                self.tell((record_id,))

    def look_again(self) -> None:
        """Send everybody who waits to look: what changed before we listened was told to nobody."""
        with self._lock:
            waited = list(self._waited.values())
        self.tell(waited)

    def after_fork(self) -> None:
        """Another thread of the parent may have held the lock."""
        self._lock = Lock()


RETRY_S = 1.0
HEAR_S = 0.5
"""How often a listening thread looks whether it is to end."""

_log = logging.getLogger("semel")


class ServerListener:
    """A thread that listens while the store is open, from the first watch on."""

    def __init__(self, place: PostgresTarget, statements: Mapping[str, str], ears: ChangeListeners) -> None:
        self._place = place
        self._statements = statements
        self._ears = ears
        self._lock = Lock()
        self._thread: Thread | None = None
        self._ended = Event()
        self._closed = False

    def open(self) -> None:
        """Allow it to start, again after `close`."""
        with self._lock:
            self._closed = False

    def start(self) -> None:
        """Begin to listen, soon; idempotent. Behind a pooler nothing can be heard."""
        with self._lock:
            if self._thread is None and not self._closed and not self._place.pooler:
                self._ended = Event()
                self._thread = Thread(
                    target=self._run, args=(self._ended,), name="semel-listener", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """End it, and wait for that; idempotent."""
        with self._lock:
            self._closed = True
            self._ended.set()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def after_fork(self) -> None:
        """In a forked child: the thread and its connection are the parent's."""
        self._lock = Lock()
        self._thread = None

    def _run(self, ended: Event) -> None:
        while not ended.is_set():
            try:
                with PostgresConnection.connect(**self._place.parameters(), context=CONTEXT) as line:
                    self._hear(line, ended)
            except psycopg.Error as error:
                _log.debug("listening to %s failed: %s", self._place.name, error)
                ended.wait(RETRY_S)

    def _hear(self, line: PostgresConnection, ended: Event) -> None:
        line.wait_s = self._place.wait_s
        line.execute(f'LISTEN "{channel_of(self._place.schema)}"')
        try:
            with line.transaction():
                line.execute(self._statements["lock_listeners"], prepare=False)
                line.execute(self._statements["listen"])
        except psycopg.errors.LockNotAvailable:
            line.execute(self._statements["listen"])
        self._ears.look_again()
        while not ended.is_set():
            for notify in line.notifies(timeout=HEAR_S):
                self._ears.on_payload(notify.payload)
                if ended.is_set():
                    break
        with suppress(psycopg.Error):
            line.execute(self._statements["unlisten"])


class AsyncServerListener:
    """A task that listens, in the event loop that uses the store."""

    def __init__(self, place: PostgresTarget, statements: Mapping[str, str], ears: ChangeListeners) -> None:
        self._place = place
        self._statements = statements
        self._ears = ears
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def open(self) -> None:
        """Allow it to start, again after `aclose`."""
        self._closed = False

    def start(self) -> None:
        """Begin to listen, soon, if anybody watches; idempotent. Outside a loop: the next call from one does it."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if self._closed or self._place.pooler or not self._ears.listeners:
            return
        if self._loop is not loop:
            self.drop()
        if self._task is None or self._task.done():
            self._loop = loop
            self._task = loop.create_task(self._run(), name="semel-listener")

    async def aclose(self) -> None:
        """End it, and wait for that where it is a task of this loop; idempotent."""
        self._closed = True
        if self._loop is not asyncio.get_running_loop():
            self.drop()
        task, self._task = self._task, None
        await end_tasks(task)

    def drop(self) -> None:
        """End it from outside its loop, where that still runs."""
        task, self._task = self._task, None
        if task is not None and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and the task with it
                self._loop.call_soon_threadsafe(task.cancel)

    def after_fork(self) -> None:
        """In a forked child: the task and its connection are the parent's."""
        self._task = self._loop = None

    async def _run(self) -> None:
        while True:
            try:
                async with await AsyncPostgresConnection.connect(
                    **self._place.parameters(), context=CONTEXT
                ) as line:
                    await self._hear(line)
            except psycopg.Error as error:
                _log.debug("listening to %s failed: %s", self._place.name, error)
                await asyncio.sleep(RETRY_S)

    async def _hear(self, line: AsyncPostgresConnection) -> None:
        line.wait_s = self._place.wait_s
        await line.execute(f'LISTEN "{channel_of(self._place.schema)}"')
        try:
            await self._enter(line)
            self._ears.look_again()
            while True:
                async for notify in line.notifies(timeout=self._place.wait_s / 2):
                    self._ears.on_payload(notify.payload)
        finally:
            with suppress(psycopg.Error):
                await line.execute(self._statements["unlisten"])

    async def _enter(self, line: AsyncPostgresConnection) -> None:
        try:
            async with line.transaction():
                await line.execute(self._statements["lock_listeners"], prepare=False)
                await line.execute(self._statements["listen"])
        except psycopg.errors.LockNotAvailable:
            await line.execute(self._statements["listen"])
