"""`semel explain`: what really holds, before something goes wrong."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semel.cli.exits import BAD_CONFIGURATION, FAILED, Stop
from semel.cli.options import (
    ConsumerOption,
    JsonOption,
    LeaseOption,
    ModeOption,
    StoreOption,
    TenantOption,
    WindowOption,
    parse_duration_us,
    settings_for,
)
from semel.cli.output import console, print_json, print_rows, say, table
from semel.cli.reach import exists, found, opened
from semel.cli.shown import exact_text
from semel.errors import SemelError
from semel.observe.explain import Circumstances, Explanation, Keys, Weakness
from semel.observe.explain import explain as explained
from semel.observe.guarantees import WINDOWS, Cell, Sink
from semel.observe.probing import weaknesses
from semel.types import Mode
from semel.windows import duration_us, resolve, window_us

if TYPE_CHECKING:
    from semel.cli.settings import Settings

__all__ = ["explain"]

Required = Annotated[
    Mode | None,
    typer.Option("--require", help="Exit with 1 if what holds is weaker than this mode.", show_default=False),
]


def explain(  # noqa: PLR0913, PLR0917 - an option each
    require: Required = None,
    sink: Annotated[
        Sink, typer.Option("--sink", help="What the system that the handler calls honours, in mode lease.")
    ] = "plain",
    store: StoreOption = None,
    consumer: ConsumerOption = None,
    tenant: TenantOption = None,
    window: WindowOption = None,
    lease: LeaseOption = None,
    mode: ModeOption = None,
    visibility: Annotated[
        str | None,
        typer.Option(
            "--visibility", metavar="DURATION", help="After how long without an ack the source sends again."
        ),
    ] = None,
    redelivers_for: Annotated[
        str | None,
        typer.Option(
            "--redelivers-for", metavar="DURATION", help="How long the source may send an event again."
        ),
    ] = None,
    redrive_after: Annotated[
        str | None,
        typer.Option("--redrive-after", metavar="DURATION", help="How late dead letters may be put back."),
    ] = None,
    keys: Annotated[Keys, typer.Option("--keys", help="What makes the key of an event.")] = "given",
    *,
    tenants: Annotated[bool, typer.Option("--tenants", help="Several tenants use the consumer.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what holds in which crash, and what weakens it.

    The store's servers are asked for what they would lose. With --consumer, the mode and window that the store has for
    it count. What semel cannot know (the source, the keys, the tenants) is told by options. Exit codes: 0 it holds, 1
    it is weaker than --require, 78 the two cannot be used together.
    """
    settings = settings_for(
        store=store, consumer=consumer, tenant=tenant, window=window, lease=lease, mode=mode
    )
    around = Circumstances(
        visibility_us=_duration(visibility, "--visibility"),
        horizon_us=_duration(redelivers_for, "--redelivers-for"),
        redrive_us=_duration(redrive_after, "--redrive-after"),
        keys=keys,
        tenants=tenants,
        tenant=settings.tenant or "",
    )
    try:
        result, lasting_us = _explained(settings, sink, around)
    except SemelError as error:
        raise Stop(str(error), BAD_CONFIGURATION) from error
    holds = require is None or result.satisfies(require)
    if as_json:
        print_json(_document(result, lasting_us, settings, require, holds=holds))
    else:
        _print(result, lasting_us, settings)
    if not holds:
        raise Stop(
            f"weaker than required: {result.mode} on {result.store} does not hold what {require} does", FAILED
        )


def _duration(given: str | None, option: str) -> int | None:
    return None if given is None else parse_duration_us(given, option)


def _explained(settings: "Settings", sink: Sink, around: Circumstances) -> tuple[Explanation, int]:
    """The explanation, and the window that it stands on."""
    target = found(settings)
    live: list[Weakness] = []
    mode, lasting_us = settings.mode, window_us(settings.window)
    if exists(target):
        with opened(settings) as reach:
            stored = reach.stored_settings()
            target = reach.store  # it knows what the start checks found
            live = weaknesses(target)
        if settings.consumer is not None:
            scope = (settings.tenant or "", settings.consumer)
            recorded = stored.modes.get(scope, mode)
            if recorded != mode and settings.given("mode"):
                raise Stop(
                    f"consumer {settings.consumer!r} works in mode {recorded}, but {settings.origin('mode')}"
                    f" says {mode}; change one of them",
                    BAD_CONFIGURATION,
                )
            mode, lasting_us = recorded, resolve(stored.windows, *scope, "", lasting_us)
    else:
        say(f"{target.name} does not exist yet.")
    lease_us = duration_us(settings.lease)
    told = explained(
        target, mode, window_us=lasting_us, lease_us=lease_us, sink=sink, around=around, live=live
    )
    return told, lasting_us


def _print(result: Explanation, lasting_us: int, settings: "Settings") -> None:
    facts = [
        ("mode", result.mode if result.mode != "lease" else f"lease ({result.sink} sink)"),
        ("store", result.store),
        ("window", f"{exact_text(lasting_us)}, counted from completion"),
        ("lease", exact_text(duration_us(settings.lease))),
    ]
    effects = [(text, _effects(result.windows[window])) for window, text in WINDOWS.items()]
    weakened = [
        ("! " if weakness.breaks else "- ")
        + weakness.what
        + (f" Change: {weakness.fix}." if weakness.fix else "")
        for weakness in result.weaknesses
    ]
    if not sys.stdout.isatty():
        print_rows((), [*facts, *effects, *(("weakened by", line[2:]) for line in weakened)])
        return
    screen = console()
    screen.print(table(("", ""), facts))
    screen.print(f"\n{result.how}\n", markup=False)
    screen.print(table(("WHAT HAPPENS", "EFFECTS IN THE END"), effects))
    if weakened:
        screen.print("\nWeakened by (!: the table does not hold):", markup=False)
        screen.print("\n".join(weakened), markup=False)


def _effects(cell: Cell | None) -> str:
    if cell is None:
        return "cannot happen"
    if cell.flagged:
        return f"{cell.effects}, flagged unknown: somebody decides"
    return {0: "0: lost", 1: "1", 2: "up to 2"}[cell.effects]


def _document(
    result: Explanation, lasting_us: int, settings: "Settings", require: Mode | None, *, holds: bool
) -> dict[str, Any]:
    return {
        "mode": result.mode,
        "store": result.store,
        "consumer": settings.consumer,
        "sink": result.sink,
        "window_s": lasting_us / 1e6,
        "lease_s": duration_us(settings.lease) / 1e6,
        "how": result.how,
        "crashes": [
            {
                "window": window,
                "text": text,
                "effects": None if (cell := result.windows[window]) is None else cell.effects,
                "flagged": bool(cell and cell.flagged),
            }
            for window, text in WINDOWS.items()
        ],
        "weakened_by": [
            {"what": weakness.what, "breaks": weakness.breaks, "fix": weakness.fix or None}
            for weakness in result.weaknesses
        ],
        "table_holds": result.holds,
        "required": require,
        "satisfied": holds,
    }
