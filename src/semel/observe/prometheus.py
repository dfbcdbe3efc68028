"""Report hook events as Prometheus metrics. Needs the extra `prometheus`."""

import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from threading import Lock
from typing import Any

from msgspec import Struct

from semel.core.error_info import error_label
from semel.errors import UsageError
from semel.observe import events
from semel.runtime.extras import install_command
from semel.types import Stats

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Info
except ImportError as _error:
    raise ImportError(
        f"metrics need prometheus-client; install the extra: {install_command('prometheus')}"
    ) from _error

__all__ = ["LABELS_MAX", "METRICS", "Metric", "PrometheusHook"]

LABELS_MAX = 200
"""The most values of one label; further values count as `other`, to bound the number of series."""
OTHER = "other"
HELD_S = 12 * 3600.0
"""The longest life of a claim: after it a claim is no longer in flight."""

TYPES_MAX = 1000
"""The most pairs of a consumer and an event type; further types of a consumer count as `other`."""

_WHO = ("consumer", "handler", "event_type", "source")
_DAY = 86400.0
_LAGS = (1, 2, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, _DAY, 2 * _DAY, 4 * _DAY, 7 * _DAY)
_SHORT = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_RUNS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900)
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class Metric(Struct, frozen=True):
    """The definition of a metric."""

    kind: type[Any]
    labels: tuple[str, ...]
    text: str
    buckets: tuple[float, ...] = ()


METRICS: dict[str, Metric] = {
    "events_received_total": Metric(Counter, _WHO, "Deliveries that came in."),
    "events_duplicate_total": Metric(Counter, (*_WHO, "reason"), "Deliveries of events that were known."),
    "events_observed_duplicate_total": Metric(
        Counter, _WHO, "Duplicates that ran in mode observe and would have been stopped otherwise."
    ),
    "events_processed_total": Metric(Counter, _WHO, "Events whose effect has happened."),
    "events_failed_total": Metric(Counter, (*_WHO, "error"), "Handlers that raised, by the kind of error."),
    "events_late_total": Metric(Counter, _WHO, "Events older than what is remembered."),
    "events_unknown_total": Metric(Counter, _WHO, "Attempts that ended without saying what happened."),
    "events_unrecorded_total": Metric(Counter, _WHO, "Effects that the store could not be told of."),
    "events_unguarded_total": Metric(
        Counter, _WHO, "Handlers that ran without a claim because the store could not be reached."
    ),
    "probes_total": Metric(
        Counter, (*_WHO, "answer"), "Times that a probe was asked about an earlier attempt, by its answer."
    ),
    "dead_letters_total": Metric(
        Counter, (*_WHO, "reason"), "Messages that were given up and written to the dead letters, by reason."
    ),
    "dead_letters_stuck_total": Metric(
        Counter,
        ("consumer",),
        "Failed tries to write a dead letter; its message stays at the broker.",
    ),
    "fingerprint_mismatch_total": Metric(Counter, _WHO, "Keys that came again with another payload."),
    "claims_lost_total": Metric(Counter, _WHO, "Claims that another attempt took over."),
    "claims_expired_total": Metric(Counter, ("consumer",), "Leases that this process could not keep."),
    "claims_in_flight": Metric(Gauge, ("consumer",), "Claims that this process holds."),
    "claims_oldest_age_seconds": Metric(
        Gauge, ("consumer",), "Age of the oldest claim that this process holds."
    ),
    "handler_duration_seconds": Metric(Histogram, ("consumer", "handler"), "How long handlers run.", _RUNS),
    "store_operation_duration_seconds": Metric(Histogram, ("op",), "Round trips of the store.", _SHORT),
    "store_errors_total": Metric(Counter, ("op",), "Round trips without an answer."),
    "store_lost_total": Metric(Counter, (), "Times that the store was found to have lost records."),
    "store_bytes": Metric(Gauge, (), "Room that the store takes."),
    "batch_size": Metric(Histogram, ("op",), "Items in one round trip.", _SIZES),
    "redelivery_lag_seconds": Metric(
        Histogram, ("consumer", "source"), "How long after the first delivery a duplicate came.", _LAGS
    ),
    "window_seconds": Metric(Gauge, ("consumer",), "How long a finished key is remembered."),
    "records": Metric(Gauge, ("state",), "Records in the store, by state; released claims and marks too."),
    "bloom_fill_ratio": Metric(Gauge, (), "How full the fullest Bloom filter is."),
    "bloom_false_positive_ratio": Metric(
        Gauge, (), "How often the Bloom filters would say maybe for nothing."
    ),
    "outbox_pending": Metric(Gauge, (), "Messages that wait to be published."),
    "outbox_oldest_age_seconds": Metric(Gauge, (), "Age of the oldest of them."),
    "outbox_published_total": Metric(Counter, (), "Messages that a relay of this process published."),
    "dedup_records_total": Metric(
        Counter, ("consumer", "result"), "Records that `semel dedup` committed, by what became of them."
    ),
    "dedup_lag_records": Metric(
        Gauge, ("consumer",), "Records of this instance's partitions that are not read yet."
    ),
    "dedup_restore_left": Metric(
        Gauge, ("consumer",), "Offsets of the marks topic that are to be read before its partitions go on."
    ),
    "dedup_index_bytes": Metric(Gauge, ("consumer",), "Disk that the local index of marks takes."),
    "purge_deleted_total": Metric(Counter, (), "Expired records that were removed."),
    "purge_lag_seconds": Metric(
        Gauge, (), "How long the oldest expired record has been waiting to be removed."
    ),
    "build_info": Metric(Info, (), "The version of semel."),
}
"""Every metric by its name after the prefix; the documents and the dashboard are checked against it."""


