"""`semel move`: the steps of a move from one store to another that an operator decides."""

from typing import Annotated, Any

import typer
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from semel.cli.help import App
from semel.cli.options import ConsumerOption, JsonOption, TenantOption, parse_duration_us, settings_for, text
from semel.cli.output import NOT_FOUND, TRY_LATER, CommandExit, console, print_json, print_rows, say
from semel.observe.formatting import local_time, plural
from semel.stores.migrating import MigratingStore, migrating
from semel.stores.migrating import moving as steps

__all__ = ["move"]

move: App = App()

FromOption = Annotated[
    str, typer.Option("--old", metavar="URL", callback=text, help="The store that the records move from.")
]
ToOption = Annotated[
    str, typer.Option("--new", metavar="URL", callback=text, help="The store that they move to.")
]


@move.callback()
def _move() -> None:
    """Move consumers from one store to another."""


def _moves(store: MigratingStore, tenant: str | None, consumer: str | None) -> list[steps.StoreMove]:
    """Return the chosen moves. Raises `CommandExit` if there is none."""
    found = [
        each
        for each in steps.moves(store.old, store.new)
        if tenant in (None, each.tenant) and consumer in (None, each.consumer)
    ]
    if not found:
        raise CommandExit(
            "no such consumer is moving between these stores; open semel.migrating(old=..., new=...) in its processes"
            " first",
            NOT_FOUND,
        )
    return found


def _state(each: steps.StoreMove) -> str:
    return "finished" if each.finished else "closed" if each.closed_at_us else "moving"


def _document(each: steps.StoreMove) -> dict[str, Any]:
    closed = each.closed_at_us / 1e6 if each.closed_at_us else None
    return {"tenant": each.tenant, "consumer": each.consumer, "state": _state(each), "closed_at": closed}


@move.command("status")
def status(
    old: FromOption,
    new: ToOption,
    consumer: ConsumerOption = None,
    tenant: TenantOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Show which consumers move, and how far they are."""
    settings = settings_for(consumer=consumer, tenant=tenant)
    store = migrating(old=old, new=new)
    store.open()
    try:
        found = _moves(store, settings.tenant, settings.consumer)
    finally:
        store.close()
    if as_json:
        print_json({"moves": [_document(each) for each in found]})
        return
    rows = [
        (each.tenant, each.consumer, _state(each), local_time(each.closed_at_us) if each.closed_at_us else "")
        for each in found
    ]
    print_rows(("TENANT", "CONSUMER", "STATE", "CLOSED AT"), rows)


@move.command("close")
def close(
    old: FromOption, new: ToOption, consumer: ConsumerOption = None, tenant: TenantOption = None
) -> None:
    """Refuse the old store to clients that use it alone. Run it when all processes use migrating.

    From here the old window is counted. A process that still uses the old store alone gets StoreMoved within seconds.
    """
    settings = settings_for(consumer=consumer, tenant=tenant)
    store = migrating(old=old, new=new)
    store.open()
    try:
        for each in _moves(store, settings.tenant, settings.consumer):
            if not each.closed_at_us:
                steps.close(store.old, store.new, each)
            say(f"{each.consumer}: the old store is closed to clients that use it alone.")
    finally:
        store.close()


@move.command("finish")
def finish(
    old: FromOption,
    new: ToOption,
    window: Annotated[
        str, typer.Option("--window", metavar="DURATION", help="The longest window of the consumer.")
    ] = "24h",
    consumer: ConsumerOption = None,
    tenant: TenantOption = None,
) -> None:
    """Allow clients of the new store alone, if the old window is over and the new store has every record.

    Exit code 75: it is too early.
    """
    window_us = parse_duration_us(window, "--window")
    settings = settings_for(consumer=consumer, tenant=tenant)
    store = migrating(old=old, new=new)
    store.open()
    drawn = console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("comparing"), MofNCompleteColumn(), TimeElapsedColumn())
    refused = 0
    try:
        with Progress(*columns, console=drawn, transient=True, disable=not drawn.is_terminal) as progress:
            bar = progress.add_task("compare", total=None)
            for each in _moves(store, settings.tenant, settings.consumer):
                why = (
                    ""
                    if each.finished
                    else steps.finish(store.old, store.new, each, window_us, lambda: progress.advance(bar))
                )
                say(f"{each.consumer}: {why or 'the move is finished; clients may use the new store alone'}.")
                refused += bool(why)
    finally:
        store.close()
    if refused:
        raise CommandExit(f"{plural(refused, 'move')} cannot be finished yet", TRY_LATER)
