"""What the service counts about itself, for Prometheus."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

__all__ = ["Metrics"]

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, which nobody asked for


class Metrics:
    """The counters of one application. No label holds a key, a consumer or a tenant."""

    def __init__(self) -> None:
        self.registry: CollectorRegistry = CollectorRegistry()
        self.requests: Counter = Counter(
            "semel_http_requests", "Requests answered.", ["route", "status"], registry=self.registry
        )
        self.durations: Histogram = Histogram(
            "semel_http_request_duration_seconds", "From head to answer.", ["route"], registry=self.registry
        )
        self.items: Counter = Counter(
            "semel_http_items", "Items carried out.", ["kind"], registry=self.registry
        )
        self.events: Counter = Counter(
            "semel_http_events",
            "Events taken in, by what became of them.",
            ["status"],
            registry=self.registry,
        )
        self.in_flight: Gauge = Gauge(
            "semel_http_requests_in_flight", "Requests that wait for their answers.", registry=self.registry
        )

    def page(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
