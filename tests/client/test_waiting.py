"""A concurrent duplicate waits: woken, taking over, or told that time is up."""

import asyncio
from collections.abc import Callable
from functools import partial
from threading import Barrier, Thread
from typing import Any

import pytest

import semel
from semel import Busy, Done, Errored, Failed, Unavailable
from semel.core.commands import Claim
from tests.client.clients import (
    Either,
    Gate,
    Place,
    down,
    happens,
    in_thread,
    only_async,
    only_sqlite,
    only_sync,
)
from tests.waiting import until

pytestmark = pytest.mark.anyio

Start = Callable[..., Any]


async def waiting(client: Either, key: str = "k", fn: Any = lambda: "mine") -> "asyncio.Task[Any]":
    """A duplicate that sits in its room."""
    task = asyncio.create_task(client.run(key, fn))
    await until(lambda: any(room.bells or room.futures for room in client.rooms.values()))
    return task


async def owner_of(client: Either, gate: Gate, key: str = "k") -> "asyncio.Task[Any]":
    task = asyncio.create_task(client.run(key, client.held(gate)))
    await happens(gate.entered)
    return task


async def test_a_duplicate_waits_and_gets_the_value(client: Either) -> None:
    gate = Gate()
    owner = await owner_of(client, gate)
    duplicate = await waiting(client)
    gate.opened.set()
    assert await owner == Done("value")
    assert await duplicate == Done("value", replayed=True)
    assert client.rooms == {}


async def test_a_duplicate_takes_over_when_the_owner_releases(client: Either) -> None:
    claim = await client.claim("k")
    duplicate = await waiting(client)
    await client.release(claim)
    assert await duplicate == Done("mine")


async def test_a_duplicate_takes_over_when_the_owner_fails_for_now(client: Either) -> None:
    gate = Gate()

    def handler() -> Any:
        gate.pass_()
        raise ValueError

    async def ahandler() -> Any:
        await gate.apass()
        raise ValueError

    owner = asyncio.create_task(client.run("k", handler if client.sync else ahandler))
    await happens(gate.entered)
    duplicate = await waiting(client, fn=lambda: semel.current().attempt)
    gate.opened.set()
    assert isinstance(await owner, Errored)
    assert await duplicate == Done(2)


async def test_a_duplicate_takes_over_when_the_lease_ends(place: Place) -> None:
    client = place.open(lease="80ms")
    assert isinstance(await client.claim("k"), semel.Claimed)  # bare: nobody renews it
    assert await (await waiting(client.using(lease_s=30), fn=lambda: semel.current().attempt)) == Done(2)


async def test_a_duplicate_is_failed_when_the_owner_failed_for_good(client: Either) -> None:
    claim = await client.claim("k")
    duplicate = await waiting(client)
    await client.fail(claim, LookupError("gone"))
    failed = await duplicate
    assert isinstance(failed, Failed)
    assert failed.replayed


async def test_without_waiting_the_answer_is_busy_at_once(client: Either, place: Place) -> None:
    await client.claim("k")
    place.spy.clear()
    assert isinstance(await client.using(wait_s=0).run("k", lambda: 1), Busy)
    assert len(place.spy.sent(Claim)) == 1


async def test_waiting_ends_in_busy(place: Place) -> None:
    client = place.open(policy=semel.Policy(wait_s=0.05))
    await client.claim("k")
    busy = await client.run("k", lambda: 1)
    assert isinstance(busy, Busy)
    assert busy.retry_after_s > 20
    assert client.rooms == {}


async def test_notification_wakes_with_polling_off(client: Either, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.inner._runtime.watches, "polling", False)
    claim = await client.claim("k")
    duplicate = await waiting(client)
    await client.complete(claim, 1)
    assert await asyncio.wait_for(duplicate, 5) == Done(1, replayed=True)


@only_sqlite
async def test_polling_wakes_with_notifications_off(client: Either, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.inner._runtime.watches, "notifications", False)
    claim = await client.claim("k")
    duplicate = await waiting(client)
    await client.complete(claim, 1)
    assert await asyncio.wait_for(duplicate, 5) == Done(1, replayed=True)


