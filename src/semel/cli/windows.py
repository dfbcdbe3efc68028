"""`semel window`: how long finished keys are remembered, changed while everything runs."""

from typing import Annotated

import typer

from semel.cli.exits import NOT_FOUND, USAGE, CommandExit
from semel.cli.help import App
from semel.cli.options import (
    ConsumerOption,
    DryRunOption,
    JsonOption,
    StoreOption,
    TenantOption,
    WindowOption,
    YesOption,
    settings_for,
    text,
)
from semel.cli.output import confirm, print_json, print_rows, say
from semel.cli.reach import StoreAccess, opened
from semel.cli.shown import exact_text
from semel.core.commands import SetWindow
from semel.errors import PolicyInvalid
from semel.keys.limits import check_consumer
from semel.windows import PRESETS, resolve, window_us

__all__ = ["window"]

window: App = App()

Consumer = Annotated[str, typer.Argument(metavar="CONSUMER", help="Who processes.", callback=text)]
TypeOption = Annotated[
    str, typer.Option("--type", metavar="TYPE", callback=text, help="Only events of this type.")
]


@window.command("set")
def set_window(
    consumer: Consumer,
    duration: Annotated[
        str,
        typer.Argument(metavar="WINDOW", help=f"24h, 15m, ..., {', '.join(PRESETS)}, or off.", callback=text),
    ],
    event_type: TypeOption = "",
    store: StoreOption = None,
    tenant: TenantOption = None,
    *,
    existing: Annotated[
        bool, typer.Option("--existing", help="Move the expiry of records that are there, too.")
    ] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Store a window for a consumer, or for one type of its events.

    Running clients follow within 10 seconds. `off` means that duplicates run.
    """
    check_consumer(consumer)
    try:
        us = window_us(duration)
    except PolicyInvalid as error:
        raise CommandExit(str(error), USAGE) from None
    what = _named(consumer, event_type)
    with opened(settings_for(store=store, tenant=tenant)) as reach:
        if dry_run:
            say(f"Would set the window of {what} to {exact_text(us)}.")
            return
        if existing:
            confirm(f"Move the expiry of all finished records of {what} to {exact_text(us)}?", yes=yes)
        reach.act(SetWindow(_tenant(reach), consumer, event_type, us, existing))
        say(f"The window of {what} is {exact_text(us)}.")
        if consumer not in {name for _, name in reach.stored_settings().modes}:
            say(f"No consumer {consumer!r} has been here yet{reach.did_you_mean(consumer)}")


@window.command("get")
def get_window(
    consumer: Consumer,
    event_type: TypeOption = "",
    store: StoreOption = None,
    tenant: TenantOption = None,
    default: WindowOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Print the window that is in force for a consumer, or for one type of its events.

    Where none is stored, a client uses the one that it was opened with: here, the setting window.
    """
    check_consumer(consumer)
    settings = settings_for(store=store, tenant=tenant, window=default)
    with opened(settings) as reach:
        stored = reach.stored_settings().windows
        owner = _tenant(reach)
    us = resolve(stored, owner, consumer, event_type, window_us(settings.window))
    origin = "client"
    if event_type and (owner, consumer, event_type) in stored:
        origin = "type"
    elif (owner, consumer, "") in stored:
        origin = "consumer"
    if as_json:
        print_json({**_document(owner, consumer, event_type, us), "origin": origin})
    else:
        print(exact_text(us))
        if origin == "client":
            say(f"None is stored for {_named(consumer, event_type)}; this is what a client is opened with.")


@window.command("list")
def list_windows(
    store: StoreOption = None,
    consumer: ConsumerOption = None,
    tenant: TenantOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """List the stored windows."""
    settings = settings_for(store=store, consumer=consumer, tenant=tenant)
    with opened(settings) as reach:
        stored = sorted(
            (*name, us)
            for name, us in reach.stored_settings().windows.items()
            if settings.tenant in (None, name[0]) and settings.consumer in (None, name[1])
        )
    if as_json:
        print_json({"windows": [_document(*each) for each in stored]})
        return
    if not stored:
        say("No window is stored: each client uses the one that it was opened with.")
        return
    headers = ("CONSUMER", "TYPE", "WINDOW", "TENANT")
    print_rows(headers, [(who, kind or "*", exact_text(us), whose) for whose, who, kind, us in stored])


@window.command("unset")
def unset_window(
    consumer: Consumer, event_type: TypeOption = "", store: StoreOption = None, tenant: TenantOption = None
) -> None:
    """Remove a stored window; clients go back to their own."""
    check_consumer(consumer)
    with opened(settings_for(store=store, tenant=tenant)) as reach:
        name = (_tenant(reach), consumer, event_type)
        if name not in reach.stored_settings().windows:
            raise CommandExit(f"no window is stored for {_named(consumer, event_type)}", NOT_FOUND)
        reach.act(SetWindow(*name, None))
    say(f"The window of {_named(consumer, event_type)} was removed.")


def _tenant(reach: StoreAccess) -> str:
    return reach.settings.tenant or ""


def _named(consumer: str, event_type: str) -> str:
    return f"consumer {consumer!r}" + (f", type {event_type!r}" if event_type else "")


def _document(tenant: str, consumer: str, event_type: str, us: int) -> dict[str, object]:
    return {
        "tenant": tenant,
        "consumer": consumer,
        "event_type": event_type or None,
        "window": exact_text(us),
        "window_s": us / 1e6,
    }
