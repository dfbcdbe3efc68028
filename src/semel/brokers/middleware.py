"""Middleware around a handler: `Route(charge, once=once, middleware=[tracing(), timeout(5), retry(IOError)])`.

The first is the outermost. Each gets the message and the next call, and awaits it.
"""

from typing import Any

from semel.brokers.routes import Call, Middleware
from semel.brokers.source import Arrival
from semel.errors import GiveUp
from semel.runtime.context import current
from semel.runtime.process import asyncio

__all__ = ["GiveUp", "dead_letter", "retry", "timeout", "tracing"]


def dead_letter(*kinds: type[Exception]) -> Middleware:
    """Dead-letter the message when its handler raises one of these, instead of retrying it."""

    async def final(message: Arrival, call: Call) -> Any:
        try:
            return await call(message)
        except kinds as error:
            raise GiveUp(f"{type(error).__name__}: {error}") from error

    return final


def retry(
    *kinds: type[Exception], tries: int = 3, wait_s: float = 0.1, wait_max_s: float = 2.0
) -> Middleware:
    """Retry the handler when it raises one of these, with a growing pause; the last error is the attempt's.

    For effects that may be repeated: it is the same attempt, under the same claim. Other errors, and the error
    of the last try, release the claim; the message comes back after the policy's delay.
    """
    import stamina

    async def patient(message: Arrival, call: Call) -> Any:
        async for attempt in stamina.retry_context(
            on=kinds or Exception, attempts=tries, timeout=None, wait_initial=wait_s, wait_max=wait_max_s
        ):
            with attempt:
                return await call(message)
        raise AssertionError("unreachable: the last try returns or raises")  # pragma: no cover

    return patient


def timeout(after_s: float) -> Middleware:
    """Cancel the handler after this time: the attempt counts, and ends with `TimeoutError`.

    A blocking handler runs in a thread, which cannot be stopped: its result counts.
    """

    async def cancel_late(message: Arrival, call: Call) -> Any:
        async with asyncio.timeout(after_s):
            return await call(message)

    return cancel_late


def tracing(tracer: Any = None) -> Middleware:
    """Open a span `process {source}` of kind CONSUMER around the handler, under the message's `traceparent`."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    spans = tracer or trace.get_tracer("semel")

    async def open_span(message: Arrival, call: Call) -> Any:
        parent = message.by_name.get("traceparent")
        context = TraceContextTextMapPropagator().extract({"traceparent": parent} if parent else {})
        attributes: dict[str, Any] = {
            "messaging.system": message.transport.replace(" ", "_"),
            "messaging.operation.type": "process",
            "messaging.message.id": message.position or "",
            "semel.consumer": current().consumer,
            "semel.attempt": current().attempt,
        }
        destination = (message.position or message.transport).partition("/")[0]
        with spans.start_as_current_span(
            f"process {destination}", context, kind=trace.SpanKind.CONSUMER, attributes=attributes
        ):
            return await call(message)

    return open_span
