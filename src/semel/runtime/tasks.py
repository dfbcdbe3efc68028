"""End background tasks for certain, and pass on the answers of calls that have no task."""

from collections.abc import Coroutine
from typing import Any

from semel.core.commands import Answer
from semel.core.protocols import OnAnswer
from semel.errors import StoreUnavailable
from semel.runtime.process import asyncio

__all__ = ["answer_in_task", "end_tasks", "resolve_future"]

AGAIN_S = 1.0
"""How long a cancelled task has to close its resources, before it is cancelled again."""


async def end_tasks(*tasks: "asyncio.Task[Any] | None") -> None:
    """Cancel tasks and wait until each has ended; its errors are dropped. For loops that run until they are cancelled.

    One cancellation may be lost: a driver raises an error of its own in its place, or `wait_for` of Python 3.11 drops
    it if its wait ends in the same turn of the loop. So the cancellation is repeated.
    """
    left = {task for task in tasks if task is not None}
    while left:
        for task in left:
            task.cancel()
        ended, left = await asyncio.wait(left, timeout=AGAIN_S)
        for task in ended:
            if not task.cancelled():
                task.exception()


def resolve_future(future: "asyncio.Future[Answer]", answer: Answer, error: Exception | None) -> None:
    """Pass an answer or an error on to the caller that waits for it, if it still does."""
    if future.done():
        return
    if error is None:
        future.set_result(answer)
    else:
        future.set_exception(error)


_answering: "set[asyncio.Task[None]]" = set()
"""Tasks that find out an answer; the event loop itself does not keep its tasks alive."""


def answer_in_task(asking: Coroutine[Any, Any, list[Answer]], done: OnAnswer) -> None:
    """Await the answer to one item in a task of its own, and pass it on."""
    task = asyncio.get_running_loop().create_task(_answer(asking, done), name="semel-answer")
    _answering.add(task)
    task.add_done_callback(_answering.discard)


async def _answer(asking: Coroutine[Any, Any, list[Answer]], done: OnAnswer) -> None:
    try:
        (answer,) = await asking
    except Exception as error:  # noqa: BLE001 - it belongs to the caller
        done(None, error)
    except asyncio.CancelledError:
        done(None, StoreUnavailable("the event loop is closing"))
    else:
        done(answer, None)
