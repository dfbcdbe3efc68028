"""`semel chaos`: run your handler through duplicates, kills, pauses and outages, and say which promises held."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semel.cli.options import (
    JsonOption,
    LeaseOption,
    ModeOption,
    StoreOption,
    ending_on_signals,
    load_handler,
    settings_for,
    text,
)
from semel.cli.output import (
    BAD_CONFIGURATION,
    FAILED,
    OK,
    USAGE,
    CommandExit,
    console,
    print_json,
    print_rows,
    say,
)
from semel.observe.guarantees import Sink
from semel.windows import duration_us

if TYPE_CHECKING:
    from semel.testing.chaos.conductor import ChaosProgress
    from semel.testing.chaos.report import ChaosReport
    from semel.testing.chaos.settings import ChaosSettings

__all__ = ["chaos"]

SEED_MAX = 2**32
LEASE = "2s"
"""Shorter than the setting: chaos waits for leases to end."""
REFRESH_PER_S = 10

HandlerArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:NAME",
        callback=text,
        help="The handler, as for semel consume. In mode inbox its first argument is the open transaction.",
    ),
]
SourceOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="URL",
        callback=text,
        help="An empty Kafka topic or Redis stream to publish into; default: a queue of its own.",
    ),
]
EffectsOption = Annotated[
    str | None,
    typer.Option(
        "--effects",
        metavar="MODULE:NAME|sql:SELECT ...",
        callback=text,
        help="What counts effects: a function or a query of the store's database. It gives key and count, or one key"
        " per effect. Default: runs of the handler.",
    ),
]
SampleOption = Annotated[
    str | None,
    typer.Option(
        "--sample",
        metavar="MODULE:NAME|JSON",
        callback=text,
        help="The body of an event: a function of key and number, or JSON with {key} and {number} in it."
        ' Default: {"id": key, "number": number}.',
    ),
]
ReportOption = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Write a page about the run, one HTML file.")
]


SinkOption = Annotated[
    Sink, typer.Option("--sink", help="What the system that the handler calls supports, in mode lease.")
]
SeedOption = Annotated[
    int | None, typer.Option(min=0, max=SEED_MAX, help="Repeat the plan of this seed; default: a new one.")
]
MinutesOption = Annotated[
    float, typer.Option(min=0.0, max=1440.0, help="Begin rounds for this long; at least one.")
]
RoundsOption = Annotated[
    int, typer.Option(min=0, help="How many rounds, instead of --minutes. 0: as many as the time allows.")
]
EventsOption = Annotated[int, typer.Option(min=1, max=10_000, help="How many events a round has.")]
WorkersOption = Annotated[int, typer.Option(min=1, max=32, help="How many worker processes.")]
ConcurrencyOption = Annotated[
    int, typer.Option("--concurrency", min=1, max=32, help="How many handlers a worker runs at once.")
]
FaultsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fault",
        metavar="KIND",
        show_default=False,
        help="Only this kind: kill, pause, store cut off, reply lost, ack lost. Repeat it for several.",
    ),
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Exit with 1 also for effects doubled or lost as the table allows.")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Use a store or a source that holds something else.")
]


def chaos(  # noqa: PLR0913, PLR0917 - one parameter for each option
    handler: HandlerArgument,
    store: StoreOption = None,
    source: SourceOption = None,
    mode: ModeOption = None,
    lease: LeaseOption = None,
    effects: EffectsOption = None,
    sample: SampleOption = None,
    sink: SinkOption = "plain",
    seed: SeedOption = None,
    minutes: MinutesOption = 1.0,
    rounds: RoundsOption = 0,
    events: EventsOption = 40,
    workers: WorkersOption = 3,
    concurrency: ConcurrencyOption = 2,
    fault: FaultsOption = None,
    report: ReportOption = None,
    *,
    strict: StrictOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> int:
    """Run your handler in real worker processes amid faults, and say which promises held.

    Deliveries are duplicated and reordered; workers are killed with -9 and paused past their lease; the store is cut
    off and its replies are lost. Effects are counted and compared with what `semel explain` promises. The handler
    runs for real: use a store and systems made for tests. Exit codes: 0 the promises held, 1 broken, 78 the settings
    cannot be used.
    """
    import secrets
    import tempfile

    from semel.testing.chaos.settings import ChaosSettings

    load_handler(handler)
    given = settings_for(store=store, mode=mode, lease=lease)
    _check_writable(report)
    with ending_on_signals(), tempfile.TemporaryDirectory(prefix="semel-chaos-") as folder:
        settings = ChaosSettings(
            handler=handler,
            store=given.store if given.is_set("store") else f"sqlite:///{folder}/store.db",
            mode=given.mode,
            sink=sink,
            source=source or "",
            effects=effects or "",
            sample=sample or "",
            seed=secrets.randbelow(SEED_MAX) if seed is None else seed,
            minutes=minutes,
            rounds=rounds,
            events=events,
            workers=workers,
            concurrency=concurrency,
            lease_s=duration_us(given.lease if given.is_set("lease") else LEASE) / 1e6,
            faults=tuple(fault or ()),
            force=force,
            store_is_new=not given.is_set("store"),
        )
        if not as_json:
            say(f"chaos for {handler} with seed {settings.seed}")
        found = _run(settings)
    _show(found, report, as_json=as_json)
    return OK if found.held and not (strict and (found.doubled or found.lost)) else FAILED


def _run(settings: "ChaosSettings") -> "ChaosReport":
    from semel.testing.chaos.run import run_chaos
    from semel.testing.chaos.settings import ChaosFailed

    try:
        with _display(shown=sys.stderr.isatty()) as step:
            return run_chaos(settings, step)
    except ChaosFailed as error:
        code = FAILED if error.usable else BAD_CONFIGURATION
        raise CommandExit(f"the run failed: {error}", code) from error


def _show(found: "ChaosReport", report: Path | None, *, as_json: bool) -> None:
    from semel.testing.chaos.page import render_page
    from semel.testing.chaos.report import document

    if report is not None:
        report.write_text(render_page(found), encoding="utf-8")
    if as_json:
        print_json(document(found))
        return
    _print(found)
    if report is not None:
        say(f"The report is in {report}.")


def _check_writable(report: Path | None) -> None:
    """Refuse a report that could not be written, before anything runs."""
    if report is not None and (report.is_dir() or not report.absolute().parent.is_dir()):
        raise CommandExit(f"--report {report}: name a file in a folder that exists", USAGE)


@contextmanager
def _display(*, shown: bool) -> "Iterator[Callable[[ChaosProgress], None]]":
    """Show progress on stderr if it is a terminal. It has no thread: each step of the run redraws it."""
    if not shown:
        yield lambda _: None
        return
    from time import monotonic

    from rich.console import Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    signs = {"working": ("●", "green"), "paused": ("‖", "yellow"), "starting": ("✕", "red")}

    def draw(progress: "ChaosProgress") -> Any:
        workers = Text("workers ")
        for word in progress.workers.split():
            workers.append(f"{signs[word][0]} ", style=signs[word][1])
        faults = ", ".join(f"{kind} {number}" for kind, number in sorted(progress.faults.items()))
        return Group(
            ProgressBar(total=1.0, completed=progress.share, width=60),
            workers.append(
                f"  round {progress.rounds + 1}   events {progress.events:,}   deliveries {progress.deliveries:,}"
            ),
            Text(f"faults: {faults or 'none yet'}"),
        )

    with Live(console=console(stderr=True), auto_refresh=False, transient=True) as live:
        drawn_at = 0.0

        def step(progress: "ChaosProgress") -> None:
            nonlocal drawn_at
            if monotonic() - drawn_at >= 1 / REFRESH_PER_S:
                drawn_at = monotonic()
                live.update(draw(progress), refresh=True)

        yield step


def _print(found: "ChaosReport") -> None:
    from semel.testing.chaos.report import promise_text, summary

    rows = [
        (
            window.text,
            promise_text(window.promised),
            f"{window.events}",
            f"{window.alone}",
            ", ".join(f"{times} x {number}" for times, number in window.effects.items()),
            "held" if window.kept else "BROKEN",
        )
        for window in found.windows
        if window.events
    ]
    print_rows(("HIT", "EFFECTS PROMISED", "EVENTS", "ONLY THERE", "THEIR EFFECTS x EVENTS", ""), rows)
    print()
    for sentence in summary(found):
        print(sentence)
    sys.stdout.flush()
