"""Records in Redis or Valkey, for event loops: native, without a thread."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from semel.clock import Clock
from semel.core.commands import Answer, Item
from semel.core.protocols import Listener
from semel.errors import StoreUnavailable
from semel.runtime.process import restart_after_fork
from semel.runtime.tasks import end_tasks
from semel.stores.redis import marks
from semel.stores.redis.base import RedisState, RedisStoreBase, link_options, pack
from semel.stores.redis.calls import Address, Ahead, Nodes, RedisCall, RedisPause, RedisQuery, Refresh, Steps
from semel.stores.redis.errors import BROKEN, as_message, unsent
from semel.stores.redis.server_checks import ServerFacts

IDLE_MAX = 8
"""Connections kept for one node while nobody uses them."""
STALE_S = 0.2
"""A connection that was idle for so long is looked at before it is used: the other side may have left."""
LINES_BYTES = 64 * 1024
"""How much is read at once of answers that come in lines."""
RELISTEN_S = 0.5
SUBSCRIBE_S = 1.0
"""How long a call waits for the listener to be heard: what it answers must not be older than what is listened to."""
FOREVER_S = float("inf")


class AsyncLink:
    """One connection. Used by one task at a time."""

    def __init__(self, core: RedisState, address: Address) -> None:
        kind: Any = SSLConnection if core.place.tls else Connection
        # The time is kept around all that is sent and read, once: the driver's own watch costs a task each time.
        options = link_options(core, address) | {"socket_timeout": None}
        self.connection: Any = kind(**options, retry=Retry(NoBackoff(), 0))
        self.address = address
        self.used_at: float = 0.0

    async def send(self, packed: bytes) -> None:
        """Raises the driver's error."""
        await self.connection.send_packed_command(packed, check_health=False)

    async def read(self, wait_s: float | None = None) -> Any:
        """A reply, or the server's error as a value. Raises the driver's error when the connection is broken."""
        try:
            return await self.connection.read_response(disable_decoding=True, timeout=wait_s)
        except Exception as error:
            message = as_message(error)
            if message is None:
                raise
            return message

    async def read_lines(self, calls: list[RedisCall]) -> list[list[bytes]]:
        """The answers of commands that answer with a line each; nothing else may be under way."""
        data = b""
        while marks.missing_lines(data, calls) > 0:
            more = await self.connection._reader.read(LINES_BYTES)
            if not more:
                raise ConnectionError("the server has hung up")
            data += more
        return marks.in_lines(data, calls)

    async def is_stale(self) -> bool:
        """Whether there is something to read where nothing should be: the end of the connection."""
        try:
            return bool(await self.connection.can_read())
        except BROKEN:
            return True

    async def close(self, *, nowait: bool = True) -> None:
        """Hang up, without waiting for the other side unless asked to."""
        with suppress(*BROKEN, RuntimeError):  # a loop that is closed has taken its connections along
            await self.connection.disconnect(nowait=nowait)


class LoopConnections:
    """The connections that belong to one event loop."""

    def __init__(self) -> None:
        self.idle: dict[Address, list[AsyncLink]] = {}
        self.busy: set[AsyncLink] = set()
        self.opening: asyncio.Lock = asyncio.Lock()
        self.listening: asyncio.Task[None] | None = None
        self.subscribed: asyncio.Event = asyncio.Event()


