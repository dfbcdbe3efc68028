"""The keeper: a claim lasts as long as its handler, and a handler is told when it does not."""

import asyncio
import time
from threading import Event, Thread
from typing import Any

import pytest

import semel
from semel import Busy, Delivery, Done, Lost
from semel.core.commands import Claim, Forget, Renew
from semel.runtime import keeper
from tests.client.clients import Either, Gate, Place, down, happens, only_async, only_sync
from tests.client.conftest import semel_threads
from tests.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("brisk")]

LEASE_S = 30.0
LEASE = "30s"
RUN_MAX_S = 60.0


async def renewed(place: Place, times: int) -> None:
    """Wait for so many renewals, from now on."""
    times += len(place.spy.sent(Renew))
    await until(lambda: len(place.spy.sent(Renew)) >= times)


async def past_run_max(client: Either, place: Place) -> None:
    """The one claim that is kept is past its longest run, and then its lease ends."""
    (kept,) = client.kept.values()
    assert RUN_MAX_S / 2 < kept.ends - time.monotonic() < RUN_MAX_S
    await renewed(place, 2)
    kept.ends = time.monotonic()
    await until(lambda: not kept.posted_at)
    before = len(place.spy.sent(Renew))
    await asyncio.sleep(0.1)  # time for three renewals, none of which comes
    assert len(place.spy.sent(Renew)) == before
    place.clock.skip(LEASE_S)


async def test_a_handler_of_three_leases_runs_once_and_is_never_taken_over(place: Place) -> None:
    client = place.open(lease=LEASE, policy=semel.Policy(wait_s=10))
    gate = Gate()
    owner = asyncio.create_task(client.run("k", client.held(gate)))
    await happens(gate.entered)
    duplicate = asyncio.create_task(client.run("k", client.held(gate)))
    for _ in range(5):
        await renewed(place, 2)  # of two, the second is sent after the first was answered
        place.clock.skip(LEASE_S * 2 / 3)
        assert isinstance(await client.claim("k"), Busy)
    gate.opened.set()
    assert await owner == Done("value")
    assert await duplicate == Done("value", replayed=True)
    assert gate.ran == 1
    assert client.kept == {}


async def test_many_claims_are_renewed_in_one_batch(place: Place) -> None:
    client = place.open(lease=LEASE)
    gate = Gate()
    given = [Delivery(key=f"k{at}", body=at) for at in range(20)]
    gate_handler = client.held(gate)
    task = asyncio.create_task(client.run_many(given, gate_handler))
    await renewed(place, 40)
    gate.opened.set()
    assert await task == [Done(at) for at in range(20)]
    batches = [sum(isinstance(item, Renew) for item in batch) for batch in place.spy.batches]
    assert max(batches) == 20


async def test_claims_waiting_their_turn_are_kept(place: Place) -> None:
    client = place.open(lease=LEASE)
    gate = Gate()
    attempts: list[int] = []

    def handler(body: int) -> None:
        attempts.append(semel.current().attempt)
        if body == 0:
            gate.pass_()

    async def ahandler(body: int) -> None:
        attempts.append(semel.current().attempt)
        if body == 0:
            await gate.apass()

    given = [Delivery(key=f"k{at}", body=at) for at in range(3)]
    task = asyncio.create_task(client.run_many(given, handler if client.sync else ahandler))
    await happens(gate.entered)
    for _ in range(3):
        await renewed(place, 6)
        place.clock.skip(LEASE_S * 2 / 3)
        assert isinstance(await client.claim("k2"), Busy)
    gate.opened.set()
    assert await task == [Done(None)] * 3
    assert attempts == [1, 1, 1]
    assert client.kept == {}


@only_sync
async def test_a_handler_that_blocks_is_told_of_its_loss(place: Place) -> None:
    client = place.open(lease=LEASE)
    lost = Event()

    def handler() -> str:
        place.spy._store.send([Forget(("", "billing", "k"), force=True)])
        for _ in range(5000):
            if semel.current().lost:
                lost.set()
                break
            Event().wait(0.002)
        return "late"

    assert await client.run("k", handler) == Lost("late")
    assert lost.is_set()


