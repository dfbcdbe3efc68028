"""A thread for calls that block: one without an answer delays neither a stop nor the exit of the process."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, TypeVar

from semel.runtime.process import asyncio

__all__ = ["DaemonThread", "call_in_daemon_thread"]

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
