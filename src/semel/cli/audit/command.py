"""`semel audit`: the duplicates in stored events, how late they came, and which window would have caught them."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TextIO

import msgspec
import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from semel.cli.advise import svg
from semel.cli.audit.measure import BINS_S, Audit, Measure, measure
from semel.cli.audit.reading import EventColumns, connect, relation_of
from semel.cli.options import JsonOption, parse_bytes, parse_duration_us
from semel.cli.output import DUPLICATE, USAGE, CommandExit, console, print_json, print_rows, say, table
from semel.observe.formatting import plural
from semel.observe.history import HistoryLine
from semel.windows import exact_text

__all__ = ["audit"]

SHOWN_S = (300, 3600, 86400)
"""The windows that are printed; --json has all."""
BAR = 40
POLL_S = 0.2
DAY_S = 86400.0
MEMORY_MIN = 64 * 2**20


PlacesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="EVENTS", help="Files (Parquet, CSV, JSON lines), patterns, or the URL of a database."
    ),
]
KeyOption = Annotated[
    str, typer.Option("--key", metavar="COLUMN", help="The column that identifies an event.")
]
TimeOption = Annotated[
    str, typer.Option("--time", metavar="COLUMN", help="The column with the time of arrival.")
]
ContentOption = Annotated[
    str | None,
    typer.Option(
        "--content", metavar="COLUMNS", help="Also find rows with another key and equal content in these."
    ),
]
WithinOption = Annotated[
    str, typer.Option("--within", metavar="DURATION", help="How close rows with equal content must be.")
]
SourceOption = Annotated[
    str | None, typer.Option("--source", metavar="COLUMN", help="The column to group by; default: the file.")
]
TableOption = Annotated[str, typer.Option("--table", metavar="NAME", help="The table of a database.")]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Write the lags as an SVG picture.")
]
HistoryOption = Annotated[
    Path | None, typer.Option("--history", metavar="FILE", help="Write the lags for semel advise.")
]
KeysOption = Annotated[
    Path | None,
    typer.Option("--keys", metavar="FILE", help="Write each key with its last time, for semel import."),
]
MemoryOption = Annotated[
    str, typer.Option("--memory", metavar="SIZE", help="The memory to use; the rest goes to --temp.")
]
TempOption = Annotated[
    Path | None,
    typer.Option("--temp", metavar="FOLDER", help="Where to put what does not fit into memory."),
]


def audit(  # noqa: PLR0913, PLR0917 - one parameter for each option
    places: PlacesArgument,
    key: KeyOption,
    time: TimeOption,
    content: ContentOption = None,
    within: WithinOption = "5m",
    source: SourceOption = None,
    from_table: TableOption = "events",
    plot: PlotOption = None,
    history: HistoryOption = None,
    keys: KeysOption = None,
    memory: MemoryOption = "1GiB",
    temp: TempOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Find the duplicates in events that were stored: how many, how late, from where, and what would have caught them.

    Exit code 3: there are duplicates. Databases: postgresql://... and sqlite:///file.db, with --table.
    """
    memory_bytes = parse_bytes(memory, "--memory")
    if memory_bytes < MEMORY_MIN:
        raise CommandExit("--memory is too small; use at least 64MiB", USAGE)
    wanted = Measure(
        key,
        time,
        tuple(each.strip() for each in content.split(",") if each.strip()) if content else (),
        parse_duration_us(within, "--within"),
        source,
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="semel-audit-", dir=temp)))
        connection = connect(folder, memory_bytes)
        stack.callback(connection.close)
        run = stack.enter_context(_progress(connection))
        try:
            columns = EventColumns(connection, relation_of(places, from_table, folder))
            file = stack.enter_context(history.open("w", encoding="utf-8")) if history else None
            found = measure(run, columns, wanted, _history_writer(file))
            if keys is not None:
                _write_keys(run, columns, wanted, keys)
        except connection_errors() as error:
            raise CommandExit(str(error).splitlines()[0], USAGE) from error
    if plot is not None:
        _plot(found, plot)
    if as_json:
        print_json(_document(found, wanted))
    else:
        _print(found, wanted, history, keys)
    if found.found:
        raise typer.Exit(DUPLICATE)


def connection_errors() -> type[Exception]:
    """Return the root of DuckDB's errors."""
    import duckdb

    return duckdb.Error


@contextmanager
def _progress(connection: Any) -> Iterator[Callable[[str, str], Any]]:
    """Execute statements in a thread, and show how far each is, on a terminal."""
    drawn = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with (
        ThreadPoolExecutor(1, "semel-audit") as thread,
        Progress(*columns, console=drawn, transient=True, disable=not drawn.is_terminal) as progress,
    ):
        bar = progress.add_task("reading", total=100)

        def run(what: str, statement: str) -> Any:
            progress.update(bar, description=what, completed=0)
            future = thread.submit(connection.execute, statement)
            while not wait((future,), POLL_S).done:
                done = connection.query_progress()
                progress.update(
                    bar, completed=max(0.0, float(done if isinstance(done, int | float) else 0.0))
                )
            return future.result()

        try:
            yield run
        except KeyboardInterrupt:
            connection.interrupt()
            raise


