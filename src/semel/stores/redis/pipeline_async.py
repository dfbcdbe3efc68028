"""Perform the steps of an exchange with Redis or Valkey: send calls, read replies, pause, find the masters."""

import asyncio  # sync: drop
from contextlib import suppress
from typing import Any

from semel.errors import StoreUnavailable
from semel.runtime.generators import adrive
from semel.stores.redis.base import RedisState, pack
from semel.stores.redis.calls import (
    Address,
    Ahead,
    Nodes,
    RedisCall,
    RedisPause,
    RedisQuery,
    Refresh,
    Step,
    Steps,
)
from semel.stores.redis.connections_async import AsyncRedisConnection, AsyncRedisPool
from semel.stores.redis.errors import BROKEN, as_message, connect_error

__all__ = ["AsyncPipeline"]


class AsyncConversation:
    """Pending calls on one connection. `read` returns the errors, also those of `send`."""

    __slots__ = ("_address", "_connection", "_core", "_error", "_pool", "_until")

    def __init__(self, core: RedisState, pool: AsyncRedisPool, address: Address) -> None:
        self._core, self._pool, self._address = core, pool, address
        # The driver's own time limit costs a task for each reply; blocking sockets keep theirs.
        self._until = asyncio.get_running_loop().time() + core.options.answer_s  # sync: drop
        self._connection: AsyncRedisConnection | None = None
        self._error: Exception | None = None

    async def send(self, calls: list[RedisCall]) -> None:
        """Send calls, unless there was an error before."""
        if self._error is not None:
            return
        packed = pack(calls)
        try:
            async with asyncio.timeout_at(self._until):  # sync: drop
                await self._send(packed)
            # sync: self._send(packed)
        except Exception as error:  # noqa: BLE001 - classified by `_note`
            await self._note(error)
        except BaseException:
            await self.drop()
            raise

    async def read(self, calls: list[RedisCall], packed: bytes = b"") -> list[Any]:
        """Send `packed`, then return a reply for each call; if the connection breaks, the rest get its error."""
        replies: list[Any] = []
        if packed or self._connection is not None:
            try:
                async with asyncio.timeout_at(self._until):  # sync: drop
                    await self._read(calls, packed, replies)
                # sync: self._read(calls, packed, replies)
            except Exception as error:  # noqa: BLE001 - classified by `_note`
                await self._note(error)
            except BaseException:
                await self.drop()
                raise
            else:
                connection, self._connection = self._connection, None
                assert connection is not None
                await self._pool.release(connection)
                return replies
        return replies + [self._error] * (len(calls) - len(replies))

    async def _send(self, packed: bytes) -> None:
        if self._connection is None:
            self._connection = await self._pool.take(self._address)
        await self._connection.send(packed)

    async def _read(self, calls: list[RedisCall], packed: bytes, replies: list[Any]) -> None:
        if packed:
            await self._send(packed)
        connection = self._connection
        assert connection is not None
        if calls[0].lines:
            replies += await connection.read_lines(calls)
            return
        for call in calls:
            if call.asking:
                await connection.read()
            replies.append(await connection.read())

    async def converse(self, calls: list[RedisCall]) -> list[Any]:
        """Send calls and read their replies."""
        return await self.read(calls, pack(calls))

    async def drop(self) -> None:
        """Close the connection: its remaining replies will not be read."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await self._pool.drop(connection)

    async def _note(self, error: Exception) -> None:
        core, connected = self._core, self._connection is not None
        await self.drop()
        if core.closed:
            raise core.closed_error() from error
        if not isinstance(error, BROKEN) and as_message(error) is None:
            raise error
        if isinstance(error, TimeoutError):
            error = TimeoutError(f"no answer within {core.options.answer_s:g} s")
        self._error = error if connected else connect_error(error)


class AsyncPipeline:
    """Performs the steps of one exchange. It keeps the calls that were sent ahead until a query reads their replies."""

    __slots__ = ("_ahead", "_core", "_pool", "_under_way")

    def __init__(self, core: RedisState, pool: AsyncRedisPool) -> None:
        self._core, self._pool = core, pool
        self._ahead: list[RedisCall] = []
        self._under_way: AsyncConversation | None = None

    async def run(self, steps: Steps) -> Any:
        """Perform all steps; returns their result."""
        try:
            return await adrive(steps, self.perform)
        finally:
            if self._under_way is not None:
                await self._under_way.drop()

    async def perform(self, step: Step) -> Any:
        """Perform one step; returns its result."""
        if type(step) is RedisQuery:
            return await self.ask(step.calls)
        if type(step) is Ahead:
            return await self._send_ahead(step.calls)
        assert self._under_way is None, "the next step must read the replies of calls sent ahead"
        if type(step) is Nodes:
            return self._core.nodes()
        if type(step) is RedisPause:
            await self._pool.pause(step.seconds)
        elif type(step) is Refresh:
            with suppress(StoreUnavailable):
                await AsyncPipeline(self._core, self._pool).run(self._core.locate_steps())
        if self._core.closed:
            raise self._core.closed_error()
        return None

    async def ask(self, calls: list[RedisCall]) -> list[Any]:
        """Return the replies to the calls sent ahead and to these: one round trip, on a cluster one per node."""
        core, pool = self._core, self._pool
        if self._under_way is not None:
            if calls:
                await self._send_ahead(calls)
            conversation, sent = self._under_way, self._ahead
            self._under_way, self._ahead = None, []
            return await conversation.read(sent)
        if not calls:
            return []
        first = core.address(calls[0])
        if len(calls) == 1 or all(core.address(call) == first for call in calls):
            return await AsyncConversation(core, pool, first).converse(calls)
        places: dict[Address, list[int]] = {}
        for at, call in enumerate(calls):
            places.setdefault(core.address(call), []).append(at)
        talks = [
            (AsyncConversation(core, pool, address), [calls[at] for at in mine])
            for address, mine in places.items()
        ]
        answered = await asyncio.gather(*(talk.converse(theirs) for talk, theirs in talks))  # sync: drop
        # sync: for talk, theirs in talks:
        # sync:     talk.send(theirs)
        # sync: answered = [talk.read(theirs) for talk, theirs in talks]
        replies: list[Any] = [None] * len(calls)
        for mine, theirs in zip(places.values(), answered, strict=True):
            for at, reply in zip(mine, theirs, strict=True):
                replies[at] = reply
        return replies

    async def _send_ahead(self, calls: list[RedisCall]) -> None:
        if self._under_way is None:
            self._under_way = AsyncConversation(self._core, self._pool, self._core.address(calls[0]))
        self._ahead += calls
        await self._under_way.send(calls)
