"""A sync client inside a running event loop says once that it blocks it, and what to use instead."""

import asyncio
import warnings
from contextlib import closing
from pathlib import Path
from sqlite3 import connect
from typing import Any

import pytest

import semel
from semel.errors import EventLoopBlocked

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def every_warning() -> Any:
    """The suite looks away from this one, because many tests do it on purpose."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EventLoopBlocked)
        yield caught


def blocked(caught: Any) -> list[Any]:
    return [each for each in caught if each.category is EventLoopBlocked]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/events.db"


async def test_it_warns_once_and_names_the_line_and_the_way_out(url: str, every_warning: Any) -> None:
    with semel.open(url, consumer="c") as once:
        for number in range(3):
            once.run(f"k{number}", lambda: None)
        once.using(semel.Policy(wait_s=0)).run("other", lambda: None)
    (warning,) = blocked(every_warning)
    assert "semel.aopen()" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("verb", ["run", "run_many", "guard", "claim", "records"])
async def test_every_verb_that_blocks_warns(url: str, every_warning: Any, verb: str) -> None:
    once = semel.open(url, consumer="c")
    verbs: dict[str, Any] = {
        "run": lambda: once.run("k", lambda: None),
        "run_many": lambda: once.run_many([semel.Delivery(key="k", body=1)], lambda _body: None),
        "guard": lambda: once.guard(key="key", name="echo")(lambda key: key)("k"),
        "claim": lambda: once.claim("k"),
        "records": lambda: once.records.lookup("k"),
    }
    verbs[verb]()
    once.close()
    (warning,) = blocked(every_warning)
    assert warning.filename == __file__


@pytest.mark.parametrize("verb", ["run", "run_many", "claim", "complete", "records", "mark", "inbox"])
def test_a_client_that_was_used_outside_warns_at_its_first_use_inside(
    url: str, tmp_path: Path, every_warning: Any, verb: str
) -> None:
    mode: Any = verb if verb in ("mark", "inbox") else "lease"
    with semel.open(url, consumer="c", mode=mode) as once, closing(connect(tmp_path / "events.db")) as own:
        claim: Any = once.claim("k") if mode == "lease" else None
        verbs: dict[str, Any] = {
            "run": lambda: once.run("l", lambda: None),
            "run_many": lambda: once.run_many([("l", 1)], lambda _body: None),
            "claim": lambda: once.claim("l"),
            "complete": lambda: once.complete(claim),
            "records": lambda: once.records.lookup("k"),
            "mark": lambda: once.mark("k"),
            "inbox": lambda: once.inbox(own),
        }

        async def use() -> None:
            verbs[verb]()

        assert blocked(every_warning) == []
        asyncio.run(use())
    (warning,) = blocked(every_warning)
    assert warning.filename == __file__


def test_outside_of_a_loop_it_is_silent(url: str, every_warning: Any) -> None:
    with semel.open(url, consumer="c") as once:
        once.run("k", lambda: None)
    assert blocked(every_warning) == []


async def test_in_a_thread_it_is_silent(url: str, every_warning: Any) -> None:
    with await asyncio.to_thread(semel.open(url, consumer="c").__enter__) as once:
        await asyncio.to_thread(once.run, "k", lambda: None)
        assert blocked(every_warning) == []


async def test_an_async_client_and_the_twin_are_silent(url: str, every_warning: Any) -> None:
    once = semel.open(url, consumer="c")

    @once.guard(key="key")
    async def charge(key: str) -> str:
        return key

    assert await charge("k") == "k"
    async with semel.aopen(url, consumer="c") as aonce:
        await aonce.run("l", charge, "l")
    await once.twin.close()
    once.close()
    assert blocked(every_warning) == []


async def test_a_store_in_memory_blocks_nothing(every_warning: Any) -> None:
    with semel.open("memory:", consumer="c") as once:
        once.run("k", lambda: None)
    assert blocked(every_warning) == []
