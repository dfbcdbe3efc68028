"""A lone caller in an event loop goes straight to a store that can start one item; nobody pays for that."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import semel
from semel import Done
from semel.core.commands import Answer, Claim, Item, Lookup, Settle
from semel.core.protocols import OnAnswer
from semel.errors import StoreRefused, StoreUnavailable
from semel.runtime.channel import LoopCoalescer
from semel.runtime.prompt_future import PromptFuture
from semel.stores.memory.store import MemoryStore
from tests.client.clients import Native, Spy, in_thread
from tests.waiting import until

pytestmark = pytest.mark.anyio


class Starting(Native):
    """A store whose single claims and settles are under way until the test lets them end."""

    def __init__(self) -> None:
        super().__init__(Spy(MemoryStore()))
        self.under_way: list[Callable[[], None]] = []
        self.holds = False
        self.error: Exception | None = None
        self.started: list[Item] = []

    def start(self, item: Item, done: OnAnswer, /) -> bool:
        if not isinstance(item, Claim | Settle):
            return False
        self.started.append(item)

        def end() -> None:
            if self.error is not None:
                done(None, self.error)
            else:
                done(self.spy.send([item])[0], None)

        if self.holds:
            self.under_way.append(end)
        else:
            asyncio.get_running_loop().call_soon(end)
        return True

    def end_all(self) -> None:
        ends, self.under_way = self.under_way, []
        for end in ends:
            end()

    def record(self, key: str) -> Any:
        return self.spy._store.send([Lookup(("", "c", key))])[0]


async def handler() -> int:
    return 1


async def opened(store: Starting, **more: Any) -> Any:
    client = semel.aopen(store, consumer="c", **more)
    await client.run("warm", handler)
    store.started.clear()
    store.spy.clear()
    return client


def channel_of(client: Any) -> LoopCoalescer:
    channel = client._runtime.channel
    assert isinstance(channel, LoopCoalescer)
    return channel


async def test_a_lone_caller_is_not_queued() -> None:
    store = Starting()
    client = await opened(store)
    assert await client.run("k", handler) == Done(1)
    assert await client.run("k", handler) == Done(1, replayed=True)
    assert [type(item) for item in store.started] == [Claim, Settle, Claim]
    assert channel_of(client)._task is None
    await client.close()


async def test_others_share_a_batch_while_one_is_under_way() -> None:
    store = Starting()
    client = await opened(store)
    store.holds = True
    first = asyncio.create_task(client.run("first", handler))
    await until(lambda: bool(store.under_way))
    others = [asyncio.create_task(client.run(f"k{at}", handler)) for at in range(20)]
    await asyncio.gather(*others)
    assert len(store.started) == 1
    assert len(store.spy.batches[0]) == 20
    store.holds = False
    store.end_all()
    assert await first == Done(1)
    await client.close()


async def test_a_claim_whose_caller_was_cancelled_is_given_back() -> None:
    store = Starting()
    client = await opened(store)
    store.holds = True
    task = asyncio.create_task(client.run("k", handler))
    await until(lambda: bool(store.under_way))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    store.holds = False
    store.end_all()
    await until(lambda: not store.record("k").owner)
    assert store.record("k").attempt == 0
    assert await client.run("k", handler) == Done(1)
    await client.close()


@pytest.mark.parametrize("answered", [True, False])
async def test_a_settle_whose_caller_was_cancelled_is_carried_out(answered: bool) -> None:
    store = Starting()
    client = await opened(store)

    async def hold() -> int:
        store.holds = True
        return 7

    task = asyncio.create_task(client.run("k", hold))
    await until(lambda: bool(store.under_way))
    task.cancel()
    await asyncio.wait([task])
    store.holds = False
    store.error = None if answered else StoreUnavailable("cut")
    store.end_all()
    store.error = None
    await until(lambda: store.record("k").state == "done")
    await client.close()


async def test_errors_reach_the_caller() -> None:
    store = Starting()
    client = await opened(store)
    store.error = StoreUnavailable("gone")
    outcome = await client.using(semel.Policy(wait_s=0)).run("k", handler)
    assert isinstance(outcome, semel.Unavailable)
    store.error = StoreRefused("damaged")
    with pytest.raises(StoreRefused):
        await client.run("k", handler)
    store.error = None
    assert await client.run("k", handler) == Done(1)
    await client.close()


async def test_close_waits_for_the_call_under_way() -> None:
    store = Starting()
    client = await opened(store)
    store.holds = True
    task = asyncio.create_task(client.run("k", handler))
    await until(lambda: bool(store.under_way))
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert not closing.done()
    store.end_all()
    await closing
    assert (store.record("k").owner, store.record("k").attempt) == (b"", 0)


async def test_a_loop_that_closes_gives_back_what_it_started() -> None:
    store = Starting()

    async def main() -> None:
        client = await opened(store)
        store.holds = True
        task = asyncio.create_task(client.run("k", handler))
        await until(lambda: bool(store.under_way))
        assert not task.done()
        store.holds = False
        asyncio.get_running_loop().call_later(0.01, store.end_all)

    await in_thread(asyncio.run, main())
    assert (store.record("k").owner, store.record("k").attempt) == (b"", 0)


async def test_a_client_outlives_the_loop_of_a_call_under_way() -> None:
    store = Starting()

    def run() -> Any:
        loop = asyncio.new_event_loop()
        client = loop.run_until_complete(opened(store))
        store.holds = True
        doomed = loop.create_task(client.run("b", handler))
        while not store.under_way:
            loop.run_until_complete(asyncio.sleep(0))
        doomed._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        store.holds = False
        return asyncio.run(client.run("c", handler))

    assert await asyncio.wait_for(in_thread(run), 10) == Done(1)


async def test_a_call_that_is_thrown_away_with_its_loop_does_not_wait() -> None:
    store = Starting()

    def run() -> None:
        loop = asyncio.new_event_loop()
        client = loop.run_until_complete(opened(store))
        store.holds = True
        call = client.run("k", handler)
        waiting = loop.create_task(call)
        while not store.under_way:
            loop.run_until_complete(asyncio.sleep(0))
        waiting._log_destroy_pending = False  # type: ignore[attr-defined]
        waiting.cancel()
        loop.close()
        call.close()  # as the garbage collector does; a wait here would be an error

    await asyncio.wait_for(in_thread(run), 10)


# --- the future ---


async def answer_of(future: PromptFuture) -> str:
    await future
    return "woken"


async def test_a_task_is_woken_at_once_outside_tasks_and_later_inside() -> None:
    loop = asyncio.get_running_loop()
    order: list[str] = []
    for inside in (True, False):
        future = PromptFuture(loop)
        task = loop.create_task(answer_of(future))
        await asyncio.sleep(0)
        task.add_done_callback(lambda _task: None)
        noted = loop.create_future()

        def wake(future: PromptFuture = future, task: Any = task, noted: Any = noted) -> None:
            future.set_result(None)
            order.append("at once" if task.done() else "later")
            noted.set_result(None)

        if inside:
            wake()
        else:
            loop.call_soon(wake)
            await noted
        assert await task == "woken"
    assert order == ["later", "at once"]


async def test_a_cancelled_wait_raises_and_a_late_result_does_not() -> None:
    loop = asyncio.get_running_loop()
    future = PromptFuture(loop)
    task = loop.create_task(answer_of(future))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert future.done()
    future = PromptFuture(loop)
    task = loop.create_task(answer_of(future))
    await asyncio.sleep(0)
    future.set_result(None)
    task.cancel()  # it is woken already: the cancellation comes with it
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_answer_is_awaited_without_a_turn_if_it_is_there() -> None:
    future = PromptFuture(asyncio.get_running_loop())
    future.set_result(None)
    answer: Answer = await answer_of(future)
    assert answer == "woken"
