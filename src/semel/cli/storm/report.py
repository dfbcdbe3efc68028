"""Show a storm while it blows, and what it left behind."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import to_builtins

from semel.cli.storm.audit import DemoResult
from semel.cli.storm.messages import PHASES
from semel.cli.storm.run import DemoProgress

__all__ = ["TITLES", "display", "document", "print_results"]

TITLES = {
    "inbox": "inbox: effect and mark in one transaction",
    "lease": "lease: the effect is outside the store",
    "control": "control: without semel",
}
_SIGNS = {"working": "[green]●[/]", "paused": "[yellow]‖[/]", "starting": "[red]✕[/]"}
REFRESH_PER_S = 10


@contextmanager
def display(kills: int, *, shown: bool) -> Iterator[Callable[[DemoProgress], None]]:
    """A live view on stderr; nothing where nobody looks. It has no thread: it is drawn by the storm's own steps."""
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
    """The table: one line for each figure, one column for each storm."""
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
    """The table and the verdict, on stdout."""
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
    """What the figures mean, a sentence for each storm."""
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
                f"lease: lost 0. {result.repeats} effects were repeated, none more often than its event was hit;"
                " through a sink that honours the idempotency key: lost 0, twice 0."
            )
        else:
            sentences.append(
                f"control: as expected without semel, {result.twice} of {result.events} events had their effect"
                " more than once."
            )
    return sentences


def document(results: Sequence[DemoResult], seed: int, workers: int) -> dict[str, Any]:
    """The same for programs. The figures at the top are those of the first storm."""
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
