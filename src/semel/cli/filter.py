"""`semel filter`: pass the first line of each key on, and drop the repeats."""

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from semel.cli.line_io import Block, LineReader, LineWriter
from semel.cli.options import (
    ConsumerOption,
    StoreOption,
    TenantOption,
    WindowOption,
    parse_bytes,
    settings_for,
    size_text,
)
from semel.cli.output import BAD_CONFIGURATION, FAILED, USAGE, CommandExit, console, quiet_stdout, say
from semel.keys.limits import KEY_BYTES_MAX
from semel.observe.formatting import plural

if TYPE_CHECKING:
    from semel.client.client import Semel

__all__ = ["filter_lines"]

RECORDS_MAX = 10_000_000
"""The most keys in memory without a store, about 160 bytes each; use a file for more."""
WINDOW_LIVE_S = 5.0
"""How long a window is used before it is read again, so that a changed one applies within 10 s."""
REPORTED_MAX = 100
"""The most malformed lines that are reported one by one; further ones are counted."""
KEYLESS_MAX = 1000
"""If none of this many lines has a key, the key is misspelt or the input is the wrong one."""
HELD_BYTES_MAX = 64 * 1024 * 1024
"""The most bytes that are held back until a line has a key; then they are passed on."""
MEMBERS_SHOWN_MAX = 10
BROKEN_PIPE = 141
"""The exit code of a shell command that SIGPIPE ended."""

Marker = Callable[[list[str]], list[bool]]
Marking = Callable[[int], AbstractContextManager[Marker]]
"""Takes a window and opens a block in which keys are marked; the marks commit if the block does not raise."""


class Malformed(StrEnum):
    """What to do with a line that has no key."""

    KEEP = "keep"
    DROP = "drop"
    FAIL = "fail"


class FilterCounters(msgspec.Struct):
    """Counts of lines by result."""

    lines: int = 0
    passed: int = 0
    duplicates: int = 0
    malformed: int = 0
    blank: int = 0


def filter_lines(  # noqa: PLR0913, PLR0917 - one parameter for each option
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="JSON lines, plain or gzipped; - or none: stdin."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key", "-k", metavar="PATH", help="The path of the key in a line: id, order.id or ids.0."
        ),
    ] = None,
    content: Annotated[  # noqa: FBT002 - a switch
        bool, typer.Option("--content", help="The whole line is the key: equal content is one event.")
    ] = False,
    store: StoreOption = None,
    consumer: ConsumerOption = None,
    tenant: TenantOption = None,
    window: WindowOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Add to this file instead of stdout."),
    ] = None,
    malformed: Annotated[
        Malformed,
        typer.Option("--malformed", help="A line without a usable key: pass it on, drop it, or stop."),
    ] = Malformed.KEEP,
    line_max: Annotated[
        str, typer.Option("--line-max", metavar="SIZE", help="A longer line counts as malformed.")
    ] = "16MiB",
    stats_json: Annotated[
        Path | None, typer.Option("--stats-json", metavar="FILE", help="Write the counts to this file.")
    ] = None,
    no_key_check: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--no-key-check", help="Go on even if none of the first 1,000 lines has a key."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no summary.")] = False,  # noqa: FBT002
) -> int:
    """Pass the first JSON line of each key on, in order, and drop the repeats.

    Remembers across runs with --store sqlite:///seen.db, else in memory for this run. If it is killed, it may
    repeat the last chunk of lines in the next run; it never loses one. If none of the first 1,000 lines has the key,
    it stops with exit code 1 before anything is written.
    """
    if (key is None) is not content:
        raise CommandExit("give one of --key PATH and --content", USAGE)
    line_bytes_max = parse_bytes(line_max, "--line-max")
    settings = settings_for(store=store, consumer=consumer, tenant=tenant, window=window)
    names = files or ["-"]
    with _client(settings, remembered=settings.is_set("store")) as client:
        marking = _marking(client, settings.tenant or "")
        keys = Keys(key, line_bytes_max)
        sieve = LineFilter(client, marking, keys, malformed, say)
        sink = LineWriter(output, names, say)
        lines = LineReader(names, line_bytes_max=line_bytes_max)
        try:
            with _progress(lines, shown=not quiet and not _shares_terminal(output)) as advance:
                unchecked = no_key_check or malformed is Malformed.FAIL
                for block in lines if unchecked else _once_keyed(lines, keys, say):
                    sieve.take(block, sink)
                    advance(lines.position_bytes)
        except BrokenPipeError:
            _forget_stdout()
            quiet = True
            return BROKEN_PIPE
        except BaseException:
            quiet = quiet or not sieve.counts.lines  # the error has the whole message
            raise
        finally:
            sink.close()
            _sum_up(sieve.counts, malformed, stats_json, None if quiet else say)
    return 0


