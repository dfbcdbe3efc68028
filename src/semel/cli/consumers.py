"""`semel consumer`: who processes, in which mode."""

from typing import Annotated, Any

import typer

from semel.cli.exits import TRY_LATER, USAGE, CommandExit
from semel.cli.help import App
from semel.cli.options import JsonOption, StoreOption, TenantOption, settings_for, text
from semel.cli.output import print_json, print_rows, say
from semel.cli.reach import OWN, StoreAccess, opened
from semel.cli.shown import exact_text
from semel.core.commands import Count, Page, Scan, SwitchMode
from semel.core.looks import RELEASED, UNFINISHED, counted_state
from semel.types import Mode

__all__ = ["consumer"]

consumer: App = App()

COUNTED = ("claimed", RELEASED, "unknown")
UNFINISHED_MAX = 1000
"""How many unfinished records are counted one by one; more are shown as this many or more."""

Name = Annotated[str, typer.Argument(metavar="CONSUMER", help="Who processes.", callback=text)]


@consumer.command("list")
def list_consumers(
    store: StoreOption = None, tenant: TenantOption = None, *, as_json: JsonOption = False
) -> None:
    """List the consumers of a store with their modes and how many records each has."""
    settings = settings_for(store=store, tenant=tenant)
    with opened(settings) as reach:
        modes = reach.stored_settings().modes
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
        say("No consumer has been here yet.")
        return
    headers = ("CONSUMER", "MODE", "RECORDS", "TENANT")
    print_rows(headers, [(who, mode, f"{number}", whose) for whose, who, mode, number in rows])


def _is_listed(scope: tuple[str, str], tenant: str | None) -> bool:
    """Whether a consumer is asked for; semel's own are by naming their tenant alone."""
    return scope[0] == tenant or (tenant is None and not any(name.startswith(OWN) for name in scope))


@consumer.command("show")
def show_consumer(
    name: Name, store: StoreOption = None, tenant: TenantOption = None, *, as_json: JsonOption = False
) -> None:
    """Show a consumer: its mode, its windows, and what is unfinished."""
    with opened(settings_for(store=store, tenant=tenant)) as reach:
        scope = reach.scope(name)
        stored = reach.stored_settings()
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
    """How many records are claimed, released and unknown, each counted up to a bound."""
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
    mode: Annotated[Mode, typer.Argument(metavar="MODE", help="How it shall work.", show_default=False)],
    store: StoreOption = None,
    tenant: TenantOption = None,
) -> None:
    """Change how a consumer works.

    Refused while records are claimed or unknown (exit code 75), since another mode would judge them otherwise. What
    failed and was released does not matter. Stop its workers first: those that run keep to the mode they were started
    with.
    """
    with opened(settings_for(store=store, tenant=tenant)) as reach:
        scope = reach.scope(name)
        before = reach.stored_settings().modes[scope]
        if before == mode:
            say(f"Consumer {name!r} works in mode {mode} already.")
            return
        if mode == "inbox" and not reach.store.capabilities.transactional:
            raise CommandExit(f"{reach.store.name} cannot hold an inbox: no transaction of yours reaches it", USAGE)
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
