"""Celery tasks that run once for each key: after a retry, a redelivery, or the death of a worker.

::

    once = semel.open("redis://localhost/0", consumer="billing")

    @task(app, once, key="order_id")
    def charge(order_id: str) -> str: ...

The record is settled before Celery acknowledges the message (`acks_late`), so a worker that dies loses nothing.
"""

import logging
from collections.abc import Callable
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Reject
from msgspec.structs import replace

from semel.client.client import Semel
from semel.client.guard import KeySource, unwrap
from semel.errors import StoreUnavailable, UsageError
from semel.types import Busy, Done, Lost, Outcome, Unavailable

__all__ = ["once_task", "task"]

_log = logging.getLogger("semel.celery")

AWAY_S = 5.0
"""How long a task waits while the store gives no answer."""
LOST_S = 1.0
"""How long a task waits whose claim another attempt has taken over; then it gets that attempt's value."""


def once_task(once: Semel, *, key: KeySource | None = None) -> type[Any]:
    """Return a base for tasks: `app.task(base=once_task(once))`. The records belong to the task's name.

    `key`: a path into the arguments or a callable, as for `guard`; by default the task's id, which is the same for
    retries and redeliveries, and new for each `delay()`. A task whose key is being handled elsewhere is sent again
    for later, with the same id, before its message is acknowledged. A direct call of the task is not guarded.
    """
    if once.mode not in ("lease", "quarantine", "observe"):
        raise UsageError(f"mode {once.mode!r} needs your transaction; call inbox() inside a plain task")
    patient = once.using(replace(once.policy, wait_s=0.0))

    class OnceTask(Task):  # type: ignore[misc]  # Celery has no types
        """A task that runs once for each key."""

        abstract = True
        acks_late = True
        reject_on_worker_lost = True
        _guarded: Any = None

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Run the task under a claim, as Celery's worker calls it."""
            if self.request.called_directly:
                return self.run(*args, **kwargs)
            if self._guarded is None:  # by now `run` has Celery's own wrapper for `autoretry_for`
                source = key or (lambda *_, **__: self.request.id)
                self._guarded = patient.guard(key=source, name=self.name)(self.run)
            try:
                outcome: Outcome[Any] = self._guarded.call(*args, **kwargs)
            except StoreUnavailable as error:
                outcome = Unavailable(error)
            return settle(self, outcome)

    return OnceTask


def task(
    app: Any, once: Semel, *, key: KeySource | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Turn a function into a task of the app that runs once for each key; `options` are those of `app.task`."""
    decorate: Callable[[Callable[..., Any]], Any] = app.task(base=once_task(once, key=key), **options)
    return decorate


def settle(running: Any, outcome: Outcome[Any]) -> Any:
    """Return the task's value, or raise what makes Celery fail it or send it again."""
    match outcome:
        case Done(value, replayed=False, recorded=False):
            _log.warning("%s ran, and could not be recorded: a repeat may run again", running.request.id)
            return value
        case Done(value):
            return value
        case Busy(retry_after_s):
            raise send_again(running, retry_after_s)
        case Lost():
            raise send_again(running, LOST_S)
        case Unavailable(error):
            _log.warning("%s waits: the store gave no answer: %s", running.request.id, error)
            raise send_again(running, AWAY_S)
        case _:
            return unwrap(outcome, str(running.request.id))


def send_again(running: Any, delay_s: float) -> Exception:
    """Send the task again for later; returns what makes Celery acknowledge this message. `retries` stays as it is.

    If it cannot be sent, the exception gives the message back to the broker.
    """
    request = running.request
    if not request.is_eager:
        try:
            running.signature_from_request(request, countdown=delay_s, retries=request.retries).apply_async()
        except Exception as error:  # noqa: BLE001 - whatever it is, the message must not be lost
            _log.warning("%s goes back to its queue: %s", request.id, error)
            back: Exception = Reject(error, requeue=True)
            return back
    done: Exception = Ignore()
    return done