class Keys:
    """Reads the keys of lines: all at once, or one by one if a line is malformed."""

    def __init__(self, path: str | None, line_bytes_max: int) -> None:
        from semel.keys import body
        from semel.keys import content as content_of
        from semel.keys.message import json_body

        self.told: str = "" if path is None else f" at {path!r}"
        self._line_bytes_max = line_bytes_max
        self._decode = None if path is None else _decoder(path)
        whole = content_of()
        self._read: Callable[[bytes], str] = (
            body(path) if path is not None else lambda line: whole(json_body(line))
        )

    def of(self, block: bytes, lines: list[bytes]) -> list[str] | None:
        """Return the keys of the lines, or `None` if they must be read one by one."""
        if self._decode is None or (len(block) > self._line_bytes_max and self._longest(lines)):
            return None
        try:
            if not block.isascii():
                block.decode()
            keys = self._decode(lines)
            joined = "".join(keys)
        except (
            msgspec.DecodeError,
            UnicodeDecodeError,
            AttributeError,
            RecursionError,
            TypeError,
            ValueError,
        ):
            return None
        if (
            joined.isascii()
            and joined.isprintable()
            and all(keys)
            and len(max(keys, key=len)) <= KEY_BYTES_MAX
        ):
            return keys
        return None

    def _longest(self, lines: list[bytes]) -> bool:
        return max(map(len, lines)) > self._line_bytes_max

    def count_keyless(self, body: bytes, lines_max: int) -> int | None:
        """Count the first lines without a key, except blank ones; `None` if one of them has a key."""
        count = 0
        for line in body.split(b"\n")[:-1]:
            found = self.one(line)
            if isinstance(found, str):
                return None
            count += found is not None
            if count == lines_max:
                break
        return count

    def one(self, line: bytes) -> str | Exception | None:
        """Return the key of one line, or its error, or `None` for a blank line."""
        from semel.errors import KeyInvalid, KeyMissing

        if len(line) > self._line_bytes_max:
            return ValueError(f"the line is longer than {size_text(self._line_bytes_max)}")
        if not line.strip():
            return None
        try:
            line.decode()
            return self._read(line)
        except UnicodeDecodeError as error:
            return ValueError(f"the line is not UTF-8: {error.reason} at byte {error.start + 1}")
        except (KeyInvalid, KeyMissing, ValueError, TypeError, RecursionError) as error:
            if isinstance(error.__cause__, msgspec.DecodeError):
                trouble = str(error.__cause__).removeprefix("JSON is malformed: ")
                return ValueError(f"the line is not JSON: {trouble}")
            return error


def _decoder(path: str) -> Callable[[list[bytes]], list[str]] | None:
    """Return a decoder that reads one nested member and skips the rest; `None` if the path may have an index."""
    from semel.keys.extract import parse

    segments = parse(path)
    if any(segment.isdecimal() for segment in segments):
        return None
    kind: Any = str | int
    for segment in reversed(segments):
        kind = msgspec.defstruct("Line", [("member", kind)], rename={"member": segment}, gc=False)
    decode = msgspec.json.Decoder(kind).decode

    def keys(lines: list[bytes]) -> list[str]:
        found: list[Any] = [decode(line).member for line in lines]
        for _ in segments[1:]:
            found = [each.member for each in found]
        return found if {*map(type, found)} == {str} else [str(each) for each in found]

    return keys


