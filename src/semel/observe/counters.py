"""Count hook events by minute and consumer, in numbers that add up across processes."""

import time
from bisect import bisect_left
from collections.abc import Callable
from threading import Lock
from typing import Any

from msgspec import Struct, field

from semel.core.error_info import error_label
from semel.observe import events
from semel.runtime.process import restart_after_fork

__all__ = [
    "LAGS_S",
    "OTHER",
    "TOOK_S",
    "ConsumerCounters",
    "CounterHook",
    "MinuteCounts",
    "StoreCounts",
    "quantile",
]

CONSUMERS_MAX = 200
"""The most consumers with counters of their own; further ones count as `OTHER`."""
OTHER = ("", "other")
KINDS_MAX = 20
"""The most kinds of errors of one consumer in a minute; further ones count as `OTHER_KIND`."""
OTHER_KIND = "other"
MINUTES_MAX = 24 * 60
"""The most minutes that are held while the store cannot be reached; then the oldest are dropped."""
HELD_MAX = 100_000
SOURCES_MAX = 8
"""The most sources of one consumer that are named."""
LAGS_S: tuple[float, ...] = tuple(2.0**power for power in range(-3, 23))
"""Upper ends of the buckets of redelivery lags: an eighth of a second to 48 days, each twice the one before."""
TOOK_S: tuple[float, ...] = tuple(1e-4 * 1.5**power for power in range(31))
"""The same for the store's round trips: a tenth of a millisecond to 19 seconds."""


class ConsumerCounters(Struct, array_like=True):
    """Counts of one consumer's deliveries. New fields go to the end: older rollups lack them."""

    received: int = 0
    processed: int = 0
    redelivery: int = 0
    """Duplicates by their reason: this and the next three."""
    producer: int = 0
    race: int = 0
    reuse: int = 0
    observed: int = 0
    """Duplicates that ran in mode observe; included in the four above."""
    failed: int = 0
    """Final failures."""
    errored: int = 0
    """Failures of one attempt; the event may run again."""
    late: int = 0
    lost: int = 0
    expired: int = 0
    unknown: int = 0
    unrecorded: int = 0
    lags: dict[int, int] = field(default_factory=dict[int, int])
    """Duplicates with a known lag, by their bucket in `LAGS_S`."""
    dead: int = 0
    """Messages that were given up and written to the dead letters."""
    took: dict[int, int] = field(default_factory=dict[int, int])
    """Calls of handlers by their bucket in `TOOK_S`; longer ones are in the last."""
    errors: dict[str, int] = field(default_factory=dict[str, int])
    """Failed attempts and final failures, by the kind of error."""

    @property
    def duplicates(self) -> int:
        """The number of duplicates."""
        return self.redelivery + self.producer + self.race + self.reuse

    def add(self, other: "ConsumerCounters") -> None:
        """Add the counts of another process or minute."""
        self.received += other.received  # one by one: a loop over their names takes four times as long
        self.processed += other.processed
        self.redelivery += other.redelivery
        self.producer += other.producer
        self.race += other.race
        self.reuse += other.reuse
        self.observed += other.observed
        self.failed += other.failed
        self.errored += other.errored
        self.late += other.late
        self.lost += other.lost
        self.expired += other.expired
        self.unknown += other.unknown
        self.unrecorded += other.unrecorded
        self.dead += other.dead
        if other.lags:
            _add(self.lags, other.lags)
        if other.took:
            _add(self.took, other.took)
        for kind, number in other.errors.items():
            self.note_error(kind, number)

    def note_error(self, kind: str, number: int = 1) -> None:
        """Count an error; the kinds after the first few count as `other`."""
        if kind not in self.errors and len(self.errors) >= KINDS_MAX:
            kind = OTHER_KIND
        self.errors[kind] = self.errors.get(kind, 0) + number


class StoreCounts(Struct, array_like=True):
    """Counts of the store's round trips."""

    errors: int = 0
    lost: int = 0
    purged: int = 0
    took: dict[int, int] = field(default_factory=dict[int, int])
    """Round trips by their bucket in `TOOK_S`."""

    def add(self, other: "StoreCounts") -> None:
        """Add other counts."""
        self.errors += other.errors
        self.lost += other.lost
        self.purged += other.purged
        _add(self.took, other.took)


