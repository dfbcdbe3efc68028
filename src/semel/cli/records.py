"""`semel show`, `list`, `forget` and `resolve`: records, one by one."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from semel.cli.options import (
    ConsumerOption,
    DryRunOption,
    JsonOption,
    StoreOption,
    TenantOption,
    WindowOption,
    YesOption,
    one_of,
    parse_duration_us,
    settings_for,
    text,
)
from semel.cli.output import (
    FAILED,
    NOT_FOUND,
    TRY_LATER,
    USAGE,
    CommandExit,
    confirm,
    console,
    print_json,
    print_rows,
    say,
    table,
)
from semel.cli.store_access import StoreAccess, open_store
from semel.client.record_items import Oblivion, Resolution
from semel.codec import encode
from semel.core.commands import Count, Forget, Page, Resolve, Scan
from semel.core.ids import is_own
from semel.observe import formatting
from semel.observe.formatting import duration_text, local_time, plural
from semel.observe.history import HistoryLine, read
from semel.runtime import audit
from semel.types import Absent, Busy, Completed, Forgotten, Lost, Record
from semel.windows import resolve as window_of
from semel.windows import window_us

__all__ = ["forget", "history", "list_records", "resolve", "show"]

PAGE_MAX = 500
WIDE_COLUMNS = 100
"""From this terminal width on the table shows the time beside the age."""

Key = Annotated[str, typer.Argument(metavar="KEY", help="The event's key.", callback=text)]


def show(
    key: Key,
    store: StoreOption = None,
    consumer: ConsumerOption = None,
    tenant: TenantOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Show what is stored for a key.

    Without --consumer, it looks in every consumer. Exit code 5: there is no record.
    """
    with open_store(settings_for(store=store, consumer=consumer, tenant=tenant)) as reach:
        found = reach.records_of(key)
        if not found:
            raise reach.no_record(key)
    now = formatting.now_us()
    if as_json:
        print_json({"records": [formatting.document(record, now) for record in found]})
    elif sys.stdout.isatty():
        for number, record in enumerate(found):
            console().print(
                "\n" if number else "", table(("", ""), formatting.lines(record, now)), sep="", end=""
            )
    else:
        for record in found:
            print_rows((), formatting.lines(record, now))


