"""`semel listen`: run a handler for the events of a WebSocket source, once for each, in any number of instances."""

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import semel
from semel.cli.observing import MetricsOption, observing
from semel.cli.options import (
    ConsumerOption,
    DrainOption,
    ErrorsOption,
    Globals,
    LeaseOption,
    LogFormatOption,
    RetryDelayOption,
    StoreOption,
    TenantOption,
    WindowOption,
    client_options,
    handler_policy,
    load_handler,
    parse_duration_us,
    read_lines,
    settings_for,
    text,
)
from semel.cli.output import BAD_CONFIGURATION, USAGE, CommandExit, say
from semel.client.client_async import AsyncSemel
from semel.observe.formatting import plural, redact
from semel.runtime.handlers import check_takes_event

if TYPE_CHECKING:
    from semel.ingest.intake import DeadLetterHandler, Event
    from semel.ingest.sockets import EventTable

__all__ = ["listen"]

UrlArgument = Annotated[str, typer.Argument(metavar="URL", callback=text, help="ws://... or wss://...")]
HandlerArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODULE:NAME",
        callback=text,
        help="A function that takes an event; a plain def runs in a thread.",
    ),
]
PersistOption = Annotated[
    str | None,
    typer.Option(
        "--persist",
        metavar="URL",
        callback=text,
        help="Write each event into the table `events` of postgresql://... or sqlite:///..., after the handler.",
    ),
]
ColumnsOption = Annotated[
    str,
    typer.Option(
        "--columns",
        metavar="NAMES",
        callback=text,
        help="Column names for event_id, type, payload and tenant, such as type=event_type,tenant= (no tenants).",
    ),
]
KeyOption = Annotated[
    str, typer.Option("--key", "-k", metavar="PATH", callback=text, help="Where the id is in the JSON.")
]
TypeOption = Annotated[str, typer.Option("--type", metavar="PATH", callback=text, help="Where the type is.")]
ConcurrencyOption = Annotated[
    int, typer.Option("--concurrency", min=1, max=1000, help="How many handlers run at once.")
]
AttemptsOption = Annotated[
    int, typer.Option("--max-attempts", min=1, help="After this many attempts the event is dead-lettered.")
]
DeadOption = Annotated[
    Path | None,
    typer.Option(
        "--dead", metavar="FILE", help="Append dead-lettered events to this file, one JSON line each."
    ),
]
HeaderOption = Annotated[
    Path | None,
    typer.Option(
        "--header-file", metavar="FILE", help="Headers for the source, such as Authorization: one per line."
    ),
]


def listen(  # noqa: PLR0913, PLR0917 - one parameter for each option
    url: UrlArgument,
    handler: HandlerArgument = None,
    store: StoreOption = None,
    consumer: ConsumerOption = None,
    tenant: TenantOption = None,
    window: WindowOption = None,
    lease: LeaseOption = None,
    persist: PersistOption = None,
    columns: ColumnsOption = "",
    key: KeyOption = "id",
    kind: TypeOption = "type",
    concurrency: ConcurrencyOption = 10,
    max_attempts: AttemptsOption = 10,
    retry_delay: RetryDelayOption = "1s",
    errors: ErrorsOption = "keep",
    drain: DrainOption = "30s",
    dead: DeadOption = None,
    header_file: HeaderOption = None,
    metrics: MetricsOption = None,
    log_format: LogFormatOption = None,
) -> int:
    """Run a handler once for each event of a WebSocket source, in any number of instances.

    The payload is journaled with the claim: if an instance dies, another takes over. On SIGTERM or Ctrl-C running
    handlers finish; the other instances take over the rest.
    """
    from semel.ingest.event_table import columns_of
    from semel.ingest.intake import IntakeLimits
    from semel.ingest.sockets import EventTable, Fields

    table = None if persist is None else EventTable(persist, columns=columns_of(columns))
    process = _process(handler, table)
    settings = settings_for(
        store=store,
        consumer=consumer,
        tenant=tenant,
        window=window,
        lease=lease,
        log_format=log_format or Globals.log_format,
    )
    policy = handler_policy(max_attempts, retry_delay, errors)
    pace = IntakeLimits(
        concurrency=concurrency,
        pending_max=max(1000, concurrency),
        drain_s=parse_duration_us(drain) / 1e6,
    )
    headers, dead_letter = _headers(header_file), _dead_letter_file(dead)
    with observing(settings, metrics) as seen:
        once = semel.aopen(
            settings.store, policy=policy, hooks=seen.hooks, **client_options(settings, "listen")
        )
        listening = _listen(url, process, table, once, pace, Fields(id=key, type=kind), headers, dead_letter)
        return asyncio.run(listening)


def _process(spec: str | None, table: "EventTable | None") -> Any:
    from semel.brokers.routes import in_loop

    if spec is None:
        if table is None:
            raise CommandExit("name a handler such as app:handle, or a table with --persist", USAGE)
        return table.persist
    handler = load_handler(spec)
    check_takes_event(handler, spec)
    return in_loop(handler) if table is None else table.after(handler)


async def _listen(
    url: str,
    process: Any,
    table: "EventTable | None",
    once: AsyncSemel,
    pace: Any,
    fields: Any,
    headers: dict[str, str],
    dead: "DeadLetterHandler | None",
) -> int:
    from semel.ingest.sockets import Intake, Listener

    try:
        async with Intake(
            once, process, pace=pace, dead=dead, source="websocket"
        ) as intake:  # also before the store answers
            listener = Listener(url, intake, fields=fields, headers=headers)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, listener.stop)
            say(redact(f"Listening to {url} as {once.consumer!r}, instance {intake.instance}."))
            await listener.run()
    finally:
        await once.close()
        if table is not None:
            await table.close()
    counts = listener.counts
    say(
        f"{counts.received:,} received, {counts.accepted:,} accepted, {plural(counts.duplicates, 'duplicate')},"
        f" {counts.invalid:,} invalid."
    )
    return 0


def _dead_letter_file(file: Path | None) -> "DeadLetterHandler | None":
    """Return a handler that appends dead-lettered events to a file and flushes it to disk."""
    if file is None:
        return None

    def write(line: bytes) -> None:
        with file.open("ab") as opened:
            opened.write(line)
            opened.flush()
            os.fsync(opened.fileno())

    async def dead_letter(event: "Event", error: Exception) -> None:
        import msgspec

        letter = {"id": event.id, "type": event.type, "error": repr(error), "payload": event.payload}
        await asyncio.to_thread(write, msgspec.json.encode(letter) + b"\n")

    return dead_letter


def _headers(file: Path | None) -> dict[str, str]:
    if file is None:
        return {}
    pairs = [line.partition(":") for line in read_lines(file)]
    if any(not colon or not name.strip() for name, colon, _ in pairs):
        raise CommandExit(
            f"{file}: each line is a header, such as Authorization: Bearer ...", BAD_CONFIGURATION
        )
    return {name.strip(): value.strip() for name, _, value in pairs}
