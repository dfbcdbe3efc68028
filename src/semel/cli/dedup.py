"""`semel dedup`: pass the first record of each key from one Kafka topic to another."""

import gc
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semel.cli.dedup_checks import CONTRACT
from semel.cli.dedup_progress import progress_writer, show_progress
from semel.cli.observing import MetricsOption, serve_metrics
from semel.cli.options import (
    DryRunOption,
    Globals,
    JsonOption,
    LogFormatOption,
    WindowOption,
    settings_for,
    stop_on_signals,
    text,
)
from semel.cli.output import BAD_CONFIGURATION, INTERRUPTED, OK, USAGE, CommandExit, print_json, say
from semel.observe.formatting import exact_text, plural, redact

if TYPE_CHECKING:
    from semel.observe.dedup_progress import ProgressWriter
    from semel.observe.prometheus import PrometheusHook
    from semel.streams import Dedup
    from semel.streams.repartition import Repartition

__all__ = ["dedup"]

_log = logging.getLogger("semel.streams")


class LatePolicy(StrEnum):
    """What to do with an event older than the window."""

    PASS = "pass"  # noqa: S105 - no password
    DROP = "drop"


def _topic(name: str, help_: str) -> Any:
    return typer.Option(name, metavar="TOPIC", callback=text, help=help_)


FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="URL",
        callback=text,
        help="The topic to read and the group, such as kafka://localhost:9092/in?group=g. Setting: source.",
    ),
]
ToOption = Annotated[str, _topic("--to", "The topic for first events, by name or URL, on the same cluster.")]
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--key",
        "-k",
        metavar="PATH",
        callback=text,
        help="Where the id is: a path in the JSON body, header:NAME or record:key; else the headers are searched.",
    ),
]
TimeOption = Annotated[
    str | None,
    typer.Option(
        "--time",
        metavar="PATH",
        callback=text,
        help="The event's own time: a path in the JSON body, header:NAME or record:timestamp. Default: arrival.",
    ),
]
LateOption = Annotated[
    LatePolicy,
    typer.Option("--late", help="Events older than the window: pass them unchecked, or drop them."),
]
LateToOption = Annotated[str, _topic("--late-to", "The topic for late events, instead of --late.")]
DuplicatesOption = Annotated[str, _topic("--duplicates-to", "A topic for the copies.")]
MismatchesOption = Annotated[
    str, _topic("--mismatches-to", "A topic for records whose key is known with another body.")
]
MarksOption = Annotated[str, _topic("--marks", "The topic for the marks. Default: TOPIC.GROUP.marks")]
StateOption = Annotated[
    Path,
    typer.Option(
        "--state", metavar="FOLDER", help="The folder of the local index; each instance takes its part."
    ),
]
InstanceOption = Annotated[
    str,
    typer.Option(
        "--instance",
        metavar="NAME",
        callback=text,
        help="A name that stays across restarts and that no other has: a restart then waits for nothing.",
    ),
]
BatchOption = Annotated[
    int, typer.Option("--batch", min=1, max=100_000, metavar="N", help="Records in one transaction.")
]
RepartitionOption = Annotated[
    bool,
    typer.Option("--repartition", help="First copy the topic into one that is partitioned by the id."),
]
ProgressStoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        callback=text,
        show_default=False,
        help="The store of a dashboard that shows the progress. Nothing else is kept there. Setting: store.",
    ),
]
UntilIdleOption = Annotated[bool, typer.Option("--until-idle", help="End when nothing is left to read.")]


