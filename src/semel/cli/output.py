"""Output of the commands: results to stdout, messages and progress to stderr.

On a terminal results are tables; elsewhere they are lines with tabs between the fields, for `cut` and `awk`.
"""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from semel.errors import (
    KeyInvalid,
    KeyMissing,
    ModeMismatch,
    PolicyInvalid,
    SemelError,
    SinkUnavailable,
    SinkUnknown,
    SourceUnavailable,
    StillRunning,
    StoreError,
    StoreRefused,
    StoreUnknown,
    UsageError,
    ValueInvalid,
)

__all__ = [
    "BAD_CONFIGURATION",
    "DUPLICATE",
    "FAILED",
    "INTERRUPTED",
    "NOT_FOUND",
    "OK",
    "TRY_LATER",
    "UNAVAILABLE",
    "USAGE",
    "CommandExit",
    "clean",
    "code_of",
    "confirm",
    "console",
    "print_json",
    "print_rows",
    "say",
    "table",
]

OK = 0
FAILED = 1
USAGE = 2
DUPLICATE = 3
NOT_FOUND = 5
UNAVAILABLE = 69
TRY_LATER = 75
BAD_CONFIGURATION = 78
INTERRUPTED = 130


class CommandExit(Exception):
    """End the command with a message on stderr and an exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


_CODES: tuple[tuple[type[SemelError], int], ...] = (
    (KeyInvalid, USAGE),
    (KeyMissing, USAGE),
    (ValueInvalid, USAGE),
    (StoreUnknown, BAD_CONFIGURATION),
    (SinkUnknown, BAD_CONFIGURATION),
    (PolicyInvalid, BAD_CONFIGURATION),
    (ModeMismatch, BAD_CONFIGURATION),
    (StillRunning, TRY_LATER),
    (StoreRefused, BAD_CONFIGURATION),
    (StoreError, UNAVAILABLE),
    (SinkUnavailable, UNAVAILABLE),
    (SourceUnavailable, UNAVAILABLE),
    (UsageError, BAD_CONFIGURATION),
)


def code_of(error: SemelError) -> int:
    """Return the exit code for an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)


WHOLE_CHARS_MAX = 28
"""Columns whose cells are at most this long, such as times, are never folded."""
_BETWEEN = re.compile(r"[\t\n]")
_BOLD = "" if os.environ.get("NO_COLOR") else "bold"


def console(*, stderr: bool = False) -> Console:
    """Return a console; without colours if `NO_COLOR` is set or the stream is no terminal."""
    return Console(stderr=stderr, highlight=False, soft_wrap=False)


def say(text: str) -> None:
    """Print a message for people to stderr."""
    print(clean(text), file=sys.stderr)


def print_json(document: Any) -> None:
    """Print one JSON document to stdout, in UTF-8, indented."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")


def print_rows(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table on a terminal; elsewhere tab-separated lines without headers, as they come."""
    if sys.stdout.isatty():
        console().print(table(headers, rows))
        return
    for row in rows:
        sys.stdout.write("\t".join(_BETWEEN.sub(" ", clean(cell)) for cell in row) + "\n")


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of plain text: no markup, no control characters. Empty columns are left out.

    Without headers all the cells of the rows are shown.
    The first column and those with long texts are folded where the terminal is narrow; the others stay whole.
    """
    gathered = [[clean(cell) for cell in row] for row in rows]
    headers = headers or [""] * max(map(len, gathered), default=0)
    used = [at for at, _ in enumerate(headers) if any(row[at] for row in gathered)]
    drawn = Table(show_header=any(headers), header_style=_BOLD, box=None, pad_edge=False)
    for at in used:
        longest = max(len(row[at]) for row in gathered)
        drawn.add_column(headers[at], overflow="fold", no_wrap=at > 0 and longest <= WHOLE_CHARS_MAX)
    for row in gathered:
        drawn.add_row(*(Text(row[at]) for at in used))
    return drawn


def clean(text: str) -> str:
    """Return the text with each control character replaced by its escape."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in "\n\t" else _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def confirm(question: str, *, yes: bool) -> None:
    """Ask before a deletion, unless `yes`. Without a terminal, raises `CommandExit` and nothing changes."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandExit(
            f"{question} There is no terminal to confirm it: add --yes. Nothing was changed.", USAGE
        )
    print(f"{clean(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandExit("Nothing was changed.")


def quiet_stdout() -> None:
    """Discard buffered output after the reader has gone, so that the program ends without an error."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, sys.stdout.fileno())
    os.close(sink)


def forgiving(stream: TextIO) -> None:
    """Write characters that the stream's encoding lacks as escapes instead of failing."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
