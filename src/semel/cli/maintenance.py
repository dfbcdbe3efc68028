"""`semel purge`, `stats` and `migrate`: the store as a whole."""

import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from semel.cli.options import (
    DryRunOption,
    JsonOption,
    StoreOption,
    TenantOption,
    parse_duration_us,
    settings_for,
    size_text,
)
from semel.cli.output import USAGE, CommandExit, clean, console, print_json, print_rows, say, table
from semel.cli.store_access import StoreAccess, exists, find_store, open_store
from semel.client.cleaner import PURGE_BATCH, Cleaner, PurgeResult
from semel.core.commands import Count, Purge, Purged
from semel.errors import StoreUnavailable
from semel.observe import formatting
from semel.observe.formatting import duration_text, local_time, plural, redact
from semel.types import Stats

__all__ = ["migrate", "purge", "stats"]

EVERY_MIN_US = 100_000
AHEAD_MIN_S = 2 * 86400
"""Fewer days of partitions than this cause a warning."""
STATES = ("claimed", "released", "done", "failed", "unknown")
SCHEMAS = {"sqlite": "semel.stores.sqlite:schema_sql", "postgresql": "semel.stores.postgres:schema_sql"}
"""The module with the schema of a store, by the scheme of its URL."""


def _every(value: str) -> int:
    every_us = parse_duration_us(value, "--every")
    if every_us < EVERY_MIN_US:
        raise typer.BadParameter(f"{value} is too often; use at least 100ms", param_hint="'--every'")
    return every_us


WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Go on until interrupted.")]


