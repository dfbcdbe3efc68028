"""Dramatiq middleware: actors that run once for each key, after a retry, a redelivery or the death of a worker.

::

    broker.add_middleware(OnceActors(once))

    @dramatiq.actor(once="order_id")
    def charge(order_id: str) -> None: ...
"""

import logging
import math
from contextvars import ContextVar
from functools import wraps
from typing import Any

from dramatiq import Actor, Broker, Middleware
from dramatiq.middleware import SkipMessage
from msgspec.structs import replace

from semel.client.client import Semel
from semel.client.guard import unwrap
from semel.errors import StoreUnavailable, UsageError
from semel.types import Busy, Done, Lost, Outcome, Unavailable

__all__ = ["OnceActors"]

_log = logging.getLogger("semel.dramatiq")

AWAY_S = 5.0
"""How long a message waits while the store gives no answer."""
LOST_S = 1.0
"""How long a message waits whose claim another attempt has taken over."""

_message: ContextVar[Any] = ContextVar("semel_dramatiq_message", default=None)


class OnceActors(Middleware):
    """Adds the option `once` to actors: where the key is in the arguments, as for `guard`; `True`: the message's id.

    The record is settled before Dramatiq acknowledges. A message whose key is being handled elsewhere is enqueued
    again for later, then skipped; its `retries` stay as they are. A direct call of an actor is not guarded. Add it
    before actors are declared.
    """

    def __init__(self, once: Semel) -> None:
        if once.mode not in ("lease", "quarantine", "observe"):
            raise UsageError(f"mode {once.mode!r} needs your transaction; call inbox() inside a plain actor")
        self._once = once.using(replace(once.policy, wait_s=0.0))

    @property
    def actor_options(self) -> set[str]:
        """The option that this middleware adds."""
        return {"once"}

    def before_process_message(self, broker: Broker, message: Any) -> None:  # noqa: ARG002 - Dramatiq's signature
        """Note the message, for the key and for another try."""
        _message.set(message)

    def after_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        """Guard the actor's function, if it has the option."""
        key = actor.options.get("once")
        if not key:
            return
        source = (lambda *_, **__: _message.get().message_id) if key is True else key
        plain = actor.fn

        @wraps(plain)
        def handle(*args: Any, **kwargs: Any) -> Any:
            _message.set(None)  # a call of an actor inside of this one is a direct call
            return plain(*args, **kwargs)

        guarded: Any = self._once.guard(key=source, name=actor.actor_name)(handle)

        @wraps(plain)
        def run(*args: Any, **kwargs: Any) -> Any:
            message = _message.get()
            if message is None or message.actor_name != actor.actor_name:
                return plain(*args, **kwargs)
            try:
                outcome: Outcome[Any] = guarded.call(*args, **kwargs)
            except StoreUnavailable as error:
                outcome = Unavailable(error)
            finally:
                _message.set(None)
            return settle(broker, message, outcome)

        actor.fn = run


def settle(broker: Broker, message: Any, outcome: Outcome[Any]) -> Any:
    """Return the actor's value, or raise what makes Dramatiq retry, fail or skip the message."""
    match outcome:
        case Done(value):
            if not outcome.recorded and not outcome.replayed:
                _log.warning("%s ran, and could not be recorded: a repeat may run again", message.message_id)
            return value
        case Busy(retry_after_s):
            delay_s = retry_after_s
        case Lost():
            delay_s = LOST_S
        case Unavailable(error):
            _log.warning("%s waits: the store gave no answer: %s", message.message_id, error)
            delay_s = AWAY_S
        case _:
            return unwrap(outcome, message.message_id)
    broker.enqueue(message.copy(), delay=math.ceil(delay_s * 1000))
    raise SkipMessage(f"{message.message_id} is handled elsewhere; it comes again in {delay_s:.1f} s")
