"""`semel consumer` and `semel window`: consumers, their modes and their windows."""

from typing import Annotated, Any

import typer

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
from semel.cli.output import NOT_FOUND, TRY_LATER, USAGE, CommandExit, confirm, print_json, print_rows, say
from semel.cli.store_access import StoreAccess, open_store
from semel.core.commands import Count, Page, Scan, SetWindow, SwitchMode
from semel.core.ids import is_own
from semel.core.machine import RELEASED, UNFINISHED, counted_state
from semel.errors import PolicyInvalid
from semel.keys.limits import check_consumer
from semel.observe.formatting import exact_text
from semel.types import Mode
from semel.windows import PRESETS, resolve, window_us

__all__ = ["consumer", "window"]

consumer: App = App()

COUNTED = ("claimed", RELEASED, "unknown")
UNFINISHED_MAX = 1000
"""The most unfinished records that are counted; above it the count is shown as "or more"."""

Name = Annotated[str, typer.Argument(metavar="CONSUMER", help="The name of the consumer.", callback=text)]


@consumer.command("list")
def list_consumers(
    store: StoreOption = None, tenant: TenantOption = None, *, as_json: JsonOption = False
) -> None:
    """List the consumers of a store with their modes and how many records each has."""
    settings = settings_for(store=store, tenant=tenant)
    with open_store(settings) as reach:
        modes = reach.read_settings().modes
        scopes = sorted(scope for scope in modes if _is_listed(scope, settings.tenant))
        counted = {
            whose: reach.ask(Count(whose)).consumers for whose in sorted({whose for whose, _ in scopes})
        }
    rows = [(whose, who, modes[whose, who], counted[whose].get(who, 0)) for whose, who in scopes]
    if as_json:
        names = ("tenant", "consumer", "mode", "records")
        print_json({"consumers": [dict(zip(names, row, strict=True)) for row in rows]})
        return
    if not rows:
        say("This store has no consumer yet.")
        return
    headers = ("CONSUMER", "MODE", "RECORDS", "TENANT")
    print_rows(headers, [(who, mode, f"{number}", whose) for whose, who, mode, number in rows])


def _is_listed(scope: tuple[str, str], tenant: str | None) -> bool:
    """Whether to list a consumer. Semel's own are listed only when their tenant is named."""
    return scope[0] == tenant or (tenant is None and not is_own(*scope))


@consumer.command("show")
def show_consumer(
    name: Name, store: StoreOption = None, tenant: TenantOption = None, *, as_json: JsonOption = False
) -> None:
    """Show a consumer: its mode, its windows, and its unfinished records."""
    with open_store(settings_for(store=store, tenant=tenant)) as reach:
        scope = reach.scope(name)
        stored = reach.read_settings()
        document: dict[str, Any] = {
            "tenant": scope[0],
            "consumer": name,
            "mode": stored.modes[scope],
            "windows": {
                kind: exact_text(us)
                for (*owner, kind), us in sorted(stored.windows.items())
                if tuple(owner) == scope
            },
            "records": reach.ask(Count(scope[0])).consumers.get(name, 0),
            **_count_unfinished(reach, scope),
        }
    if as_json:
        print_json(document)
        return
    windows = document.pop("windows")
    rows = [(field, _number(field, value)) for field, value in document.items() if value != ""]
    rows += [(f"window {kind}".strip(), text) for kind, text in windows.items()]
    print_rows(("", ""), rows)


def _number(field: str, value: object) -> str:
    return f"{value} or more" if field in COUNTED and value == UNFINISHED_MAX else str(value)


def _count_unfinished(reach: StoreAccess, scope: tuple[str, str]) -> dict[str, int]:
    """Count claimed, released and unknown records, each up to a bound."""
    counts = dict.fromkeys(COUNTED, 0)
    for state in UNFINISHED:
        cursor, more = None, True
        while more and counts[state] < UNFINISHED_MAX:
            page: Page = reach.ask(Scan(*scope, state, cursor=cursor, limit=500))
            for record in page.records:
                counts[counted_state(record)] += 1
            cursor, more = page.cursor, page.cursor is not None
    return {state: min(count, UNFINISHED_MAX) for state, count in counts.items()}