def _history_writer(file: TextIO | None) -> Callable[[str, int, float], object]:
    encode = msgspec.json.Encoder().encode

    def write(key: str, at_us: int, lag_s: float) -> None:
        if file is not None:
            line = HistoryLine(at_us=at_us, event="duplicate", consumer="audit", key=key, lag_s=lag_s)
            file.write(encode(line).decode() + "\n")

    return write


def _write_keys(run: Callable[[str, str], Any], columns: EventColumns, wanted: Measure, file: Path) -> None:
    name = columns.name(wanted.key)
    place = str(file).replace("'", "''")
    run(
        "writing keys",
        f"COPY (SELECT {name}::VARCHAR AS key, max({columns.time_us(wanted.time)}) AS time FROM {columns.relation}"  # noqa: S608
        f" WHERE {name} IS NOT NULL GROUP BY 1) TO '{place}' (FORMAT json)",
    )


def _plot(found: Audit, file: Path) -> None:
    if not found.lags:
        say("There are no lags to draw.")
        return
    title = f"How late {plural(found.surplus, 'duplicate')} came"
    file.write_text(svg(found.lags, suggested_s=None, current_s=None, title=title), encoding="utf-8")
    say(f"{file} was written.")


def _document(found: Audit, wanted: Measure) -> dict[str, Any]:
    timed = found.surplus - found.without_time
    return {
        "rows": found.rows,
        "keys": found.keys,
        "surplus_rows": found.surplus,
        "repeated_keys": found.repeated_keys,
        "rows_without_key": found.without_key,
        "surplus_rows_without_time": found.without_time,
        "changed_keys": found.changed_keys,
        "changed_rows": found.changed_rows,
        "content": {
            "columns": list(wanted.content),
            "within_s": wanted.content_window_us / 1e6,
            "duplicates": found.content_duplicates,
            "groups": found.content_groups,
        }
        if wanted.content
        else None,
        "lags": [
            {"up_to_s": bound, "rows": count}
            for bound, count in zip((*BINS_S, None), found.bins, strict=True)
        ],
        "longest_lag_s": found.lags[-1] if found.lags else None,
        "windows": [
            {"window_s": window_s, "caught": caught, "missed": timed - caught}
            for window_s, caught in found.caught.items()
        ],
        "sources": [
            {"source": name, "rows": rows, "surplus_rows": surplus}
            for name, (rows, surplus) in found.sources.items()
        ],
        "span_s": found.span_s,
    }


def _print(found: Audit, wanted: Measure, history: Path | None, keys: Path | None) -> None:
    facts = [
        ("rows", f"{found.rows:,}"),
        ("keys", f"{found.keys:,}"),
        ("surplus rows", f"{found.surplus:,}"),
        ("repeated keys", f"{found.repeated_keys:,}"),
        ("keys with another body", f"{found.changed_keys:,}"),
    ]
    if found.without_key:
        facts.append(("rows without a key", f"{found.without_key:,}"))
    if wanted.content:
        facts.append(
            (
                f"equal {', '.join(wanted.content)} within {_text(wanted.content_window_us / 1e6)}",
                f"{found.content_duplicates:,} in {found.content_groups:,} groups",
            )
        )
    facts += [
        (f"a window of {_text(window_s)} would have caught", f"{found.caught[window_s]:,}")
        for window_s in SHOWN_S
    ]
    lags = [
        (f"up to {_text(bound)}" if bound else "later", count)
        for bound, count in zip((*BINS_S, 0), found.bins, strict=True)
        if count
    ]
    sources = [(name, f"{rows:,}", f"{surplus:,}") for name, (rows, surplus) in found.sources.items()]
    if not sys.stdout.isatty():
        print_rows((), [*facts, *((f"lag {name}", f"{count:,}") for name, count in lags)])
        print_rows((), [(f"source {name}", *more) for name, *more in sources])
    else:
        screen, most = console(), max((count for _, count in lags), default=1)
        screen.print(table(("", ""), facts))
        rows = [(name, "█" * max(1, round(BAR * count / most)), f"{count:,}") for name, count in lags]
        screen.print(table(("LAG", "", "DUPLICATES"), rows))
        screen.print(table(("SOURCE", "ROWS", "SURPLUS"), sources))
    if history is not None and found.span_s:
        per_day = round(found.keys / found.span_s * DAY_S)
        say(f"Next: semel advise {history} --per-day {per_day}")
    if keys is not None:
        say(f"Next: semel import {keys} --key key --time time --consumer NAME")


def _text(seconds: float) -> str:
    return exact_text(round(seconds * 1e6))
