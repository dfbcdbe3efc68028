"""What all processes on the store have counted, read when somebody looks and kept for a moment."""

import asyncio
import time
from collections.abc import Callable, Iterable

from msgspec import Struct, field

from semel.observe.rollups import Writer, hours
from semel.observe.tally import ConsumerCounters, MinuteCounts, StoreCounts, CounterHook
from semel.server.dashboard.looks import StoreReader

__all__ = ["RANGES", "RollupReader", "RollupCell", "Range"]

FRESH_S = 5.0
"""How long an hour that still grows is believed."""
SETTLED_S = 900.0
"""How long an hour that is over is believed: a process that could not reach the store may write it late."""
FOLDS = ((25, 60), (7, 10))
"""Hours of that age are kept in pieces of so many minutes: no chart shows them finer."""
READ_H = 6
"""Hours that are read at a time: others have their turn in between."""
KEPT_H = 7 * 24 + 1
MINUTES = 60


class Range(Struct, frozen=True):
    """How much time a chart shows, and how long each of its points is."""

    name: str
    minutes: int
    step: int
    """Minutes."""


RANGES: dict[str, Range] = {
    each.name: each
    for each in (
        Range("15m", 15, 1),
        Range("1h", 60, 1),
        Range("6h", 360, 5),
        Range("24h", 1440, 10),
        Range("7d", 10080, 60),
    )
}


class RollupCell(Struct):
    """What happened in a stretch of time."""

    consumers: dict[tuple[str, str], ConsumerCounters] = field(default_factory=dict[tuple[str, str], ConsumerCounters])
    store: StoreCounts = field(default_factory=StoreCounts)
    held: dict[str, int] = field(default_factory=dict[str, int])
    """Claims in flight by who holds them: the last word of each."""

    @property
    def in_flight(self) -> int:
        """Claims that were held at its end."""
        return sum(self.held.values())

    def add(self, part: MinuteCounts) -> None:
        """Add what one process counted."""
        for tenant, consumer, counts in part.consumers:
            self.at((tenant, consumer)).add(counts)
        self.store.add(part.store)
        self.held[part.writer] = part.in_flight

    def join(self, other: "RollupCell") -> None:
        """Add what happened in a later stretch."""
        for name, counts in other.consumers.items():
            self.at(name).add(counts)
        self.store.add(other.store)
        self.held |= other.held

    def at(self, name: tuple[str, str]) -> ConsumerCounters:
        """The counts of one consumer, to be added to."""
        counts = self.consumers.get(name)
        if counts is None:
            counts = self.consumers[name] = ConsumerCounters()
        return counts

    def total(self, tenant: str | None, consumer: str = "") -> ConsumerCounters:
        """The counts of a tenant (`None`: all) and of one consumer of it, or of all."""
        total = ConsumerCounters()
        for (whose, name), counts in self.consumers.items():
            if tenant in (None, whose) and consumer in ("", name):
                total.add(counts)
        return total


class _Hour(Struct):
    read_at: float
    cells: dict[int, RollupCell]
    """By their first minute."""


class RollupReader:
    """The rollups of one store. Reads by key, never by listing: its cost does not grow with the store."""

    def __init__(
        self, looks: StoreReader, tally: CounterHook, writer: Writer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._looks = looks
        self._tally = tally
        self._writer = writer
        self._clock = clock
        self._hours: dict[int, _Hour] = {}
        self.turning: asyncio.Lock = asyncio.Lock()
        """Held while rollups are written or read, so that nothing is seen twice or not at all."""

    @property
    def minute(self) -> int:
        """This minute, by the store's clock as far as it is known."""
        return int(self._tally.now_s // 60)

    def expire(self) -> None:
        """Something was written by this process."""
        self._hours.pop(self.minute // MINUTES, None)
        self._hours.pop(self.minute // MINUTES - 1, None)

    async def cells(self, since: int, step: int = 1, until: int | None = None) -> dict[int, RollupCell]:
        """What happened since a minute, in pieces of `step` minutes by their first one; what is under way included."""
        until = self.minute if until is None else until
        wanted = range(since // MINUTES, until // MINUTES + 1)
        async with self.turning:
            await self._read(wanted)
            found: dict[int, RollupCell] = {}
            for hour in wanted:
                for minute, cell in self._hours[hour].cells.items():  # in the order of time
                    if since <= minute <= until:
                        _at(found, minute - minute % step).join(cell)
            for part in self._writer.unwritten():
                if since <= part.minute <= until:
                    _at(found, part.minute - part.minute % step).add(part)
            return found

    async def total(self, since: int) -> RollupCell:
        """All of it in one piece."""
        total = RollupCell()
        for _, cell in sorted((await self.cells(since, MINUTES)).items()):
            total.join(cell)
        return total

    async def _read(self, wanted: Iterable[int]) -> None:
        now, this_hour = self._clock(), self.minute // MINUTES
        stale = []
        for hour in wanted:
            known = self._hours.get(hour)
            live_s = FRESH_S if hour >= this_hour - 1 else SETTLED_S
            if known is None or now - known.read_at > live_s:
                stale.append(hour)
        for at in range(0, len(stale), READ_H):
            read: dict[int, list[MinuteCounts]] = await self._looks.ask(hours(stale[at : at + READ_H]))
            for hour, parts in read.items():
                self._hours[hour] = _Hour(now, _folded(parts, _fold(this_hour - hour)))
                await asyncio.sleep(0)
        for hour in [hour for hour in self._hours if hour < this_hour - KEPT_H]:
            del self._hours[hour]


def _fold(age_h: int) -> int:
    return next((minutes for least_h, minutes in FOLDS if age_h >= least_h), 1)


def _folded(parts: Iterable[MinuteCounts], minutes: int) -> dict[int, RollupCell]:
    cells: dict[int, RollupCell] = {}
    for part in sorted(parts, key=lambda part: part.minute):
        first = part.minute - part.minute % minutes
        _at(cells, first).add(part)
    return cells


def _at(cells: dict[int, RollupCell], first: int) -> RollupCell:
    cell = cells.get(first)
    if cell is None:
        cell = cells[first] = RollupCell()
    return cell