@only_sqlite
async def test_polling_wakes_across_two_store_objects(client: Either, place: Place) -> None:
    other = place.open(store=place.elsewhere())
    claim = await other.claim("k")
    duplicate = await waiting(client)
    await other.complete(claim, 1)
    assert await asyncio.wait_for(duplicate, 5) == Done(1, replayed=True)
    other.inner.store.close()


@only_sqlite
async def test_with_both_off_nobody_is_woken(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    client = place.open(policy=semel.Policy(wait_s=0.3))
    for name in ("polling", "notifications"):
        monkeypatch.setattr(client.inner._runtime.watches, name, False)
    claim = await client.claim("k")
    duplicate = await waiting(client)
    await until(lambda: place.spy.claims_answered >= 3)  # it claims again once it watches
    place.spy.clear()
    await client.complete(claim, 1)
    assert await duplicate == Done(1, replayed=True)  # by its last look, when its time was up
    assert len(place.spy.sent(Claim)) == 1


async def test_the_claim_is_repeated_between_watch_and_sleep(client: Either, place: Place) -> None:
    """The owner finishes after the duplicate's claim and before its watch: the wake-up must not be lost."""
    claim = await client.claim("k")
    watches = client.inner._runtime.watches
    watches.polling = False
    enter = watches.enter

    def late(*args: Any) -> Any:
        place.spy._store.send([client.inner._plan.completion(claim.claim, claim.granted, 1)])
        return enter(*args)

    watches.enter = late
    assert await asyncio.wait_for(client.run("k", lambda: 2), 5) == Done(1, replayed=True)


@only_sync
async def test_two_hundred_threads_run_it_once(place: Place) -> None:
    client = place.open()
    gate, barrier = Gate(), Barrier(201)
    outcomes: list[Any] = []

    def call() -> None:
        barrier.wait()
        outcomes.append(client.inner.run("k", gate.pass_))

    threads = [Thread(target=call) for _ in range(200)]
    for thread in threads:
        thread.start()
    barrier.wait()
    gate.opened.set()
    for thread in threads:
        thread.join()
    assert gate.ran == 1
    assert sorted(outcome.replayed for outcome in outcomes) == [False] + [True] * 199
    assert {outcome.value for outcome in outcomes} == {"value"}
    assert client.rooms == {}


@only_async
async def test_five_hundred_tasks_run_it_once(place: Place) -> None:
    client = place.open()
    gate = Gate()
    tasks = [asyncio.create_task(client.inner.run("k", gate.apass)) for _ in range(500)]
    await happens(gate.entered)
    gate.opened.set()
    outcomes = await asyncio.gather(*tasks)
    assert gate.ran == 1
    assert sorted(outcome.replayed for outcome in outcomes) == [False] + [True] * 499
    assert client.rooms == {}


def asleep(client: Either) -> int:
    return sum(len(room.bells) + len(room.futures) for room in client.rooms.values())


async def test_callers_of_one_process_fold_their_claims_when_woken(place: Place) -> None:
    client = place.open()
    claim = await client.claim("k")
    client.inner._runtime.watches.polling = False
    tasks = [asyncio.create_task(client.run("k", lambda: 1)) for _ in range(50)]
    await until(lambda: asleep(client) == 50)
    place.spy.clear()
    await client.complete(claim, 1)
    assert await asyncio.gather(*tasks) == [Done(1, replayed=True)] * 50
    folds = place.kind.colour == "async" and place.kind.store != "memory"
    assert len(place.spy.sent(Claim)) <= (3 if folds else 50)


@only_sqlite
async def test_callers_of_one_process_share_one_wait(client: Either, place: Place) -> None:
    """Forty wait for one record: one of them polls for all."""
    claim = await client.claim("k")
    tasks = [asyncio.create_task(client.run("k", lambda: 1)) for _ in range(40)]
    await until(lambda: asleep(client) >= 39)
    channel = client.inner._runtime.channel
    asked: list[Any] = []

    def counted(real: Any, items: Any) -> Any:
        asked.append(items)
        return real(items)

    for name in ("send", "asend"):
        setattr(channel, name, partial(counted, getattr(channel, name)))
    place.spy.clear()
    await until(lambda: len(place.spy.batches) >= 8)
    assert len(asked) <= 10
    await client.complete(claim, 1)
    assert await asyncio.gather(*tasks) == [Done(1, replayed=True)] * 40


@only_sqlite
async def test_when_the_one_who_polls_leaves_another_does(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = place.open()
    monkeypatch.setattr(client.inner._runtime.watches, "notifications", False)
    claim = await client.claim("k")
    poller = await waiting(client.using(wait_s=0.1))
    others = [asyncio.create_task(client.run("k", lambda: 1)) for _ in range(3)]
    assert isinstance(await poller, Busy)
    await client.complete(claim, 1)
    assert await asyncio.wait_for(asyncio.gather(*others), 5) == [Done(1, replayed=True)] * 3


@only_async
async def test_no_watch_is_left_by_a_waiter_who_is_cancelled(place: Place) -> None:
    client = place.open()
    await client.claim("k")
    duplicate = await waiting(client)
    room = next(iter(client.rooms.values()))
    duplicate.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await duplicate
    assert cancelled.value.__traceback__ is not None  # held, and with it the frames of the wait
    assert client.rooms == {}
    assert room.futures == {}


@only_sync
async def test_no_watch_is_left_by_a_waiter_who_is_interrupted(place: Place) -> None:
    client = place.open()
    await client.claim("k")

    def struck(*_args: Any) -> bool:
        raise KeyboardInterrupt

    client.inner._runtime.watches.sleep = struck
    with pytest.raises(KeyboardInterrupt) as interrupted:
        client.inner.run("k", lambda: 1)
    assert interrupted.value.__traceback__ is not None  # held, and with it the frames of the wait
    assert client.rooms == {}


async def test_a_room_forgets_its_sleepers_between_polls(client: Either) -> None:
    watches = client.inner._runtime.watches
    watch = watches.enter(("", "billing", "k"), 10.0)
    for _ in range(5):
        if client.sync:
            watches.sleep(watch, 0.001)
        else:
            await watches.asleep(watch, 0.001)
    assert (watch.room.bells, watch.room.futures) == ({}, {})
    watch.leave()
    watch.leave()
    assert client.rooms == {}


async def test_an_outage_during_a_wait_is_outlived(client: Either, place: Place) -> None:
    claims = 0

    def before(items: list[Any]) -> None:
        nonlocal claims
        if any(isinstance(item, Claim) for item in items):
            claims += 1
            if claims in (3, 4):  # the owner's was the first, the duplicate's own the second
                raise semel.errors.StoreUnavailable("for a moment")

    place.spy.before = before
    claim = await client.claim("k")
    duplicate = await waiting(client)
    await until(lambda: claims >= 3)
    await place.open().complete(claim, 1)  # in a batch without claims
    assert await duplicate == Done(1, replayed=True)
    assert claims >= 5


async def test_an_outage_at_the_claim_keeps_the_owner(place: Place) -> None:
    client = place.open(policy=semel.Policy(wait_s=0.1))
    await client.run("warm", lambda: 1)
    place.spy.clear()
    place.spy.before = down(Claim)
    assert isinstance(await client.run("k", lambda: 1), Unavailable)
    assert len(place.spy.sent(Claim)) > 1
    assert len(place.owners()) == 1


@only_async
async def test_two_loops_wait_for_one_record(place: Place) -> None:
    if place.kind.store == "native":
        return  # its connections belong to one loop
    client = place.open()
    claim = await client.claim("k")
    outcomes: list[Any] = []

    async def handler() -> None: ...

    def other_loop() -> None:
        outcomes.append(asyncio.run(client.inner.run("k", handler)))

    thread = Thread(target=other_loop)
    thread.start()
    await until(lambda: any(room.futures for room in client.rooms.values()))
    await client.complete(claim, 1)
    await in_thread(thread.join)
    assert outcomes == [Done(1, replayed=True)]
