"""A span for each run of a handler, by OpenTelemetry; it continues the producer's trace."""

from typing import Any

from semel.brokers.routes import Call, Middleware
from semel.brokers.source import Arrival
from semel.context import current

__all__ = ["tracing"]


def tracing(tracer: Any = None) -> Middleware:
    """Open a span `process {source}` of kind CONSUMER around the handler, under the message's `traceparent`."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    spans = tracer or trace.get_tracer("semel")

    async def traced(message: Arrival, call: Call) -> Any:
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

    return traced
