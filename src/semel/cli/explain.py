"""`semel explain`: which guarantees hold with these settings and servers."""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from semel.cli.dedup_checks import (
    DedupKeyOption,
    DedupMarksOption,
    DedupOption,
    DedupToOption,
    explain_dedup,
    refuse_without_dedup,
)
from semel.cli.options import (
    ConsumerOption,
    JsonOption,
    LeaseOption,
    ModeOption,
    SourcesOption,
    StoreOption,
    TenantOption,
    WindowOption,
    parse_duration_us,
    settings_for,
    sources_of,
)
from semel.cli.output import (
    BAD_CONFIGURATION,
    FAILED,
    UNAVAILABLE,
    CommandExit,
    console,
    print_json,
    print_rows,
    say,
    table,
)
from semel.cli.store_access import StoreAccess, exists, find_store, open_store
from semel.core.commands import Scan
from semel.errors import SemelError, SourceUnavailable, StoreUnavailable
from semel.observe.explain import Explanation
from semel.observe.explain import explain as explained
from semel.observe.formatting import exact_text, redact
from semel.observe.guarantees import WINDOWS, GuaranteeCell, Sink, Weakness
from semel.observe.probes import Keys, SourceFacts, SourceProbe, keys_of, weaknesses
from semel.observe.window_in_force import SAMPLE, WindowInForce, window_in_force
from semel.policy import OnUnavailable
from semel.types import Mode
from semel.windows import duration_us, window_us

if TYPE_CHECKING:
    from semel.cli.settings import CliSettings

__all__ = ["explain", "probe_sources", "source_text"]

Required = Annotated[
    Mode | None,
    typer.Option("--require", help="Exit with 1 if less holds than in this mode.", show_default=False),
]
VisibilityOption = Annotated[
    str | None,
    typer.Option(
        "--visibility",
        metavar="DURATION",
        help="After how long without an ack the source redelivers; overrides the broker's setting.",
    ),
]
HorizonOption = Annotated[
    str | None,
    typer.Option(
        "--redelivers-for",
        metavar="DURATION",
        help="How long the source may redeliver an event; overrides the broker's setting.",
    ),
]
RedriveOption = Annotated[
    str | None,
    typer.Option("--redrive-after", metavar="DURATION", help="How late dead letters may be put back."),
]
KeysOption = Annotated[
    Keys | None,
    typer.Option(
        "--keys",
        help="How the key of an event is made; overrides what the records show.",
        show_default=False,
    ),
]


_WITHOUT_STORE: dict[OnUnavailable, str] = {
    "refuse": "refused: nothing runs",
    "run": "handlers run without a claim",
}


