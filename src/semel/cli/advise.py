"""`semel advise`: how long to remember, from how late duplicates really came; with `--rate`, what that takes."""

import itertools
import sys
from bisect import bisect_right
from collections.abc import Sequence
from math import log10
from pathlib import Path
from typing import Annotated, Any
from xml.sax.saxutils import escape

import typer

from semel.cli.capacity import advise_capacity
from semel.cli.options import ConsumerOption, JsonOption, WindowOption, settings_for, size_text
from semel.cli.output import NOT_FOUND, USAGE, CommandExit, console, print_json, print_rows, say, table
from semel.observe.advise import CATCH, SAFETY, Advice, Lags, from_history, from_metrics
from semel.observe.advise import advise as advised
from semel.observe.capacity import SERVER_CORES
from semel.observe.formatting import plural
from semel.observe.history import read
from semel.windows import exact_text, is_endless, window_us

__all__ = ["advise", "svg"]

WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM = 860, 400, 60, 60, 64, 56
BINS_PER_DECADE = 6
SHORTEST_S = 1.0
"""Shorter lags are drawn in the first bar, with those of one second."""
TICKS_S = (1, 10, 60, 600, 3600, 6 * 3600, 86400, 7 * 86400, 30 * 86400, 365 * 86400)
BARS, CURVE, NOW, SUGGESTED = "#56b4e9", "#000000", "#d55e00", "#009e73"
"""Colours that colour-blind people can tell apart."""


def svg(seconds: Sequence[float], *, suggested_s: float | None, current_s: float | None, title: str) -> str:
    """Return the SVG of ascending lags. The left scale is for the bars, the right one for the curve."""
    longest_s = max(seconds[-1], suggested_s or 0.0, current_s or 0.0, SHORTEST_S) * 1.5
    decades = log10(longest_s / SHORTEST_S)

    def x(at_s: float) -> float:
        return LEFT + (WIDE - LEFT - RIGHT) * log10(max(at_s, SHORTEST_S) / SHORTEST_S) / decades

    floor, height = HIGH - BOTTOM, HIGH - BOTTOM - TOP
    edges = [SHORTEST_S * 10 ** (n / BINS_PER_DECADE) for n in range(int(decades * BINS_PER_DECADE) + 2)]
    bins = [
        bisect_right(seconds, high) - (0 if at == 0 else bisect_right(seconds, low))
        for at, (low, high) in enumerate(itertools.pairwise(edges))
    ]
    most = max(bins)
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" width="{WIDE}" height="{HIGH}"'
            ' font-family="sans-serif" font-size="12">'
        ),
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for low, high, count in zip(edges, edges[1:], bins, strict=False):
        if count:
            tall, right = height * count / most, min(x(high), WIDE - RIGHT)
            lines.append(
                f'<rect x="{x(low):.1f}" y="{floor - tall:.1f}" width="{max(1.0, right - x(low) - 1):.1f}"'
                f' height="{tall:.1f}" fill="{BARS}"><title>{count} up to {high:.3g} s</title></rect>'
            )
    caught = [
        f"{x(edge):.1f},{floor - height * bisect_right(seconds, edge) / len(seconds):.1f}" for edge in edges
    ]
    lines.append(f'<polyline points="{" ".join(caught)}" fill="none" stroke="{CURVE}" stroke-width="1.5"/>')
    for tick_s in (each for each in TICKS_S if each <= longest_s):
        at = x(tick_s)
        lines += [
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{floor}" y2="{floor + 5}" stroke="#000"/>',
            f'<text x="{at:.1f}" y="{floor + 19}" text-anchor="middle">{exact_text(tick_s * 10**6)}</text>',
        ]
    for share in (0.0, 0.5, 1.0):
        y = floor - height * share
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{round(most * share):,}</text>',
            f'<text x="{WIDE - RIGHT + 8}" y="{y + 4:.1f}">{share:.0%}</text>',
        ]
    lines += [
        f'<line x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{floor}" y2="{floor}" stroke="#000"/>',
        (
            f'<text x="{LEFT}" y="{HIGH - 12}">bars: duplicates by how late they came; curve: the share that a window'
            " catches</text>"
        ),
    ]
    for window_s, colour, name, y in (
        (current_s, NOW, "now", TOP - 22),
        (suggested_s, SUGGESTED, "suggested", TOP - 8),
    ):
        if window_s:
            at, text = x(window_s), f"{name}: {exact_text(round(window_s * 1e6))}"
            lines += [
                (
                    f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y + 2}" y2="{floor}" stroke="{colour}" stroke-width="2"'
                    ' stroke-dasharray="6 3"/>'
                ),
                f'<text x="{at + 4:.1f}" y="{y + 4}" fill="{colour}" font-weight="bold">{escape(text)}</text>',
            ]
    return "\n".join([*lines, "</svg>", ""])


