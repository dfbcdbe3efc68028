"""Records in Redis or Valkey, for threads: connections, and the loop that carries out an exchange."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Lock, Thread, current_thread
from typing import Any

from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection
from redis.retry import Retry

from semel.clock import Clock
from semel.core.commands import Answer, Item
from semel.core.protocols import AsyncStore, Listener
from semel.errors import StoreUnavailable
from semel.runtime.process import restart_after_fork
from semel.stores.redis import marks
from semel.stores.redis.base import RedisState, RedisStoreBase, link_options, pack
from semel.stores.redis.calls import Address, Ahead, Nodes, RedisCall, RedisPause, RedisQuery, Refresh, Steps
from semel.stores.redis.errors import BROKEN, as_message, unsent
from semel.stores.redis.server_checks import ServerFacts, facts_of_masters

IDLE_MAX = 8
"""Connections kept for one node while nobody uses them."""
STALE_S = 0.2
"""A connection that was idle for so long is looked at before it is used: the other side may have left."""
LINES_BYTES = 64 * 1024
"""How much is read at once of answers that come in lines."""
LISTEN_S = 0.2
"""How often a listener looks whether it is to end."""
RELISTEN_S = 0.5
SUBSCRIBE_S = 1.0
"""How long a call waits for the listener to be heard: what it answers must not be older than what is listened to."""


class RedisConnection:
    """One connection. Used by one thread at a time."""

    def __init__(self, core: RedisState, address: Address) -> None:
        kind: Any = SSLConnection if core.place.tls else Connection
        self.connection: Any = kind(**link_options(core, address), retry=Retry(NoBackoff(), 0))
        self.address = address
        self.used_at: float = 0.0

    def send(self, packed: bytes) -> None:
        """Raises the driver's error."""
        self.connection.send_packed_command([packed], check_health=False)

    def read(self) -> Any:
        """A reply, or the server's error as a value. Raises the driver's error when the connection is broken."""
        try:
            return self.connection.read_response(disable_decoding=True)
        except Exception as error:
            message = as_message(error)
            if message is None:
                raise
            return message

    def read_lines(self, calls: list[RedisCall]) -> list[list[bytes]]:
        """The answers of commands that answer with a line each; nothing else may be under way."""
        data = b""
        while marks.missing_lines(data, calls) > 0:
            more = self.connection._sock.recv(LINES_BYTES)
            if not more:
                raise ConnectionError("the server has hung up")
            data += more
        return marks.in_lines(data, calls)

    def is_stale(self) -> bool:
        """Whether there is something to read where nothing should be: the end of the connection."""
        try:
            return bool(self.connection.can_read(0))
        except BROKEN:
            return True

    def close(self) -> None:
        """Hang up; from any thread."""
        with suppress(*BROKEN):
            self.connection.disconnect()


