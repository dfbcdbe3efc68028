"""A call that would wait for a claim of its own caller is refused at once."""

import asyncio
import contextvars
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import semel
from semel import Delivery, Done, Errored
from semel.core.commands import Sleep
from semel.runtime.context import held_owners
from semel.runtime.executor import AsyncExecutor, Executor
from semel.stores.memory.store import MemoryStore

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for itself would sleep: here that fails at once instead of after ten seconds."""
    for hands in (Executor, AsyncExecutor):
        rarely = hands._rarely

        def strict(self: Any, command: Any, rarely: Any = rarely) -> Any:
            assert not isinstance(command, Sleep), "it waits for itself"
            return rarely(self, command)

        monkeypatch.setattr(hands, "_rarely", strict)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return MemoryStore() if request.param == "memory" else f"sqlite:///{tmp_path}/events.db"


def errored(outcome: Any) -> semel.errors.UsageError:
    assert isinstance(outcome, Errored)
    assert isinstance(outcome.error, semel.errors.UsageError)
    assert "wait for itself" in str(outcome.error)
    return outcome.error


def nested(once: semel.Semel, key: str) -> Callable[[], int]:
    """A handler that runs another key."""

    def handler() -> int:
        outcome = once.run(key, lambda: 1)
        assert isinstance(outcome, Done)
        return outcome.value

    return handler


def test_run_inside_run(store: Any) -> None:
    with semel.open(store, consumer="billing") as once:
        error = errored(once.run("a", lambda: once.run("a", lambda: 1)))
        assert "__wrapped__" in str(error)
        assert once.run("c", nested(once, "d")) == Done(1)


def test_a_claim_further_out(store: Any) -> None:
    with semel.open(store, consumer="billing") as once:
        found: list[Any] = []

        def inner() -> None:
            try:
                once.run("a", lambda: 1)
            except semel.errors.UsageError as error:
                found.append(error)

        assert isinstance(once.run("a", lambda: once.run("b", inner).__class__.__name__), Done)
        assert len(found) == 1


def test_a_guard_that_calls_itself(store: Any) -> None:
    with semel.open(store, consumer="billing") as once:

        @once.guard(key="order")
        def charge(order: str, depth: int = 0) -> int:
            return depth or charge(order, depth + 1)

        with pytest.raises(semel.errors.UsageError, match="wait for itself"):
            charge("a")

        @once.guard(key="order")
        def plainly(order: str, depth: int = 0) -> int:
            return depth or plainly.__wrapped__(order, depth + 1)

        assert plainly("a") == 1


def test_run_many_inside_and_outside(store: Any) -> None:
    with semel.open(store, consumer="billing") as once:

        def handler(body: str) -> list[Any]:
            outcomes = once.run_many([("a", "inner"), ("b" + body, "inner")], lambda body: body)
            errored(outcomes[0])
            assert outcomes[1] == Done("inner")
            return ["seen"]

        assert once.run_many([Delivery(key="a", body="x")], handler) == [Done(["seen"])]
        assert once.run("c", lambda: str(errored(once.run_many([("c", 1)], str)[0]))[:3]) == Done("'c'")


def test_a_claim_by_hand(store: Any) -> None:
    with semel.open(store, consumer="billing") as once:
        claim = once.claim("a")
        assert isinstance(claim, semel.Claimed)
        with claim, pytest.raises(semel.errors.UsageError, match="wait for itself"):
            once.run("a", lambda: 1)
        assert once.run("a", lambda: None) == Done(None, replayed=True)


def test_another_client_of_the_same_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/events.db"
    with semel.open(url, consumer="billing") as once, semel.open(url, consumer="billing") as other:
        errored(once.run("a", lambda: other.run("a", lambda: 1)))


def test_another_store_and_another_consumer_are_others() -> None:
    store = MemoryStore()
    with (
        semel.open(store, consumer="billing") as once,
        semel.open(store, consumer="mailer") as mailer,
        semel.open("memory:", consumer="billing") as elsewhere,
    ):
        assert once.run("a", nested(mailer, "a")) == Done(1)
        assert once.run("b", nested(elsewhere, "b")) == Done(1)


async def test_awaited(store: Any) -> None:
    async with semel.aopen(store, consumer="billing") as once:

        async def one() -> int:
            return 1

        async def again() -> Any:
            return await once.run("a", one)

        async def in_a_task() -> Any:
            return await asyncio.create_task(once.run("a", one))

        errored(await once.run("a", again))
        errored(await once.run("a", in_a_task))

        @once.guard(key="order")
        async def charge(order: str) -> int:
            return await charge(order)

        with pytest.raises(semel.errors.UsageError, match="wait for itself"):
            await charge("a")

        async def many(_: Any) -> Any:
            async def echo(body: Any) -> Any:
                return body

            return [type(each).__name__ for each in await once.run_many([("m", 1), ("n", 2)], echo)]

        assert await once.run_many([("m", 1)], many) == [Done(["Errored", "Done"])]
        claim = await once.claim("h")
        assert isinstance(claim, semel.Claimed)
        async with claim:
            with pytest.raises(semel.errors.UsageError, match="wait for itself"):
                await once.run("h", one)


async def test_a_blocking_client_in_a_thread_of_an_async_handler(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/events.db"
    with semel.open(url, consumer="billing") as blocking:
        async with semel.aopen(url, consumer="billing") as once:

            async def handler() -> Any:
                return await asyncio.to_thread(blocking.run, "a", lambda: 1)

            errored(await once.run("a", handler))


def test_a_context_that_outlives_its_handler_holds_nothing(store: Any) -> None:
    with semel.open(store, consumer="billing") as once:
        contexts: list[contextvars.Context] = []
        assert once.run("a", lambda: contexts.append(contextvars.copy_context())) == Done(None)
        once.records.forget("a")
        assert contexts[0].run(once.run, "a", lambda: 1) == Done(1)


def test_a_claim_is_ones_own_while_its_handler_runs(store: Any) -> None:
    contexts: list[contextvars.Context] = []
    seen: list[int] = []

    def fails() -> None:
        contexts.append(contextvars.copy_context())
        seen.append(len(held_owners(("", "billing", "a"))))
        raise ValueError

    with semel.open(store, consumer="billing") as once:
        assert isinstance(once.run("a", fails), Errored)
        assert seen == [1]
        assert contexts[0].run(held_owners, ("", "billing", "a")) == set()
        claim = once.claim("a")
        assert isinstance(claim, semel.Claimed)
        with claim:
            context = contextvars.copy_context()
            assert len(context.run(held_owners, ("", "billing", "a"))) == 1
        assert context.run(held_owners, ("", "billing", "a")) == set()