def list_records(
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="TEXT", callback=text, help="Only keys with this prefix.")
    ] = "",
    state: Annotated[
        Literal["claimed", "done", "failed", "unknown"] | None,
        typer.Option("--state", help="Only this state."),
    ] = None,
    older_than: Annotated[
        int | None,
        typer.Option(
            "--older-than",
            metavar="DURATION",
            parser=parse_duration_us,
            help="Only records first seen longer ago than this, such as 15m.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, metavar="N", help="At most so many; 0: all.")] = 100,
    store: StoreOption = None,
    consumer: ConsumerOption = None,
    tenant: TenantOption = None,
    *,
    internal: Annotated[
        bool, typer.Option("--internal", help="Also semel's own records: tokens, figures, audit.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List records, of all consumers unless one is named.

    On a terminal, a claimed record is shown as running, released or over. Piped, each record is a line: key, consumer,
    state, attempt, first seen, age, expires in, tenant, last error.
    """
    settings = settings_for(store=store, consumer=consumer, tenant=tenant)
    seen_before = None if older_than is None else formatting.now_us() - older_than
    with open_store(settings) as reach:
        scan = Scan(settings.tenant, settings.consumer, state, prefix, seen_before, limit=PAGE_MAX)
        pages = _pages(reach, scan, limit, internal=internal)
        if as_json:
            _print_documents(pages)
            return
        empty = True
        for page in pages:
            now = formatting.now_us()
            if page.records:
                empty = False
                _print_records(page.records, now)
            if page.cursor is not None:
                say(f"There are more than {limit}: raise --limit, or --limit 0 for all.")
        if settings.consumer is not None:
            if empty and sys.stderr.isatty():
                say("No records.")
            _tell_of_marks(reach, settings.consumer)
        elif empty:
            _tell_of_nothing(reach, filtered=bool(state or prefix or older_than))


def _print_records(records: Sequence[Record], now: int) -> None:
    if not sys.stdout.isatty():
        print_rows((), [formatting.row(record, now) for record in records])
        return
    screen = console()
    rows = [formatting.screen_row(record, now, wide=screen.width >= WIDE_COLUMNS) for record in records]
    drawn = table(formatting.SCREEN_HEADERS, rows)
    unbounded = screen.options.update_width(10 * screen.width)
    if screen.measure(drawn, options=unbounded).maximum > screen.width:  # errors are left to `show`
        drawn = table(formatting.SCREEN_HEADERS[:-1], [row[:-1] for row in rows])
    screen.print(drawn)


def _pages(reach: StoreAccess, scan: Scan, limit: int, *, internal: bool) -> Iterator[Page]:
    """Yield pages of records; only a last page that the limit cut short has a cursor.

    Semel's own records are left out, unless `internal`, their tenant or their consumer is given.
    """
    named = is_own(scan.tenant or "", scan.consumer or "")
    left = limit or None
    cursor: str | None = None
    while True:
        size = PAGE_MAX if left is None else min(left, PAGE_MAX)
        page: Page = reach.ask(msgspec.structs.replace(scan, cursor=cursor, limit=size))
        cursor = page.cursor
        if not internal and not named:
            page = Page(
                [record for record in page.records if not is_own(record.tenant, record.consumer)], cursor
            )
        left = None if left is None else left - len(page.records)
        if cursor is None or left == 0:
            yield page
            return
        yield Page(page.records)


def _print_documents(pages: Iterator[Page]) -> None:
    """Write the JSON of a list record by record, in constant memory."""
    sys.stdout.write('{"records": [')
    separator, more = "\n  ", False
    for page in pages:
        now = formatting.now_us()
        for record in page.records:
            sys.stdout.write(separator + msgspec.json.encode(formatting.summary(record, now)).decode())
            separator = ",\n  "
        more = page.cursor is not None
    sys.stdout.write(f'\n], "more": {"true" if more else "false"}}}\n')


def _tell_of_nothing(reach: StoreAccess, *, filtered: bool) -> None:
    """Report an empty list, and that marks exist, which cannot be listed."""
    marks = 0 if filtered else reach.ask(Count(reach.settings.tenant)).marks
    if marks:
        say(
            f"No records, but {plural(marks, 'mark')}: marks are counted by `semel stats`,"
            " and found by `semel show KEY`."
        )
    elif sys.stderr.isatty():
        say("No such records." if filtered else "No records.")


def _tell_of_marks(reach: StoreAccess, consumer: str) -> None:
    modes = reach.read_settings().modes
    if any(scope[1] == consumer and mode == "mark" for scope, mode in modes.items()):
        say(
            f"{consumer!r} works in mode mark: its marks are counted by `semel stats`, and found by `semel show KEY`."
        )
    elif consumer not in {name for _, name in modes}:
        say(f"No consumer {consumer!r} is known here{reach.did_you_mean(consumer)}")


def forget(
    key: Key,
    store: StoreOption = None,
    consumer: ConsumerOption = None,
    tenant: TenantOption = None,
    *,
    force: Annotated[bool, typer.Option("--force", help="Also forget a running attempt.")] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Make a key new again: its next delivery runs.

    A running attempt is not forgotten (exit code 75) unless --force; its late completion is then refused. The audit
    records who did it, for 90 days: semel list --consumer semel.audit
    """
    with open_store(settings_for(store=store, consumer=consumer, tenant=tenant)) as reach:
        record = reach.record_of(key)
        what = f"{key!r} of consumer {record.consumer!r} ({record.state}, attempt {record.attempt})"
        if formatting.claim_of(record, formatting.now_us()) == "running" and not force:
            raise _running(what)
        if dry_run:
            say(f"Would forget {what}.")
            return
        confirm(f"Forget {what}? Its next delivery will run again.", yes=yes)
        fence = record.fence if record.owner or record.state != "done" else None  # a mark has no fence
        answer: Oblivion = reach.act(Forget(record.id, force, fence), **audit.held_by(record))
        if force and audit.is_forced(record):
            audit.warn(record, None)
    match answer:
        case Forgotten():
            say(f"Forgot {what}.")
        case Absent():
            raise reach.no_record(key)
        case Busy():
            raise _running(what)
        case Lost():
            raise CommandExit(f"{what} changed meanwhile; look again with: semel show {key}", TRY_LATER)


def _running(what: str) -> CommandExit:
    return CommandExit(
        f"{what} is running; wait for it, or --force (its completion will then be refused)", TRY_LATER
    )


def resolve(
    key: Key,
    fence: Annotated[
        int, typer.Option("--fence", min=1, metavar="N", help="The fence that `semel show` printed.")
    ],
    store: StoreOption = None,
    consumer: ConsumerOption = None,
    tenant: TenantOption = None,
    window: WindowOption = None,
    value: Annotated[
        str | None,
        typer.Option("--value", metavar="JSON", callback=text, help="The value for duplicates, with --done."),
    ] = None,
    *,
    done: Annotated[bool, typer.Option("--done", help="The effect has happened.")] = False,
    absent: Annotated[
        bool, typer.Option("--absent", help="It has not happened: the next delivery runs.")
    ] = False,
) -> None:
    """Decide whether an event of unknown outcome was done.

    The fence protects you from resolving another attempt than the one that you looked at.
    """
    choice = one_of({"--done": done, "--absent": absent})
    if value is not None and choice == "--absent":
        raise CommandExit("--value goes with --done: an event that has not happened has no value", USAGE)
    try:
        decided = None if value is None else msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise CommandExit(
            f"--value is not JSON: {error}; quote it for the shell: --value '\"text\"'", USAGE
        ) from None
    settings = settings_for(store=store, consumer=consumer, tenant=tenant, window=window)
    with open_store(settings) as reach:
        record = reach.record_of(key)
        kept = reach.read_settings().windows
        lasting = window_of(
            kept, record.tenant, record.consumer, record.event_type, window_us(settings.window)
        )
        to: Literal["done", "absent"] = "done" if done else "absent"
        item = Resolve(record.id, fence, to, encode(decided) if done else None, lasting)
        answer: Resolution = reach.act(item)
    match answer:
        case Completed():
            say(f"{key!r} is done: duplicates get {value or 'null'} for {formatting.exact_text(lasting)}.")
        case Forgotten():
            say(f"{key!r} is new again: its next delivery runs.")
        case Lost():
            raise _not_decided(key, record, fence)


def _not_decided(key: str, record: Record, fence: int) -> CommandExit:
    if record.state != "unknown":
        return CommandExit(f"{key!r} is {record.state}, not unknown: there is nothing to decide", FAILED)
    return CommandExit(
        f"{key!r} has the fence {record.fence}, not {fence}: look at it again before you decide", FAILED
    )


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
    """Print the log of a HistoryHook: how each delivery ended, oldest first.

    Keys that were written as digests are found by their plain text too. Exit code 5: nothing was found.
    """
    if not place.exists():
        raise CommandExit(f"{place} does not exist", NOT_FOUND)
    since_us = 0 if since is None else formatting.now_us() - parse_duration_us(since, "--since")
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