def dedup(  # noqa: PLR0913, PLR0917 - one parameter for each option
    source: FromOption = None,
    to: ToOption = "",
    key: KeyOption = None,
    window: WindowOption = None,
    time: TimeOption = None,
    late: LateOption = LatePolicy.PASS,
    late_to: LateToOption = "",
    duplicates_to: DuplicatesOption = "",
    mismatches_to: MismatchesOption = "",
    marks: MarksOption = "",
    state: StateOption = Path("semel-dedup"),
    instance: InstanceOption = "",
    batch: BatchOption = 4000,
    repartition: RepartitionOption = False,  # noqa: FBT002 - a switch
    until_idle: UntilIdleOption = False,  # noqa: FBT002 - a switch
    metrics: MetricsOption = None,
    store: ProgressStoreOption = None,
    log_format: LogFormatOption = None,
    *,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> int:
    """Pass the first record of each key from a Kafka topic to another; drop or put aside the copies.

    Kafka keeps everything: output, marks and offsets commit in one transaction. Start as many instances as there are
    partitions. Readers of the output must use isolation.level=read_committed. On SIGTERM or Ctrl-C it ends after its
    batch. Exit code 78: the topics do not fit, with what to do.
    """
    settings = settings_for(
        source=source, window=window, store=store, log_format=log_format or Globals.log_format
    )
    url = settings.source
    if not url or not to:
        raise CommandExit("give --from kafka://localhost:9092/in?group=g and --to TOPIC", USAGE)
    if late_to and late is LatePolicy.DROP:
        raise CommandExit("give one of --late drop and --late-to", USAGE)
    if settings.log_format == "json" and not _log.isEnabledFor(logging.INFO):
        _log.setLevel(logging.INFO)  # progress is logged
    first, engine = _engines(
        url, to, key, settings.window, repartition=repartition, instance=instance, time=time, late=late.value,
        late_to=late_to, duplicates_to=duplicates_to, mismatches_to=mismatches_to, marks=marks,
        state=state, batch=batch,
    )  # fmt: skip
    if dry_run:
        return _check(engine, first, as_json=as_json)
    with ExitStack() as stack:
        hook = None
        if metrics is not None:
            hook, close = serve_metrics(metrics)
            stack.callback(close)
        writer = progress_writer(settings, engine.name, exact_text(engine.window_us))
        if writer is not None:
            writer.start()
            stack.callback(writer.close)
        return _run(engine, first, hook, writer, until_idle=until_idle, as_json=as_json)


def _engines(
    url: str, to: str, key: str | None, window: Any, *, repartition: bool, instance: str, **more: Any
) -> "tuple[Repartition | None, Dedup]":
    try:
        from semel.streams import Dedup, rocks
        from semel.streams.repartition import Repartition
    except ImportError as error:
        raise CommandExit(str(error), BAD_CONFIGURATION) from None
    del rocks  # imported for its message: the extra may be missing
    if instance:
        url += f"{'&' if '?' in url else '?'}instance={instance}"
    if not repartition:
        return None, Dedup(url, to, key=key, window=window, **more)
    first = Repartition(url, key)
    return first, Dedup(first.url_behind(), to, key=key, window=window, repartitioned=True, **more)


def _check(engine: "Dedup", first: "Repartition | None", *, as_json: bool) -> int:
    """Say what would be created, and whether the topics fit."""
    facts = (first or engine).check()
    if as_json:
        print_json(
            {"partitions": dict(facts.partitions), "create": facts.created, "warnings": facts.warnings}
        )
        return OK
    for name in facts.created:
        say(f"would create {name}")
    for line in facts.warnings:
        say(f"warning: {line}")
    say(f"{engine.name} fits. {CONTRACT}")
    return OK


def _run(
    engine: "Dedup",
    first: "Repartition | None",
    hook: "PrometheusHook | None",
    writer: "ProgressWriter | None",
    *,
    until_idle: bool,
    as_json: bool,
) -> int:
    failure: list[BaseException] = []
    received = stop_on_signals(engine.stop)
    say(redact(f"deduplicating {engine.name}, window {exact_text(engine.window_us)}. {CONTRACT}"))
    with (
        _beside(engine, first, failure, until_idle=until_idle),
        show_progress(engine, hook, writer) as show,
        engine,
    ):
        gc.freeze()  # the modules: a collection among the records of batches need not look at them
        engine.run(until_idle=until_idle and first is None, on_step=show)
    if failure:
        raise failure[0]
    _report(engine, as_json=as_json)
    return INTERRUPTED if signal.SIGINT in received else OK


@contextmanager
def _beside(
    engine: "Dedup", first: "Repartition | None", failure: list[BaseException], *, until_idle: bool
) -> Iterator[None]:
    """Run the repartitioning in a thread of its own; the deduplication learns how it ends."""
    if first is None:
        yield
        return
    first.prepare()  # the topic in between must exist before its reader starts

    def copy() -> None:
        try:
            first.run(until_idle=until_idle)
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            failure.append(error)
            engine.stop()
        else:
            engine.stop_when_idle()

    thread = threading.Thread(target=copy, name="semel-repartition")
    thread.start()
    try:
        yield
    finally:
        first.stop()
        thread.join()


def _report(engine: "Dedup", *, as_json: bool) -> None:
    counts = engine.counts
    if as_json:
        print_json(counts)
        return
    say(
        f"{engine.name}: {counts.received:,} received, {counts.passed:,} passed,"
        f" {plural(counts.duplicates, 'duplicate')}, {plural(counts.mismatches, 'mismatch', 'mismatches')},"
        f" {counts.late:,} late, {plural(counts.dead_lettered, 'dead letter')}"
    )
