"""Show a storm while it runs, and its result."""

import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import Struct, to_builtins

from semel.cli.demo.queue import PHASES, Mode
from semel.cli.demo.run import DemoProgress
from semel.cli.demo.worker import DemoFolder
from semel.observe.formatting import plural

__all__ = ["TITLES", "DemoResult", "SinkCounts", "audit", "display", "document", "print_results"]


class SinkCounts(Struct, frozen=True):
    """Effects in a system that honours idempotency keys."""

    lost: int
    twice: int


class DemoResult(Struct, frozen=True):
    """The result of one storm. `broken`: the guarantees that did not hold; empty if all held."""

    mode: Mode
    events: int
    deliveries: int
    duplicates_suppressed: int
    replays: int
    kills: int
    kills_by_phase: dict[str, int]
    pauses: int
    takeovers: int
    lost: int
    """Events whose effect never happened."""
    twice: int
    """Events whose effect happened more than once."""
    repeats: int
    """Effects beyond the first of each event."""
    repeats_unexplained: int
    """Repeats beyond the number of kills, pauses and lost claims of their event."""
    answers_differ: int
    """Events whose deliveries got different answers."""
    sink: SinkCounts | None
    seconds: float
    broken: list[str]


def audit(place: DemoFolder, progress: DemoProgress, events: list[str], seconds: float) -> DemoResult:
    """Read the ledgers, which do not use semel, and compare them with the guarantees."""
    happened = _effects(place)
    lost = sum(not happened[event] for event in events)
    twice = sum(count > 1 for count in happened.values())
    over = sum(max(0, count - 1 - progress.hits[event]) for event, count in happened.items())
    differ = sum(len(answers) > 1 for answers in progress.answers.values())
    sink = _sink(place, events) if place.mode == "lease" else None
    broken = [f"no worker was killed at: {phase}" for phase in PHASES if not progress.kills[phase]]
    if lost:
        broken.append(f"{plural(lost, 'event was', 'events were')} lost")
    if place.mode == "inbox" and twice:
        broken.append(f"{plural(twice, 'event')} had an effect twice")
    if place.mode == "lease" and over:
        broken.append(f"{plural(over, 'repeat')} that no kill, pause or lost claim explains")
    if differ:
        broken.append(f"{plural(differ, 'event was', 'events were')} answered differently")
    if sink is not None and (sink.lost or sink.twice):
        broken.append(f"the sink with idempotency keys lost {sink.lost} and doubled {sink.twice}")
    if place.mode == "control" and not twice:
        broken.append("the control shows no double: the storm was too mild")
    return DemoResult(
        mode=place.mode,
        events=len(events),
        deliveries=progress.deliveries,
        duplicates_suppressed=progress.duplicates,
        replays=progress.replays,
        kills=progress.kills.total(),
        kills_by_phase={phase: progress.kills[phase] for phase in PHASES},
        pauses=progress.pauses,
        takeovers=progress.takeovers,
        lost=lost,
        twice=twice,
        repeats=sum(count - 1 for count in happened.values()),
        repeats_unexplained=over,
        answers_differ=differ,
        sink=sink,
        seconds=round(seconds, 2),
        broken=broken,
    )


def _effects(place: DemoFolder) -> Counter[str]:
    if place.mode == "lease":
        return Counter(place.effects.read_text().split())
    return _count(place, "SELECT event, count(*) FROM ledger GROUP BY event")


def _sink(place: DemoFolder, events: list[str]) -> SinkCounts:
    connection = sqlite3.connect(place.sink)
    try:
        applied = dict(connection.execute("SELECT event, count(*) FROM applied GROUP BY event").fetchall())
    finally:
        connection.close()
    return SinkCounts(
        sum(event not in applied for event in events), sum(count > 1 for count in applied.values())
    )


def _count(place: DemoFolder, query: str) -> Counter[str]:
    connection = sqlite3.connect(place.database)
    try:
        return Counter(dict(connection.execute(query).fetchall()))
    finally:
        connection.close()


TITLES = {
    "inbox": "inbox: effect and mark in one transaction",
    "lease": "lease: the effect is outside the store",
    "control": "control: without semel",
}
_SIGNS = {"working": "[green]●[/]", "paused": "[yellow]‖[/]", "starting": "[red]✕[/]"}
REFRESH_PER_S = 10