def explain(  # noqa: PLR0913, PLR0917 - an option each
    require: Required = None,
    sink: Annotated[
        Sink, typer.Option("--sink", help="What the system that the handler calls supports, in mode lease.")
    ] = "plain",
    store: StoreOption = None,
    source: SourcesOption = None,
    consumer: ConsumerOption = None,
    tenant: TenantOption = None,
    window: WindowOption = None,
    lease: LeaseOption = None,
    mode: ModeOption = None,
    visibility: VisibilityOption = None,
    redelivers_for: HorizonOption = None,
    redrive_after: RedriveOption = None,
    keys: KeysOption = None,
    on_unavailable: Annotated[
        OnUnavailable,
        typer.Option("--on-unavailable", help="The policy's setting for an unreachable store."),
    ] = "refuse",
    dedup: DedupOption = None,
    to: DedupToOption = "",
    key: DedupKeyOption = None,
    marks: DedupMarksOption = "",
    *,
    probe: Annotated[
        bool, typer.Option("--probe", help="The policy has a probe, which asks about unknown outcomes.")
    ] = False,
    tenants: Annotated[bool, typer.Option("--tenants", help="Several tenants use the consumer.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show which guarantee holds in which crash, and what weakens it.

    Reads the settings of the store's server and of the sources (--from): durability, retention, redelivery. Nothing
    is consumed or changed. With --consumer, the mode and window that the store has for it count, and its records show
    whether keys are hashes of the content. With --dedup it shows the contract of a deduplication instead, and what
    the topics, their latest records and the group say about it. Exit codes: 0 they hold, 1 weaker than --require, 69
    a server does not answer, 78 a broker refuses or the settings cannot be used together.
    """
    settings = settings_for(
        store=store, consumer=consumer, tenant=tenant, window=window, lease=lease, mode=mode
    )
    if dedup is not None:
        with _as_exits():
            explain_dedup(settings, dedup, to=to, key=key, marks=marks, as_json=as_json)
        return
    refuse_without_dedup(to=to, key=key, marks=marks)
    told = {
        "deadline_s": _seconds(visibility, "--visibility"),
        "horizon_s": _seconds(redelivers_for, "--redelivers-for"),
        "redrive_s": _seconds(redrive_after, "--redrive-after"),
    }
    with _as_exits():
        around = SourceProbe(
            sources=_merge_options(probe_sources(sources_of(source, settings)), told),
            keys=keys or "given",
            tenants=tenants,
            tenant=settings.tenant or "",
            consumer=settings.consumer or "",
        )
        result, in_force = _explain(
            settings, sink, around, look_at_keys=keys is None, probe=probe, on_unavailable=on_unavailable
        )
    holds = require is None or result.satisfies(require)
    if as_json:
        print_json(_document(result, in_force, settings, around.sources, require, holds=holds))
    else:
        _print(result, in_force, settings, around.sources)
    if not holds:
        why = (
            "a finding breaks its guarantees"
            if not result.holds
            else f"{result.mode} promises less than that"
        )
        raise CommandExit(f"weaker than --require {require}: {why}", FAILED)


@contextmanager
def _as_exits() -> Iterator[None]:
    """Turn errors of servers and settings into exit codes."""
    try:
        yield
    except (SourceUnavailable, StoreUnavailable) as error:
        raise CommandExit(str(error), UNAVAILABLE) from error
    except SemelError as error:
        raise CommandExit(str(error), BAD_CONFIGURATION) from error


def _seconds(given: str | None, option: str) -> float | None:
    return None if given is None else parse_duration_us(given, option) / 1e6


def probe_sources(urls: Sequence[str]) -> list[SourceFacts]:
    """Return what the brokers report about the sources. Raises `UsageError` and `SourceUnavailable`."""
    if not urls:
        return []
    from semel.brokers.probes import look_at
    from semel.cli.consume import quiet_clients

    quiet_clients()

    async def look() -> list[SourceFacts]:
        return [await look_at(url) for url in urls]

    return asyncio.run(look())


def _merge_options(sources: list[SourceFacts], told: dict[str, float | None]) -> tuple[SourceFacts, ...]:
    """Override the brokers' facts with the user's options."""
    said: dict[str, Any] = {name: value for name, value in told.items() if value is not None}
    if not said:
        return tuple(sources)
    names = {name.replace("_s", "_name"): "as you say" for name in said}
    return tuple(replace(source, **said, **names) for source in sources or [SourceFacts()])


def _explain(
    settings: "CliSettings",
    sink: Sink,
    around: SourceProbe,
    *,
    look_at_keys: bool,
    probe: bool,
    on_unavailable: OnUnavailable,
) -> tuple[Explanation, WindowInForce]:
    """Return the explanation and the window that it is based on."""
    target = find_store(settings)
    live: list[Weakness] = []
    mode, window = settings.mode, WindowInForce(window_us(settings.window), "assumed")
    if settings.is_set("window"):
        window = replace(window, origin="seen")
    if exists(target):
        with open_store(settings) as reach:
            target = reach.store  # it has the results of the start checks
            live = weaknesses(target)
            if settings.consumer is not None:
                mode, window = _mode_and_window(reach, settings.consumer, mode, window)
                around = _source_probe(reach, settings.consumer, around, look_at_keys=look_at_keys)
    else:
        say(f"{target.name} does not exist yet.")
    lease_us = duration_us(settings.lease)
    told = explained(
        target,
        mode,
        window_us=window.us,
        lease_us=lease_us,
        sink=sink,
        around=around,
        live=live,
        probe=probe,
        on_unavailable=on_unavailable,
    )
    return told, window


def _mode_and_window(
    reach: StoreAccess, consumer: str, mode: Mode, said: WindowInForce
) -> tuple[Mode, WindowInForce]:
    """Return the mode that the store has for the consumer, and its effective window."""
    settings, stored = reach.settings, reach.read_settings()
    scope = (settings.tenant or "", consumer)
    recorded = stored.modes.get(scope, mode)
    if recorded != mode and settings.is_set("mode"):
        raise CommandExit(
            f"consumer {consumer!r} works in mode {recorded}, but {settings.origin('mode')} says {mode}; change one of"
            " them",
            BAD_CONFIGURATION,
        )
    page = reach.ask(Scan(*scope, "done", limit=SAMPLE))
    window = window_in_force(stored.windows, *scope, page.records, said.us)
    is_said = settings.is_set("window") and window.origin != "stored"
    return recorded, said if is_said else window


def _source_probe(
    reach: StoreAccess, consumer: str, around: SourceProbe, *, look_at_keys: bool
) -> SourceProbe:
    """Read which kinds of keys and tenants a consumer's records have."""
    others = [tenant for tenant, name in reach.read_settings().modes if name == consumer and tenant]
    around = replace(around, tenants=around.tenants or bool(others))
    return replace(around, keys=keys_of(reach.store, around.tenant, consumer)) if look_at_keys else around


def _print(
    result: Explanation, window: WindowInForce, settings: "CliSettings", sources: Sequence[SourceFacts]
) -> None:
    broken = sum(weakness.breaks for weakness in result.weaknesses)
    facts = [
        ("mode", result.mode if result.mode != "lease" else f"lease ({result.sink} sink)"),
        ("store", result.store),
        *(("source", redact(source_text(source))) for source in sources),
        ("window", f"{window.text}, counted from completion"),
        ("lease", exact_text(duration_us(settings.lease))),
        *((("probe", "asked about unknown outcomes"),) if result.probe else ()),
        ("store out of reach", _WITHOUT_STORE[result.on_unavailable]),
        (
            "holds",
            f"NO: {broken} of the findings below break{'s' * (broken == 1)} the table"
            if broken
            else "yes"
            if result.horizon_known
            else "unknown: how long the source may send again is not known (--from, or --redelivers-for)",
        ),
    ]
    effects = [(text, _effects(result.windows[crash])) for crash, text in WINDOWS.items()]
    weakened = [
        (weakness.breaks, redact(weakness.what), redact(weakness.fix)) for weakness in result.weaknesses
    ]
    if not sys.stdout.isatty():
        lines = [f"{what} Change: {fix}." if fix else what for _, what, fix in weakened]
        print_rows((), [*facts, *effects, *(("weakened by", line) for line in lines)])
        return
    screen = console()
    screen.print(table(("", ""), facts))
    screen.print(f"\n{result.how}\n", markup=False)
    screen.print(table(("WHAT HAPPENS", "EFFECTS IN THE END"), effects))
    for sign, breaks, title in (
        ("!", True, "Breaks it: the table does not hold"),
        ("-", False, "Weakens it"),
    ):
        chosen = [
            (sign, f"{what}\nChange: {fix}" if fix else what)
            for broke, what, fix in weakened
            if broke is breaks
        ]
        if chosen:
            screen.print()
            screen.print(table(("", title.upper()), chosen))


def source_text(source: SourceFacts) -> str:
    """Return one line about a source and its broker's settings."""
    parts = [source.name if not source.version else f"{source.name} ({source.version})"]
    if source.deadline_s is not None:
        parts.append(f"sends again after {_lasting(source.deadline_s)}")
    if source.horizon_s is not None:
        parts.append(f"for {_lasting(source.horizon_s)}")
    if source.deliveries_max is not None:
        parts.append(f"{source.deliveries_max} times at most, then to {source.buries or 'nowhere'}")
    if source.redrive_s is not None:
        parts.append(f"dead letters stay {_lasting(source.redrive_s)}")
    if source.dedupe_s is not None:
        parts.append(f"drops a producer's repeats for {_lasting(source.dedupe_s)}")
    return "; ".join((", ".join(parts), *source.notes))


def _lasting(seconds: float) -> str:
    return "ever" if seconds == inf else exact_text(round(seconds * 1e6))


def _effects(cell: GuaranteeCell | None) -> str:
    if cell is None:
        return "cannot happen"
    if cell.flagged:
        return f"{cell.effects}, flagged unknown: somebody decides"
    return {0: "0: lost", 1: "1", 2: "up to 2"}[cell.effects]


def _document(
    result: Explanation,
    window: WindowInForce,
    settings: "CliSettings",
    sources: Sequence[SourceFacts],
    require: Mode | None,
    *,
    holds: bool,
) -> dict[str, Any]:
    return {
        "mode": result.mode,
        "store": result.store,
        "sources": [_source_document(source) for source in sources],
        "consumer": settings.consumer,
        "sink": result.sink,
        "window": exact_text(window.us),
        "window_s": window.us / 1e6,
        "window_from": window.origin,
        "lease_s": duration_us(settings.lease) / 1e6,
        "probe": result.probe,
        "on_unavailable": result.on_unavailable,
        "how": result.how,
        "crashes": [
            {
                "window": crash,
                "text": text,
                "effects": None if (cell := result.windows[crash]) is None else cell.effects,
                "flagged": bool(cell and cell.flagged),
            }
            for crash, text in WINDOWS.items()
        ],
        "weakened_by": [
            {"what": redact(each.what), "breaks": each.breaks, "fix": redact(each.fix) or None}
            for each in result.weaknesses
        ],
        "table_holds": result.holds,
        "horizon_known": result.horizon_known,
        "required": require,
        "satisfied": holds,
    }


def _source_document(source: SourceFacts) -> dict[str, Any]:
    """Return a source as JSON. An endless duration is the word `ever`, because JSON has no infinity."""
    return {
        "name": redact(source.name),
        "version": source.version or None,
        "deadline_s": source.deadline_s,
        "horizon_s": "ever" if source.horizon_s == inf else source.horizon_s,
        "redrive_s": "ever" if source.redrive_s == inf else source.redrive_s,
        "deliveries_max": source.deliveries_max,
        "dead_letters": source.buries or None,
        "dedupe_s": source.dedupe_s,
        "durable": source.durable,
        "waiting": source.waiting,
        "in_hand": source.in_hand,
        "notes": list(source.notes),
    }
