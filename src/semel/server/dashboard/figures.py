"""Figures from the rollups: totals for the header, lines for the charts, rows for the tables, lags for the advisor."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from semel.core.commands import ReadSettings, StoreSettings
from semel.errors import UsageError
from semel.observe.advise import Advice, Lags, advise
from semel.observe.tally import LAGS_S, TOOK_S, ConsumerCounters, CounterHook, quantile
from semel.plans import reachable
from semel.server.dashboard.book import RollupReader, RollupCell, Range
from semel.server.dashboard.looks import DEFAULT_WINDOW_US, OWN_TENANTS, StoreReader
from semel.types import Mode

__all__ = ["ALARM", "Figures"]

ALARM = 0.01
"""The share of duplicates above which somebody should look: the line in the chart, and the alert's."""
HEADER_MINUTES = 60
HEADER_LIVE_S = 0.5
SETTINGS_LIVE_S = 5.0
TOLD_S = 8.0
"""So long after a minute everybody has written what happened in it, and it has been read."""
LAGS_MAX = 20_000
"""Lags that the advisor is given; more of them are thinned out, in proportion."""
WEEK_MINUTES = 7 * 24 * 60


class Figures:
    """What pages show of the rollups, for a tenant (`None`: all)."""

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
        """The store's windows and modes, semel's own consumers left out."""
        if self._settings is None or self._clock() - self._settings[0] > SETTINGS_LIVE_S:
            found = reachable((await self._looks.quick((ReadSettings(),)))[0])
            modes = {place: mode for place, mode in found.modes.items() if place[0] not in OWN_TENANTS}
            self._settings = (self._clock(), StoreSettings(found.windows, modes, found.ids, found.live_us))
        return self._settings[1]

    def expire(self) -> None:
        """Settings were changed."""
        self._settings = None

    async def header(self, tenant: str | None) -> dict[str, Any]:
        """The counters that are always visible: the last hour, up to this moment."""
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
            "in_flight": None
            if tenant is not None
            else self._in_flight(cells.get(at) for at in range(minute - 2, minute + 1)),
            "alarm": bool(counts.received) and counts.duplicates / counts.received > ALARM,
        }
        if len(self._headers) > 1000:  # noqa: PLR2004 - tenants that looked once
            self._headers.clear()
        self._headers[tenant] = (self._clock(), made)
        return made

    def _in_flight(self, cells: Iterable[RollupCell | None]) -> int:
        last = RollupCell()
        for cell in cells:
            if cell is not None:
                last.held |= cell.held
        last.held[self._mark] = self._tally.in_flight()[0]
        return last.in_flight

    async def lines(self, chosen: Range, tenant: str | None, consumer: str = "") -> dict[str, Any]:
        """The charts: columns of equal length, one value for each point of time, and their totals."""
        until = await self._until()
        last = until - until % chosen.step
        points = range(last - chosen.minutes + chosen.step, last + 1, chosen.step)
        cells = await self._book.cells(points[0], chosen.step, until)
        until_s = min(self._tally.now_s, 60 * (until + 1))
        columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        for point in points:
            cell = cells.get(point, RollupCell())
            if tenant is not None:  # what is about the whole store is not for one of its tenants
                cell = RollupCell(cell.consumers)
            elapsed_s = chosen.step * 60.0
            if point == last:  # it is not over: a line that falls at its end would be a lie
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
        """The last minute that can be drawn: this one while this process is alone, else the last that all have told."""
        minute = self._book.minute
        recent = RollupCell()
        for _, cell in sorted((await self._book.cells(minute - 2)).items()):
            recent.join(cell)
        if recent.held.keys() <= {self._mark}:
            return minute
        return minute - 1 if self._tally.now_s % 60 > TOLD_S else minute - 2

    async def rows(self, chosen: Range, tenant: str | None) -> list[dict[str, Any]]:
        """A line for each consumer, the busiest first; those that only the store knows are there too."""
        total = await self.whole(chosen)
        settings = await self.settings()
        names = {name for name in (*total.consumers, *settings.modes) if tenant in (None, name[0])}
        rows = [
            _row(name, total.consumers.get(name, ConsumerCounters()), settings.modes.get(name), settings.windows)
            for name in names
            if not name[1].startswith("semel.")
        ]
        return sorted(rows, key=lambda row: (-row["received"], row["tenant"], row["consumer"]))

    async def counts(self, chosen: Range, tenant: str | None) -> ConsumerCounters:
        """All counts of a range."""
        return (await self.whole(chosen)).total(tenant)

    async def whole(self, chosen: Range) -> RollupCell:
        """Everything of a range, the store's own figures too."""
        return await self._book.total(self._book.minute - chosen.minutes + 1)

    async def lags(self, tenant: str | None, consumer: str = "") -> ConsumerCounters:
        """All that is known of how late duplicates came: the last seven days."""
        return (await self._book.total(self._book.minute - WEEK_MINUTES)).total(tenant, consumer)


_COLUMNS = ("t", "received", "processed", "duplicates", "failed", "rate", "p50", "p99", "in_flight")


def _append(columns: dict[str, list[Any]], point: int, cell: RollupCell, counts: ConsumerCounters, elapsed_s: float) -> None:
    half, most = (quantile(cell.store.took, TOOK_S, part) for part in (0.5, 0.99))
    values = (
        point * 60,
        counts.received / elapsed_s,
        counts.processed / elapsed_s,
        counts.duplicates / elapsed_s,
        (counts.failed + counts.errored) / elapsed_s,
        100 * counts.duplicates / counts.received if counts.received else None,
        None if half is None else 1000 * half,
        None if most is None else 1000 * most,
        cell.in_flight,
    )
    for name, value in zip(_COLUMNS, values, strict=True):
        columns[name].append(round(value, 4) if isinstance(value, float) else value)


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
    name: tuple[str, str], counts: ConsumerCounters, mode: Mode | None, windows: dict[tuple[str, str, str], int]
) -> dict[str, Any]:
    return {
        "tenant": name[0],
        "consumer": name[1],
        "mode": mode,
        "window_us": windows.get((*name, "")),
        "observed": counts.observed,
        **_totals(counts),
    }


def _share(part: int, whole: int) -> float | None:
    return min(1.0, part / whole) if whole else None


def advice(counts: ConsumerCounters, current_us: int | None) -> tuple[Advice | None, str]:
    """What the advisor says of these lags; or why it says nothing."""
    number = sum(counts.lags.values())
    thin = max(1.0, number / LAGS_MAX)
    seconds: list[float] = []
    for at in sorted(counts.lags):
        seconds += [LAGS_S[at]] * max(1, round(counts.lags[at] / thin))
    lags = Lags(tuple(seconds), counts.processed, WEEK_MINUTES * 60.0)
    try:
        return advise(lags, current_s=(current_us or DEFAULT_WINDOW_US) / 1e6), ""
    except UsageError as error:
        return None, str(error)