@contextmanager
def display(kills: int, *, shown: bool) -> Iterator[Callable[[DemoProgress], None]]:
    """Show a live view on stderr if it is a terminal. It has no thread: each step of the storm redraws it."""
    if not shown:
        yield lambda _: None
        return
    from rich.console import Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    from semel.cli.output import console

    def draw(progress: DemoProgress) -> Any:
        struck = ", ".join(f"{phase} {progress.kills[phase]}" for phase in PHASES)
        signs = " ".join(_SIGNS[each] for each in progress.workers.split())
        return Group(
            Text(TITLES[progress.mode], style="bold"),
            ProgressBar(total=progress.messages, completed=progress.acked, width=60),
            Text.from_markup(f"workers {signs}   deliveries {progress.deliveries:,}"),
            Text(f"killed -9: {progress.kills.total()} of {kills} ({struck})   paused: {progress.pauses}"),
        )

    with Live(console=console(stderr=True), auto_refresh=False, transient=True) as live:
        from time import monotonic

        drawn_at = 0.0

        def step(progress: DemoProgress) -> None:
            nonlocal drawn_at
            if monotonic() - drawn_at >= 1 / REFRESH_PER_S:
                drawn_at = monotonic()
                live.update(draw(progress), refresh=True)

        yield step


def rows(results: Sequence[DemoResult]) -> list[tuple[str, ...]]:
    """Return the table: one line per figure, one column per storm."""
    figures: list[tuple[str, Sequence[int | str]]] = [
        ("events", [each.events for each in results]),
        ("deliveries", [each.deliveries for each in results]),
        ("duplicates suppressed", [each.duplicates_suppressed for each in results]),
        ("replays of the first answer", [each.replays for each in results]),
        *((f"killed -9: {phase}", [each.kills_by_phase[phase] for each in results]) for phase in PHASES),
        ("paused past the lease", [each.pauses for each in results]),
        ("taken over", [each.takeovers for each in results]),
        ("lost", [each.lost for each in results]),
        ("twice", [each.twice for each in results]),
    ]
    if any(each.sink is not None for each in results):
        figures += [
            (
                "more often than it was hit",
                ["-" if each.sink is None else each.repeats_unexplained for each in results],
            ),
            (
                "lost where the key is honoured",
                ["-" if each.sink is None else each.sink.lost for each in results],
            ),
            (
                "twice where the key is honoured",
                ["-" if each.sink is None else each.sink.twice for each in results],
            ),
        ]
    figures.append(("seconds", [f"{each.seconds:.1f}" for each in results]))
    return [
        (name, *(f"{cell:,}" if isinstance(cell, int) else cell for cell in cells)) for name, cells in figures
    ]


def print_results(results: Sequence[DemoResult], seed: int) -> None:
    """Print the table and the conclusions to stdout."""
    from rich.table import Table
    from rich.text import Text

    from semel.cli.output import console

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"seed {seed}")
    for result in results:
        table.add_column(result.mode, justify="right")
    for row in rows(results):
        alarming = row[0] in ("lost", "twice")
        table.add_row(*(Text(cell, style="bold" if alarming else "") for cell in row))
    where = console()
    where.print(table)
    where.print()
    for sentence in verdicts(results):
        where.print(Text(sentence), soft_wrap=True)
    sys.stdout.flush()


def verdicts(results: Sequence[DemoResult]) -> list[str]:
    """Return one sentence per storm about its figures."""
    sentences: list[str] = []
    for result in results:
        if result.broken:
            sentences.append(f"{result.mode}: BROKEN: {'; '.join(result.broken)}")
        elif result.mode == "inbox":
            sentences.append(
                "inbox: lost 0, twice 0. Effect and mark were committed together, or neither was."
            )
        elif result.mode == "lease":
            sentences.append(
                f"lease: lost 0. {plural(result.repeats, 'effect was', 'effects were')} repeated, none more often than"
                " its event was hit; through a sink that honours the idempotency key: lost 0, twice 0."
            )
        else:
            sentences.append(
                f"control: as expected without semel, {result.twice} of {result.events} events had their effect"
                " more than once."
            )
    return sentences


def document(results: Sequence[DemoResult], seed: int, workers: int) -> dict[str, Any]:
    """Return the results as a JSON document. The figures at the top are those of the first storm."""
    first = results[0]
    by_mode = {result.mode: to_builtins(result) for result in results}
    return {
        "seed": seed,
        "workers": workers,
        "events": first.events,
        "deliveries": first.deliveries,
        "kills": first.kills,
        "lost": first.lost,
        "twice": first.twice,
        "ok": not any(result.broken for result in results),
        "inbox": by_mode.get("inbox"),
        "lease": by_mode.get("lease"),
        "control": by_mode.get("control"),
    }
