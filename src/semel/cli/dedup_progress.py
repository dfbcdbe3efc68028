"""The progress of `semel dedup`: a bar in a terminal, metrics, log lines, and figures for the dashboard."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from semel.cli.observing import NO_ROLLUPS
from semel.cli.output import console
from semel.cli.store_access import find_store
from semel.observe.formatting import plural
from semel.observe.log_format import about

if TYPE_CHECKING:
    from semel.cli.settings import CliSettings
    from semel.observe.dedup_progress import ProgressWriter
    from semel.observe.prometheus import PrometheusHook
    from semel.streams import Dedup, DedupCounters
    from semel.streams.progress import DedupProgress

__all__ = ["progress_writer", "show_progress"]

_log = logging.getLogger("semel.streams")

DRAW_S = 0.5
METRICS_S = 2.0
STORE_S = 5.0
LOG_S = 10.0
"""How often progress is drawn, put into the metrics, given to the store's writer, and logged."""


class _Clock:
    """Says when something is due, and how many records for each second came since it was."""

    def __init__(self, every_s: float, first_s: float = 0.0) -> None:
        self._every_s = every_s
        self._due = monotonic() + first_s
        self._at, self._received = monotonic(), 0

    def is_due(self, now: float) -> bool:
        """Whether it is time."""
        return now >= self._due

    def rate(self, now: float, received: int) -> float:
        """Return the rate since the last call, and start the next count."""
        rate = (received - self._received) / max(now - self._at, 1e-6)
        self._due, self._at, self._received = now + self._every_s, now, received
        return rate


def progress_writer(settings: "CliSettings", name: str, window: str) -> "ProgressWriter | None":
    """Return the writer of the dashboard's figures; `None` if no store is set, or nobody could read it."""
    if not settings.is_set("store") or not settings.rollups or settings.store.startswith(NO_ROLLUPS):
        return None
    from semel.observe.dedup_progress import ProgressWriter

    return ProgressWriter(find_store(settings), name, window)


@contextmanager
def show_progress(
    engine: "Dedup", hook: "PrometheusHook | None", writer: "ProgressWriter | None"
) -> Iterator[Callable[[], None]]:
    """Yield a function that draws, exports and logs the progress where it is due."""
    drawn = console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=drawn, transient=True, disable=not drawn.is_terminal) as progress:
        bar = progress.add_task("reading", total=None, figures="")
        sinks: list[tuple[_Clock, Callable[[DedupProgress, float], None]]] = [
            (_Clock(LOG_S, LOG_S), lambda found, rate: _log_line(engine.name, found, rate))
        ]
        if drawn.is_terminal:
            sinks.append((_Clock(DRAW_S), lambda found, rate: _draw(progress, bar, found, rate)))
        if hook is not None:
            sinks.append((_Clock(METRICS_S), lambda found, _rate: _export(hook, engine.group, found)))
        if writer is not None:
            sinks.append((_Clock(STORE_S), lambda found, rate: writer.set(_figures(found, rate))))

        def show() -> None:
            now = monotonic()
            due = [(clock, tell) for clock, tell in sinks if clock.is_due(now)]
            if due:
                found = engine.progress()
                for clock, tell in due:
                    tell(found, clock.rate(now, found.counts.received))

        yield show
        if hook is not None:
            _export(hook, engine.group, engine.progress())


def _export(hook: "PrometheusHook", group: str, found: "DedupProgress") -> None:
    hook.note_dedup(group, _results(found.counts), found.lag, found.restore_left, found.index_bytes)


def _log_line(name: str, found: "DedupProgress", rate: float) -> None:
    fields = {**msgspec.to_builtins(found), "rate": round(rate)}
    _log.info(
        "%s: %d received, lag %d", name, found.counts.received, found.lag, extra=about("dedup", **fields)
    )


def _figures(found: "DedupProgress", rate: float) -> Any:
    from semel.observe.dedup_progress import InstanceFigures

    return InstanceFigures(
        **_results(found.counts),
        received=found.counts.received,
        aborts=found.counts.aborts,
        rate=round(rate, 1),
        partitions=found.partitions,
        restoring=found.restoring,
        restore_left=found.restore_left,
        restore_total=found.restore_total,
        lag=found.lag,
        index_bytes=found.index_bytes,
    )


def _draw(progress: Progress, bar: Any, found: "DedupProgress", rate: float) -> None:
    if found.restore_left:
        done = found.restore_total - found.restore_left
        progress.update(
            bar, description="restoring marks", total=found.restore_total, completed=done,
            figures=f"{done:,} of {found.restore_total:,}",
        )  # fmt: skip
        return
    counts = found.counts
    progress.update(
        bar, description="deduplicating", total=counts.received + found.lag, completed=counts.received,
        figures=f"{rate:,.0f}/s, {plural(counts.duplicates, 'duplicate')}, lag {found.lag:,}",
    )  # fmt: skip


def _results(counts: "DedupCounters") -> dict[str, int]:
    names = ("passed", "duplicates", "mismatches", "late", "dead_lettered")
    return {name: getattr(counts, name) for name in names}
