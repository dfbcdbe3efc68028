"""The Redis store that clients open."""

import asyncio  # sync: drop
from collections.abc import Callable, Sequence
from functools import partial  # sync: drop
from typing import Any

from semel.clock import Clock
from semel.core.commands import Answer, Item
from semel.core.protocols import Listener, OnAnswer  # sync: from semel.core.protocols import Listener
from semel.runtime.process import restart_after_fork
from semel.runtime.tasks import resolve_future  # sync: drop
from semel.stores.redis.base import RedisState, RedisStoreBase
from semel.stores.redis.calls import Steps
from semel.stores.redis.connections_async import AsyncRedisPool, AsyncRedisPools
from semel.stores.redis.errors import kind_of
from semel.stores.redis.pipeline_async import AsyncPipeline
from semel.stores.redis.server_checks import ServerFacts, facts_of_masters
from semel.stores.redis.single import RedisSingleCall
from semel.stores.redis.started import start_call  # sync: drop

# sync: from semel.stores.redis.store_async import AsyncRedisStore

__all__ = ["AsyncRedisStore"]


class AsyncRedisStore(RedisStoreBase):
    """A store in a Redis or Valkey server, cluster, or behind sentinels. Its name: the URL without the password.

    Give options in the URL or by name; `semel.stores.redis.settings.RedisOptions` lists them. `clock` is for tests;
    without it the server's clock decides. One batch is one round trip, on a cluster one per node.
    """

    def __init__(self, url: str, *, clock: Clock | None = None, **options: Any) -> None:
        self._core = RedisState(url, clock, options)
        self.name: str = self._core.name
        self._pools = AsyncRedisPools(self._core)
        restart_after_fork(self)

    async def facts(self) -> ServerFacts:
        """Return the facts about the servers from the start checks, and what they mean for the guarantee."""
        if self._core.facts is None:
            await self.aopen()
        assert self._core.facts is not None
        return self._core.facts

    async def read_info(self) -> list[dict[str, str]]:
        """Return the current INFO of each master by line, and `time_us`, its clock. One round trip."""
        await self.facts()
        infos: list[dict[str, str]] = await self.run(facts_of_masters(self._core.nodes()))
        return infos

    # sync: def twin(self) -> AsyncRedisStore:
    # sync:     """Return the same store for an event loop, not yet connected."""
    # sync:     return AsyncRedisStore(self._core.url, clock=self._core.clock, **self._core.given)
    # sync:
    # --- the store protocol ---

    async def aopen(self) -> None:
        """Connect and run the start checks; idempotent. Raises `StoreRefused` for a server that would lose records."""
        self._core.closed = False
        pool = self._pools.current()
        async with pool.opening:
            if self._core.facts is None:
                try:
                    await AsyncPipeline(self._core, pool).run(self._core.open_steps())
                except BaseException:
                    await pool.drop_all()
                    raise

    async def aclose(self) -> None:
        """Close all connections; idempotent, and safe while another caller is inside `asend`."""
        self._core.closed = True
        await self._pools.pop().aclose()
        self._core.facts = None

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Carry out the items in one round trip; an item that no server answered is `Unavailable`."""
        if len(items) == 1:  # sync: drop
            answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            if self.start(items[0], partial(resolve_future, answer)):
                return [await answer]
        core, pool = self._core, await self._open_pool()
        if core.listeners:
            await pool.listener.wait_subscribed()
        call = core.single.call_for(items)
        answers: list[Answer] = (
            await AsyncPipeline(core, pool).run(core.carry_out(items))
            if call is None
            else await self._send_single(AsyncPipeline(core, pool), call)
        )
        core.notify_listeners(items, answers)
        return answers

    def start(self, item: Item, done: OnAnswer, /) -> bool:  # sync: drop
        """Send one plain item now, on an idle connection; `done` gets its answer. `False`: nothing was sent."""
        core = self._core
        if core.closed or core.facts is None:
            return False
        return start_call(core, self._pools.current(), item, done, self.finish_single)

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Notify `listener` of records that end: settled, released or forgotten here, or elsewhere if awaited here."""
        stop = self._core.listen(listener)
        self._pools.current().listener.start()
        return stop

    def after_fork(self) -> None:
        """Drop the connections, threads, loops and locks of the parent process."""
        self._pools = AsyncRedisPools(self._core)
        self._core.after_fork()

    async def run(self, steps: Steps) -> Any:
        """Perform the steps of another exchange with the same servers; returns their result."""
        return await AsyncPipeline(self._core, await self._open_pool()).run(steps)

    async def _send_single(self, pipeline: AsyncPipeline, call: RedisSingleCall) -> list[Answer]:
        """Answer one item by its own script; if that does not decide, by the script for many."""
        (reply,) = await pipeline.ask([self._core.single_call(call)])
        return await self.finish_single(pipeline, call, reply)

    async def finish_single(self, pipeline: AsyncPipeline, call: RedisSingleCall, reply: Any) -> list[Answer]:
        """Read the reply to the script of one item, and ask again if that has not decided."""
        core = self._core
        if isinstance(reply, Exception) and kind_of(reply) == "text":
            (reply,) = await pipeline.ask([core.single_call(call, as_text=True)])
        if isinstance(reply, Exception):
            cut = kind_of(reply) in ("cut", "unsent")
            # Any other error comes again there, and is handled like every other.
            return await pipeline.run(core.carry_out_again(call) if cut else core.carry_out([call.item]))  # type: ignore[no-any-return]
        answer = call.read_answer(reply)
        return [answer] if answer is not None else await pipeline.run(core.carry_out([call.item]))

    async def _open_pool(self) -> AsyncRedisPool:
        if self._core.closed:
            raise self._core.closed_error()
        if self._core.facts is None:
            await self.aopen()
        return self._pools.current()
