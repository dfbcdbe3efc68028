"""The metrics of one instance, and reports of callers' items to hooks."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from semel.core.commands import Answer, Claim, Granted, Item, Mark, Marked, Settle
from semel.observe.events import ClaimedEvent, HookEvent, Hooks
from semel.observe.instrument import report_claimed, report_marked, report_settled
from semel.observe.prometheus import PrometheusHook
from semel.types import Busy, Unavailable

__all__ = ["ItemReporter", "Metrics"]

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, which nobody asked for


class Metrics:
    """The metrics of one application, and their hook. No label contains a key or a tenant."""

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
            # A caller's claim may be completed through another instance, so its age is not known here.
            self.hook.note_window(happening.consumer, happening.window_s)
        else:
            self.hook(happening)

    def page(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)


WAITING_MAX = 10_000
"""The most waiting callers that are tracked."""
CLAIMS_MAX = 100_000
"""The most claims whose event types are remembered until they are settled."""
SOURCE = "service"
"""The source of deliveries of callers."""


class ItemReporter:
    """Reports items and their answers to hooks."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._waiting: dict[bytes, None] = {}
        """Owners that got `Busy`: one that waits claims repeatedly, and counts as one delivery."""
        self._types: dict[bytes, str] = {}
        """The event types of granted claims by their owners: a settle does not name it."""

    def __call__(self, item: Item, answer: Answer) -> None:
        """Report an item and its answer."""
        kind = type(item)
        if kind is Claim:
            assert isinstance(item, Claim)
            self._claim(item, answer)
        elif kind is Settle:
            assert isinstance(item, Settle)
            event_type = "" if isinstance(answer, Unavailable) else self._types.pop(item.owner, "")
            report_settled(self._hooks, (item,), (answer,), (event_type,), source=SOURCE)
        elif kind is Mark and isinstance(answer, Marked):
            assert isinstance(item, Mark)
            report_marked(self._hooks, item.tenant, item.consumer, item.keys, answer.firsts, source=SOURCE)

    def _claim(self, claim: Claim, answer: Answer) -> None:
        if claim.event_type and isinstance(answer, Granted):
            self._types[claim.owner] = claim.event_type
            if len(self._types) > CLAIMS_MAX:
                del self._types[next(iter(self._types))]
        if claim.owner not in self._waiting:
            if isinstance(answer, Busy):
                self._waiting[claim.owner] = None
                if len(self._waiting) > WAITING_MAX:
                    del self._waiting[next(iter(self._waiting))]
            report_claimed(self._hooks, (claim,), (answer,), SOURCE)
        elif not isinstance(answer, Busy):
            del self._waiting[claim.owner]
            if isinstance(answer, Granted):  # it waited before and was reported as received
                who = (*claim.id, claim.owner, "", SOURCE)
                self._hooks(
                    ClaimedEvent(*who, answer.attempt, answer.first_seen_us, event_type=claim.event_type)
                )