async def test_a_loss_is_told_at_once_not_when_the_lease_ends(place: Place) -> None:
    client = place.open(lease=LEASE)
    left: list[float] = []

    def handler() -> None:
        place.spy._store.send([Forget(("", "billing", "k"), force=True)])
        me = semel.current()
        for _ in range(5000):
            if me.lost:
                break
            Event().wait(0.002)
        left.append(me.deadline_s)

    async def ahandler() -> None:
        place.spy._store.send([Forget(("", "billing", "k"), force=True)])
        try:
            await asyncio.Event().wait()
        finally:
            left.append(semel.current().deadline_s)

    await client.run("k", handler if client.sync else ahandler)
    assert left[0] > LEASE_S / 2


@only_async
async def test_a_handler_that_awaits_is_cancelled_by_its_loss(place: Place) -> None:
    client = place.open(lease=LEASE)
    told: list[bool] = []

    async def handler() -> None:
        place.spy._store.send([Forget(("", "billing", "k"), force=True)])
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.append(semel.current().lost)
            raise

    task = asyncio.current_task()
    assert task is not None
    assert await client.run("k", handler) == Lost()
    assert told == [True]
    assert task.cancelling() == 0


@only_async
@pytest.mark.parametrize("end", ["returns", "raises"])
async def test_a_cancellation_of_ours_is_taken_back_however_the_handler_ends(place: Place, end: str) -> None:
    client = place.open(lease=LEASE)

    async def handler() -> str:
        place.spy._store.send([Forget(("", "billing", "k"), force=True)])
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if end == "raises":
                raise ValueError from None
        return "all the same"

    task = asyncio.current_task()
    assert task is not None
    outcome = await client.run("k", handler)
    assert task.cancelling() == 0
    assert outcome == Lost("all the same") if end == "returns" else isinstance(outcome, semel.Errored)
    await asyncio.sleep(0)  # no cancellation is left in the task


@only_async
async def test_a_cancellation_from_outside_is_not_taken_for_a_loss(place: Place) -> None:
    client = place.open(lease=LEASE)
    entered = asyncio.Event()

    async def handler() -> None:
        entered.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(client.inner.run("k", handler))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not place.record("k").owner)  # type: ignore[union-attr]
    assert place.record("k").attempt == 0  # type: ignore[union-attr]


async def test_an_unreachable_store_is_told_before_the_lease_ends(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "RENEW_AT", 1 / 3)
    client = place.open(lease="600ms")  # time that has to pass: told at 400 ms, it has another 200
    left: list[float] = []

    def handler() -> None:
        place.spy.before = down()
        me = semel.current()
        for _ in range(5000):
            if me.lost:
                break
            Event().wait(0.001)
        left.append(me.deadline_s)
        place.spy.before = lambda _items: None

    async def ahandler() -> None:
        place.spy.before = down()
        me = semel.current()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            left.append(me.deadline_s)
            place.spy.before = lambda _items: None
            raise

    outcome = await client.run("k", handler if client.sync else ahandler)
    assert 0 < left[0] < 0.3
    assert len(place.spy.sent(Renew)) >= 2  # no answer: asked again
    assert outcome == (Done(None) if client.sync else Lost())


async def test_a_renewal_without_an_answer_is_repeated_and_saves_the_claim(place: Place) -> None:
    client = place.open(lease=LEASE)
    gate, strikes = Gate(), [1]

    def before(items: list[Any]) -> None:
        if strikes[0] and any(isinstance(item, Renew) for item in items):
            strikes[0] -= 1
            raise semel.errors.StoreUnavailable("for a moment")

    place.spy.before = before
    task = asyncio.create_task(client.run("k", client.held(gate)))
    await renewed(place, 4)
    assert strikes == [0]
    place.clock.skip(LEASE_S * 2 / 3)
    await renewed(place, 2)
    place.clock.skip(LEASE_S * 2 / 3)
    assert isinstance(await client.claim("k"), Busy)
    gate.opened.set()
    assert await task == Done("value")


async def test_a_hung_handler_frees_its_key(place: Place) -> None:
    client = place.open(lease=LEASE, policy=semel.Policy(run_max_s=RUN_MAX_S, wait_s=10))
    gate = Gate()
    hung = asyncio.create_task(client.run("k", client.held(gate)))
    await happens(gate.entered)
    await past_run_max(client, place)
    assert await client.run("k", lambda: semel.current().attempt) == Done(2)
    gate.opened.set()
    outcome = await hung
    assert isinstance(outcome, Lost)