class PrometheusHook:
    """A hook that exports metrics. One for each registry, shared by all clients of the process.

    `prefix`: in front of every name; empty gives the bare names. The key is never a label; of `consumer`,
    `handler`, `event_type`, `source` and `error` the first 200 values have series of their own, and the rest is
    `other`.
    """

    def __init__(
        self, registry: CollectorRegistry = REGISTRY, *, prefix: str = "semel_", labels_max: int = LABELS_MAX
    ) -> None:
        self._labels_max = labels_max
        self._lock = Lock()
        self._values: dict[str, set[str]] = {}
        self._metrics: dict[str, Any] = {}
        for name, metric in METRICS.items():
            more = {"buckets": metric.buckets} if metric.buckets else {}
            bare = name.removesuffix("_info") if metric.kind is Info else name
            try:
                made = metric.kind(prefix + bare, metric.text, metric.labels, registry=registry, **more)
            except ValueError as error:
                raise UsageError(
                    f"the registry already has {prefix}{bare}: make one PrometheusHook and share it between the clients"
                    " of the process, or give this one another registry or prefix"
                ) from error
            self._metrics[name] = made
        self._metrics["build_info"].info({"version": version("semel")})
        self._held: dict[tuple[str, bytes], float] = {}
        """When each claim in flight was granted, by consumer and owner."""
        self._windows: dict[str, float] = {}
        self._dedup_counts: dict[tuple[str, str], int] = {}
        self._types: set[tuple[str, str]] = set()
        """Pairs of a consumer and an event type that have series of their own."""
        self._series: dict[tuple[str, ...], Any] = {}
        self._handlers: dict[type[events.HookEvent], Callable[[Any], None]] = {
            events.Received: self._on_received,
            events.CompletedEvent: self._on_processed,
            events.MarkedEvent: self._on_processed,
            events.FailedEvent: self._on_ended,
            events.Released: self._on_ended,
            events.LostEvent: self._on_lost,
            events.Quarantined: self._on_quarantined,
            events.Unrecorded: self._on_unrecorded,
            events.Unguarded: self._count("events_unguarded_total"),
            events.Probed: lambda event: self._who("probes_total", event, event.answer).inc(),
            events.Dropped: self._let_go,
            events.LateArrivalEvent: self._count("events_late_total"),
            events.DeadLettered: lambda event: self._who("dead_letters_total", event, event.reason).inc(),
            events.DeadLetterStuck: lambda event: self._at("dead_letters_stuck_total", event.consumer).inc(),
            events.Expired: lambda event: self._at("claims_expired_total", event.consumer).inc(),
            events.ClaimedEvent: self._on_claimed,
            events.EndedEvent: self._on_handled,
            events.Duplicate: self._duplicate,
            events.StoreSent: self._on_store_sent,
            events.StoreFailed: lambda failed: self._at("store_errors_total", failed.op).inc(),
            events.StoreLost: lambda _: self._at("store_lost_total").inc(),
            events.PurgedEvent: self._on_purged,
            events.Counted: lambda counted: self.note_stats(counted.stats),
        }

    def __call__(self, happening: events.HookEvent) -> None:
        """Count it."""
        handler = self._handlers.get(type(happening))
        if handler is not None:
            handler(happening)

    # --- figures that no event has: the owner of the figures calls these ---

    def note_stats(self, stats: Stats) -> None:
        """Set the gauges of a store. `records.stats()` of a client with this hook calls it."""
        for state, number in stats.states.items():
            self._at("records", state).set(number)
        self._at("records", "marked").set(stats.marks)
        self._at("purge_lag_seconds").set(stats.purge_lag_s)
        if stats.bytes_used is not None:
            self._at("store_bytes").set(stats.bytes_used)
        if "filter_fill_ratio" in stats.tiers:
            self.note_bloom(stats.tiers["filter_fill_ratio"], stats.tiers["filter_false_positive_ratio"])

    def note_window(self, consumer: str, window_s: float) -> None:
        """Set the effective window of a consumer, to compare lags with. Every claim sets it too."""
        self._at("window_seconds", consumer).set(window_s)

    def note_bloom(self, fill_ratio: float, false_positive_ratio: float) -> None:
        """Set the gauges of a Bloom filter."""
        self._at("bloom_fill_ratio").set(fill_ratio)
        self._at("bloom_false_positive_ratio").set(false_positive_ratio)

    def note_outbox(self, pending: int, oldest_age_s: float) -> None:
        """Set the gauges of an outbox, from its `counts()`."""
        self._at("outbox_pending").set(pending)
        self._at("outbox_oldest_age_seconds").set(oldest_age_s)

    def note_published(self, step: Any) -> None:
        """Count one step of a relay: `Relay(..., on_step=hook.note_published)`."""
        self._at("outbox_published_total").inc(step.published)

    def note_dedup(
        self, consumer: str, results: Mapping[str, int], lag: int, restore_left: int, size: int
    ) -> None:
        """Set the figures of a deduplication; `results` are its counts since its start."""
        for result, count in results.items():
            before = self._dedup_counts.get((consumer, result), 0)
            self._at("dedup_records_total", consumer, result).inc(count - before)
            self._dedup_counts[consumer, result] = count
        self._at("dedup_lag_records", consumer).set(lag)
        self._at("dedup_restore_left", consumer).set(restore_left)
        self._at("dedup_index_bytes", consumer).set(size)

    # --- events ---

    def _at(self, name: str, *labels: str) -> Any:
        """Return the series of a metric, cached by its labels."""
        series = self._series.get((name, *labels))
        if series is None:
            metric = self._metrics[name]
            capped = [
                self._cap(label, value) for label, value in zip(METRICS[name].labels, labels, strict=True)
            ]
            series = metric.labels(*capped) if labels else metric
            if OTHER not in capped:
                self._series[(name, *labels)] = series
        return series

    def _cap(self, label: str, value: str) -> str:
        known = self._values.get(label)
        if known is not None and value in known:
            return value
        with self._lock:
            known = self._values.setdefault(label, set())
            if len(known) < self._labels_max:
                known.add(value)
            return value if value in known else OTHER

    def _count(self, name: str) -> Callable[[events.DeliveryEvent], None]:
        def count(event: events.DeliveryEvent) -> None:
            self._who(name, event).inc()

        return count

    def _on_received(self, event: events.Received) -> None:
        if not event.again:
            self._who("events_received_total", event).inc()

    def _who(self, name: str, event: events.DeliveryEvent, *more: str) -> Any:
        kind = event.event_type
        if kind and (event.consumer, kind) not in self._types:
            kind = self._bound_type(event.consumer, kind)
        return self._at(name, event.consumer, event.handler, kind, event.source, *more)

    def _bound_type(self, consumer: str, kind: str) -> str:
        """Return the event type for a label: a producer could send any number of them."""
        with self._lock:
            if len(self._types) >= TYPES_MAX:
                return OTHER
            self._types.add((consumer, kind))
            return kind

    def _on_claimed(self, event: events.ClaimedEvent) -> None:
        consumer = self._cap("consumer", event.consumer)
        if self._windows.get(consumer) != event.window_s:
            self._windows[consumer] = event.window_s
            self.note_window(consumer, event.window_s)
            self._at("claims_in_flight", consumer).set_function(lambda: self._in_flight(consumer))
            self._at("claims_oldest_age_seconds", consumer).set_function(lambda: self._oldest_s(consumer))
        self._held[consumer, event.owner] = time.monotonic()

    def _let_go(self, event: events.DeliveryEvent) -> None:
        self._held.pop((self._cap("consumer", event.consumer), event.owner), None)

    def _in_flight(self, consumer: str) -> int:
        return len(self._since(consumer))

    def _oldest_s(self, consumer: str) -> float:
        return max(self._since(consumer), default=0.0)

    def _since(self, consumer: str) -> list[float]:
        """Return the ages of a consumer's claims; drops claims that must have ended."""
        now = time.monotonic()
        ages: list[float] = []
        for (held, owner), at in list(self._held.items()):
            if now - at > HELD_S:
                self._held.pop((held, owner), None)
            elif held == consumer:
                ages.append(now - at)
        return ages

    def _on_handled(self, event: events.EndedEvent) -> None:
        self._at("handler_duration_seconds", event.consumer, event.handler).observe(event.duration_s)

    def _on_processed(self, event: events.DeliveryEvent) -> None:
        self._let_go(event)
        self._who("events_processed_total", event).inc()

    def _on_ended(self, event: events.FailedEvent | events.Released) -> None:
        self._let_go(event)
        if event.error:
            self._who("events_failed_total", event, error_label(event.error)).inc()

    def _on_lost(self, event: events.LostEvent) -> None:
        self._let_go(event)
        self._who("claims_lost_total", event).inc()

    def _on_quarantined(self, event: events.Quarantined) -> None:
        self._let_go(event)
        self._who("events_unknown_total", event).inc()

    def _on_unrecorded(self, event: events.Unrecorded) -> None:
        self._let_go(event)
        self._who("events_unrecorded_total", event).inc()

    def _duplicate(self, event: events.Duplicate) -> None:
        if event.parked:
            return
        self._who("events_duplicate_total", event, event.reason).inc()
        if not event.suppressed:
            self._who("events_observed_duplicate_total", event).inc()
        if event.reason == "reuse":
            self._who("fingerprint_mismatch_total", event).inc()
        if event.lag_s is not None:
            self._at("redelivery_lag_seconds", event.consumer, event.source).observe(event.lag_s)

    def _on_store_sent(self, sent: events.StoreSent) -> None:
        self._at("store_operation_duration_seconds", sent.op).observe(sent.duration_s)
        self._at("batch_size", sent.op).observe(sent.items)

    def _on_purged(self, purged: events.PurgedEvent) -> None:
        self._at("purge_deleted_total").inc(purged.count)
        self._at("purge_lag_seconds").set(purged.lag_s)
