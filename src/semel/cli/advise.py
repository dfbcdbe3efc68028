"""`semel advise`: how long to remember, from how late duplicates really came."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from semel.cli.exits import NOT_FOUND, USAGE, Stop
from semel.cli.gauge.measure import Row
from semel.cli.gauge.plot import bars, svg
from semel.cli.options import ConsumerOption, JsonOption, WindowOption, settings_for
from semel.cli.output import console, print_json, print_rows, say, table
from semel.cli.shown import exact_text
from semel.cli.sizes import size_text
from semel.observe.advise import CATCH, SAFETY, Advice, Lags, Share, from_history, from_metrics
from semel.observe.advise import advise as advised
from semel.observe.history import read
from semel.windows import window_us

__all__ = ["advise"]

COLUMNS_MAX = 100
FETCH_S = 10.0
FETCH_BYTES_MAX = 64 * 1024 * 1024


def advise(
    histories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[HISTORY]...", help="Folders or files that a HistoryHook wrote.", show_default=False
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option("--metrics", metavar="URL", help="A live /metrics page, or a file with one, instead."),
    ] = None,
    consumer: ConsumerOption = None,
    window: WindowOption = None,
    catch: Annotated[
        float, typer.Option("--catch", min=0.5, max=1.0, help="Which part of the duplicates must be caught.")
    ] = CATCH,
    safety: Annotated[
        float, typer.Option("--safety", min=1.0, help="How much longer than that the window shall be.")
    ] = SAFETY,
    per_day: Annotated[
        float | None,
        typer.Option("--per-day", min=0.0, help="New events a day, for the space; default: as measured."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Write the shares as an SVG picture.")
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Suggest a window from measured redelivery lags: what each would catch, and what it costs.

    A history also shows the duplicates that came after the window and ran again; metrics cannot. Where duplicates
    come as late as the window lasts, the suggestion says so.
    """
    if bool(histories) == bool(metrics):
        raise Stop("give the history to look at, or --metrics", USAGE)
    settings = settings_for(consumer=consumer, window=window)
    lags = (
        _from_histories(histories, settings.consumer)
        if histories
        else _from_page(str(metrics), settings.consumer)
    )
    current_s = window_us(settings.window) / 1e6
    advice = advised(lags, current_s=current_s, catch=catch, safety=safety, per_day=per_day)
    rows = [_bar(share, advice) for share in advice.shares]
    if plot is not None:
        title = f"Share of {advice.lags:,} duplicates that a window catches; suggested: {_text(advice.suggested_s)}"
        plot.write_text(svg(rows, title), encoding="utf-8")
        say(f"{plot} was written.")
    if as_json:
        print_json(_document(advice, lags))
        return
    _print(advice, rows)


def _from_histories(places: list[Path], consumer: str | None) -> Lags:
    for place in places:
        if not place.exists():
            raise Stop(f"{place} does not exist", NOT_FOUND)
    return from_history(line for place in places for line in read(place, consumer=consumer))


def _from_page(place: str, consumer: str | None) -> Lags:
    if not place.startswith(("http://", "https://")):
        path = Path(place)
        if not path.exists():
            raise Stop(f"{place} is neither a file nor an http address", NOT_FOUND)
        return from_metrics(path.read_text(encoding="utf-8"), consumer)
    from urllib.error import URLError
    from urllib.request import urlopen

    try:
        with urlopen(place, timeout=FETCH_S) as page:  # noqa: S310 - only http, as asked for above
            return from_metrics(page.read(FETCH_BYTES_MAX).decode(), consumer)
    except (URLError, OSError) as error:
        raise Stop(f"{place} gives no metrics: {error}") from error


def _bar(share: Share, advice: Advice) -> Row:
    return Row(
        store="window",
        what=_text(share.window_s),
        rate=share.caught,
        limit="the duplicates",
        limit_rate=1.0,
        aim=advice.catch,
    )


def _print(advice: Advice, rows: list[Row]) -> None:
    facts = [
        ("suggested window", _text(advice.suggested_s)),
        ("because", advice.reason),
        ("duplicates looked at", f"{advice.lags:,}"),
        (f"the window of {_text(advice.current_s or 0)} catches", f"{advice.current_caught:.3%}"),
    ]
    columns = [
        (
            _text(share.window_s),
            f"{share.caught:.3%}",
            f"{share.records:,}",
            *map(size_text, share.bytes.values()),
        )
        for share in advice.shares
    ]
    if sys.stdout.isatty():
        screen = console()
        screen.print(table(("", ""), facts))
        screen.print()
        for line in bars(rows, min(screen.width, COLUMNS_MAX), "all duplicates"):
            screen.print(line, markup=False)
        screen.print()
        screen.print(
            table(("WINDOW", "CATCHES", "RECORDS", *map(str.upper, advice.shares[0].bytes)), columns)
        )
    else:
        print_rows((), [*facts, *columns])
    for warning in advice.warnings:
        say(f"Note: {warning}.")


def _document(advice: Advice, lags: Lags) -> dict[str, Any]:
    return {
        "suggested_window_s": advice.suggested_s,
        "reason": advice.reason,
        "lags": advice.lags,
        "missed": lags.missed,
        "catch": advice.catch,
        "safety": advice.safety,
        "lag_at_catch_s": advice.at_quantile_s,
        "window_s": advice.current_s,
        "window_catches": advice.current_caught,
        "windows": [
            {"window_s": each.window_s, "catches": each.caught, "records": each.records, "bytes": each.bytes}
            for each in advice.shares
        ],
        "warnings": list(advice.warnings),
    }


def _text(seconds: float) -> str:
    return exact_text(round(seconds * 1e6))