BAR = 28
"""As wide as its heading."""
FETCH_S = 10.0
FETCH_BYTES_MAX = 64 * 1024 * 1024

RateOption = Annotated[
    str | None,
    typer.Option(
        "--rate", metavar="RATE", help="Plan each store for this many new events: 12k/s, 1B/day, 500/s."
    ),
]
PlannedStore = Annotated[
    str | None,
    typer.Option("--store", metavar="STORE", help="With --rate: only this store, by URL or name."),
]
CoresOption = Annotated[
    int, typer.Option("--cores", min=1, help="With --rate: the cores of one PostgreSQL server.")
]
MemoryOption = Annotated[
    str, typer.Option("--memory", metavar="BYTES", help="With --rate: the memory of one Redis server.")
]


def advise(  # noqa: PLR0913, PLR0917 - one parameter for each option
    histories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="HISTORY", help="Folders or files that a HistoryHook wrote.", show_default=False
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option("--metrics", metavar="URL", help="A live /metrics page, or a file with one, instead."),
    ] = None,
    consumer: ConsumerOption = None,
    window: WindowOption = None,
    catch: Annotated[
        float,
        typer.Option(
            "--catch", min=0.5, max=1.0, help="The share of the duplicates that the window must catch."
        ),
    ] = CATCH,
    safety: Annotated[
        float, typer.Option("--safety", min=1.0, help="The factor by which the window is longer than that.")
    ] = SAFETY,
    per_day: Annotated[
        float | None,
        typer.Option("--per-day", min=0.0, help="New events a day, for the space; default: as measured."),
    ] = None,
    rate: RateOption = None,
    store: PlannedStore = None,
    cores: CoresOption = SERVER_CORES,
    memory: MemoryOption = "64GiB",
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="Write the lags, the shares and the windows as an SVG picture."
        ),
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Suggest a window from measured redelivery lags: what each would catch, and what it costs.

    A history also shows the duplicates that came after the window and ran again; metrics cannot. Where duplicates
    come as late as the window lasts, the suggestion says so.

    With --rate: memory, disk, partitions, shards and connections that each store needs for --window.
    """
    if rate is not None and not (histories or metrics or plot):
        lasting_us = window_us(settings_for(window=window).window)
        advise_capacity(rate, lasting_us, store, cores=cores, memory=memory, as_json=as_json)
        return
    if rate is not None or store is not None:
        raise CommandExit("--store goes with --rate, and neither with a history, --metrics or --plot", USAGE)
    if bool(histories) == bool(metrics):
        raise CommandExit(
            "name the history to look at (a folder that a HistoryHook writes), or a /metrics page with --metrics, or"
            " give --rate to plan a store",
            USAGE,
        )
    settings = settings_for(consumer=consumer, window=window)
    lags = (
        _from_histories(histories, settings.consumer)
        if histories
        else _from_page(str(metrics), settings.consumer)
    )
    current_s = window_us(settings.window) / 1e6
    advice = advised(lags, current_s=current_s, catch=catch, safety=safety, per_day=per_day)
    if plot is not None:
        title = f"How late {plural(advice.lags, 'duplicate')} came" + (f": {consumer}" if consumer else "")
        drawn = svg(lags.seconds, suggested_s=advice.suggested_s, current_s=advice.current_s, title=title)
        plot.write_text(drawn, encoding="utf-8")
        say(f"{plot} was written.")
    if as_json:
        print_json(_document(advice, lags))
        return
    _print(advice, lags.observed)


def _from_histories(places: list[Path], consumer: str | None) -> Lags:
    for place in places:
        if not place.exists():
            raise CommandExit(f"{place} does not exist", NOT_FOUND)
    return from_history(line for place in places for line in read(place, consumer=consumer))


def _from_page(place: str, consumer: str | None) -> Lags:
    if not place.startswith(("http://", "https://")):
        path = Path(place)
        if not path.exists():
            raise CommandExit(f"{place} is neither a file nor an http address", NOT_FOUND)
        return from_metrics(path.read_text(encoding="utf-8"), consumer)
    from urllib.error import HTTPError, URLError
    from urllib.request import urlopen

    try:
        with urlopen(place, timeout=FETCH_S) as page:  # noqa: S310 - only http, as asked for above
            return from_metrics(page.read(FETCH_BYTES_MAX).decode(), consumer)
    except (URLError, OSError) as error:
        if isinstance(error, HTTPError):
            error.close()  # it holds the connection
        raise CommandExit(f"{place} gives no metrics: {error}") from error


def _print(advice: Advice, observed: int) -> None:
    facts = [
        ("suggested window", _text(advice.suggested_s)),
        ("because", advice.reason),
        ("duplicates looked at", f"{advice.lags:,}"),
        (f"the window of {_text(advice.current_s or 0)} catches", _percent(advice.current_caught or 0.0)),
    ]
    if observed:
        facts.append(("ran in mode observe", f"{observed:,}, which another mode would have stopped"))
    if not sys.stdout.isatty():
        columns = [
            (
                _text(share.window_s),
                _percent(share.caught),
                f"{share.records:,}",
                *map(size_text, share.bytes.values()),
            )
            for share in advice.shares
        ]
        print_rows((), [*facts, *columns])
    else:
        _draw(advice, facts)
    for warning in advice.warnings:
        say(f"Note: {warning}.")
    if is_endless(round((advice.current_s or 0) * 1e6)):
        sizes = ", ".join(
            f"{store} {size_text(size)}" for store, size in advice.per_day_bytes.items() if size
        )
        say(
            "The window is forever: it catches every duplicate, and every day adds to the store, which never shrinks"
            + (f": {sizes}." if sizes else "; give --per-day to see how much.")
        )


def _draw(advice: Advice, facts: list[tuple[str, str]]) -> None:
    """Print the windows as bars, without rows that repeat the one above, then the space by store."""
    screen = console()
    screen.print(table(("", ""), facts))
    last_s = max(advice.suggested_s, advice.current_s or 0.0)
    shares = [each for each in advice.shares if each.window_s <= last_s or each.caught < 1]
    rows = [
        (
            _text(each.window_s),
            "█" * round(each.caught * BAR) + "·" * (BAR - round(each.caught * BAR)),
            _percent(each.caught),
            f"{each.records:,}" if each.records else "",
            "<- suggested"
            if each.window_s == advice.suggested_s
            else "<- now"
            if each.window_s == advice.current_s
            else "",
        )
        for each in shares
    ]
    screen.print()
    screen.print(table(("WINDOW", "OF THE DUPLICATES IT CATCHES", "", "RECORDS KEPT", " "), rows))
    by_window = {each.window_s: each for each in advice.shares}
    chosen = [
        by_window[each] for each in dict.fromkeys((advice.suggested_s, advice.current_s)) if each in by_window
    ]
    if not chosen[0].records:
        say("The number of events is not known: give --per-day to see the space that the window takes.")
        return
    headers = ("SPACE IN", *(_text(each.window_s) for each in chosen))
    screen.print()
    screen.print(
        table(
            headers,
            [(store, *(size_text(each.bytes[store]) for each in chosen)) for store in chosen[0].bytes],
        )
    )


def _percent(part: float) -> str:
    """Format a share; it is never rounded up to 100 %."""
    return "100%" if part >= 1 else f"{min(part, 0.99999):.3%}"


def _document(advice: Advice, lags: Lags) -> dict[str, Any]:
    return {
        "suggested_window_s": advice.suggested_s,
        "reason": advice.reason,
        "lags": advice.lags,
        "missed": lags.missed,
        "observed": lags.observed,
        "catch": advice.catch,
        "safety": advice.safety,
        "lag_at_catch_s": advice.at_quantile_s,
        "window": None if advice.current_s is None else _text(advice.current_s),
        "window_s": advice.current_s,
        "window_catches": advice.current_caught,
        "windows": [
            {"window_s": each.window_s, "catches": each.caught, "records": each.records, "bytes": each.bytes}
            for each in advice.shares
        ],
        "bytes_per_day": advice.per_day_bytes,
        "warnings": list(advice.warnings),
    }


def _text(seconds: float) -> str:
    return exact_text(round(seconds * 1e6))
