"""Trace deliveries with OpenTelemetry: one span each; a duplicate links to the span of the first delivery.

Needs the extra `otel`, which installs only the API: without an SDK in the program nothing is recorded.
"""

from collections.abc import Callable
from typing import Any

from semel.core.ids import digest
from semel.observe import events
from semel.runtime.extras import install_command

try:
    from opentelemetry import context as otel_context
    from opentelemetry import trace
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as _error:
    raise ImportError(
        f"traces need opentelemetry-api; install the extra: {install_command('otel')}"
    ) from _error

__all__ = ["TraceHook"]

OPEN_MAX = 100_000
"""The most open spans; further deliveries have none."""
_FORMAT = TraceContextTextMapPropagator()
_OUTCOMES: dict[type[events.HookEvent], str] = {
    events.CompletedEvent: "done",
    events.Duplicate: "duplicate",
    events.FailedEvent: "failed",
    events.Released: "released",
    events.Quarantined: "unknown",
    events.LostEvent: "lost",
    events.LateArrivalEvent: "late",
    events.Unguarded: "unguarded",
    events.Unrecorded: "unrecorded",
    events.Unreachable: "unavailable",
    events.Dropped: "dropped",
}
"""The values of `semel.outcome`, by the event that ends a delivery."""
_BAD = {"failed", "released", "unknown", "lost", "unrecorded", "unavailable", "dropped"}


class TraceHook:
    """A hook that makes a span `process {destination}` for each delivery, current while the handler runs.

    With `links`, the span's context is stored in the metadata of the record (55 bytes), and a duplicate reads it, one
    round trip more, to link its own span to the first one. `keys=False` leaves the key out and gives its
    digest instead.
    """

    def __init__(
        self, provider: trace.TracerProvider | None = None, *, links: bool = True, keys: bool = True
    ) -> None:
        self._tracer = trace.get_tracer("semel", tracer_provider=provider)
        self._keys = keys
        self._spans: dict[bytes, Span] = {}
        self._tokens: dict[bytes, Any] = {}
        if links:
            self.carry: Callable[[events.Received], dict[str, str]] = self._carry
            """`Hooks` looks for this attribute: it returns metadata for the record of a delivery."""

    def __call__(self, happening: events.HookEvent) -> None:
        """Begin, update or end the span of a delivery."""
        if not isinstance(happening, events.DeliveryEvent) or not happening.owner:
            return
        if isinstance(happening, events.Received):
            self._begin(happening)
            return
        span = self._spans.get(happening.owner)
        if span is None:
            return
        if isinstance(happening, events.Began):
            span.set_attribute("semel.attempt", happening.attempt)
            self._tokens[happening.owner] = otel_context.attach(trace.set_span_in_context(span))
        elif isinstance(happening, events.EndedEvent):
            token = self._tokens.pop(happening.owner, None)
            if token is not None:
                otel_context.detach(token)
            if happening.error is not None:
                span.record_exception(happening.error)
        elif isinstance(happening, events.ClaimedEvent) and not happening.handler:
            self._end(happening, span, "claimed")  # a plain verb: later events belong to the caller's span
        elif type(happening) in _OUTCOMES:
            self._note(happening, span)

    def _begin(self, received: events.Received) -> None:
        if len(self._spans) >= OPEN_MAX:
            return
        destination = received.source or received.event_type or received.consumer
        attributes = {
            "messaging.system": "semel",
            "messaging.operation.type": "process",
            "messaging.operation.name": "process",
            "messaging.destination.name": destination,
            "messaging.consumer.group.name": received.consumer,
            "messaging.message.id": received.key if self._keys else _hash(received),
        }
        self._spans[received.owner] = self._tracer.start_span(
            f"process {destination}", kind=SpanKind.CONSUMER, attributes=attributes
        )

    def _carry(self, received: events.Received) -> dict[str, str]:
        """Return the `traceparent` of the delivery for its record; empty if the span is not recorded."""
        span = self._spans.get(received.owner)
        carrier: dict[str, str] = {}
        if span is not None and span.is_recording():
            _FORMAT.inject(carrier, trace.set_span_in_context(span))
        return {name: carrier[name] for name in ("traceparent",) if name in carrier}

    def _note(self, event: events.DeliveryEvent, span: Span) -> None:
        outcome = _OUTCOMES[type(event)]
        if isinstance(event, events.Duplicate):
            span.set_attribute("semel.duplicate.reason", event.reason)
            if event.lag_s is not None:
                span.set_attribute("semel.duplicate.lag_s", event.lag_s)
            origin = trace.get_current_span(_FORMAT.extract(event.origin or {}, otel_context.Context()))
            if origin.get_span_context().is_valid:
                span.add_link(origin.get_span_context(), {"semel.link": "origin"})
            if not event.suppressed:
                return  # mode observe: it ran, and its end follows
        self._end(event, span, outcome)

    def _end(self, event: events.DeliveryEvent, span: Span, outcome: str) -> None:
        del self._spans[event.owner]
        span.set_attribute("semel.outcome", outcome)
        if outcome in _BAD:
            error = getattr(event, "error", None)
            span.set_status(Status(StatusCode.ERROR, None if error is None else str(error)))
        span.end()


def _hash(event: events.DeliveryEvent) -> str:
    return digest((event.tenant, event.consumer, event.key)).hex()[:32]
