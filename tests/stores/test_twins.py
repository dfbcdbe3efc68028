"""A client that blocks has one async twin for all that is made from it, and closes it."""

import asyncio
import threading
from pathlib import Path

import pytest

import semel
from semel.errors import StoreClosed
from tests.services import postgres
from tests.waiting import await_true, until

QUICK = semel.Policy(wait_s=0)


def sessions(name: str) -> int:
    ((count,),) = postgres.execute(
        postgres.url(), f"SELECT count(*)::int FROM pg_stat_activity WHERE application_name = '{name}'"
    )
    return int(count)


@pytest.fixture
def name(tmp_path: Path) -> str:
    return f"twin_{tmp_path.name}"[-40:]


@pytest.fixture
def once(tmp_path: Path, name: str) -> semel.Semel:
    return semel.open(f"{postgres.place(tmp_path)}&application_name={name}", consumer="c")


async def handler() -> int:
    return 1


def test_all_that_is_made_from_a_client_shares_one_twin(once: semel.Semel) -> None:
    assert once.using(QUICK).twin.store is once.twin.store
    once.close()


def test_closing_it_afterwards_closes_the_twin(once: semel.Semel, name: str) -> None:
    async def main() -> None:
        assert await once.twin.run("k", handler) == semel.Done(1)

    with once:
        asyncio.run(main())
        assert sessions(name) >= 2
    assert await_true(lambda: sessions(name) == 0, 10)
    with pytest.raises(StoreClosed):
        asyncio.run(main())


def test_closing_it_inside_the_loop_closes_the_twin_soon(once: semel.Semel, name: str) -> None:
    async def main() -> None:
        await once.twin.run("k", handler)
        once.close()
        await until(left)

    async def left() -> bool:
        return await asyncio.to_thread(sessions, name) == 0

    asyncio.run(main())


def test_closing_it_from_another_thread_closes_the_twin_in_its_loop(once: semel.Semel, name: str) -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(once.twin.run("k", handler), loop).result(20)
    once.close()
    assert await_true(lambda: sessions(name) == 0, 10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_twin_that_nobody_used_costs_nothing(once: semel.Semel, name: str) -> None:
    twin = once.twin
    once.run("k", int)
    once.close()
    assert await_true(lambda: sessions(name) == 0, 10)
    with pytest.raises(StoreClosed):
        asyncio.run(twin.run("k", handler))
