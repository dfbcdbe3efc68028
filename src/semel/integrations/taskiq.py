"""Taskiq middleware: tasks that run once for each key, after a retry, a redelivery or the death of a worker.

::

    broker = RedisStreamBroker("redis://localhost/0").with_middlewares(OnceTasks(once))

    @broker.task(once="order_id")
    async def charge(order_id: str) -> str: ...
"""

import asyncio
import logging
from contextvars import ContextVar
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any

from msgspec.structs import replace
from taskiq import TaskiqMessage, TaskiqMiddleware, TaskiqResult
from taskiq.exceptions import NoResultError

from semel.client.client import Semel
from semel.client.guard import unwrap
from semel.errors import StoreUnavailable, UsageError
from semel.types import Busy, Done, Lost, Outcome, Unavailable

__all__ = ["OnceTasks"]

_log = logging.getLogger("semel.taskiq")

AWAY_S = 5.0
"""How long a task waits, in its slot of the worker, while the store gives no answer."""
WAIT_S = 5.0
"""How long a task waits, in its slot of the worker, for an attempt that runs elsewhere; then it is sent again."""

_message: ContextVar[TaskiqMessage | None] = ContextVar("semel_taskiq_message", default=None)


class SentAgain(NoResultError):
    """The task is sent again with the same id, so its result comes later."""

    delay_s: float = 0.0
    """How long to wait before that."""


class OnceTasks(TaskiqMiddleware):
    """Adds the label `once` to tasks: where the key is in the arguments, as for `guard`; `True`: the task's id.

    The record is settled before Taskiq acknowledges. A task whose key is being handled elsewhere waits a little, and
    is then sent again with the same id. A direct call of a task is not guarded. Worker processes use threads for
    blocking tasks; `--use-process-pool` cannot be used for guarded ones.
    """

    def __init__(self, once: Semel) -> None:
        super().__init__()
        if once.mode not in ("lease", "quarantine", "observe"):
            raise UsageError(f"mode {once.mode!r} needs your transaction; call inbox() inside a plain task")
        self._once = once.using(replace(once.policy, wait_s=min(once.policy.wait_s or WAIT_S, WAIT_S)))
        self._guarded: set[str] = set()

    def pre_execute(self, message: TaskiqMessage) -> TaskiqMessage:
        """Guard the task's function, if it has the label, and note the message for the key."""
        task: Any = self.broker.find_task(message.task_name)
        key = task.labels.get("once")
        if key:
            if message.task_name not in self._guarded:
                task.original_func = self._guard(task, key)
                self._guarded.add(message.task_name)
            message.labels.setdefault("ack_type", "when_saved")  # whatever the worker does with other tasks
            _message.set(message)
        return message

    async def on_error(
        self,
        message: TaskiqMessage,
        result: TaskiqResult[Any],  # noqa: ARG002 - Taskiq's signature
        exception: BaseException,
    ) -> None:
        """Send a task again whose key is being handled elsewhere; its message is acknowledged after that."""
        if isinstance(exception, SentAgain):
            await asyncio.sleep(exception.delay_s)
            await self.broker.kick(self.broker.formatter.dumps(message))

    def _guard(self, task: Any, key: Any) -> Any:
        plain, name = task.original_func, task.task_name
        source = _task_id if key is True else key
        if iscoroutinefunction(plain):

            @wraps(plain)
            async def handle(*args: Any, **kwargs: Any) -> Any:
                _message.set(None)  # a call of this task inside of it is a direct call
                return await plain(*args, **kwargs)

            guarded: Any = self._once.guard(key=source, name=name)(handle)

            @wraps(plain)
            async def run(*args: Any, **kwargs: Any) -> Any:
                if (message := _message.get()) is None or message.task_name != name:
                    return await plain(*args, **kwargs)
                try:
                    return settle(await guarded.call(*args, **kwargs), message.task_id)
                except StoreUnavailable as error:
                    return settle(Unavailable(error), message.task_id)

            return run

        @wraps(plain)
        def handle_blocking(*args: Any, **kwargs: Any) -> Any:
            _message.set(None)
            return plain(*args, **kwargs)

        blocking: Any = self._once.guard(key=source, name=name)(handle_blocking)

        @wraps(plain)
        def run_blocking(*args: Any, **kwargs: Any) -> Any:
            if (message := _message.get()) is None or message.task_name != name:
                return plain(*args, **kwargs)
            try:
                return settle(blocking.call(*args, **kwargs), message.task_id)
            except StoreUnavailable as error:
                return settle(Unavailable(error), message.task_id)

        return run_blocking


def _task_id(*_: Any, **__: Any) -> str:
    message = _message.get()
    assert message is not None
    return message.task_id


def settle(outcome: Outcome[Any], task_id: str) -> Any:
    """Return the task's value, or raise what makes Taskiq fail it, retry it or send it again."""
    match outcome:
        case Done(value, replayed=False, recorded=False):
            _log.warning("%s ran, and could not be recorded: a repeat may run again", task_id)
            return value
        case Done(value):
            return value
        case Busy() | Lost():
            raise SentAgain
        case Unavailable(error):
            _log.warning("%s waits: the store gave no answer: %s", task_id, error)
            raise SentAgain(delay_s=AWAY_S) from error
        case _:
            return unwrap(outcome, task_id)
