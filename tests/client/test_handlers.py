"""What cannot be run to its end is refused before the claim, or gives its claim back without a counted attempt."""

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import semel
from semel import Delivery, Done, Errored
from tests.client.clients import Either, Place

pytestmark = pytest.mark.anyio


def generates(*_: Any) -> Iterator[int]:
    yield 1


async def agenerates(*_: Any) -> AsyncIterator[int]:
    yield 1


async def awaits(*_: Any) -> int:
    return 1


class Awaits:
    async def __call__(self, *_: Any) -> int:
        return 1

    async def method(self, *_: Any) -> int:
        return 1


class Generates:
    def __call__(self, *_: Any) -> Iterator[int]:
        yield 1

    def method(self, *_: Any) -> Iterator[int]:
        yield 1


ASYNC = [awaits, Awaits(), Awaits().method, functools.partial(awaits, 1), functools.partial(Awaits(), 1)]
GENERATORS = [
    generates,
    agenerates,
    Generates(),
    Generates().method,
    functools.partial(generates, 1),
    functools.partial(functools.partial(Generates(), 1), 2),
]


def verbs(once: Any, handler: Any) -> list[Any]:
    """Every way to hand a handler to a client."""
    return [
        lambda: once.run("k", handler),
        lambda: once.run_many([Delivery(key="k", body=1)], handler),
        lambda: once.sweep(handler),
    ]


async def refused(place: Place, handler: Any, match: str) -> None:
    client = place.open()
    await client.run("warm", lambda: None)
    place.spy.clear()
    for verb in verbs(client.inner, handler):
        with pytest.raises(TypeError, match=match):
            verb() if client.sync else await verb()
    assert place.record("k") is None


@pytest.mark.parametrize("handler", GENERATORS, ids=range(len(GENERATORS)))
async def test_a_generator_function_is_refused_before_the_claim(place: Place, handler: Any) -> None:
    await refused(place, handler, "generator function")
    with pytest.raises(TypeError, match="generator function"):
        place.open().inner.guard(key=lambda *_: "k", name="handler")(handler)


@pytest.mark.parametrize("handler", ASYNC, ids=range(len(ASYNC)))
async def test_what_is_awaited_is_refused_by_a_client_that_blocks(place: Place, handler: Any) -> None:
    if place.kind.colour == "sync":
        await refused(place, handler, "async def")
    else:
        assert await place.open().inner.run("k", handler) == Done(1)


@pytest.mark.parametrize("handler", [None, 5, "charge"])
async def test_what_is_not_callable_is_refused_before_the_claim(place: Place, handler: Any) -> None:
    await refused(place, handler, "not callable")


@pytest.mark.parametrize("made", [awaits, generates, agenerates])
async def test_work_that_has_not_run_is_not_done_and_counts_no_attempt(place: Place, made: Any) -> None:
    client = place.open(policy=semel.Policy(max_attempts=2))

    def handler() -> Any:
        return made()

    for _ in range(4):  # more often than attempts are allowed
        outcome = await client.run("k", handler)
        assert isinstance(outcome, Errored)
        assert isinstance(outcome.error, TypeError)
        assert "has not run" in str(outcome.error)
        assert outcome.attempt == 1
    assert await client.run("k", lambda: 1) == Done(1)


@pytest.mark.parametrize("made", [awaits, generates])
async def test_in_a_batch(client: Either, made: Any) -> None:
    bad, good = await client.run_many(
        [Delivery(key="bad", body=1), Delivery(key="good", body=2)],
        lambda body: made() if body == 1 else body,
    )
    assert isinstance(bad, Errored)
    assert good == Done(2)
