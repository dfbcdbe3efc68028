"""End background tasks for certain."""

from typing import Any

from semel.runtime.process import asyncio

__all__ = ["end_tasks"]

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