class Conversation:
    """Calls under way on one connection. What goes wrong is told by `read`, not by `send`."""

    def __init__(self, store: "AsyncRedisStore", address: Address) -> None:
        self._store, self._room, self._address = store, store._room(), address
        self._until = asyncio.get_running_loop().time() + store._core.options.answer_s
        self._link: AsyncLink | None = None
        self._error: Exception | None = None

    async def send(self, calls: list[RedisCall]) -> None:
        """Send calls, unless something went wrong before."""
        if self._error is not None:
            return
        packed = pack(calls)
        try:
            async with asyncio.timeout_at(self._until):
                if self._link is None:
                    self._link = await self._store._link(self._room, self._address)
                await self._link.send(packed)
        except Exception as error:  # noqa: BLE001 - sorted by `_note`
            await self._note(error)
        except BaseException:
            await self.drop()
            raise

    async def read(self, calls: list[RedisCall]) -> list[Any]:
        """A reply for each call that was sent; where the connection breaks, the rest get its error."""
        replies: list[Any] = []
        link = self._link
        if link is not None and self._error is None:
            try:
                async with asyncio.timeout_at(self._until):
                    if calls[0].lines:
                        replies += await link.read_lines(calls)
                    else:
                        for call in calls:
                            if call.asking:
                                await link.read()
                            replies.append(await link.read())
            except Exception as error:  # noqa: BLE001 - sorted by `_note`
                await self._note(error)
            except BaseException:
                await self.drop()
                raise
            else:
                await self._store._release(self._room, link)
        return replies + [self._error] * (len(calls) - len(replies))

    async def drop(self) -> None:
        """Hang up: there are replies that nobody will read."""
        link, self._link = self._link, None
        await self._store._drop(self._room, link)

    async def _note(self, error: Exception) -> None:
        core, connected = self._store._core, self._link is not None
        await self.drop()
        if core.closed:
            raise core.closed_error() from error
        if not isinstance(error, BROKEN) and as_message(error) is None:
            raise error
        if isinstance(error, TimeoutError):
            error = TimeoutError(f"no answer within {core.options.answer_s:g} s")
        self._error = error if connected else unsent(error)


