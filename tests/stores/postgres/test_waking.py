"""Waiters in other processes are woken by notifications, and by polling where there are none."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.core.commands import Claim
from semel.stores.postgres import from_url
from semel.types import Done
from tests.services import postgres
from tests.stores.postgres import places
from tests.stores.shells import InLoop
from tests.waiting import await_true, until

CALLERS = 500
PATIENT = semel.Policy(lease_s=60, wait_s=30)


async def never() -> Any:
    return "never"


def never_either() -> Any:
    return "never"


def listeners(place: str, schema: str) -> int:
    ((count,),) = postgres.execute(place, f"SELECT count(*)::int FROM {schema}.listeners")
    return int(count)


def opened(place: str, name: str = "billing") -> semel.Semel:
    return semel.open(place, consumer=name, policy=PATIENT)


@pytest.mark.parametrize("off", ["polling", "notifications"])
def test_a_thread_is_woken_by_either_alone(place: str, off: str) -> None:
    with opened(place) as owner, opened(place) as waiter, ThreadPoolExecutor(1) as threads:
        setattr(waiter._runtime.watches, off, False)
        claim: Any = owner.claim("k")
        waiting = threads.submit(waiter.run, "k", never_either)
        assert await_true(lambda: bool(waiter._runtime.watches._rooms), 10)
        owner.complete(claim, 1)
        assert waiting.result(10) == Done(1, replayed=True)


@pytest.mark.parametrize("off", ["polling", "notifications"])
def test_a_task_is_woken_by_either_alone(place: str, off: str) -> None:
    async def scene() -> None:
        async with (
            semel.aopen(place, consumer="billing", policy=PATIENT) as owner,
            semel.aopen(place, consumer="billing", policy=PATIENT) as waiter,
        ):
            setattr(waiter._runtime.watches, off, False)
            claim: Any = await owner.claim("k")
            waiting = asyncio.create_task(waiter.run("k", never))
            await until(lambda: waiter._runtime.watches._rooms or waiting.done())
            await owner.complete(claim, 1)
            assert await asyncio.wait_for(waiting, 10) == Done(1, replayed=True)

    asyncio.run(scene())


def test_behind_a_pooler_nobody_listens_and_waiters_poll(place: str) -> None:
    at = place + "&pooler=true"
    with opened(at) as owner, opened(at) as waiter, ThreadPoolExecutor(1) as threads:
        claim: Any = owner.claim("k")
        waiting = threads.submit(waiter.run, "k", never_either)
        assert await_true(lambda: bool(waiter._runtime.watches._rooms), 10)
        assert listeners(place, from_url(place).place.schema) == 0
        owner.complete(claim, 1)
        assert waiting.result(10) == Done(1, replayed=True)


def test_five_hundred_wait_without_any_thread(place: str) -> None:
    async def scene() -> int:
        loop = asyncio.get_running_loop()
        blocked = threading.Event()
        executor = ThreadPoolExecutor(1)
        loop.set_default_executor(executor)
        stuck = loop.run_in_executor(None, blocked.wait)  # its only thread is taken
        try:
            async with (
                semel.aopen(place, consumer="billing", policy=PATIENT) as owner,
                semel.aopen(place, consumer="billing", policy=PATIENT) as waiter,
            ):
                before = threading.active_count()
                keys = [f"key {number}" for number in range(CALLERS)]
                claims: Any = await owner.claim_many(keys)
                waiting = [asyncio.create_task(waiter.run(key, never)) for key in keys]
                await until(lambda: len(waiter._runtime.watches._rooms) == CALLERS)
                threads = threading.active_count() - before
                await owner.complete_many(claims)
                outcomes = await asyncio.wait_for(asyncio.gather(*waiting), 30)
                assert outcomes == [Done(None, replayed=True)] * CALLERS
                return threads
        finally:
            blocked.set()
            await stuck
            executor.shutdown()

    assert asyncio.run(scene()) == 0


def test_a_listener_comes_and_goes_with_its_store(tmp_path: Path, place: str) -> None:
    store = places.make(tmp_path)
    store.open()
    schema = store.place.schema
    assert listeners(place, schema) == 0
    stop = store.watch(lambda _: None)
    assert await_true(lambda: listeners(place, schema) == 1, 10)
    stop()
    store.close()
    assert await_true(lambda: listeners(place, schema) == 0, 10)


def test_a_listening_task_comes_and_goes_with_its_store(tmp_path: Path, place: str) -> None:
    async def scene() -> int:
        store = places.make(tmp_path).twin()
        await store.aopen()
        stop = store.watch(lambda _: None)
        schema = store.place.schema
        await until(lambda: asyncio.to_thread(listeners, place, schema))
        stop()
        await store.aclose()
        return listeners(place, schema)

    assert asyncio.run(scene()) == 0


def test_a_listener_of_another_role_is_left_alone(tmp_path: Path, place: str) -> None:
    """A role sees of the sessions of others hardly more than that they exist."""
    first = places.make(tmp_path)
    first.open()
    schema = first.place.schema
    role = f"l_{schema}"[:40]
    postgres.execute(
        place,
        f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {role};"
        f" GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {role}",
    )
    second = from_url(place.replace("//semel@", f"//{role}@"))
    second.open()
    try:
        stops = [first.watch(lambda _: None)]
        assert await_true(lambda: listeners(place, schema) == 1, 10)
        stops.append(second.watch(lambda _: None))
        assert await_true(lambda: listeners(place, schema) == 2, 10)
        for stop in stops:
            stop()
    finally:
        second.close()
        first.close()
        postgres.execute(place, f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_listener_that_was_killed_is_struck_off_by_the_next(tmp_path: Path, place: str) -> None:
    store = places.make(tmp_path)
    store.open()
    schema = store.place.schema
    postgres.execute(place, f"INSERT INTO {schema}.listeners VALUES (2147483647, now())")
    store.watch(lambda _: None)()
    assert await_true(
        lambda: (
            postgres.execute(place, f"SELECT count(*)::int FROM {schema}.listeners WHERE pid = 2147483647")
            == [(0,)]
        ),
        10,
    )
    store.close()


def test_a_store_that_moves_to_another_loop_leaves_nothing_in_the_first(tmp_path: Path, place: str) -> None:
    """The first loop goes on meanwhile, in another thread."""
    store = places.make(tmp_path).twin()
    first = InLoop(store)
    first.open()
    stop = first.watch(lambda _: None)
    schema = store.place.schema
    assert await_true(lambda: listeners(place, schema) == 1, 10)

    async def elsewhere() -> Any:
        (answer,) = await store.asend([Claim(("", "c", "k"), b"o" * 16, 1_000_000, 1_000_000)])
        await store.aclose()
        return answer

    answer = asyncio.run(elsewhere())
    assert answer.attempt == 1
    assert await_true(lambda: listeners(place, schema) == 0, 10)
    stop()
    first.close()


def test_whoever_waits_while_the_listener_starts_is_woken_too(place: str) -> None:
    async def scene(number: int) -> None:
        async with (
            semel.aopen(place, consumer="billing", policy=PATIENT) as owner,
            semel.aopen(place, consumer="billing", policy=PATIENT) as waiter,
        ):
            waiter._runtime.watches.polling = False
            claim: Any = await owner.claim(f"k{number}")
            waiting = asyncio.create_task(waiter.run(f"k{number}", never))
            await asyncio.sleep(number / 5000)  # from before it watches to after it listens
            await owner.complete(claim, 1)
            assert await asyncio.wait_for(waiting, 10) == Done(1, replayed=True)

    for number in range(0, 200, 8):
        asyncio.run(scene(number))


def test_one_store_serves_one_loop_after_the_other(tmp_path: Path) -> None:
    store = places.make(tmp_path).twin()
    answers = []
    for number in range(3):

        async def scene(number: int = number) -> None:
            stop = store.watch(lambda _: None)
            claim = Claim(("", "c", f"k{number}"), b"o" * 16, 1_000_000, 1_000_000)
            answers.extend(await store.asend([claim]))
            stop()
            await store.aclose()
            await store.aopen()
            await store.aclose()
            store._closed = False

        asyncio.run(scene())
    assert [answer.attempt for answer in answers] == [1, 1, 1]
