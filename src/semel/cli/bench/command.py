"""`semel bench`: how fast the user's own store is, beside the raw limit of what it stands on."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semel.cli.options import JsonOption, StoreOption, ending_on_signals, settings_for
from semel.cli.output import USAGE, CommandExit, console, print_json, print_rows

if TYPE_CHECKING:
    from pathlib import Path

    from semel.cli.bench.measure import Measurement

__all__ = ["bench"]

SECONDS_MIN, SECONDS_MAX = 1.0, 3600.0
COLUMNS_MAX = 100
HEADERS = ("WHAT", "PER SECOND", "RAW LIMIT", "PER SECOND", "RATIO")


def bench(
    store: StoreOption = None,
    seconds: Annotated[
        float, typer.Option(min=SECONDS_MIN, max=SECONDS_MAX, help="About how long to measure, in all.")
    ] = 20.0,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE.svg", help="Write the bars to this file too.")
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Measure a store beside the raw limit of what it stands on.

    Measures marks, runs, batches of claims, duplicates and fifty callers at once, each beside the same work done raw:
    a dict, an insert, a loop inside the server, commands packed by hand. It works in a file, schema or prefix of
    its own beside the store and removes it at the end, also when interrupted. Ratios say something about
    semel, absolute figures about the computer.
    """
    from pathlib import Path

    from semel.cli.bench.measure import scratch_for
    from semel.stores.registry import store_for

    settings = settings_for(store=store)
    measured = store_for(settings.store)
    name = measured.name
    target = None if plot is None else Path(plot)
    if target is not None and not target.parent.is_dir():
        raise CommandExit(f"{target.parent} is no folder; --plot cannot write there", USAGE)
    with ending_on_signals(), scratch_for(settings.store) as scratch:
        rows = _measure(scratch, seconds)
    document = _document(rows, name, seconds)
    _show(rows, document, target, as_json=as_json)


def _measure(scratch: Any, seconds: float) -> "list[Measurement]":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from semel.cli.bench.workloads import measures

    drawn = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        measures(scratch) as planned,
        Progress(*columns, console=drawn, transient=True, disable=not drawn.is_terminal) as progress,
    ):
        bar = progress.add_task("measuring", total=len(planned))
        rows: list[Measurement] = []
        for what, measure in planned:
            progress.update(bar, description=what)
            rows.append(measure(seconds / len(planned)))
            progress.advance(bar)
    return rows


def _show(rows: "list[Measurement]", document: dict[str, Any], plot: "Path | None", *, as_json: bool) -> None:
    from semel.cli.bench.measure import bars, svg

    if plot is not None:
        plot.write_text(
            svg(rows, f"{document['store']} beside its raw limit (bar = ratio)"), encoding="utf-8"
        )
    if as_json:
        print_json(document)
        return
    print_rows(
        HEADERS,
        [
            (row.what, f"{row.rate:,.0f}", row.limit, f"{row.limit_rate:,.0f}", f"{row.ratio:.2f}")
            for row in rows
        ],
    )
    if sys.stdout.isatty():
        screen = console()
        print()
        for line in bars(rows, min(screen.width, COLUMNS_MAX)):
            print(line)


def _document(rows: "list[Measurement]", name: str, seconds: float) -> dict[str, Any]:
    import platform

    import semel

    return {
        "store": name,
        "seconds": seconds,
        "semel": semel.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rows": [
            {
                "what": row.what,
                "per_second": round(row.rate, 1),
                "limit": row.limit,
                "limit_per_second": round(row.limit_rate, 1),
                "ratio": round(row.ratio, 4),
            }
            for row in rows
        ],
    }