@consumer.command("set-mode")
def set_mode(
    name: Name,
    mode: Annotated[Mode, typer.Argument(metavar="MODE", help="The new mode.", show_default=False)],
    store: StoreOption = None,
    tenant: TenantOption = None,
) -> None:
    """Change the mode of a consumer.

    Refused while records are claimed or unknown (exit code 75), because another mode treats them differently. Released
    records do not matter. Stop its workers first: running workers keep the mode that they were started
    with.
    """
    with open_store(settings_for(store=store, tenant=tenant)) as reach:
        scope = reach.scope(name)
        before = reach.read_settings().modes[scope]
        if before == mode:
            say(f"Consumer {name!r} works in mode {mode} already.")
            return
        if mode == "inbox" and not reach.store.capabilities.transactional:
            raise CommandExit(
                f"{reach.store.name} cannot hold an inbox: your transactions cannot write to it", USAGE
            )
        unfinished: int = reach.act(SwitchMode(*scope, mode))
    if unfinished:
        raise CommandExit(
            f"consumer {name!r} stays in mode {before}: {unfinished} of its records are claimed or unknown. Let its"
            f" workers finish, then `semel resolve` or `semel forget` what is left: semel list --consumer {name}",
            TRY_LATER,
        )
    say(f"Consumer {name!r} works in mode {mode} now (before: {before}).")
    if "mark" in (before, mode):
        say("Marks and records are kept apart: what was finished in the old mode is new in this one.")


window: App = App()

Consumer = Annotated[str, typer.Argument(metavar="CONSUMER", help="The name of the consumer.", callback=text)]
TypeOption = Annotated[
    str, typer.Option("--type", metavar="TYPE", callback=text, help="Only events of this type.")
]


@window.command("set")
def set_window(
    consumer: Consumer,
    duration: Annotated[
        str,
        typer.Argument(
            metavar="WINDOW", help=f"24h, 15m, ..., {', '.join(PRESETS)}, forever, or off.", callback=text
        ),
    ],
    event_type: TypeOption = "",
    store: StoreOption = None,
    tenant: TenantOption = None,
    *,
    existing: Annotated[
        bool, typer.Option("--existing", help="Also change the expiry of existing records.")
    ] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Store a window for a consumer, or for one type of its events.

    Running clients follow within 10 seconds. `off` means that duplicates run. `forever` keeps every finished key until
    somebody forgets it: the store grows without end.
    """
    check_consumer(consumer)
    try:
        us = window_us(duration)
    except PolicyInvalid as error:
        raise CommandExit(str(error), USAGE) from None
    what = _display_name(consumer, event_type)
    with open_store(settings_for(store=store, tenant=tenant)) as reach:
        reach.check_window(us)
        if dry_run:
            say(f"Would set the window of {what} to {exact_text(us)}.")
            return
        if existing:
            confirm(f"Move the expiry of all finished records of {what} to {exact_text(us)}?", yes=yes)
        reach.act(SetWindow(_tenant(reach), consumer, event_type, us, existing))
        say(f"The window of {what} is {exact_text(us)}.")
        if consumer not in {name for _, name in reach.read_settings().modes}:
            say(f"This store has no consumer {consumer!r} yet{reach.did_you_mean(consumer)}")


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
    with open_store(settings) as reach:
        stored = reach.read_settings().windows
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
            say(f"No window is stored for {_display_name(consumer, event_type)}; this is the client's own.")


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
    with open_store(settings) as reach:
        stored = sorted(
            (*name, us)
            for name, us in reach.read_settings().windows.items()
            if settings.tenant in (None, name[0]) and settings.consumer in (None, name[1])
            if settings.tenant is not None or not is_own(name[0], name[1])
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
    with open_store(settings_for(store=store, tenant=tenant)) as reach:
        name = (_tenant(reach), consumer, event_type)
        if name not in reach.read_settings().windows:
            raise CommandExit(f"no window is stored for {_display_name(consumer, event_type)}", NOT_FOUND)
        reach.act(SetWindow(*name, None))
    say(f"The window of {_display_name(consumer, event_type)} was removed.")


def _tenant(reach: StoreAccess) -> str:
    return reach.settings.tenant or ""


def _display_name(consumer: str, event_type: str) -> str:
    return f"consumer {consumer!r}" + (f", type {event_type!r}" if event_type else "")


def _document(tenant: str, consumer: str, event_type: str, us: int) -> dict[str, object]:
    return {
        "tenant": tenant,
        "consumer": consumer,
        "event_type": event_type or None,
        "window": exact_text(us),
        "window_s": us / 1e6,
    }
