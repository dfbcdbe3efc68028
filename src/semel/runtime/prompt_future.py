"""A future for one task, which the answer wakes at once: a future of asyncio wakes it in the next turn of the loop.

A turn costs a lone caller as much as the rest of the way to the store.
"""

from collections.abc import Callable, Generator
from typing import Any

from semel.runtime.process import asyncio

__all__ = ["PromptFuture"]


class PromptFuture:
    """Awaited by one task. A task accepts it as it accepts a future: by `_asyncio_future_blocking`."""

    __slots__ = ("_asyncio_future_blocking", "_callback", "_cancelled", "_context", "_done", "_loop")

    def __init__(self, loop: "asyncio.AbstractEventLoop") -> None:
        self._asyncio_future_blocking = False
        self._loop = loop
        self._callback: Callable[[PromptFuture], object] | None = None
        self._context: Any = None
        self._done = False
        self._cancelled = False

    def __await__(self) -> Generator["PromptFuture", None, None]:
        if not self._done:
            self._asyncio_future_blocking = True
            yield self
        self.result()

    def set_result(self, _result: None) -> None:
        """Wake the task. It runs now, unless the caller is a task itself; call this last."""
        self._done = True
        if self._callback is None:
            return
        if asyncio.current_task(self._loop) is None:
            self._context.run(self._callback, self)
        else:
            self._loop.call_soon(self._callback, self, context=self._context)

    def done(self) -> bool:
        """Whether the task was woken or cancelled."""
        return self._done

    # --- called by the task ---

    def get_loop(self) -> "asyncio.AbstractEventLoop":
        """Return the loop of the task."""
        return self._loop

    def add_done_callback(self, callback: Callable[["PromptFuture"], object], *, context: Any = None) -> None:
        """Note how to wake the task."""
        self._callback, self._context = callback, context

    def cancel(self, msg: Any = None) -> bool:  # noqa: ARG002 - as a future has it
        """Wake the task with a cancellation, in the next turn. `False`: it was woken already."""
        if self._done:
            return False
        self._done = self._cancelled = True
        if self._callback is not None:
            self._loop.call_soon(self._callback, self, context=self._context)
        return True

    def result(self) -> None:
        """Raise the cancellation, if there was one."""
        if self._cancelled:
            raise asyncio.CancelledError
