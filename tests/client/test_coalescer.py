"""The coalescer: callers who wait together share a round trip, and none of them pays for another."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, Thread, current_thread, main_thread
from typing import Any

import pytest

import semel
from semel import Busy, Done, Mismatch
from semel.core.commands import Claim, Granted, Item, Lookup, Mark, Renew, Settle
from semel.errors import StoreClosed
from semel.runtime.channel import BATCH_MAX, Coalescer, Direct, LoopCoalescer, channel_for
from semel.stores.memory.store import MemoryStore
from semel.types import Completed, Lost, Renewed, Unavailable
from tests.client.clients import GUARD_S, Either, Native, Place, Spy, in_thread, only_async
from tests.client.conftest import semel_threads
from tests.waiting import until

pytestmark = pytest.mark.anyio


def claim(key: str, owner: bytes = b"o" * 16, **more: Any) -> Claim:
    return Claim(("", "c", key), owner, 30_000_000, 60_000_000, **more)


def settle(item: Claim, granted: Granted, to: Any = "done") -> Settle:
    return Settle(item.id, item.owner, granted.fence, to, window_us=60_000_000, lease_us=30_000_000)


class Held:
    """A channel to memory whose store can be held in the middle of a batch: in threads, or in the loop."""

    def __init__(self, *, loop: bool) -> None:
        self.spy = Spy(MemoryStore(), instant=False)
        self.loop = loop
        self.busy, self.go = Event(), Event()
        self.armed = False
        self.native = Native(self.spy)
        self.channel: Any = channel_for(self.native if loop else self.spy)
        if loop:
            self.native.pace = self._apace
        else:
            self.spy.before = self._pace

    def hold(self) -> None:
        self.busy.clear()
        self.go.clear()
        self.armed = True

    def _pace(self, _items: list[Item]) -> None:
        if self.armed:
            self.armed = False
            self.busy.set()
            assert self.go.wait(GUARD_S)

    async def _apace(self) -> None:
        await asyncio.sleep(0)
        if self.armed:
            self.armed = False
            self.busy.set()
            await until(self.go.is_set)

    async def send(self, *items: Item) -> list[Any]:
        if self.loop:
            return await self.channel.asend(items)  # type: ignore[no-any-return]
        return await in_thread(self.channel.send, items)  # type: ignore[no-any-return]

    @property
    def batches(self) -> list[list[Item]]:
        """What was sent, but for what kept the store busy."""
        return [batch for batch in self.spy.batches if not isinstance(batch[0], Lookup)]

    async def gathered(self, number: int) -> None:
        await until(lambda: len(self.channel._queue) == number)


@pytest.fixture(params=["threads", "loop"])
async def held(request: pytest.FixtureRequest) -> Any:
    made = Held(loop=request.param == "loop")
    yield made
    made.go.set()
    if made.loop:
        await made.channel.aclose()
    else:
        made.channel.close()
    await until(lambda: semel_threads() == [])


async def while_busy(held: Held, *calls: tuple[Item, ...]) -> list[list[Any]]:
    """What each call is answered that arrives while the store is busy."""
    held.hold()
    first = asyncio.create_task(held.send(Lookup(("", "c", "first"))))
    await until(held.busy.is_set)
    tasks = []
    gathered = 0
    for items in calls:  # one after the other, so that their order is known
        tasks.append(asyncio.create_task(held.send(*items)))
        gathered += len(items)
        await held.gathered(gathered)
    held.spy.clear()
    held.go.set()
    await first
    return await asyncio.gather(*tasks)


# --- the channel ---


async def test_the_channel_fits_the_store() -> None:
    assert isinstance(channel_for(MemoryStore()), Direct)
    assert isinstance(channel_for(Spy(MemoryStore(), instant=False)), Coalescer)
    assert isinstance(channel_for(Native(Spy(MemoryStore()))), LoopCoalescer)


async def test_an_idle_caller_goes_straight_through() -> None:
    spy = Spy(MemoryStore(), instant=False)
    threads: list[Thread] = []
    spy.before = lambda _items: threads.append(current_thread())
    channel = Coalescer(spy)
    assert isinstance(channel.send([claim("k")])[0], Granted)
    assert threads == [main_thread()]
    assert semel_threads() == []


async def test_those_who_wait_together_share_a_round_trip(held: Held) -> None:
    answers = await while_busy(held, *((claim(f"k{at}", bytes([at]) * 16),) for at in range(50)))
    assert all(isinstance(answer, Granted) for (answer,) in answers)
    assert [len(batch) for batch in held.batches] == [50]


async def test_fifty_threads_send_less_often_than_they_call() -> None:
    spy = Spy(MemoryStore(), instant=False)
    pause = Event()

    def before(_items: list[Item]) -> None:
        pause.wait(0.002)

    spy.before = before
    channel, barrier = Coalescer(spy), Barrier(50)
    threads_that_sent: set[str] = set()
    spy.after = lambda _items: threads_that_sent.add(current_thread().name)

    def call(number: int) -> None:
        barrier.wait()
        for turn in range(10):
            channel.send([claim(f"{number}-{turn}")])

    threads = [Thread(target=call, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(spy.sent(Claim)) == 500
    assert len(spy.batches) < 250
    channel.close()


async def test_nobodys_thread_sends_for_others() -> None:
    held = Held(loop=False)
    senders: dict[str, str] = {}
    held.spy.after = lambda items: senders.update({item.id[2]: current_thread().name for item in items})  # type: ignore[union-attr]
    await while_busy(held, (claim("a"),), (claim("b"),))
    assert senders["a"] == senders["b"] == "semel-flusher"
    assert senders["first"] != "semel-flusher"
    held.channel.close()


async def test_ends_and_renewals_go_before_claims(held: Held) -> None:
    one, two = claim("one"), claim("two")
    granted = await held.send(one, two)
    await while_busy(
        held,
        (claim("new"),),
        (Renew(one.id, one.owner, granted[0].fence, one.lease_us),),
        (claim("newer"),),
        (settle(two, granted[1]),),
    )
    kinds = [type(item) for item in held.batches[0]]
    assert kinds == [Renew, Settle, Claim, Claim]


async def test_a_batch_is_bounded(held: Held) -> None:
    many = tuple(claim(f"k{at}") for at in range(BATCH_MAX + 100))
    answers = await held.send(*many)
    assert all(isinstance(answer, Granted) for answer in answers)
    assert [len(batch) for batch in held.batches] == [BATCH_MAX, 100]


async def test_nothing_asked_is_nothing_answered(held: Held) -> None:
    assert await asyncio.wait_for(held.send(), 5) == []
    posted: list[Any] = []
    held.channel.post([], posted.append)
    assert posted == [[]]


# --- folding between callers ---


async def test_a_copy_of_a_granted_claim_is_busy(held: Held) -> None:
    (mine,), (copy,) = await while_busy(held, (claim("k", b"a" * 16),), (claim("k", b"b" * 16),))
    assert isinstance(mine, Granted)
    assert isinstance(copy, Busy)
    assert len(held.spy.sent(Claim)) == 1


async def test_a_copy_of_anything_else_takes_the_same_answer(held: Held) -> None:
    first = claim("k")
    (granted,) = await held.send(first)
    await held.send(settle(first, granted))
    answers = await while_busy(held, (claim("k", b"a" * 16),), (claim("k", b"b" * 16),))
    assert answers[0] == answers[1]
    assert len(held.spy.sent(Claim)) == 1


async def test_a_copy_with_another_fingerprint_goes_into_the_next_batch(held: Held) -> None:
    first, second = (claim("k", bytes([at]) * 16, fingerprint=b"\x01" + bytes([at])) for at in (1, 2))
    (mine,), (other,) = await while_busy(held, (first,), (second,))
    assert isinstance(mine, Granted)
    assert other == Mismatch()
    assert [len(batch) for batch in held.batches] == [1, 1]


async def test_of_several_ends_only_the_greatest_fence_is_sent(held: Held) -> None:
    item = claim("k")
    (old,) = await held.send(item)
    await held.send(settle(item, old, "released"))
    newer = claim("k", b"n" * 16)
    (new,) = await held.send(newer)
    (late,), (right,), (later,) = await while_busy(
        held, (settle(item, old),), (settle(newer, new),), (settle(item, old),)
    )
    assert (late, later) == (Lost(), Lost())
    assert isinstance(right, Completed)
    assert len(held.spy.sent(Settle)) == 1


async def test_the_end_of_a_claim_drops_its_queued_renewal(held: Held) -> None:
    item = claim("k")
    (granted,) = await held.send(item)
    renewal = Renew(item.id, item.owner, granted.fence, item.lease_us)
    (renewed,), (done,) = await while_busy(held, (renewal,), (settle(item, granted),))
    assert isinstance(renewed, Renewed)
    assert isinstance(done, Completed)
    assert held.spy.sent(Renew) == []


async def test_a_claim_that_says_two_things_says_them_in_order(held: Held) -> None:
    item = claim("k")
    (granted,) = await held.send(item)
    (done,), (released,) = await while_busy(
        held, (settle(item, granted),), (settle(item, granted, "released"),)
    )
    assert isinstance(done, Completed)
    assert released == Lost()


async def test_of_equal_marks_one_is_the_first(held: Held) -> None:
    def mark(*keys: str) -> Mark:
        return Mark("", "m", list(keys), 60_000_000)

    (one,), (two,) = await while_busy(held, (mark("a", "b"),), (mark("b", "c"),))
    assert (one.firsts, two.firsts) == ([True, True], [False, True])
    assert len(held.spy.sent(Mark)) == 1


# --- errors ---


async def test_an_unreachable_store_answers_each(held: Held) -> None:
    def before(items: list[Item]) -> None:
        if any(isinstance(item, Claim) for item in items):
            raise semel.errors.StoreUnavailable("gone")

    held.spy.before = before
    (answer,) = await held.send(claim("k"))
    assert isinstance(answer, Unavailable)


async def test_any_other_error_of_the_store_reaches_each_caller() -> None:
    held = Held(loop=True)

    def before(items: list[Item]) -> None:
        if any(isinstance(item, Claim) for item in items):
            raise semel.errors.StoreRefused("damaged")

    held.spy.before = before
    held.hold()
    first = asyncio.create_task(held.send(Lookup(("", "c", "first"))))
    await until(held.busy.is_set)
    tasks = [asyncio.create_task(held.send(claim(f"k{at}"))) for at in range(3)]
    await held.gathered(3)
    held.go.set()
    await first
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [semel.errors.StoreRefused] * 3
    held.spy.before = lambda _items: None
    assert isinstance((await held.send(claim("k")))[0], Granted)  # and the flusher lives


async def test_an_error_in_one_batch_gives_back_the_claims_of_the_others(held: Held) -> None:
    store = held.spy._store

    def before(items: list[Item]) -> None:
        if any(isinstance(item, Claim) and item.id[2] == f"k{BATCH_MAX}" for item in items):
            raise semel.errors.StoreRefused("damaged")

    held.spy.before = before
    with pytest.raises(semel.errors.StoreRefused):
        await held.send(*(claim(f"k{at}") for at in range(BATCH_MAX + 1)))

    def free() -> bool:
        records = store.send([Lookup(("", "c", f"k{at}")) for at in range(BATCH_MAX)])
        return all(isinstance(record, semel.Record) and not record.owner for record in records)

    await until(free)


async def queued(held: Held, item: Item) -> "asyncio.Task[list[Any]]":
    """A call that the flusher will send."""
    held.hold()
    first = asyncio.create_task(held.send(Lookup(("", "c", "first"))))
    await until(held.busy.is_set)
    task = asyncio.create_task(held.send(item))
    await held.gathered(1)
    held.go.set()
    await first
    return task


async def test_a_damaged_store_reaches_those_who_were_queued_and_the_flusher_lives(held: Held) -> None:
    store: Any = held.spy._store
    real = store.send

    def damaged(items: Any) -> Any:
        if isinstance(items[0], Claim):
            raise semel.errors.StoreRefused("damaged")
        return real(items)

    store.send = damaged
    task = await queued(held, claim("k"))
    with pytest.raises(semel.errors.StoreRefused):
        await asyncio.wait_for(task, 5)
    store.send = real
    assert isinstance((await asyncio.wait_for(await queued(held, claim("k")), 5))[0], Granted)


async def test_too_few_answers_hang_nobody(held: Held) -> None:
    store: Any = held.spy._store
    real = store.send
    store.send = lambda items: real(items)[:-1] if isinstance(items[0], Claim) else real(items)
    task = await queued(held, claim("k"))
    with pytest.raises(semel.errors.StoreError, match="answers"):
        await asyncio.wait_for(task, 5)
    store.send = real
    assert isinstance((await asyncio.wait_for(held.send(claim("other")), 5))[0], Granted)


async def test_a_callback_that_fails_does_not_end_the_flusher(
    held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    def done(_answers: list[Any]) -> None:
        raise ZeroDivisionError

    held.channel.post([claim("k")], done)
    assert isinstance((await asyncio.wait_for(held.send(claim("other")), 5))[0], Granted)
    await until(lambda: "ZeroDivisionError" in caplog.text)


async def test_no_thread_to_be_had_is_the_callers_error_and_not_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spy = Spy(MemoryStore(), instant=False)
    channel = Coalescer(spy)

    def start(self: Thread) -> None:
        raise RuntimeError("can't start new thread")

    with channel._gate, monkeypatch.context() as patched:  # somebody is there, so the flusher is needed
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="start new thread"):
            channel.send([claim("k")])
    answers = await asyncio.wait_for(in_thread(channel.send, [claim("other")]), 5)
    assert isinstance(answers[0], Granted)
    channel.close()
    record = spy._store.send([Lookup(("", "c", "k"))])[0]
    assert (record.owner, record.attempt) == (b"", 0)


# --- those who leave ---


@pytest.mark.parametrize("instant", [True, False])
@pytest.mark.parametrize("applied", [True, False])
async def test_an_interrupt_in_mid_air_is_made_good(instant: bool, applied: bool) -> None:
    """The end of a claim is said again; a claim is asked for again, and given back."""
    spy = Spy(MemoryStore(), instant=instant)
    channel: Any = channel_for(spy)
    item = claim("ended")
    (granted,) = channel.send([item])
    strikes: list[int] = []

    def strike(_items: list[Item]) -> None:
        if strikes and current_thread() is main_thread():
            strikes.clear()
            raise KeyboardInterrupt

    spy.before, spy.after = (lambda _items: None, strike) if applied else (strike, lambda _items: None)

    def record(key: str) -> Any:
        return spy._store.send([Lookup(("", "c", key))])[0]

    strikes.append(1)
    with pytest.raises(KeyboardInterrupt):
        channel.send([settle(item, granted)])
    await until(lambda: len(spy.sent(Settle)) == 2 and record("ended").state == "done")
    await until(lambda: instant or not channel._gate.locked())
    strikes.append(1)
    with pytest.raises(KeyboardInterrupt):
        channel.send([claim("new")])
    await until(lambda: isinstance(record("new"), semel.Record) and record("new").owner == b"")
    assert record("new").attempt == 0
    channel.close()


@only_async
async def test_a_claim_whose_caller_was_cancelled_in_flight_is_given_back(place: Place) -> None:
    client = place.open()
    await client.run("warm", client.handler(lambda: 1))
    if place.kind.store == "memory":
        return  # answers at once: there is no flight
    busy, go = Event(), Event()

    def before(items: list[Item]) -> None:
        if any(isinstance(item, Claim) for item in items):
            busy.set()

    place.spy.before = before
    if place.kind.store == "native":

        async def pace() -> None:
            await until(go.is_set) if busy.is_set() else await asyncio.sleep(0)

        place.native.pace = pace
    else:

        def after(_items: list[Item]) -> None:
            go.wait(GUARD_S)

        place.spy.after = after
    task = asyncio.create_task(client.inner.run("k", client.handler(lambda: 1)))
    await until(busy.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    await until(lambda: (record := place.record("k")) is not None and not record.owner)
    assert place.record("k").attempt == 0  # type: ignore[union-attr]
    assert await client.run("k", lambda: semel.current().attempt) == Done(1)


@only_async
async def test_a_completion_whose_caller_was_cancelled_is_carried_out(place: Place) -> None:
    client = place.open()
    task: asyncio.Task[Any] | None = None

    async def handler() -> int:
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        return 7

    task = asyncio.create_task(client.inner.run("k", handler))
    await asyncio.wait([task])
    await until(lambda: place.record("k").state == "done")  # type: ignore[union-attr]
    assert await client.run("k", lambda: 8) == Done(7, replayed=True)


async def test_a_call_is_given_back_once(held: Held) -> None:
    if not held.loop:
        return
    held.hold()
    first = asyncio.create_task(held.send(Lookup(("", "c", "first"))))
    await until(held.busy.is_set)
    task = asyncio.create_task(held.send(claim("k")))
    await held.gathered(1)
    task.cancel()
    held.go.set()
    await first
    await until(lambda: len(held.spy.sent(Settle)) >= 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert [item.count_attempt for item in held.spy.sent(Settle)] == [False]


async def test_a_loop_that_closes_gives_back_what_it_asked_for() -> None:
    """The last thing a loop does is to cancel everybody, the flusher too: here, before the reply is there."""
    spy = Spy(MemoryStore())
    native = Native(spy)

    async def main() -> None:
        client = semel.aopen(native, consumer="c")

        async def handler() -> None: ...

        await client.run("warm", handler)
        applied = asyncio.Event()

        async def pace() -> None:
            if spy.sent(Claim)[-1].id[2] == "k" and not applied.is_set():
                applied.set()
                await asyncio.Event().wait()

        native.pace = pace
        task = asyncio.create_task(client.run("k", handler))
        await applied.wait()
        assert not task.done()

    await in_thread(asyncio.run, main())
    record = spy._store.send([Lookup(("", "c", "k"))])[0]
    assert isinstance(record, semel.Record)
    assert (record.owner, record.attempt) == (b"", 0)


# --- closing ---


async def test_what_is_queued_is_sent_before_the_end(held: Held) -> None:
    held.hold()
    first = asyncio.create_task(held.send(Lookup(("", "c", "first"))))
    await until(held.busy.is_set)
    task = asyncio.create_task(held.send(claim("k")))
    await held.gathered(1)
    closing = asyncio.create_task(held.channel.aclose() if held.loop else in_thread(held.channel.close))
    await until(lambda: held.channel._closed)
    with pytest.raises(StoreClosed):
        await held.send(claim("too late"))
    held.go.set()
    await asyncio.gather(first, closing)
    assert isinstance((await task)[0], Granted)
    assert semel_threads() == []


async def test_the_end_of_a_claim_is_let_through_after_close() -> None:
    for channel in (Direct(MemoryStore()), Coalescer(Spy(MemoryStore(), instant=False))):
        item = claim("k")
        (granted,) = channel.send([item])
        channel.close()
        channel.close()
        assert isinstance(channel.send([settle(item, granted)])[0], Completed)
        with pytest.raises(StoreClosed):
            channel.send([claim("other")])


async def test_a_store_for_loops_is_not_for_threads() -> None:
    with pytest.raises(StoreClosed, match="aopen"):
        LoopCoalescer(Native(Spy(MemoryStore()))).send([claim("k")])


# --- a native store ---


async def test_five_hundred_callers_need_no_executor() -> None:
    native = Native(Spy(MemoryStore()))
    loop = asyncio.get_running_loop()
    pool = ThreadPoolExecutor(1)
    loop.set_default_executor(pool)
    stuck = Event()
    blocked = loop.run_in_executor(None, stuck.wait)
    threads = threading.active_count()
    try:
        client = Either(semel.aopen(native, consumer="c"))
        outcomes = await asyncio.gather(*(client.run(f"k{at % 100}", lambda: 1) for at in range(500)))
        await client.close()
        assert threading.active_count() == threads
    finally:
        stuck.set()
        await blocked
        pool.shutdown()
    assert sorted(outcome.replayed for outcome in outcomes) == [False] * 100 + [True] * 400
    assert native.opened == 1
    assert len(native.spy.batches) < 60


async def test_a_client_outlives_its_loop() -> None:
    """A flusher that a dead loop took with it must not be waited for."""
    native = Native(Spy(MemoryStore()))
    client = semel.aopen(native, consumer="c")

    async def handler() -> int:
        return 1

    def run() -> Any:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(client.run("a", handler))
        native.pace = asyncio.Event().wait
        doomed = loop.create_task(client.run("b", handler))
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(asyncio.sleep(0))
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        del doomed
        native.pace = lambda: asyncio.sleep(0)
        return asyncio.run(client.run("c", handler))

    assert await asyncio.wait_for(in_thread(run), 5) == Done(1)
