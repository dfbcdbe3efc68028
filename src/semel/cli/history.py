"""`semel history`: what happened to an event, also long after its record is gone."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from semel.cli import shown
from semel.cli.exits import NOT_FOUND, CommandExit
from semel.cli.options import ConsumerOption, JsonOption, parse_duration_us, text
from semel.cli.output import duration_text, local_time, print_json, print_rows
from semel.observe.history import HistoryLine, read

__all__ = ["history"]


def history(
    place: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where a HistoryHook writes, or one of its files.")
    ],
    key: Annotated[
        str | None, typer.Option("--key", metavar="KEY", callback=text, help="Only this key.")
    ] = None,
    consumer: ConsumerOption = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="DURATION", help="Not older than this: 7d.")
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Print what a HistoryHook wrote down: how each delivery ended, oldest first.

    Keys that were written as digests are found by their plain text too. Exit code 5: nothing was found.
    """
    if not place.exists():
        raise CommandExit(f"{place} does not exist", NOT_FOUND)
    since_us = 0 if since is None else shown.now_us() - parse_duration_us(since, "--since")
    lines = list(read(place, consumer=consumer, key=key, since_us=since_us))
    if as_json:
        print_json({"lines": [msgspec.to_builtins(line) for line in lines]})
    else:
        print_rows(("AT", "EVENT", "CONSUMER", "KEY", "REASON", "LAG", "ERROR"), map(_row, lines))
    if not lines:
        raise CommandExit("nothing was found", NOT_FOUND)


def _row(line: HistoryLine) -> tuple[str, ...]:
    lag = "" if line.lag_s is None else duration_text(round(line.lag_s * 1e6))
    return (local_time(line.at_us), line.event, line.consumer, line.key, line.reason, lag, line.error)
