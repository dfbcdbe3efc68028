"""Background tasks and threads: end tasks for certain, answer calls without a task, call what blocks in a thread."""

import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, TypeVar

from semel.core.commands import Answer
from semel.core.protocols import OnAnswer
from semel.errors import StoreUnavailable
from semel.runtime.process import asyncio

__all__ = ["DaemonThread", "answer_in_task", "call_in_daemon_thread", "end_tasks", "resolve_future"]

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


T = TypeVar("T")


async def call_in_daemon_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Return the answer of a call that blocks.

    If this is cancelled, the call goes on, and no one waits for it: `asyncio.to_thread` would delay the end of the
    event loop until it has returned.
    """
    thread = DaemonThread("semel-call")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, call, *arguments)
    finally:
        thread.shutdown(wait=False)


class DaemonThread(Executor):
    """One thread for blocking calls. A call without an answer does not block the exit of the process."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, fn = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(fn())
            except BaseException as error:  # noqa: BLE001 - the caller's
                future.set_exception(error)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call."""
        future: Future[Any] = Future()
        self._calls.put((future, lambda: fn(*args, **kwargs)))
        return future

    async def finish(self, last: Callable[[], None]) -> None:
        """Queue the last call, and wait for it. It runs also if this is cancelled."""
        left = asyncio.wrap_future(self.submit(last))
        left.add_done_callback(_retrieve_error)
        self.shutdown(wait=False)
        await asyncio.shield(left)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - the base's
        """End the thread after the queued calls; with `wait`, return when it has ended."""
        del cancel_futures
        self._calls.put(None)
        if wait:
            self._thread.join()


def _retrieve_error(call: "asyncio.Future[None]") -> None:
    """Retrieve the error of a call that nobody waits for, so that it is not logged as forgotten."""
    if not call.cancelled():
        call.exception()
