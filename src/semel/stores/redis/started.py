"""Single items under way in an event loop without a task of their own."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from semel.core.commands import Answer, Claim, Item, Settle
from semel.core.protocols import OnAnswer
from semel.runtime.tasks import answer_in_task
from semel.stores.redis.base import RedisState, pack
from semel.stores.redis.connections_async import AsyncRedisConnection, AsyncRedisPool
from semel.stores.redis.errors import ServerError
from semel.stores.redis.pipeline_async import AsyncPipeline
from semel.stores.redis.single import RedisSingleCall

__all__ = ["start_call"]

FinishSingle: TypeAlias = Callable[[AsyncPipeline, RedisSingleCall, Any], Awaitable[list[Answer]]]
"""Reads the reply to the script of one item, and asks again if that has not decided."""


def start_call(
    core: RedisState, pool: AsyncRedisPool, item: Item, done: OnAnswer, finish: FinishSingle
) -> bool:
    """Send one plain item on an idle connection. `False`: there is none, or the item is not plain."""
    kind = type(item)
    if (kind is not Claim and kind is not Settle) or core.exchange.cluster:
        return False
    if core.listeners and not pool.listener.is_ready:
        return False
    assert core.map is not None
    link = pool.take_idle(core.map.buckets[0])  # without a cluster all are at one address
    if link is None:
        return False
    call = core.single.call_for((item,))
    if call is None:
        pool.keep(link)
        return False
    link.ask(pack([core.single_call(call)]), StartedRedisCall(core, pool, link, call, done, finish))
    return True


class StartedRedisCall:
    """A single item under way. Called with the reply; what is not the plain case gets a task."""

    __slots__ = ("_call", "_core", "_done", "_finish_single", "_link", "_pool")

    def __init__(
        self,
        core: RedisState,
        pool: AsyncRedisPool,
        link: AsyncRedisConnection,
        call: RedisSingleCall,
        done: OnAnswer,
        finish: FinishSingle,
    ) -> None:
        self._core, self._pool, self._link, self._call = core, pool, link, call
        self._done, self._finish_single = done, finish

    def __call__(self, reply: Any) -> None:
        kept = not isinstance(reply, Exception) and self._pool.keep(self._link)
        if kept:
            try:
                answer = self._call.read_answer(reply)
            except Exception as error:  # noqa: BLE001 - it belongs to the caller, not to the connection
                self._done(None, error)
                return
            if answer is not None:
                self._core.notify_listeners((self._call.item,), (answer,))
                self._done(answer, None)
                return
        answer_in_task(self._finish(reply, kept=kept), self._done)

    async def _finish(self, reply: Any, *, kept: bool) -> list[Answer]:
        core, pool = self._core, self._pool
        if isinstance(reply, Exception) and not isinstance(reply, ServerError):
            await pool.drop(self._link)
            if core.closed:
                raise core.closed_error() from reply
        elif not kept:
            await pool.release(self._link)
        answers = await self._finish_single(AsyncPipeline(core, pool), self._call, reply)
        core.notify_listeners((self._call.item,), answers)
        return answers
