"""The two drivers: what they send into a flow, what they throw, and what they return."""

import asyncio
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

import pytest

from semel.runtime.generators import adrive, drive

Talk: TypeAlias = Generator[str, Any, Any]
Run: TypeAlias = Callable[..., Any]


def awaited(flow: Talk, perform: Callable[[str], Any], answer: Any = None) -> Any:
    async def awaits(command: str) -> Any:
        await asyncio.sleep(0)
        return perform(command)

    return asyncio.run(adrive(flow, awaits, answer))


both = pytest.mark.parametrize("run", [drive, awaited], ids=["drive", "adrive"])


class Refused(BaseException):
    """No `Exception`, as a cancellation is none."""


def refuse(command: str) -> str:
    if command == "bad":
        raise Refused
    return command.upper()


def two() -> Talk:
    first = yield "a"
    second = yield "b"
    return [first, second]


def careful() -> Talk:
    try:
        yield "bad"
    except Refused:
        return (yield "good")


def careless(seen: list[str]) -> Talk:
    try:
        yield "bad"
    finally:
        seen.append("cleaned up")


@both
def test_a_flow_is_sent_each_answer_and_its_value_is_returned(run: Run) -> None:
    assert run(two(), refuse) == ["A", "B"]


@both
def test_a_flow_under_way_goes_on_with_the_answer_it_waits_for(run: Run) -> None:
    flow = two()
    next(flow)
    assert run(flow, refuse, "given") == ["given", "B"]


@both
def test_a_flow_that_yields_nothing_returns_at_once(run: Run) -> None:
    def empty() -> Talk:
        yield from ()
        return "value"

    assert run(empty(), refuse) == "value"


@both
def test_an_error_is_thrown_into_the_flow_which_may_go_on(run: Run) -> None:
    assert run(careful(), refuse) == "GOOD"


@both
def test_an_error_that_the_flow_does_not_catch_is_raised_after_its_clean_up(run: Run) -> None:
    seen: list[str] = []
    with pytest.raises(Refused):
        run(careless(seen), refuse)
    assert seen == ["cleaned up"]


@both
def test_a_flow_may_raise_another_error_for_the_one_it_was_given(run: Run) -> None:
    def translating() -> Talk:
        try:
            yield "bad"
        except Refused as error:
            raise ValueError("refused") from error

    with pytest.raises(ValueError, match="refused") as caught:
        run(translating(), refuse)
    assert isinstance(caught.value.__cause__, Refused)


def test_a_cancelled_adrive_closes_its_flow() -> None:
    seen: list[str] = []

    async def main() -> None:
        begun = asyncio.Event()

        async def hang(_command: str) -> None:
            begun.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(adrive(careless(seen), hang))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert seen == ["cleaned up"]
