"""Records in Redis or Valkey: the store that clients open."""

from collections.abc import Callable, Sequence
from typing import Any

from semel.clock import Clock
from semel.core.commands import Answer, Item
from semel.core.protocols import Listener
from semel.runtime.process import restart_after_fork
from semel.stores.redis.base import RedisState, RedisStoreBase
from semel.stores.redis.calls import Steps
from semel.stores.redis.connections_async import AsyncRedisPool, AsyncRedisPools
from semel.stores.redis.pipeline_async import AsyncPipeline
from semel.stores.redis.server_checks import ServerFacts, facts_of_masters

# sync: from semel.stores.redis.store_async import AsyncRedisStore

__all__ = ["AsyncRedisStore"]


class AsyncRedisStore(RedisStoreBase):
    """A store in a Redis or Valkey server, cluster, or behind sentinels. Its name: the URL without the password.

    The options stand in the URL or are given by name; `semel.stores.redis.settings.RedisOptions` lists them. `clock`
    is for tests: without it the server's clock decides. One batch is one round trip, on a cluster one per node.
    """

    def __init__(self, url: str, *, clock: Clock | None = None, **options: Any) -> None:
        self._core = RedisState(url, clock, options)
        self.name: str = self._core.name
        self._pools = AsyncRedisPools(self._core)
        restart_after_fork(self)

    async def facts(self) -> ServerFacts:
        """What was found out about the servers when the store was opened, and what each of it costs."""
        if self._core.facts is None:
            await self.aopen()
        assert self._core.facts is not None
        return self._core.facts

    async def say(self) -> list[dict[str, str]]:
        """What each master says of itself now: the lines of INFO, and `time_us`, its clock. One round trip."""
        await self.facts()
        told: list[dict[str, str]] = await self.run(facts_of_masters(self._core.nodes()))
        return told

    # sync: def twin(self) -> AsyncRedisStore:
    # sync:     """The same store for an event loop, not yet connected."""
    # sync:     return AsyncRedisStore(self._core.url, clock=self._core.clock, **self._core.given)
    # sync:
    # --- the port ---

    async def aopen(self) -> None:
        """Connect and run the start checks; idempotent. Raises `StoreRefused` for a server that would forget."""
        self._core.closed = False
        pool = self._pools.current()
        async with pool.opening:
            if self._core.facts is None:
                try:
                    await AsyncPipeline(self._core, pool).run(self._core.opening())
                except BaseException:
                    await pool.drop_all()
                    raise

    async def aclose(self) -> None:
        """Let go of all connections; idempotent, and safe while another caller is inside `asend`."""
        self._core.closed = True
        await self._pools.pop().aclose()
        self._core.facts = None

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Carry out the items in one round trip; what no server answered is `Unavailable`, item by item."""
        core, pool = self._core, await self._open_pool()
        if core.listeners:
            await pool.listener.wait_subscribed()
        answers: list[Answer] = await AsyncPipeline(core, pool).run(core.carry_out(items))
        core.notify(items, answers)
        return answers

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Tell `listener` of what is settled, released or forgotten: by this object, or by others where it waits."""
        stop = self._core.listen(listener)
        self._pools.current().listener.start()
        return stop

    def after_fork(self) -> None:
        """Connections, threads, loops and locks are the parent's."""
        self._pools = AsyncRedisPools(self._core)
        self._core.after_fork()

    async def run(self, steps: Steps) -> Any:
        """Carry out the steps of another exchange with the same servers; what they return."""
        return await AsyncPipeline(self._core, await self._open_pool()).run(steps)

    async def _open_pool(self) -> AsyncRedisPool:
        if self._core.closed:
            raise self._core.closed_error()
        if self._core.facts is None:
            await self.aopen()
        return self._pools.current()