def _once_keyed(lines: LineReader, keys: Keys, say: Callable[[str], None]) -> Iterator[Block]:
    """Yield the blocks, held back until a line has a key.

    Raises `CommandExit` after `KEYLESS_MAX` lines without a key; until then nothing is written or
    marked. An input that ends earlier is passed on, with a warning.
    """
    blocks = iter(lines)
    held: list[Block] = []
    held_bytes = keyless = 0
    for block in blocks:
        held.append(block)
        held_bytes += len(block.body)
        looked = None if block.torn else keys.count_keyless(block.body, KEYLESS_MAX - keyless)
        if looked is None or held_bytes > HELD_BYTES_MAX:
            break
        keyless += looked
        if keyless >= KEYLESS_MAX:
            raise CommandExit(
                f"none of the first {KEYLESS_MAX:,} lines has a key{keys.told}{_members(held[0].body)}. Nothing was"
                " written or remembered: correct --key, or pass such lines on with --no-key-check",
                FAILED,
            )
    else:
        if keyless:
            say(f"no line has a key{keys.told}{_members(held[0].body)}; is --key right?")
    yield from held
    yield from blocks


def _members(body: bytes) -> str:
    """Return the names of the first line's members, for the message."""
    try:
        first = msgspec.json.decode(body.split(b"\n", 1)[0])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "; the first line is not JSON"
    if not isinstance(first, dict):
        return "; the first line is not a JSON object"
    return f"; the first line has {', '.join(list(first)[:MEMBERS_SHOWN_MAX]) or 'no member'}"


class LineFilter:
    """Passes each key once. A chunk's marks are committed after its lines are written."""

    def __init__(
        self, client: "Semel", marking: Marking, keys: Keys, malformed: Malformed, say: Callable[[str], None]
    ) -> None:
        self.counts: FilterCounters = FilterCounters()
        self._client = client
        self._keys = keys
        self._malformed = malformed
        self._say = say
        self._marking = marking
        self._window_us = 0
        self._window_due = 0.0
        self._torn = ("", 0)

    def take(self, block: Block, sink: LineWriter) -> None:
        """Filter one block. Raises `CommandExit` at a malformed line in mode `fail`, after the lines before it."""
        if block.torn:
            self._take_torn(block, sink)
            return
        lines = block.body.split(b"\n")
        lines.pop()
        keys: list[str] | list[str | None] | None = self._keys.of(block.body, lines)
        kept, stop = set[int](), None
        whole: bytes | None = block.body
        if keys is None:
            keys, kept, stop = self._look(block, lines)
            if stop is not None:
                lines, whole = lines[: len(keys)], None
        self._sift(lines, keys, kept, whole, sink)
        if stop is not None:
            raise stop

    def _sift(
        self, lines: list[bytes], keys: list[Any], kept: set[int], whole: bytes | None, sink: LineWriter
    ) -> None:
        unique = dict.fromkeys(keys)
        unique.pop(None, None)
        window_us = self._window()
        with self._marking(window_us) if unique and window_us else nullcontext(_all_new) as mark:
            distinct = list(unique)
            new = set(compress(distinct, mark(distinct)))
            fresh = len(new) if window_us else sum(key is not None for key in keys)
            if whole is not None and fresh == len(lines):
                sink.write(whole)
            elif passed := self._unseen_lines(lines, keys, kept, new if window_us else None):
                sink.write(b"\n".join(passed) + b"\n")
            sink.settle()
        counts = self.counts
        counts.lines += len(lines)
        counts.passed += fresh + len(kept)
        counts.duplicates += sum(key is not None for key in keys) - fresh

    @staticmethod
    def _unseen_lines(
        lines: list[bytes], keys: list[Any], kept: set[int], new: set[str] | None
    ) -> list[bytes]:
        passed: list[bytes] = []
        for position, key in enumerate(keys):
            if key is None:
                if position in kept:
                    passed.append(lines[position])
            elif new is None:
                passed.append(lines[position])
            elif key in new:
                new.remove(key)
                passed.append(lines[position])
        return passed

    def _look(
        self, block: Block, lines: list[bytes]
    ) -> tuple[list[str | None], set[int], CommandExit | None]:
        """Read the keys one by one; `None` for a line without a key. Ends before a line that must stop the command."""
        keys: list[str | None] = []
        kept: set[int] = set()
        for position, line in enumerate(lines):
            found = self._keys.one(line)
            if isinstance(found, Exception):
                stop = self._report(block.source, block.number + position, found)
                if stop is not None:
                    return keys, kept, stop
                if self._malformed is Malformed.KEEP:
                    kept.add(position)
                found = None
            elif found is None:
                self.counts.blank += 1
            keys.append(found)
        return keys, kept, None

    def _take_torn(self, block: Block, sink: LineWriter) -> None:
        """Pass on or drop a line that is too long to hold, part by part."""
        if self._torn != (block.source, block.number):
            self._torn = (block.source, block.number)
            self.counts.lines += 1
            stop = self._report(block.source, block.number, ValueError("the line is longer than --line-max"))
            if stop is not None:
                raise stop
            if self._malformed is Malformed.KEEP:
                self.counts.passed += 1
        if self._malformed is Malformed.KEEP:
            sink.write(block.body)

    def _report(self, source: str, number: int, error: Exception) -> CommandExit | None:
        self.counts.malformed += 1
        where = f"{source}:{number}: {error}"
        if self._malformed is Malformed.FAIL:
            return CommandExit(where, FAILED)
        if self.counts.malformed <= REPORTED_MAX:
            self._say(f"{where} ({'kept' if self._malformed is Malformed.KEEP else 'dropped'})")
        elif self.counts.malformed == REPORTED_MAX + 1:
            self._say("further malformed lines are only counted")
        return None

    def _window(self) -> int:
        now = time.monotonic()
        if now >= self._window_due:
            self._window_us = self._client.windows.get()
            self._window_due = now + WINDOW_LIVE_S
        return self._window_us