class MinuteCounts(Struct, array_like=True):
    """The counts of one process in one minute, or in a part of it."""

    minute: int
    """Since 1970, by the store's clock."""
    consumers: list[tuple[str, str, ConsumerCounters]] = field(
        default_factory=list[tuple[str, str, ConsumerCounters]]
    )
    """Tenant, consumer, counts."""
    store: StoreCounts = field(default_factory=StoreCounts)
    in_flight: int = 0
    """Claims that the process held when it was written."""
    oldest_s: float = 0.0
    writer: str = ""
    """The process that counted. Its held claims are not a sum: the last value counts."""


class _Minute:
    def __init__(self) -> None:
        self.consumers: dict[tuple[str, str], ConsumerCounters] = {}
        self.store = StoreCounts()


class CounterHook:
    """A hook that counts. The owner takes the counts out; the hook writes nothing."""

    def __init__(
        self, wall: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall = wall
        self._clock = clock
        self.ahead_s: float = 0.0
        """How far the store's clock is ahead of this computer's; an estimate."""
        self._minutes: dict[int, _Minute] = {}
        self._known: set[tuple[str, str]] = set()
        self._sources: dict[tuple[str, str], dict[str, None]] = {}
        """Where the deliveries of each consumer came from, in order."""
        self.source_urls: tuple[str, ...] = ()
        """The URLs of the sources of this process, for its heartbeats: without passwords."""
        self._held: dict[bytes, float] = {}
        """When each claim in flight was granted, by its owner."""
        self._handlers: dict[type[events.HookEvent], Callable[[Any], None]] = {
            events.Received: self._on_received,
            events.ClaimedEvent: self._on_claimed,
            events.CompletedEvent: self._end("processed"),
            events.MarkedEvent: self._count("processed"),
            events.FailedEvent: self._on_failed,
            events.EndedEvent: self._on_handled,
            events.DeadLettered: self._count("dead"),
            events.Released: self._on_released,
            events.Quarantined: self._end("unknown"),
            events.LostEvent: self._end("lost"),
            events.Unrecorded: self._end("unrecorded"),
            events.Dropped: self._on_dropped,
            events.LateArrivalEvent: self._count("late"),
            events.Expired: self._count("expired"),
            events.Duplicate: self._duplicate,
            events.StoreSent: self._on_store_sent,
            events.StoreFailed: lambda _: self._store("errors", 1),
            events.StoreLost: lambda _: self._store("lost", 1),
            events.PurgedEvent: lambda purged: self._store("purged", purged.count),
        }
        self.after_fork()
        restart_after_fork(self)

    def after_fork(self) -> None:
        """Drop the counts in a child process; the parent reports them."""
        self._lock = Lock()
        self._minutes.clear()
        self._held.clear()

    def __call__(self, happening: events.HookEvent) -> None:
        """Count it."""
        handler = self._handlers.get(type(happening))
        if handler is not None:
            with self._lock:
                handler(happening)

    @property
    def now_s(self) -> float:
        """The store's clock, estimated."""
        return self._wall() + self.ahead_s

    def note_time(self, store_us: int) -> None:
        """Set the store's clock from an answer of the store."""
        self.ahead_s = store_us / 1e6 - self._wall()

    def peek(self) -> list[MinuteCounts]:
        """Return the counts that were not taken yet, oldest first."""
        with self._lock:
            return self._parts()

    def take(self) -> list[MinuteCounts]:
        """Return the same, and remove them."""
        with self._lock:
            parts = self._parts()
            self._minutes.clear()
            return parts

    def consumers(self) -> list[tuple[str, str]]:
        """Return the tenants and consumers that were counted, in order."""
        with self._lock:
            return sorted(self._known)

    def sources(self) -> list[tuple[str, str, str]]:
        """Return tenants, consumers, and the sources that their deliveries named."""
        with self._lock:
            return [(*name, source) for name, found in sorted(self._sources.items()) for source in found]

    def in_flight(self) -> tuple[int, float]:
        """Return the number of claims that this process holds, and the age of the oldest."""
        with self._lock:
            return self._in_flight()

    def _in_flight(self) -> tuple[int, float]:
        oldest = next(iter(self._held.values()), None)
        return len(self._held), 0.0 if oldest is None else self._clock() - oldest

    def _parts(self) -> list[MinuteCounts]:
        held, oldest_s = self._in_flight()
        if held:  # report a long claim even if nothing else happens
            self._minute()
        return [
            MinuteCounts(
                number,
                [(*name, _copy(counts)) for name, counts in minute.consumers.items()],
                StoreCounts(
                    minute.store.errors, minute.store.lost, minute.store.purged, dict(minute.store.took)
                ),
                held,
                oldest_s,
            )
            for number, minute in sorted(self._minutes.items())
        ]

    # --- events; the lock is held ---

    def _minute(self) -> _Minute:
        number = int(self.now_s // 60)
        minute = self._minutes.get(number)
        if minute is None:
            minute = self._minutes[number] = _Minute()
            if len(self._minutes) > MINUTES_MAX:
                del self._minutes[min(self._minutes)]
        return minute

    def _counts(self, event: events.DeliveryEvent) -> ConsumerCounters:
        name = (event.tenant, event.consumer)
        if name not in self._known:
            if len(self._known) < CONSUMERS_MAX:
                self._known.add(name)
            else:
                name = OTHER
        consumers = self._minute().consumers
        counts = consumers.get(name)
        if counts is None:
            counts = consumers[name] = ConsumerCounters()
        return counts

    def _count(self, what: str) -> Callable[[events.DeliveryEvent], None]:
        def count(event: events.DeliveryEvent) -> None:
            counts = self._counts(event)
            setattr(counts, what, getattr(counts, what) + 1)

        return count

    def _end(self, what: str) -> Callable[[events.DeliveryEvent], None]:
        count = self._count(what)

        def end(event: events.DeliveryEvent) -> None:
            self._held.pop(event.owner, None)
            count(event)

        return end

    def _on_claimed(self, event: events.ClaimedEvent) -> None:
        self._held[event.owner] = self._clock()
        if len(self._held) > HELD_MAX:  # claims by hand that were not settled
            del self._held[next(iter(self._held))]

    def _on_dropped(self, event: events.Dropped) -> None:
        self._held.pop(event.owner, None)

    def _on_released(self, event: events.Released) -> None:
        self._held.pop(event.owner, None)
        if event.error is not None:
            counts = self._counts(event)
            counts.errored += 1
            counts.note_error(error_label(event.error))

    def _on_failed(self, event: events.FailedEvent) -> None:
        self._held.pop(event.owner, None)
        counts = self._counts(event)
        counts.failed += 1
        counts.note_error(error_label(event.error))

    def _on_handled(self, event: events.EndedEvent) -> None:
        took, at = self._counts(event).took, _bucket(TOOK_S, event.duration_s)
        took[at] = took.get(at, 0) + 1

    def _on_received(self, event: events.Received) -> None:
        if not event.again:
            self._counts(event).received += 1
        if event.source:
            self._note_source((event.tenant, event.consumer), event.source)

    def _note_source(self, name: tuple[str, str], source: str) -> None:
        found = self._sources.get(name)
        if found is None:
            if name not in self._known:
                return
            found = self._sources[name] = {}
        if source not in found and len(found) < SOURCES_MAX:
            found[source] = None

    def _duplicate(self, event: events.Duplicate) -> None:
        if event.parked:
            return
        counts = self._counts(event)
        setattr(counts, event.reason, getattr(counts, event.reason) + 1)
        if not event.suppressed:
            counts.observed += 1
        if event.lag_s is not None:
            at = _bucket(LAGS_S, event.lag_s)
            counts.lags[at] = counts.lags.get(at, 0) + 1

    def _on_store_sent(self, sent: events.StoreSent) -> None:
        took, at = self._minute().store.took, _bucket(TOOK_S, sent.duration_s)
        took[at] = took.get(at, 0) + 1

    def _store(self, what: str, number: int) -> None:
        store = self._minute().store
        setattr(store, what, getattr(store, what) + number)


def quantile(buckets: dict[int, int], ends: tuple[float, ...], part: float) -> float | None:
    """Return the quantile, in its bucket as if values were spread evenly there; `None` if the buckets are empty."""
    wanted = part * sum(buckets.values())
    if not wanted:
        return None
    below = 0
    for at in sorted(buckets):
        if below + buckets[at] >= wanted:
            start = ends[at - 1] if at else 0.0
            return start + (ends[at] - start) * (wanted - below) / buckets[at]
        below += buckets[at]
    return ends[-1]


def _bucket(ends: tuple[float, ...], value: float) -> int:
    return min(bisect_left(ends, value), len(ends) - 1)


def _copy(counts: ConsumerCounters) -> ConsumerCounters:
    made = ConsumerCounters()
    made.add(counts)
    return made


def _add(mine: dict[int, int], others: dict[int, int]) -> None:
    for at, number in others.items():
        mine[at] = mine.get(at, 0) + number
