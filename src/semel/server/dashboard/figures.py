"""Figures from the rollups: totals for the header, lines for the charts, rows for the tables, lags for the advisor."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from semel.core.commands import ReadSettings, StoreSettings, answer_or_raise
from semel.core.ids import is_own
from semel.errors import UsageError
from semel.observe.advise import Advice, Lags, advise
from semel.observe.counters import (
    LAGS_S,
    TOOK_S,
    ConsumerCounters,
    CounterHook,
    MinuteCounts,
    StoreCounts,
    quantile,
)
from semel.observe.formatting import duration_text, plural
from semel.observe.rollups import Writer, hours
from semel.server.dashboard.store_reader import DEFAULT_WINDOW_US, StoreReader
from semel.types import Mode

__all__ = ["ALARM", "RANGES", "Figures", "Range", "RollupCell", "RollupReader"]

FRESH_S = 5.0
"""How long the cached current hour is valid."""
SETTLED_S = 900.0
"""How long a cached past hour is valid: a process that could not reach the store may write it late."""
FOLDS = ((25, 60), (7, 10))
"""Older hours are kept in pieces of this many minutes, the finest that a chart shows."""
READ_H = 6
"""Hours per read, so that other requests run in between."""
KEPT_H = 7 * 24 + 1
MINUTES = 60


class Range(Struct, frozen=True):
    """The time span of a chart, and the length of a point."""

    name: str
    minutes: int
    step: int
    """In minutes."""


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
    """The counts of a period."""

    consumers: dict[tuple[str, str], ConsumerCounters] = field(
        default_factory=dict[tuple[str, str], ConsumerCounters]
    )
    store: StoreCounts = field(default_factory=StoreCounts)
    held: dict[str, int] = field(default_factory=dict[str, int])
    """Claims in flight by process: the last value of each."""

    @property
    def in_flight(self) -> int:
        """Claims in flight at its end."""
        return sum(self.held.values())

    def add(self, part: MinuteCounts) -> None:
        """Add the counts of one process."""
        for tenant, consumer, counts in part.consumers:
            self.at((tenant, consumer)).add(counts)
        self.store.add(part.store)
        self.held[part.writer] = part.in_flight

    def join(self, other: "RollupCell") -> None:
        """Add a later period."""
        for name, counts in other.consumers.items():
            self.at(name).add(counts)
        self.store.add(other.store)
        self.held |= other.held

    def at(self, name: tuple[str, str]) -> ConsumerCounters:
        """Return the counts of one consumer, for adding."""
        counts = self.consumers.get(name)
        if counts is None:
            counts = self.consumers[name] = ConsumerCounters()
        return counts

    def total(self, tenant: str | None, consumer: str = "") -> ConsumerCounters:
        """Return the counts of a tenant (`None`: all), of one consumer or of all."""
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
        self,
        looks: StoreReader,
        tally: CounterHook,
        writer: Writer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._looks = looks
        self._tally = tally
        self._writer = writer
        self._clock = clock
        self._hours: dict[int, _Hour] = {}
        self.turning: asyncio.Lock = asyncio.Lock()
        """Held while rollups are written or read, so that no count is seen twice or missed."""

    @property
    def minute(self) -> int:
        """The current minute by the store's clock."""
        return int(self._tally.now_s // 60)

    def expire(self) -> None:
        """Invalidate the cache after a write of this process."""
        self._hours.pop(self.minute // MINUTES, None)
        self._hours.pop(self.minute // MINUTES - 1, None)

    async def cells(self, since: int, step: int = 1, until: int | None = None) -> dict[int, RollupCell]:
        """Return the counts since a minute, in pieces of `step` minutes, including the current minute."""
        until = self.minute if until is None else until
        wanted = range(since // MINUTES, until // MINUTES + 1)
        async with self.turning:
            await self._read(wanted)
            found: dict[int, RollupCell] = {}
            for hour in wanted:
                for minute, cell in self._hours[hour].cells.items():  # in order of time
                    if since <= minute <= until:
                        _at(found, minute - minute % step).join(cell)
            for part in self._writer.unwritten_counts():
                if since <= part.minute <= until:
                    _at(found, part.minute - part.minute % step).add(part)
            return found

    async def total(self, since: int) -> RollupCell:
        """Return one sum."""
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
            read: dict[int, list[MinuteCounts]] = await self._looks.ask_own(hours(stale[at : at + READ_H]))
            for hour, parts in read.items():
                self._hours[hour] = _Hour(now, _fold_cells(parts, _fold(this_hour - hour)))
                await asyncio.sleep(0)
        for hour in [hour for hour in self._hours if hour < this_hour - KEPT_H]:
            del self._hours[hour]


def _fold(age_h: int) -> int:
    return next((minutes for least_h, minutes in FOLDS if age_h >= least_h), 1)


def _fold_cells(parts: Iterable[MinuteCounts], minutes: int) -> dict[int, RollupCell]:
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


ALARM = 0.01
"""The share of duplicates that deserves attention: the line in the chart, and the alert's threshold."""
ALARM_EVENTS = 100
"""Of so few deliveries the share says little, as in the alert: one duplicate of three wakes nobody."""
HEADER_MINUTES = 60
HEADER_LIVE_S = 0.5
SETTINGS_LIVE_S = 5.0
TOLD_S = 8.0
"""By this time after a minute all processes have written it, and it has been read."""
LAGS_MAX = 20_000
"""The most lags for the advisor; more are sampled in proportion."""
WEEK_MINUTES = 7 * 24 * 60


class Figures:
    """Figures for pages from the rollups, for a tenant (`None`: all)."""

    def __init__(
        self,
        book: RollupReader,
        tally: CounterHook,
        looks: StoreReader,
        mark: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._book = book
        self._tally = tally
        self._looks = looks
        self._mark = mark
        self._clock = clock
        self._headers: dict[str | None, tuple[float, dict[str, Any]]] = {}
        self._settings: tuple[float, StoreSettings] | None = None

    async def settings(self) -> StoreSettings:
        """Return the store's windows and modes, without semel's own consumers."""
        if self._settings is None or self._clock() - self._settings[0] > SETTINGS_LIVE_S:
            found = answer_or_raise((await self._looks.quick((ReadSettings(),)))[0])
            modes = {place: mode for place, mode in found.modes.items() if not is_own(*place)}
            self._settings = (self._clock(), StoreSettings(found.windows, modes, found.ids, found.live_us))
        return self._settings[1]

    def expire(self) -> None:
        """Invalidate the cached settings."""
        self._settings = None

    async def header(self, tenant: str | None) -> dict[str, Any]:
        """Return the counters of the header: the last hour until now."""
        known = self._headers.get(tenant)
        if known is not None and self._clock() - known[0] < HEADER_LIVE_S:
            return known[1]
        minute = self._book.minute
        cells = await self._book.cells(minute - HEADER_MINUTES + 1)
        counts = ConsumerCounters()
        for cell in cells.values():
            counts.add(cell.total(tenant))
        made = {
            "received": counts.received,
            "processed": counts.processed,
            "duplicates": counts.duplicates,
            "rate": _share(counts.duplicates, counts.received),
            "failed": counts.failed + counts.errored,
            "alarm": is_alarming(counts.duplicates, counts.received),
        }
        if len(self._headers) > 1000:  # noqa: PLR2004 - tenants that looked once
            self._headers.clear()
        self._headers[tenant] = (self._clock(), made)
        return made

    async def lines(self, chosen: Range, tenant: str | None, consumer: str = "") -> dict[str, Any]:
        """Return the data of the charts: columns of equal length, one value per point, and their totals."""
        until = await self._until()
        last = until - until % chosen.step
        points = range(last - chosen.minutes + chosen.step, last + 1, chosen.step)
        cells = await self._book.cells(points[0], chosen.step, until)
        until_s = min(self._tally.now_s, 60 * (until + 1))
        columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        for point in points:
            cell = cells.get(point, RollupCell())
            if tenant is not None:  # figures of the whole store are not shown to one tenant
                cell = RollupCell(cell.consumers)
            elapsed_s = chosen.step * 60.0
            if point == last:  # the last point is incomplete and would look like a drop
                elapsed_s = min(elapsed_s, max(1.0, until_s - point * 60))
            _append(columns, point, cell, cell.total(tenant, consumer), elapsed_s)
        counts = (await self.whole(chosen)).total(tenant, consumer)
        return {
            "columns": columns,
            "alarm": 100 * ALARM,
            "totals": _totals(counts),
            "step_s": chosen.step * 60,
        }

    async def _until(self) -> int:
        """Return the last minute to draw: the current one if this process is alone, else the last complete one."""
        minute = self._book.minute
        recent = RollupCell()
        for _, cell in sorted((await self._book.cells(minute - 2)).items()):
            recent.join(cell)
        if recent.held.keys() <= {self._mark}:
            return minute
        return minute - 1 if self._tally.now_s % 60 > TOLD_S else minute - 2

    async def rows(self, chosen: Range, tenant: str | None) -> list[dict[str, Any]]:
        """Return a row per consumer, the busiest first, including consumers without recent traffic."""
        total = await self.whole(chosen)
        settings = await self.settings()
        names = {name for name in (*total.consumers, *settings.modes) if tenant in (None, name[0])}
        rows = [
            _row(
                name,
                total.consumers.get(name, ConsumerCounters()),
                settings.modes.get(name),
                settings.windows,
            )
            for name in names
            if not is_own(*name)
        ]
        return sorted(rows, key=lambda row: (-row["received"], row["tenant"], row["consumer"]))

    async def counts(self, chosen: Range, tenant: str | None) -> ConsumerCounters:
        """Return the counts of a range."""
        return (await self.whole(chosen)).total(tenant)

    async def whole(self, chosen: Range) -> RollupCell:
        """Return all figures of a range, including those of the store."""
        return await self._book.total(self._book.minute - chosen.minutes + 1)

    async def lags(self, tenant: str | None, consumer: str = "") -> tuple[ConsumerCounters, float]:
        """Return the counts of the last seven days, and for how many seconds of them there are any."""
        minute, total = self._book.minute, ConsumerCounters()
        began: int | None = None
        for first, cell in sorted((await self._book.cells(minute - WEEK_MINUTES)).items()):
            counts = cell.total(tenant, consumer)
            if began is None and counts.received:
                began = first
            total.add(counts)
        return total, 0.0 if began is None else max(60.0, self._tally.now_s - 60.0 * began)


_COLUMNS = (
    "t", "received", "processed", "duplicates", "failed", "rate", "p50", "p99", "in_flight",
    "handler_p50", "handler_p95",
)  # fmt: skip


def _append(
    columns: dict[str, list[Any]], point: int, cell: RollupCell, counts: ConsumerCounters, elapsed_s: float
) -> None:
    half, most = (_ms(cell.store.took, part) for part in (0.5, 0.99))
    values = (
        point * 60,
        counts.received / elapsed_s,
        counts.processed / elapsed_s,
        counts.duplicates / elapsed_s,
        (counts.failed + counts.errored) / elapsed_s,
        100 * counts.duplicates / counts.received if counts.received else None,
        half,
        most,
        cell.in_flight,
        _ms(counts.took, 0.5),
        _ms(counts.took, 0.95),
    )
    for name, value in zip(_COLUMNS, values, strict=True):
        columns[name].append(round(value, 4) if isinstance(value, float) else value)


def _ms(took: dict[int, int], part: float) -> float | None:
    found = quantile(took, TOOK_S, part)
    return None if found is None else 1000 * found


def _totals(counts: ConsumerCounters) -> dict[str, Any]:
    return {
        "received": counts.received,
        "processed": counts.processed,
        "duplicates": counts.duplicates,
        "rate": _share(counts.duplicates, counts.received),
        "failed": counts.failed + counts.errored,
        "unknown": counts.unknown,
        "redelivery": counts.redelivery,
        "producer": counts.producer,
        "race": counts.race,
        "reuse": counts.reuse,
    }


def _row(
    name: tuple[str, str],
    counts: ConsumerCounters,
    mode: Mode | None,
    windows: dict[tuple[str, str, str], int],
) -> dict[str, Any]:
    return {
        "tenant": name[0],
        "consumer": name[1],
        "mode": mode,
        "window_us": windows.get((*name, "")),
        "observed": counts.observed,
        "alarm": is_alarming(counts.duplicates, counts.received),
        "few": 0 < counts.received <= ALARM_EVENTS,
        **_totals(counts),
    }


def is_alarming(duplicates: int, received: int) -> bool:
    """Whether the share of duplicates deserves attention."""
    return received > ALARM_EVENTS and duplicates / received > ALARM


def _share(part: int, whole: int) -> float | None:
    return min(1.0, part / whole) if whole else None


LITTLE_S = 86400.0
"""Advice from less than a day says so: a day has its peaks and its nightly jobs."""


def advice(counts: ConsumerCounters, span_s: float, current_us: int | None) -> tuple[Advice | None, str]:
    """Return the advice for the lags of `span_s` seconds, or the reason why there is none."""
    number = sum(counts.lags.values())
    thin = max(1.0, number / LAGS_MAX)
    seconds: list[float] = []
    for at in sorted(counts.lags):
        seconds += [LAGS_S[at]] * max(1, round(counts.lags[at] / thin))
    lags = Lags(tuple(seconds), counts.processed, span_s)
    try:
        advised = advise(lags, current_s=(current_us or DEFAULT_WINDOW_US) / 1e6)
    except UsageError as error:
        return None, str(error)
    if span_s < LITTLE_S:
        little = (
            f"this is little to go by: {plural(number, 'duplicate')} in {duration_text(round(span_s) * 10**6)};"
            " look again after a day, and keep a longer window until then"
        )
        advised = replace(advised, warnings=(little, *advised.warnings))
    return advised, ""
