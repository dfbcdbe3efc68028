"""`semel import`: take over what another system has recorded as processed."""

from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from semel.cli.imports.run import Imported, Importer, Kind
from semel.cli.imports.sources import source_for
from semel.cli.options import (
    ConsumerOption,
    DryRunOption,
    JsonOption,
    StoreOption,
    TenantOption,
    WindowOption,
    settings_for,
    text,
)
from semel.cli.output import BAD_CONFIGURATION, USAGE, CommandExit, console, print_json, print_rows, say
from semel.cli.store_access import StoreAccess, find_store
from semel.keys.limits import check_consumer
from semel.observe.formatting import plural
from semel.windows import window_us

__all__ = ["import_keys"]


SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        callback=text,
        help="postgresql://..., sqlite:///file.db, redis://... or a file of JSON lines.",
    ),
]
TableOption = Annotated[str, typer.Option("--table", metavar="NAME", help="The table to read.")]
KeyOption = Annotated[
    str, typer.Option("--key", metavar="COLUMN", help="The column (or member) with the key.")
]
TimeOption = Annotated[
    str | None,
    typer.Option(
        "--time",
        metavar="COLUMN",
        help="The column with the time of processing: the window is counted from it.",
    ),
]
PatternOption = Annotated[
    str | None,
    typer.Option(
        "--pattern",
        metavar="GLOB",
        help="Which keys of Redis; the text before the first wildcard is removed.",
    ),
]
KindOption = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="KIND",
        help="marks or records. Default: marks for a consumer in mode mark, else records.",
    ),
]


def import_keys(  # noqa: PLR0913, PLR0917 - one parameter for each option
    source: SourceArgument,
    table: TableOption = "processed_events",
    key: KeyOption = "event_id",
    time: TimeOption = None,
    pattern: PatternOption = None,
    kind: KindOption = None,
    store: StoreOption = None,
    consumer: ConsumerOption = None,
    tenant: TenantOption = None,
    window: WindowOption = None,
    *,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Import keys that another system has processed, so that their next delivery is a duplicate.

    A key with a time is remembered for the window from that time, a key of Redis for the rest of its own expiry, any
    other for the window from now. A killed import goes on where it was; a repeated one changes nothing. Run it again
    after the other system has stopped, to import what it has processed meanwhile.
    """
    settings = settings_for(store=store, consumer=consumer, tenant=tenant, window=window)
    if settings.consumer is None:
        raise CommandExit("say for which consumer, with --consumer", USAGE)
    check_consumer(settings.consumer)
    length_us = window_us(settings.window)
    if not length_us:
        raise CommandExit("the window is off, so nothing would be remembered; give --window", USAGE)
    reading = source_for(source, table=table, key=key, time=time, pattern=pattern)
    target = find_store(settings)
    target.open()
    try:
        whose = settings.tenant or ""
        StoreAccess(target, settings).check_window(length_us)
        chosen = _kind(StoreAccess(target, settings), whose, settings.consumer, kind)
        if not dry_run:
            StoreAccess(target, settings).note(
                whose, "import", consumer=settings.consumer, source=reading.name, kind=chosen
            )
        importer = Importer(
            target, reading, tenant=whose, consumer=settings.consumer, window_us=length_us, kind=chosen
        )
        made = _run(importer, reading.count(), dry_run=dry_run)
    finally:
        reading.close()
        target.close()
    _report(made, chosen, dry_run=dry_run, as_json=as_json)


def _kind(reach: StoreAccess, tenant: str, consumer: str, given: str | None) -> Kind:
    """Return what to write. Raises `CommandExit` if the consumer would not look at it."""
    mode = reach.read_settings().modes.get((tenant, consumer))
    wanted: Kind = "marks" if mode == "mark" else "records"
    if given is None:
        return wanted
    if given not in ("marks", "records"):
        raise CommandExit(f"--as is {given!r}; write marks or records", USAGE)
    if mode is not None and given != wanted:
        raise CommandExit(
            f"consumer {consumer!r} works in mode {mode!r}, which looks at {wanted}; leave out --as",
            BAD_CONFIGURATION,
        )
    return "marks" if given == "marks" else "records"


def _run(importer: Importer, total: int | None, *, dry_run: bool) -> Imported:
    drawn = console(stderr=True)
    columns = (TextColumn("importing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=drawn, transient=True, disable=not drawn.is_terminal) as progress:
        bar = progress.add_task("import", total=total)
        return importer.run(lambda made: progress.update(bar, completed=made.read), dry_run=dry_run)


def _report(made: Imported, kind: Kind, *, dry_run: bool, as_json: bool) -> None:
    counts = {
        "read": made.read,
        "written": made.written,
        "known": made.known,
        "expired": made.expired,
        "refused": made.refused,
        "verified": made.verified,
    }
    if as_json:
        print_json({**counts, "kind": kind, "resumed": made.resumed, "dry_run": dry_run})
    else:
        print_rows((), [(name, f"{number:,}") for name, number in counts.items()])
        if dry_run:
            say("Nothing was written: this was a dry run.")
        elif made.resumed:
            say("It went on where an earlier import had ended; the counts begin there.")
    if not dry_run and made.verified != made.written + made.known:
        missing = plural(made.written + made.known - made.verified, "key is", "keys are")
        raise CommandExit(f"{missing} not in the store after the import; run it again")
