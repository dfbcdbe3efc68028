"""One connection that listens for changes by other processes: in a thread, or in a task of an event loop.

It starts with the first watch and reconnects when the server goes away. To register as a listener it takes a lock
that the ends of claims share. A transaction that did not see the registration, and so notifies nobody, has ended by
then, and all waiters are woken to check again. If the lock is not free at once, it registers without it. Waiters
poll as well, so a missed notification costs time, never an event.
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
"""How many keys answered with `Busy` are kept, to find the key: a notification has only the digest."""


class ChangeListeners:
    """The listeners of a store, and the keys that callers may wait for."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waited: OrderedDict[bytes, Id] = OrderedDict()
        self.listeners: tuple[Listener, ...] = ()

    def add(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` for changes from now on; returns a function that stops it."""
        with self._lock:
            self.listeners = (*self.listeners, listener)

        def stop() -> None:
            with self._lock:
                self.listeners = tuple(each for each in self.listeners if each is not listener)

        return stop

    def note(self, items: Sequence[Item], answers: Sequence[Answer]) -> None:
        """Remember the keys that are busy: the caller may wait for them next."""
        for item, answer in zip(items, answers, strict=True):
            if isinstance(answer, Busy) and isinstance(item, Claim):
                key = digest(item.id)
                with self._lock:
                    self._waited[key] = item.id
                    self._waited.move_to_end(key)
                    if len(self._waited) > WAITED_MAX:
                        self._waited.popitem(last=False)

    def notify(self, changed: Iterable[Id]) -> None:
        """Call the listeners for records that have changed."""
        for record_id in changed if self.listeners else ():
            for listener in self.listeners:
                listener(record_id)

    def on_payload(self, payload: str) -> None:
        """Handle a notification of the server: digests in hexadecimal, one after the other."""
        step = 2 * DIGEST_BYTES
        for start in range(0, len(payload), step):
            try:
                record_id = self._waited.get(bytes.fromhex(payload[start : start + step]))
            except ValueError:
                return  # another program uses the channel
            if record_id is not None:
                self.notify((record_id,))

    def look_again(self) -> None:
        """Wake all waiters: nobody was notified of changes made before we listened."""
        with self._lock:
            waited = list(self._waited.values())
        self.notify(waited)

    def after_fork(self) -> None:
        """Replace the lock: another thread of the parent may have held it."""
        self._lock = Lock()


RETRY_S = 1.0
LISTEN_S = 0.5
"""How often a listening thread checks whether it should end."""

_log = logging.getLogger("semel")


class ServerListener:
    """A thread that listens from the first watch until the store is closed."""

    def __init__(
        self, place: PostgresTarget, statements: Mapping[str, str], changes: ChangeListeners
    ) -> None:
        self._place = place
        self._statements = statements
        self._changes = changes
        self._lock = Lock()
        self._thread: Thread | None = None
        self._ended = Event()
        self._closed = False

    def open(self) -> None:
        """Allow the thread to start, also after `close`."""
        with self._lock:
            self._closed = False

    def start(self) -> None:
        """Start the thread; idempotent. Does nothing behind a pooler, where a session cannot listen."""
        with self._lock:
            if self._thread is None and not self._closed and not self._place.pooler:
                self._ended = Event()
                self._thread = Thread(
                    target=self._run, args=(self._ended,), name="semel-listener", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for its end; idempotent."""
        with self._lock:
            self._closed = True
            self._ended.set()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def after_fork(self) -> None:
        """Drop the thread in a forked child: it and its connection belong to the parent."""
        self._lock = Lock()
        self._thread = None

    def _run(self, ended: Event) -> None:
        while not ended.is_set():
            try:
                with PostgresConnection.connect(**self._place.parameters(), context=CONTEXT) as connection:
                    self._listen(connection, ended)
            except psycopg.Error as error:
                _log.debug("listening to %s failed: %s", self._place.name, error)
                ended.wait(RETRY_S)

    def _listen(self, connection: PostgresConnection, ended: Event) -> None:
        connection.wait_s = self._place.wait_s
        connection.execute(f'LISTEN "{channel_of(self._place.schema)}"')
        try:
            with connection.transaction():
                connection.execute(self._statements["lock_listeners"], prepare=False)
                connection.execute(self._statements["listen"])
        except psycopg.errors.LockNotAvailable:
            connection.execute(self._statements["listen"])
        self._changes.look_again()
        while not ended.is_set():
            for notify in connection.notifies(timeout=LISTEN_S):
                self._changes.on_payload(notify.payload)
                if ended.is_set():
                    break
        with suppress(psycopg.Error):
            connection.execute(self._statements["unlisten"])


class AsyncServerListener:
    """A task that listens, in the event loop that uses the store."""

    def __init__(
        self, place: PostgresTarget, statements: Mapping[str, str], changes: ChangeListeners
    ) -> None:
        self._place = place
        self._statements = statements
        self._changes = changes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def open(self) -> None:
        """Allow the task to start, also after `aclose`."""
        self._closed = False

    def start(self) -> None:
        """Start the task, if there are listeners; idempotent. Outside a loop, the next call from a loop starts it."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if self._closed or self._place.pooler or not self._changes.listeners:
            return
        if self._loop is not loop:
            self.drop()
        if self._task is None or self._task.done():
            self._loop = loop
            self._task = loop.create_task(self._run(), name="semel-listener")

    async def aclose(self) -> None:
        """Stop the task, and wait for its end if it belongs to this loop; idempotent."""
        self._closed = True
        if self._loop is not asyncio.get_running_loop():
            self.drop()
        task, self._task = self._task, None
        await end_tasks(task)

    def drop(self) -> None:
        """Stop the task from outside its loop, if that loop still runs."""
        task, self._task = self._task, None
        if task is not None and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and the task with it
                self._loop.call_soon_threadsafe(task.cancel)

    def after_fork(self) -> None:
        """Drop the task in a forked child: it and its connection belong to the parent."""
        self._task = self._loop = None

    async def _run(self) -> None:
        while True:
            try:
                async with await AsyncPostgresConnection.connect(
                    **self._place.parameters(), context=CONTEXT
                ) as connection:
                    await self._listen(connection)
            except psycopg.Error as error:
                _log.debug("listening to %s failed: %s", self._place.name, error)
                await asyncio.sleep(RETRY_S)

    async def _listen(self, connection: AsyncPostgresConnection) -> None:
        connection.wait_s = self._place.wait_s
        await connection.execute(f'LISTEN "{channel_of(self._place.schema)}"')
        try:
            await self._register(connection)
            self._changes.look_again()
            while True:
                async for notify in connection.notifies(timeout=self._place.wait_s / 2):
                    self._changes.on_payload(notify.payload)
        finally:
            with suppress(psycopg.Error):
                await connection.execute(self._statements["unlisten"])

    async def _register(self, connection: AsyncPostgresConnection) -> None:
        try:
            async with connection.transaction():
                await connection.execute(self._statements["lock_listeners"], prepare=False)
                await connection.execute(self._statements["listen"])
        except psycopg.errors.LockNotAvailable:
            await connection.execute(self._statements["listen"])
