"""Run a generator that yields commands and is sent their answers: `drive` blocks, `adrive` awaits."""

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

__all__ = ["adrive", "drive"]

C = TypeVar("C")
T = TypeVar("T")


def drive(flow: Generator[C, Any, T], perform: Callable[[C], Any], answer: Any = None) -> T:
    """Run a flow to its end and return its value.

    An exception of `perform` is thrown into the flow; one that the flow does not catch is raised. `answer` is
    sent first: the answer to the command that the flow yielded last, `None` for a flow that has not begun.
    """
    try:
        command = flow.send(answer)
        while True:
            try:
                answer = perform(command)
            except BaseException as error:  # noqa: BLE001 - the flow decides, and may clean up
                command = flow.throw(error)
            else:
                command = flow.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def adrive(flow: Generator[C, Any, T], perform: Callable[[C], Awaitable[Any]], answer: Any = None) -> T:
    """Do the same as `drive`, and await what `perform` returns."""
    try:
        command = flow.send(answer)
        while True:
            try:
                answer = await perform(command)
            except BaseException as error:  # noqa: BLE001 - the flow decides, and may clean up
                command = flow.throw(error)
            else:
                command = flow.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
