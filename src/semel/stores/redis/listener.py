"""Listen on a Redis channel for records that other clients end: in a thread, or in a task of an event loop."""

import asyncio
from collections.abc import Callable
from threading import Event, Lock, Thread, current_thread
from typing import Any, TypeAlias

from semel.runtime.tasks import end_tasks
from semel.stores.redis.base import RedisState, pack
from semel.stores.redis.calls import Address

__all__ = ["AsyncRedisListener", "RedisListener"]

LISTEN_S = 0.2
"""How often the listening thread checks whether it must stop."""
RELISTEN_S = 0.5
SUBSCRIBE_S = 1.0
"""How long a call waits for the listener's subscription."""

NewConnection: TypeAlias = Callable[[RedisState, Address], Any]


class RedisListener:
    """Receives the ids of ended records while the store has listeners. Errors only cost speed: waiters also poll."""

    def __init__(self, core: RedisState, new_connection: NewConnection) -> None:
        self._core = core
        self._new_connection = new_connection
        self._lock = Lock()
        self._thread: Thread | None = None
        self._subscribed = Event()
        self._stopped = Event()

    def start(self) -> None:
        """Start listening, unless it already runs."""
        with self._lock:
            if self._thread is None and not self._core.closed:
                self._subscribed.clear()
                self._thread = Thread(target=self._listen, name="semel-redis-listener", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop, and wait until it has stopped."""
        self._stopped.set()
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None and thread is not current_thread():
            thread.join()

    def wait_subscribed(self) -> None:
        """Wait up to `SUBSCRIBE_S` for the subscription: an answer must not be older than the first message."""
        if self._thread is not None and not self._subscribed.wait(SUBSCRIBE_S):
            self._subscribed.set()  # the call goes on; after the subscription all waiters check again

    def _listen(self) -> None:
        core = self._core
        while not self._stopped.is_set():
            link: Any = None
            try:
                link = self._new_connection(core, core.nodes()[0])
                link.connection.connect()
                link.send(pack([core.subscribe_call()]))
                self._read_messages(link)
            except Exception:  # noqa: BLE001 - after any error polling goes on
                self._subscribed.set()
                self._stopped.wait(RELISTEN_S)
            finally:
                if link is not None:
                    link.close()
            with self._lock:
                if not core.listeners:
                    self._thread = None
                    return

    def _read_messages(self, link: Any) -> None:
        core = self._core
        while not self._stopped.is_set():
            if link.connection.can_read(LISTEN_S):
                if core.is_subscribed(link.read()):
                    if self._subscribed.is_set():
                        core.notify_all_waiting()
                    self._subscribed.set()
            elif not core.listeners:
                return


class AsyncRedisListener:
    """Receives the ids of ended records while the store has listeners. Errors only cost speed: waiters also poll."""

    def __init__(self, core: RedisState, new_connection: NewConnection) -> None:
        self._core = core
        self._new_connection = new_connection
        self._task: asyncio.Task[None] | None = None
        self._subscribed = asyncio.Event()

    def start(self) -> None:
        """Start listening, unless it already runs."""
        if self._task is None and not self._core.closed:
            self._subscribed.clear()
            self._task = asyncio.get_running_loop().create_task(self._listen(), name="semel-redis-listener")

    async def stop(self) -> None:
        """Stop, and wait until it has stopped."""
        task, self._task = self._task, None
        await end_tasks(task)

    @property
    def is_ready(self) -> bool:
        """Whether `wait_subscribed` would not wait."""
        return self._task is None or self._subscribed.is_set()

    async def wait_subscribed(self) -> None:
        """Wait up to `SUBSCRIBE_S` for the subscription: an answer must not be older than the first message."""
        if self._task is not None and not self._subscribed.is_set():
            try:
                await asyncio.wait_for(self._subscribed.wait(), SUBSCRIBE_S)
            except TimeoutError:
                self._subscribed.set()  # the call goes on; after the subscription all waiters check again

    async def _listen(self) -> None:
        core = self._core
        while not core.closed and core.listeners:
            link: Any = None
            try:
                link = self._new_connection(core, core.nodes()[0])
                await link.connection.connect()
                await link.send(pack([core.subscribe_call()]))
                while core.listeners:
                    if core.is_subscribed(await link.read()):
                        if self._subscribed.is_set():
                            core.notify_all_waiting()
                        self._subscribed.set()
            except Exception:  # noqa: BLE001 - after any error polling goes on
                self._subscribed.set()
                await asyncio.sleep(RELISTEN_S)
            finally:
                if link is not None:
                    await link.close()
        self._task = None