async def test_a_zombie_does_not_unregister_its_successor(place: Place) -> None:
    client = place.open(lease=LEASE, policy=semel.Policy(run_max_s=RUN_MAX_S, wait_s=10))
    zombie, successor = Gate(), Gate()
    old = asyncio.create_task(client.run("k", client.held(zombie)))
    await happens(zombie.entered)
    await past_run_max(client, place)
    patient = client.using(wait_s=10)
    new = asyncio.create_task(patient.run("k", client.held(successor)))
    await happens(successor.entered)
    zombie.opened.set()
    assert isinstance(await old, Lost)
    owner = place.spy.sent(Claim)[-1].owner
    assert list(client.kept) == [owner]
    await renewed(place, 2)
    assert place.record("k").owner == owner  # type: ignore[union-attr]
    successor.opened.set()
    assert await new == Done("value")


async def test_due_times_follow_each_claims_own_lease(place: Place) -> None:
    client = place.open(lease="12h", policy=semel.Policy(run_max_s=43_200))
    long, short = Gate(), Gate()
    first = asyncio.create_task(client.run("long", client.held(long)))
    await happens(long.entered)
    quick = client.using(lease_s=LEASE_S)
    second = asyncio.create_task(quick.run("short", client.held(short)))
    await renewed(place, 4)
    assert {item.id[2] for item in place.spy.sent(Renew)} == {"short"}
    long.opened.set()
    short.opened.set()
    assert list(await asyncio.gather(first, second)) == [Done("value")] * 2


@only_async
async def test_one_alarm_however_many_renewals(place: Place) -> None:
    client = place.open(lease=LEASE)
    gate = Gate()
    task = asyncio.create_task(client.run("k", client.held(gate)))
    await renewed(place, 6)
    loop: Any = asyncio.get_running_loop()
    alarms = [
        handle
        for handle in loop._scheduled
        if not handle._cancelled and getattr(handle._callback, "__name__", "") == "_ring"
    ]
    assert len(alarms) <= 1
    gate.opened.set()
    await task


@only_async
async def test_loops_that_ended_are_let_go(place: Place) -> None:
    if place.kind.store == "native":
        return  # its connections belong to one loop
    client = place.open()

    async def handler() -> None: ...

    def many() -> None:
        for number in range(5):
            asyncio.run(client.inner.run(f"k{number}", handler))

    thread = Thread(target=many)
    thread.start()
    await until(lambda: not thread.is_alive())
    await client.run("here", handler)
    assert len(client.inner._runtime._loop_states) <= 2


@only_sync
async def test_the_keepers_thread_ends_when_idle(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "IDLE_S", 0.01)
    client = place.open()
    for number in range(2):  # the second claim starts another
        assert await client.run(f"k{number}", lambda: "semel-keeper" in semel_threads()) == Done(True)
        await until(lambda: "semel-keeper" not in semel_threads())


@only_sync
async def test_the_keepers_thread_ends_with_the_client(place: Place) -> None:
    client = place.open()
    await client.run("k", lambda: None)
    assert "semel-keeper" in semel_threads()
    await client.close()
    assert "semel-keeper" not in semel_threads()


@only_sync
async def test_no_thread_before_the_first_claim(place: Place) -> None:
    client = place.open()
    await client.records("stats")
    assert semel_threads() == []


async def test_a_strange_error_does_not_end_the_keeper(place: Place) -> None:
    client = place.open(lease=LEASE)
    gate, strikes = Gate(), [1]

    def before(items: list[Any]) -> None:
        if strikes[0] and any(isinstance(item, Renew) for item in items):
            strikes[0] -= 1
            raise RuntimeError("a bug of the store")

    place.spy.before = before
    task = asyncio.create_task(client.run("k", client.held(gate)))
    await renewed(place, 3)
    gate.opened.set()
    assert await task == Done("value")


async def test_lost_before_its_turn_it_does_not_start(place: Place) -> None:
    client = place.open(lease=LEASE)
    ran: list[int] = []

    def forget() -> None:
        place.spy._store.send([Forget(("", "billing", "k1"), force=True)])

    def lost() -> bool:
        return any(kept.lost for kept in client.kept.values())

    def handler(body: int) -> None:
        ran.append(body)
        forget()
        for _ in range(5000):
            if lost():
                break
            Event().wait(0.002)

    async def ahandler(body: int) -> None:
        ran.append(body)
        forget()
        await until(lost)

    given = [Delivery(key=f"k{at}", body=at) for at in range(2)]
    assert await client.run_many(given, handler if client.sync else ahandler) == [Done(None), Lost()]
    assert ran == [0]
    assert client.kept == {}