def purge(
    store: StoreOption = None,
    every: Annotated[
        str,
        typer.Option("--every", metavar="DURATION", help="The wait between rounds, with --watch."),
    ] = "60s",
    *,
    watch: WatchOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove records whose window is over, and published messages after their retention.

    Expired records count as absent already, so this only frees space. Where records are in
    partitions, it creates new ones ahead and drops old ones. On a shared store one cleaner works at a time; any
    number may be started, and any may be killed.
    """
    every_us = _every(every)
    if watch and (dry_run or as_json):
        raise CommandExit("--watch never ends; leave out --dry-run and --json", USAGE)
    with open_store(settings_for(store=store)) as reach:
        if not dry_run:
            reach.note("", "purge", watch=watch)
        if watch:
            _watch_purge(reach, every_us)
        waiting: Purged = reach.ask(Purge(dry_run=True))
        made = PurgeResult() if dry_run else _purge_all(reach, waiting.count)
    if as_json:
        print_json(_purge_document(waiting, made, dry_run=dry_run))
    elif dry_run:
        gone = f" and {_partitions(waiting.partitions)}" if waiting.partitions else ""
        since = f"; the oldest is over since {_lag(waiting)}" if waiting.count else ""
        say(f"Would remove {_records(waiting.count)}{gone}{since}.")
    else:
        say(f"Removed {_summary(made)}.")


def _purge_document(waiting: Purged, made: PurgeResult, *, dry_run: bool) -> dict[str, Any]:
    return {
        "expired": waiting.count,
        "removed": made.count,
        "partitions": waiting.partitions if dry_run else made.partitions,
        "lag_s": round(waiting.lag_s, 3),
        "cleaner": made.cleaner or None,
        "dry_run": dry_run,
    }


def _summary(made: PurgeResult) -> str:
    words = _records(made.count)
    if made.partitions:
        words += f" and {_partitions(made.partitions)}"
    if made.cleaner:
        words += f"; another cleaner is running ({clean(made.cleaner)})"
    return words


def _partitions(count: int) -> str:
    return plural(count, "partition")


def _records(count: int) -> str:
    return plural(count, "expired record")


def _lag(purged: Purged) -> str:
    return duration_text(round(purged.lag_s) * 10**6)


class _Reached:
    """A store without a client, for a cleaner."""

    def __init__(self, reach: StoreAccess) -> None:
        self._reach = reach

    @property
    def records(self) -> "_Reached":
        return self

    def purge(self, *, limit: int = PURGE_BATCH, dry_run: bool = False) -> Purged:
        return self._reach.ask(Purge(limit, dry_run))


def _purge_all(reach: StoreAccess, total: int) -> PurgeResult:
    """Purge in batches until nothing is left, with a bar on stderr if it is a terminal."""
    columns = (TextColumn("purging"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    drawn = console(stderr=True)
    with Progress(*columns, console=drawn, transient=True, disable=not drawn.is_terminal) as progress:
        bar = progress.add_task("purge", total=total)

        def show(made: PurgeResult) -> None:
            progress.update(bar, completed=made.count, total=max(total, made.count))

        return Cleaner(_Reached(reach)).clean(show)


def _watch_purge(reach: StoreAccess, every_us: int) -> None:
    """Purge repeatedly until interrupted; retry next time if the store does not answer."""
    total, rounds = 0, 0
    while True:
        try:
            made = _purge_all(reach, 0)
            total, rounds = total + made.count, rounds + 1
            if made.count or made.partitions or rounds == 1 or sys.stderr.isatty():
                at = local_time(formatting.now_us())
                say(f"{at} removed {_summary(made)}, {total:,} in all; next in {duration_text(every_us)}")
        except StoreUnavailable as error:
            say(redact(f"semel: {error}; trying again in {duration_text(every_us)}"))
        time.sleep(every_us / 1e6)


def stats(
    store: StoreOption = None,
    tenant: TenantOption = None,
    every: Annotated[
        str, typer.Option("--every", metavar="DURATION", help="How often to look, with --watch.")
    ] = "2s",
    *,
    watch: WatchOption = False,
    as_json: JsonOption = False,
) -> None:
    """Count the records by state and consumer, and for tiers the calls that each answered.

    It reads every record, which takes a while on a large store. Records of semel itself are counted only if
    their tenant is named, as in --tenant semel.tokens. The tiers' shares are those of all clients of a Redis cache
    since it was emptied; a cache in memory counts only its own process.
    """
    every_us = _every(every)
    if watch and as_json:
        raise CommandExit("--json prints one document; leave out --watch", USAGE)
    settings = settings_for(store=store, tenant=tenant)
    with open_store(settings) as reach:
        if watch:
            _watch_stats(lambda: reach.ask(Count(settings.tenant)), reach.store.name, every_us)
        counted: Stats = reach.ask(Count(settings.tenant))
        name = reach.store.name
    if as_json:
        print_json(_document(counted, name))
    elif sys.stdout.isatty():
        console().print(_draw(counted, name))
    else:
        print_rows((), _rows(counted))


def _watch_stats(count: Callable[[], Stats], name: str, every_us: int) -> None:
    """Redraw the table until interrupted; without a terminal, print the lines repeatedly."""
    if not sys.stdout.isatty():
        while True:
            print_rows((), _rows(count()))
            sys.stdout.flush()
            time.sleep(every_us / 1e6)
    drawn: Any = ""
    with Live(drawn, console=console(), auto_refresh=False) as live:
        while True:
            try:
                drawn = _draw(count(), name)
            except StoreUnavailable as error:
                drawn = clean(redact(str(error)))
            live.update(drawn, refresh=True)
            time.sleep(every_us / 1e6)


def _rows(counted: Stats) -> list[tuple[str, str]]:
    rows = [(state, str(counted.states.get(state, 0))) for state in STATES]
    rows += [("marks", str(counted.marks)), ("expired", str(counted.expired))]
    rows += [("purge_lag_s", f"{counted.purge_lag_s:.3f}")]
    if counted.bytes_used is not None:
        rows.append(("bytes_used", str(counted.bytes_used)))
    if counted.ahead_s is not None:
        rows.append(("ahead_s", f"{counted.ahead_s:.0f}"))
    rows += [(f"consumer {name}", str(number)) for name, number in sorted(counted.consumers.items())]
    return rows + [(f"tier {name}", str(number)) for name, number in counted.tiers.items()]


def _draw(counted: Stats, name: str) -> Table:
    rows = [(state, f"{counted.states.get(state, 0):,}") for state in STATES]
    rows += [("marks", f"{counted.marks:,}")]
    waiting = f"{counted.expired:,}"
    if counted.expired:
        waiting += f" (the oldest since {duration_text(round(counted.purge_lag_s) * 10**6)}; semel purge)"
    rows.append(("expired, not yet purged", waiting))
    if counted.bytes_used is not None:
        rows.append(("room taken", size_text(counted.bytes_used)))
    if counted.ahead_s is not None:
        rows.append(("partitions ahead", f"{counted.ahead_s / 86400:.1f} days{_alarm(counted.ahead_s)}"))
    rows += [(f"consumer {who}", f"{number:,}") for who, number in sorted(counted.consumers.items())]
    return table((name, local_time(counted.now_us)), rows + _shares(counted.tiers))


def _shares(tiers: dict[str, float]) -> list[tuple[str, str]]:
    """Return each tier's share of the calls, without zero counts."""
    hits, asked = tiers.get("cache_hits", 0), tiers.get("truth_asked", 0)
    rows = [
        (f"answered by the {who}", f"{number:,} ({number / (hits + asked):.1%})")
        for who, number in (("cache", hits), ("truth", asked))
        if hits + asked
    ]
    known = tiers.get("truth_known", 0)
    if hits + known:
        rows.append(("duplicates that the cache knew", f"{hits / (hits + known):.1%}"))
    shown = ("cache_hits", "truth_asked", "truth_known")
    return rows + [
        (name.replace("_", " "), f"{number:,}")
        for name, number in tiers.items()
        if number and name not in shown
    ]


def _alarm(ahead_s: float) -> str:
    return " (too few: run semel purge as their owner)" if ahead_s < AHEAD_MIN_S else ""


def _document(counted: Stats, name: str) -> dict[str, Any]:
    return {
        "store": name,
        "states": {state: counted.states.get(state, 0) for state in STATES},
        "marks": counted.marks,
        "consumers": counted.consumers,
        "expired": counted.expired,
        "purge_lag_s": round(counted.purge_lag_s, 3),
        "bytes_used": counted.bytes_used,
        "tiers": counted.tiers,
        "ahead_s": counted.ahead_s,
    }


def migrate(
    store: StoreOption = None,
    *,
    sql: Annotated[bool, typer.Option("--sql", help="Print the schema as SQL; touch nothing.")] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Create the store, or bring its schema up to date.

    Clients also do this when they open a store.
    """
    settings = settings_for(store=store)
    target = find_store(settings)
    if sql:
        scheme = getattr(target, "truth", target).name.partition(":")[0]
        if scheme not in SCHEMAS:
            raise CommandExit(f"{target.name} has no schema", USAGE)
        module, _, function = SCHEMAS[scheme].partition(":")
        sys.stdout.write(getattr(import_module(module), function)())
        return
    before = exists(target)
    if dry_run:
        say(f"Would {'bring' if before else 'create'} {target.name}{' up to date' if before else ''}.")
        return
    with open_store(settings, create=True):
        say(f"{target.name} {'is up to date' if before else 'was created'}.")
