"""`close`: idempotent, from anywhere, while others wait; and nothing works after it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

import semel
from semel import Done
from semel.core.commands import Claim
from semel.stores.sqlite import SqliteStore
from tests.client.clients import GUARD_S, Either, Gate, Place, happens, in_thread, only_async
from tests.client.conftest import semel_threads
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def test_closing_twice_is_closing(client: Either) -> None:
    await client.run("k", lambda: 1)
    await client.close()
    await client.close()


async def test_nothing_works_after_close(client: Either) -> None:
    await client.run("k", lambda: 1)
    claim = await client.claim("held")
    await client.close()
    calls: list[Callable[[], Any]] = [
        lambda: client.run("k", lambda: 1),
        lambda: client.run_many([semel.Delivery(key="k", body=1)], lambda body: body),
        lambda: client.claim("k"),
        lambda: client.claim_many(["k"]),
        lambda: client.renew(claim),
        lambda: client.records("lookup", "k"),
        lambda: client.windows("list"),
        lambda: client.sweep(lambda payload: payload),
        lambda: client.using(wait_s=0).run("k", lambda: 1),
    ]
    for call in calls:
        with pytest.raises(semel.errors.StoreClosed):
            await call()


async def test_a_client_that_was_never_used_closes(client: Either) -> None:
    await client.close()
    with pytest.raises(semel.errors.StoreClosed):
        await client.run("k", lambda: 1)


async def test_a_waiting_duplicate_is_let_go(client: Either) -> None:
    await client.claim("k")
    task = asyncio.create_task(client.run("k", lambda: 1))
    await until(lambda: any(room.bells or room.futures for room in client.rooms.values()))
    await client.close()
    with pytest.raises(semel.errors.StoreClosed):
        await asyncio.wait_for(task, 5)


async def test_a_handler_that_outlives_its_client_is_recorded_or_told(client: Either, place: Place) -> None:
    gate = Gate()
    task = asyncio.create_task(client.run("k", client.held(gate)))
    await happens(gate.entered)
    await client.close()
    gate.opened.set()
    outcome = await asyncio.wait_for(task, 5)
    assert outcome.value == "value"
    assert outcome.recorded == (place.record("k").state == "done")  # type: ignore[union-attr]
    assert client.kept == {}


async def test_a_handler_that_outlives_its_store_is_told_that_nothing_is_recorded(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'semel.db'}"
    for client in (Either(semel.open(url, consumer="c")), Either(semel.aopen(url, consumer="c"))):
        gate = Gate()
        task = asyncio.create_task(client.run("k", client.held(gate)))
        await happens(gate.entered)
        await client.close()
        gate.opened.set()
        assert await asyncio.wait_for(task, 5) == Done("value", recorded=False)
        assert client.kept == {}
        forgetting = semel.open(url, consumer="c")
        forgetting.records.forget("k", force=True)
        forgetting.close()


async def test_handlers_of_a_batch_that_outlive_their_client(client: Either, place: Place) -> None:
    gate = Gate()
    given = [semel.Delivery(key=f"k{at}", body=at) for at in range(2)]
    task = asyncio.create_task(client.run_many(given, client.held(gate)))
    await happens(gate.entered)
    await client.close()
    gate.opened.set()
    outcomes = await asyncio.wait_for(task, 5)
    assert outcomes[0].value == 0
    assert len(outcomes) == 2


async def test_close_from_another_thread(client: Either) -> None:
    await client.run("k", lambda: 1)
    if client.sync:
        thread = Thread(target=client.inner.close)
    elif client.inner.store.name == "native:":
        await client.close()
        return
    else:
        thread = Thread(target=lambda: asyncio.run(client.inner.close()))
    thread.start()
    await in_thread(thread.join)
    with pytest.raises(semel.errors.StoreClosed):
        await client.run("k", lambda: 1)


async def test_close_while_a_batch_is_under_way(place: Place) -> None:
    if place.kind.store != "sqlite":
        return
    client = place.open()
    await client.run("warm", lambda: 1)
    busy, go = Event(), Event()

    def before(items: list[Any]) -> None:
        if any(isinstance(item, Claim) for item in items):
            busy.set()
            go.wait(5)

    place.spy.before = before
    task = asyncio.create_task(client.run("k", lambda: 1))
    await happens(busy)
    closing = asyncio.create_task(client.close())
    await until(lambda: client.inner._runtime._closed)
    go.set()
    await asyncio.wait_for(closing, 5)
    outcome = (await asyncio.gather(task, return_exceptions=True))[0]
    assert outcome == Done(1) or isinstance(outcome, Done | semel.errors.StoreClosed | semel.Lost)


@only_async
async def test_a_closing_that_is_cancelled_goes_on(place: Place) -> None:
    client = place.open()
    await client.run("k", lambda: 1)
    closing = asyncio.create_task(client.inner.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    await until(lambda: semel_threads() == [])
    with pytest.raises(semel.errors.StoreClosed):
        await client.run("k", lambda: 1)


async def test_a_store_that_was_given_stays_open(place: Place) -> None:
    first, second = place.open(), place.open()
    await first.run("k", lambda: 1)
    await first.close()
    assert await second.run("k", lambda: 2) == Done(1, replayed=True)


def test_with_opens_and_closes(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'semel.db'}"
    with semel.open(url, consumer="c") as once:
        assert (tmp_path / "semel.db").exists()
        once.run("k", lambda: 1)
    with pytest.raises(semel.errors.StoreClosed):
        once.run("k", lambda: 1)
    again = semel.open(url, consumer="c")
    assert again.run("k", lambda: 2) == Done(1, replayed=True)
    again.close()
    assert semel_threads() == []


async def test_async_with_opens_and_closes(tmp_path: Path) -> None:
    async with semel.aopen(f"sqlite:///{tmp_path / 'semel.db'}", consumer="c") as once:
        assert (tmp_path / "semel.db").exists()
    with pytest.raises(semel.errors.StoreClosed):
        await once.records.stats()


def test_opening_does_no_io(tmp_path: Path) -> None:
    semel.open(f"sqlite:///{tmp_path / 'semel.db'}", consumer="c")
    semel.aopen(f"sqlite:///{tmp_path / 'semel.db'}", consumer="c")
    assert list(tmp_path.iterdir()) == []
    assert semel_threads() == []


async def test_opening_does_not_stop_the_loop(tmp_path: Path) -> None:
    gate = Event()

    class Slow(SqliteStore):
        opened_in_time = False

        def open(self) -> None:
            self.opened_in_time = gate.wait(GUARD_S)
            super().open()

    store = Slow(tmp_path / "semel.db")
    once = semel.aopen(store, consumer="c")
    opening = asyncio.create_task(once.run("k", _nothing))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.05, gate.set)
    assert await opening == Done(None)
    assert store.opened_in_time
    await once.close()
    store.close()


async def _nothing() -> None:
    """A handler."""
