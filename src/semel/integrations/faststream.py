"""A middleware for FastStream: its handlers run once for each key, and its acks follow the outcome.

::

    broker = NatsBroker(middlewares=[once_middleware(semel.aopen("redis://localhost/0", consumer="billing"))])

The key is read from the raw message: FastStream invents an id if none was sent.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from faststream import BaseMiddleware
from faststream.exceptions import AckMessage, NackMessage, RejectMessage, SkipMessage
from msgspec.structs import replace

from semel.client.client_async import AsyncSemel
from semel.errors import GiveUp, KeyInvalid, KeyMissing, UsageError
from semel.keys.identity import Identity
from semel.keys.message import Envelope
from semel.types import Done, Errored, Failed, Late, Mismatch, Outcome, Unknown

__all__ = ["once_middleware"]

_log = logging.getLogger("semel.faststream")


def once_middleware(once: AsyncSemel, *, key: Any = None) -> Callable[..., BaseMiddleware[Any, Any]]:
    """Return a middleware for a broker or a subscriber; `key`: where the key is, as for a runner's route.

    Done, now or before: acknowledged. Failed for good, unknown, or without a key: rejected, and routed as the broker
    does with rejected messages. Anything else: requeued and delivered again. A handler's own `AckMessage` and
    `RejectMessage` mean done and failed. Not for batch subscribers, whose messages have no ack of their own.
    """
    if once.mode not in ("lease", "quarantine", "mark", "observe"):
        raise UsageError(f"mode {once.mode!r} runs in a transaction; use semel.brokers.Runner")
    permanent = (*once.policy.permanent, GiveUp, RejectMessage)
    patient = once.using(replace(once.policy, wait_s=0.0, keep_value=False, permanent=permanent))
    identity = key if isinstance(key, Identity) else Identity(key=key)

    class Once(BaseMiddleware[Any, Any]):
        """One message of one subscriber."""

        async def consume_scope(self, call_next: Callable[[Any], Awaitable[Any]], msg: Any) -> Any:
            """Run the rest of the chain under a claim."""
            try:
                found = identity(raw(msg))
            except (KeyMissing, KeyInvalid) as error:
                _log.warning("rejected: %s", error)
                raise RejectMessage from error
            return answer(await patient.run(found, call_handler, call_next, msg))

    return Once


async def call_handler(call_next: Callable[[Any], Awaitable[Any]], msg: Any) -> Any:
    """Call the next middleware; the framework's acknowledging exceptions count as done."""
    try:
        return await call_next(msg)
    except (AckMessage, SkipMessage):
        return None


def raw(msg: Any) -> Envelope:
    """Return the raw message."""
    if isinstance(msg.raw_message, list | tuple) or msg.batch_headers:
        raise UsageError("a batch subscriber acknowledges all or none; use one that takes single messages")
    sent = msg.raw_message
    broker_id = getattr(sent, "message_id", None) if hasattr(sent, "delivery_tag") else None
    return Envelope(headers=msg.headers, body=msg.body, broker_id=broker_id, transport="faststream")


def answer(outcome: Outcome[Any]) -> Any:
    """Return the handler's value, or raise the exception that makes FastStream ack, reject or requeue the message."""
    match outcome:
        case Done(value, replayed=False, recorded=True) | Done(value, guarded=False):
            return value
        case Done(recorded=True) | Failed(replayed=True):
            raise AckMessage
        case Failed(error):
            _log.error("given up", exc_info=error)
            raise RejectMessage from error
        case Errored(error):
            _log.warning("to be delivered again", exc_info=error)
            raise NackMessage from error
        case Unknown() | Mismatch() | Late():
            _log.error("rejected: %r", outcome)
            raise RejectMessage
        case _:
            _log.warning("to be delivered again: %r", outcome)
            raise NackMessage