class RedisStore(RedisStoreBase):
    """A store in a Redis or Valkey server, cluster, or behind sentinels. Its name: the URL without the password.

    The options stand in the URL or are given by name; `semel.stores.redis.settings.Options` lists them. `clock` is
    for tests: without it the server's clock decides. One batch is one round trip, on a cluster one per node.
    """

    def __init__(self, url: str, *, clock: Clock | None = None, **options: Any) -> None:
        self._core = RedisState(url, clock, options)
        self._made_with = (url, clock, options)
        self._listening: Thread | None = None
        self.name: str = self._core.name
        self.after_fork()
        restart_after_fork(self)

    def facts(self) -> ServerFacts:
        """What was found out about the servers when the store was opened, and what each of it costs."""
        if self._core.facts is None:
            self.open()
        assert self._core.facts is not None
        return self._core.facts

    def say(self) -> list[dict[str, str]]:
        """What each master says of itself now: the lines of INFO, and `time_us`, its clock. One round trip."""
        self.facts()
        told: list[dict[str, str]] = self._drive(facts_of_masters(self._core.nodes()))
        return told

    def twin(self) -> AsyncStore:
        """The same store for an event loop, not yet connected."""
        from semel.stores.redis.store_async import AsyncRedisStore

        url, clock, options = self._made_with
        return AsyncRedisStore(url, clock=clock, **options)

    # --- the port ---

    def open(self) -> None:
        """Connect and run the start checks; idempotent. Raises `StoreRefused` for a server that would forget."""
        with self._opening:
            self._core.closed = False
            self._closing.clear()
            if self._core.facts is None:
                try:
                    self._drive(self._core.opening())
                except BaseException:
                    self._let_go()
                    raise

    def close(self) -> None:
        """Let go of all connections; idempotent, and safe while another thread is inside `send`."""
        self._core.closed = True
        self._closing.set()
        with self._lock:
            listening, self._listening = self._listening, None
        self._let_go()
        if listening is not None and listening is not current_thread():
            listening.join()
        self._core.facts = None

    def _let_go(self) -> None:
        with self._lock:
            links = [*self._busy, *(link for idle in self._idle.values() for link in idle)]
            self._idle.clear()
        for link in links:
            link.close()

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Carry out the items in one round trip; what no server answered is `Unavailable`, item by item."""
        core = self._core
        if core.closed:
            raise core.closed_error()
        if core.facts is None:
            self.open()
        if core.listeners and not self._subscribed.is_set():
            self._subscribed.wait(SUBSCRIBE_S)
        answers: list[Answer] = self._drive(core.carry_out(items))
        core.told(items, answers)
        return answers

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Tell `listener` of what is settled, released or forgotten: by this object, or by others where it waits."""
        stop = self._core.listen(listener)
        with self._lock:
            if self._listening is None and not self._core.closed:
                self._subscribed.clear()
                self._listening = Thread(target=self._listen, name="semel-redis-listener", daemon=True)
                self._listening.start()
        return stop

    def after_fork(self) -> None:
        """Connections, threads and locks are the parent's."""
        self._lock = Lock()
        self._opening = Lock()
        self._closing = Event()
        self._subscribed = Event()
        self._idle: dict[Address, list[RedisConnection]] = {}
        self._busy: set[RedisConnection] = set()
        self._listening = None
        self._core.after_fork()

    # --- the loop ---

    def _drive(self, steps: Steps) -> Any:
        reply: Any = None
        ahead: list[RedisCall] = []
        link: RedisConnection | Exception | None = None
        try:
            while True:
                step = steps.send(reply)
                if type(step) is Ahead:
                    link = self._send_ahead(link, step.calls)
                    ahead += step.calls
                elif link is not None:
                    assert type(step) is RedisQuery, "what was sent ahead is asked for next"
                    if step.calls:
                        link = self._send_ahead(link, step.calls)
                    calls, ahead, under_way, link = ahead + step.calls, [], link, None
                    reply = self._finish(under_way, calls)
                else:
                    reply = self._do(step)
        except StopIteration as stop:
            return stop.value
        finally:
            if isinstance(link, RedisConnection):
                self._drop(link)

    def _send_ahead(
        self, link: RedisConnection | Exception | None, calls: list[RedisCall]
    ) -> RedisConnection | Exception:
        """Send on the connection on which the others are under way, or begin one."""
        if link is None:
            return self._start(self._core.address(calls[0]), calls)
        if isinstance(link, RedisConnection):
            try:
                link.send(pack(calls))
            except BROKEN as error:
                self._drop(link)
                return error
        return link

    def _do(self, step: Any) -> Any:
        if type(step) is RedisQuery:
            return self._ask(step.calls)
        if type(step) is RedisPause:
            self._closing.wait(step.seconds)
        elif type(step) is Refresh:
            with suppress(StoreUnavailable):
                self._drive(self._core.locating())
        elif type(step) is Nodes:
            return self._core.nodes()
        if self._core.closed:
            raise self._core.closed_error()
        return None

    def _ask(self, calls: list[RedisCall]) -> list[Any]:
        if not calls:
            return []
        core = self._core
        first = core.address(calls[0])
        if len(calls) == 1 or all(core.address(call) == first for call in calls):
            return self._finish(self._start(first, calls), calls)
        groups: dict[Address, list[int]] = {}
        for at, call in enumerate(calls):
            groups.setdefault(core.address(call), []).append(at)
        started = [
            (places, self._start(address, [calls[at] for at in places])) for address, places in groups.items()
        ]
        replies: list[Any] = [None] * len(calls)
        for places, link in started:
            for at, reply in zip(places, self._finish(link, [calls[at] for at in places]), strict=True):
                replies[at] = reply
        return replies

    def _start(self, address: Address, calls: list[RedisCall]) -> RedisConnection | Exception:
        """Send the calls to one node; what comes back of it, or why nothing will."""
        packed = pack(calls)
        link: RedisConnection | None = None
        try:
            link = self._link(address)
            link.send(packed)
            return link
        except Exception as error:
            if not isinstance(error, BROKEN) and as_message(error) is None:
                raise
            self._drop(link)
            return unsent(error) if link is None else error
        except BaseException:
            self._drop(link)
            raise

    def _finish(self, link: RedisConnection | Exception, calls: list[RedisCall]) -> list[Any]:
        """Read one reply per call. Where the connection breaks, the rest get the reason."""
        if isinstance(link, Exception):
            if self._core.closed:
                raise self._core.closed_error()
            return [link] * len(calls)
        replies: list[Any] = []
        try:
            if calls[0].lines:
                replies += link.read_lines(calls)
            else:
                for call in calls:
                    if call.asking:
                        link.read()
                    replies.append(link.read())
        except BROKEN as error:
            self._drop(link)
            if self._core.closed:
                raise self._core.closed_error() from error
            return replies + [error] * (len(calls) - len(replies))
        except BaseException:
            self._drop(link)
            raise
        self._release(link)
        return replies

    # --- connections ---

    def _link(self, address: Address) -> RedisConnection:
        """A connection that nobody uses, or a new one. Raises the driver's error where none can be had."""
        while True:
            with self._lock:
                if self._core.closed:
                    raise self._core.closed_error()
                idle = self._idle.get(address)
                link = idle.pop() if idle else None
                if link is not None:
                    self._busy.add(link)
            if link is None:
                break
            if time.monotonic() - link.used_at < STALE_S or not link.is_stale():
                return link
            self._drop(link)
        link = RedisConnection(self._core, address)
        link.connection.connect()
        with self._lock:
            self._busy.add(link)
            late: bool = self._closing.is_set()
        if late:
            self._drop(link)
            raise self._core.closed_error()
        return link

    def _release(self, link: RedisConnection) -> None:
        link.used_at = time.monotonic()
        with self._lock:
            self._busy.discard(link)
            idle = self._idle.setdefault(link.address, [])
            if len(idle) < IDLE_MAX and not self._core.closed and link.connection.is_connected:
                idle.append(link)
                return
        link.close()

    def _drop(self, link: RedisConnection | None) -> None:
        if link is not None:
            with self._lock:
                self._busy.discard(link)
            link.close()

    # --- listening ---

    def _listen(self) -> None:
        """Hear what others end, until nobody listens any more. Errors cost speed: there is polling beside it."""
        core, mine = self._core, current_thread()
        while self._listening is mine and not core.closed:
            link: RedisConnection | None = None
            try:
                link = RedisConnection(core, core.nodes()[0])
                link.connection.connect()
                link.send(pack([RedisCall([b"SUBSCRIBE", core.exchange.layout.channel])]))
                self._hear(link, mine)
            except Exception:  # noqa: BLE001 - whatever it is, polling goes on
                self._subscribed.set()
                self._closing.wait(RELISTEN_S)
            finally:
                if link is not None:
                    link.close()
            with self._lock:
                if not core.listeners and self._listening is mine:
                    self._listening = None

    def _hear(self, link: RedisConnection, mine: Thread) -> None:
        core = self._core
        while self._listening is mine and not core.closed:
            if not link.connection.can_read(LISTEN_S):
                if not core.listeners:
                    return
                continue
            if core.is_subscribed(link.read()):
                if self._subscribed.is_set():
                    core.resubscribed()
                self._subscribed.set()