class AsyncRedisStore(RedisStoreBase):
    """The same store as `RedisStore`, for event loops. A program may run one loop after the other."""

    def __init__(self, url: str, *, clock: Clock | None = None, **options: Any) -> None:
        self._core = RedisState(url, clock, options)
        self.name: str = self._core.name
        self._rooms: dict[asyncio.AbstractEventLoop, LoopConnections] = {}
        restart_after_fork(self)

    async def facts(self) -> ServerFacts:
        """What was found out about the servers when the store was opened, and what each of it costs."""
        if self._core.facts is None:
            await self.aopen()
        assert self._core.facts is not None
        return self._core.facts

    # --- the port ---

    async def aopen(self) -> None:
        """Connect and run the start checks; idempotent. Raises `StoreRefused` for a server that would forget."""
        self._core.closed = False
        async with self._room().opening:
            if self._core.facts is None:
                try:
                    await self._drive(self._core.opening())
                except BaseException:
                    await self._let_go(self._room())
                    raise

    async def aclose(self) -> None:
        """Let go of all connections; idempotent."""
        core = self._core
        core.closed = True
        room = self._room()
        self._rooms.clear()
        listening, room.listening = room.listening, None
        await end_tasks(listening)
        await self._let_go(room)
        core.facts = None

    async def _let_go(self, room: LoopConnections) -> None:
        links = [*room.busy, *(link for idle in room.idle.values() for link in idle)]
        room.idle.clear()
        for link in links:
            await link.close(nowait=False)
        await asyncio.sleep(0)  # what was hung up before is closed at the end of the tick

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Carry out the items in one round trip; what no server answered is `Unavailable`, item by item."""
        core = self._core
        if core.closed:
            raise core.closed_error()
        if core.facts is None:
            await self.aopen()
        if core.listeners:
            await self._be_heard()
        answers: list[Answer] = await self._drive(core.carry_out(items))
        core.told(items, answers)
        return answers

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Tell `listener` of what is settled, released or forgotten: by this object, or by others where it waits."""
        stop = self._core.listen(listener)
        room = self._room()
        if room.listening is None and not self._core.closed:
            room.subscribed.clear()
            room.listening = asyncio.get_running_loop().create_task(
                self._listen(room), name="semel-redis-listener"
            )
        return stop

    def after_fork(self) -> None:
        """Loops and connections are the parent's."""
        self._rooms = {}
        self._core.after_fork()

    # --- the loop ---

    def _room(self) -> LoopConnections:
        loop = asyncio.get_running_loop()
        room = self._rooms.get(loop)
        if room is None:  # what belongs to closed loops is let go
            self._rooms = {each: room for each, room in self._rooms.items() if not each.is_closed()}
            room = self._rooms[loop] = LoopConnections()
        return room

    async def _drive(self, steps: Steps) -> Any:
        reply: Any = None
        ahead: list[RedisCall] = []
        under_way: Conversation | None = None
        try:
            while True:
                step = steps.send(reply)
                if type(step) is Ahead:
                    under_way = under_way or Conversation(self, self._core.address(step.calls[0]))
                    await under_way.send(step.calls)
                    ahead += step.calls
                elif under_way is not None:
                    assert type(step) is RedisQuery, "what was sent ahead is asked for next"
                    if step.calls:
                        await under_way.send(step.calls)
                    conversation, calls, under_way, ahead = under_way, ahead + step.calls, None, []
                    reply = await conversation.read(calls)
                else:
                    reply = await self._do(step)
        except StopIteration as stop:
            return stop.value
        finally:
            if under_way is not None:
                await under_way.drop()

    async def _do(self, step: Any) -> Any:
        if type(step) is RedisQuery:
            return await self._ask(step.calls)
        if type(step) is RedisPause:
            await asyncio.sleep(step.seconds)
        elif type(step) is Refresh:
            with suppress(StoreUnavailable):
                await self._drive(self._core.locating())
        elif type(step) is Nodes:
            return self._core.nodes()
        if self._core.closed:
            raise self._core.closed_error()
        return None

    async def _ask(self, calls: list[RedisCall]) -> list[Any]:
        if not calls:
            return []
        core = self._core
        first = core.address(calls[0])
        if len(calls) == 1 or all(core.address(call) == first for call in calls):
            return await self._converse(first, calls)
        groups: dict[Address, list[int]] = {}
        for at, call in enumerate(calls):
            groups.setdefault(core.address(call), []).append(at)
        answered = await asyncio.gather(
            *(self._converse(address, [calls[at] for at in places]) for address, places in groups.items())
        )
        replies: list[Any] = [None] * len(calls)
        for places, theirs in zip(groups.values(), answered, strict=True):
            for at, reply in zip(places, theirs, strict=True):
                replies[at] = reply
        return replies

    async def _converse(self, address: Address, calls: list[RedisCall]) -> list[Any]:
        conversation = Conversation(self, address)
        await conversation.send(calls)
        return await conversation.read(calls)

    # --- connections ---

    async def _link(self, room: LoopConnections, address: Address) -> AsyncLink:
        """A connection that nobody uses, or a new one. Raises the driver's error where none can be had."""
        idle = room.idle.get(address)
        while idle:
            link = idle.pop()
            room.busy.add(link)
            if time.monotonic() - link.used_at < STALE_S or not await link.is_stale():
                return link
            await self._drop(room, link)
        link = AsyncLink(self._core, address)
        await link.connection.connect()
        room.busy.add(link)
        return link

    async def _release(self, room: LoopConnections, link: AsyncLink) -> None:
        link.used_at = time.monotonic()
        room.busy.discard(link)
        idle = room.idle.setdefault(link.address, [])
        if len(idle) < IDLE_MAX and not self._core.closed and link.connection.is_connected:
            idle.append(link)
        else:
            await link.close()

    async def _drop(self, room: LoopConnections, link: AsyncLink | None) -> None:
        if link is not None:
            room.busy.discard(link)
            await link.close()

    # --- listening ---

    async def _be_heard(self) -> None:
        room = self._room()
        if room.listening is not None and not room.subscribed.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(room.subscribed.wait(), SUBSCRIBE_S)

    async def _listen(self, room: LoopConnections) -> None:
        """Hear what others end, until nobody listens any more. Errors cost speed: there is polling beside it."""
        core = self._core
        while not core.closed and core.listeners:
            link: AsyncLink | None = None
            try:
                link = AsyncLink(core, core.nodes()[0])
                await link.connection.connect()
                await link.send(pack([RedisCall([b"SUBSCRIBE", core.exchange.layout.channel])]))
                while core.listeners:
                    reply = await link.read(FOREVER_S)
                    if core.is_subscribed(reply):
                        if room.subscribed.is_set():
                            core.resubscribed()
                        room.subscribed.set()
            except Exception:  # noqa: BLE001 - whatever it is, polling goes on
                room.subscribed.set()
                await asyncio.sleep(RELISTEN_S)
            finally:
                if link is not None:
                    await link.close()
        room.listening = None