def _all_new(keys: list[str]) -> list[bool]:
    return [True] * len(keys)


def _client(settings: Any, *, remembered: bool) -> "Semel":
    import semel
    from semel.stores import MemoryStore

    return semel.open(
        settings.store if remembered else MemoryStore(records_max=RECORDS_MAX),
        consumer=settings.consumer or "filter",
        tenant=settings.tenant or "",
        window=settings.window,
        mode="mark",
    )


def _marking(client: "Semel", tenant: str) -> Marking:
    """Return how this store holds marks back until the lines are written."""
    from semel.stores.memory.store import MemoryStore

    store = client.store
    if isinstance(store, MemoryStore):
        return lambda _: nullcontext(client.mark_many)
    from semel.stores.sqlite.store import SqliteStore
    from semel.stores.sqlite.stream import marking

    if isinstance(store, SqliteStore):
        return partial(marking, store, tenant, client.consumer)
    raise CommandExit(
        f"{store.name} cannot hold its marks back until the lines are written, so a kill would lose lines;"
        " use sqlite:///seen.db",
        BAD_CONFIGURATION,
    )


def _shares_terminal(output: Path | None) -> bool:
    import sys

    return not sys.stderr.isatty() or (output is None and sys.stdout.isatty())


@contextmanager
def _progress(lines: LineReader, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr for sources of known size."""
    total = lines.total_bytes if shown else None
    if not total:
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda position: progress.update(task, completed=position)


def _sum_up(
    counts: FilterCounters, malformed: Malformed, stats_json: Path | None, say: Callable[[str], None] | None
) -> None:
    if stats_json is not None:
        stats_json.write_bytes(msgspec.json.encode(counts) + b"\n")
    if say is None:
        return
    words = [f"{counts.passed:,} passed on", f"{plural(counts.duplicates, 'duplicate')} dropped"]
    if counts.malformed:
        fate = {Malformed.KEEP: "kept", Malformed.DROP: "dropped", Malformed.FAIL: "refused"}[malformed]
        words.append(f"{counts.malformed:,} malformed {fate}")
    if counts.blank:
        words.append(f"{counts.blank:,} blank dropped")
    say(f"{plural(counts.lines, 'line')}: {', '.join(words)}")


def _forget_stdout() -> None:
    """Redirect stdout after its reader has gone, so that Python's final flush does not fail."""
    try:
        quiet_stdout()
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
