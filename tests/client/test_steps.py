"""Steps: one effect each, not repeated by a second attempt."""

from collections.abc import Callable
from typing import Any

import pytest

import semel
from semel import Done, Errored
from semel.core.commands import Forget, Renew
from semel.runtime.context import STEPS_MAX
from tests.client.clients import Either, Place, down

pytestmark = pytest.mark.anyio


async def run(client: Either, body: Callable[[Any], Any], key: str = "k") -> Any:
    """Run a handler that is given `step`; each step is a plain function, in either colour."""
    if client.sync:

        def drive(generator: Any) -> Any:
            value = None
            try:
                while True:
                    name, fn = generator.send(value)
                    value = semel.step(name, fn)
            except StopIteration as end:
                return end.value

        return await client.run(key, lambda: drive(body(None)))

    async def handler() -> Any:
        generator, value = body(None), None
        try:
            while True:
                name, fn = generator.send(value)
                value = await semel.step(name, client.handler(fn))
        except StopIteration as end:
            return end.value

    return await client.run(key, handler)


async def test_a_second_attempt_does_not_repeat_a_step(client: Either) -> None:
    effects: list[str] = []

    def effect(name: str) -> Callable[[], Any]:
        def happen() -> tuple[str, int]:
            effects.append(name)
            return name, len(effects)

        return happen

    def body(_: Any) -> Any:
        first = yield "mail", effect("mail")
        second = yield "stock", effect("stock")
        if semel.current().attempt == 1:
            raise ValueError
        third = yield "bill", effect("bill")
        return [first, second, third]

    assert isinstance(await run(client, body), Errored)
    assert await run(client, body) == Done([("mail", 1), ("stock", 2), ("bill", 3)])
    assert effects == ["mail", "stock", "bill"]


async def test_none_is_a_value_too(client: Either) -> None:
    effects: list[int] = []

    def body(_: Any) -> Any:
        value = yield "s", lambda: effects.append(1)
        if semel.current().attempt == 1:
            raise ValueError
        return value is None

    await run(client, body)
    assert await run(client, body) == Done(True)
    assert effects == [1]


async def test_a_name_used_twice_is_refused(client: Either) -> None:
    def body(_: Any) -> Any:
        yield "same", lambda: 1
        yield "same", lambda: 2

    outcome = await run(client, body)
    assert isinstance(outcome.error, semel.errors.StepRepeated)


async def test_each_step_has_its_own_stable_idempotency_key(client: Either) -> None:
    keys: list[tuple[str, str, str]] = []

    def handler() -> None:
        me = semel.current()
        keys.append((me.idempotency_key, me.step_key("a"), me.step_key("b")))
        raise ValueError

    await client.run("k", handler)
    await client.run("k", handler)
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == 3


async def test_steps_are_limited_in_number(client: Either) -> None:
    ran: list[int] = []

    def body(_: Any) -> Any:
        for number in range(STEPS_MAX + 1):
            yield f"s{number}", lambda number=number: ran.append(number)

    outcome = await run(client, body)
    assert isinstance(outcome.error, semel.errors.UsageError)
    assert len(ran) == STEPS_MAX


async def test_steps_share_one_value_limit_and_are_noted_all_the_same(place: Place) -> None:
    client = place.open(policy=semel.Policy(value_bytes_max=1000))
    effects: list[str] = []

    def effect(name: str) -> str:
        effects.append(name)
        return "x" * 600

    def body(_: Any) -> Any:
        yield "a", lambda: effect("a")
        yield "b", lambda: effect("b")
        raise ValueError

    await run(client, body)
    record = place.record("k")
    assert record is not None
    assert [(name, (value or b"")[:1]) for name, value in record.steps] == [("a", b"j"), ("b", b"x")]
    outcome = await run(client, body)
    assert isinstance(outcome.error, semel.errors.ValueNotKept)
    assert "share one value limit" in str(outcome.error)
    assert effects == ["a", "b"]


@pytest.mark.parametrize("name", ["", "x" * 129])
async def test_a_name_has_its_limits(client: Either, name: str) -> None:
    def body(_: Any) -> Any:
        yield name, lambda: 1

    assert isinstance((await run(client, body)).error, semel.errors.UsageError)


async def test_a_step_under_a_lost_claim_says_so(client: Either, place: Place) -> None:
    def body(_: Any) -> Any:
        place.spy._store.send([Forget(("", "billing", "k"), force=True)])
        yield "s", lambda: 1

    assert await run(client, body) == semel.Lost()


async def test_a_step_that_cannot_be_noted_says_so_with_its_value(place: Place) -> None:
    client = place.open(lease="80ms")
    errors: list[semel.errors.NotRecorded] = []

    def body(_: Any) -> Any:
        place.spy.before = down(Renew)
        try:
            yield "s", lambda: 7
        except semel.errors.NotRecorded as error:
            errors.append(error)
            place.spy.before = lambda _items: None
            raise

    # In the generator the error would arrive at its yield; here it ends the handler.
    outcome = await run(client, body)
    assert isinstance(outcome, Errored | semel.Lost)
    place.spy.before = lambda _items: None


async def test_what_a_step_raises_is_the_handlers_own(client: Either) -> None:
    error = LookupError("no")

    def effect() -> None:
        raise error

    def body(_: Any) -> Any:
        yield "s", effect

    assert await run(client, body) == Errored(error, 1)


async def test_steps_are_forgotten_with_their_record(client: Either) -> None:
    effects: list[int] = []

    def body(_: Any) -> Any:
        yield "s", lambda: effects.append(1)
        raise ValueError

    await run(client, body)
    await client.records("forget", "k")
    await run(client, body)
    assert effects == [1, 1]


async def test_no_step_outside_a_handler() -> None:
    with pytest.raises(semel.errors.NotInHandler):
        semel.step("s", lambda: 1)


async def test_a_step_has_the_colour_of_its_handler(client: Either) -> None:
    async def effect() -> None: ...

    if client.sync:

        def handler() -> None:
            coroutine: Any = semel.step("s", effect)
            coroutine.send(None)

        outcome = await client.run("k", handler)
    else:

        async def ahandler() -> None:
            semel.step("s", lambda: 1)

        outcome = await client.run("k", ahandler)
    assert isinstance(outcome.error, TypeError)
