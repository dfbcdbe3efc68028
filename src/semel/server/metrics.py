"""What the service counts, for Prometheus: its requests, and what every client counts."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from semel.observe.events import ClaimedEvent, HookEvent
from semel.observe.prometheus import PrometheusHook

__all__ = ["Metrics"]

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, which nobody asked for


class Metrics:
    """The metrics of one application, and a hook that feeds them. No label holds a key or a tenant."""

    def __init__(self) -> None:
        self.registry: CollectorRegistry = CollectorRegistry()
        self.hook: PrometheusHook = PrometheusHook(self.registry)
        self.requests: Counter = Counter(
            "semel_http_requests", "Requests answered.", ["route", "status"], registry=self.registry
        )
        self.durations: Histogram = Histogram(
            "semel_http_request_duration_seconds", "From head to answer.", ["route"], registry=self.registry
        )
        self.in_flight: Gauge = Gauge(
            "semel_http_requests_in_flight", "Requests that wait for their answers.", registry=self.registry
        )

    def __call__(self, happening: HookEvent) -> None:
        """Count it."""
        if type(happening) is ClaimedEvent and not happening.handler:
            # A caller's own: it may be completed through another instance, so nobody here knows how long it is held.
            self.hook.note_window(happening.consumer, happening.window_s)
        else:
            self.hook(happening)

    def page(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
