"""`semel outbox` and `semel relay`: list, retry, drop and publish the messages of an outbox."""

import asyncio
import signal
import sys
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from semel.cli.help import App
from semel.cli.observing import MetricsOption, observing
from semel.cli.options import (
    Globals,
    JsonOption,
    LogFormatOption,
    StoreOption,
    YesOption,
    parse_duration_us,
    read_lines,
    settings_for,
    stop_on_signals,
    text,
)
from semel.cli.output import (
    BAD_CONFIGURATION,
    INTERRUPTED,
    NOT_FOUND,
    OK,
    USAGE,
    CommandExit,
    confirm,
    console,
    print_json,
    print_rows,
    say,
    table,
)
from semel.cli.store_access import existing, open_store
from semel.core.relay_flow import Retrying
from semel.observe import formatting
from semel.observe.formatting import duration_text, local_time, plural, redact

__all__ = ["outbox", "relay"]

if TYPE_CHECKING:
    from semel.observe.prometheus import PrometheusHook
    from semel.outbox.relay import Relay
    from semel.outbox.tables import Entry, Rows, State


T = TypeVar("T")
PAGE_MAX = 500
HEADERS = ("ID", "TYPE", "STATE", "ATTEMPTS", "AGE", "AGGREGATE", "DESTINATION", "ERROR")

outbox: App = App()

Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="The messages' ids.")]


@outbox.command("list")
def list_messages(
    limit: Annotated[int, typer.Option("--limit", min=0, metavar="N", help="At most so many; 0: all.")] = 100,
    store: StoreOption = None,
    *,
    dead: Annotated[bool, typer.Option("--dead", help="Only dead messages.")] = False,
    published: Annotated[bool, typer.Option("--published", help="Only those published.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Whatever their state.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List messages in their order: those that are not published yet, unless an option selects others.

    Piped, each message is a line: id, type, state, attempts, age, aggregate, destination, error.
    """
    if dead + published + everything > 1:
        raise CommandExit("give one of --dead, --published and --all", USAGE)

    async def gather(rows: "Rows") -> "list[Entry]":
        wanted: list[State | None] = ["pending", "dead"]
        if dead or published or everything:
            wanted = ["dead" if dead else "published" if published else None]
        entries: list[Entry] = []
        for state in wanted:
            after = 0
            while len(page := await rows.entries(state, after, PAGE_MAX)):
                entries += page
                after = page[-1].row.seq
                if limit and len(entries) > limit * len(wanted):
                    break
        return sorted(entries, key=lambda entry: entry.row.seq)

    entries = _with_rows(store, gather)
    chosen = entries[:limit] if limit else entries
    now = formatting.now_us()
    if as_json:
        print_json({"messages": [_document(entry, now, payload=False) for entry in chosen]})
    elif chosen:
        print_rows(HEADERS, [_row(entry, now) for entry in chosen])
    else:
        say("Nothing waits here." if not published and not everything else "There is none.")
    if len(entries) > len(chosen):
        say(f"There are more than {limit}: raise --limit, or --limit 0 for all.")


@outbox.command("show")
def show_message(
    message_id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.", callback=text)],
    store: StoreOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Show a message with all its fields. Exit code 5: no message has this id."""
    (checked,) = _check([message_id])
    entry = _with_rows(store, lambda rows: rows.entry(checked))
    if entry is None:
        raise CommandExit(
            f"no message {message_id} in this outbox: never written, or removed after its retention",
            NOT_FOUND,
        )
    document = _document(entry, formatting.now_us(), payload=True)
    if as_json:
        print_json(document)
        return
    lines = [(name, str(value)) for name, value in document.items() if value not in (None, {}, "")]
    if sys.stdout.isatty():
        console().print(table(("", ""), lines))
    else:
        print_rows((), lines)


@outbox.command("retry")
def retry_messages(
    ids: Ids = None,
    store: StoreOption = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Every dead message.")] = False,
) -> None:
    """Retry dead messages, from the first attempt.

    The audit records who did it. Exit code 5: none of them was dead.
    """
    if everything == bool(ids):
        raise CommandExit("give ids, or --all", USAGE)
    checked = None if everything else _check(ids or [])
    _note(store, "outbox retry", ", ".join(checked) if checked else "all that are dead")
    count = _with_rows(store, lambda rows: rows.retry(checked))
    if not count:
        raise CommandExit("no such message is dead; see: semel outbox list --dead", NOT_FOUND)
    say(f"{_messages(count)} will be tried again.")


@outbox.command("drop")
def drop_messages(ids: Ids = None, store: StoreOption = None, *, yes: YesOption = False) -> None:
    """Drop messages: they are never published, and messages behind them continue.

    Their rows stay, so that a repeated handler does not write them again. The audit records who did it.
    Exit code 5: none of them was waiting.
    """
    if not ids:
        raise CommandExit("give the ids of the messages", USAGE)
    checked = _check(ids)
    confirm(f"Drop {_messages(len(checked))}? They will never be published.", yes=yes)
    _note(store, "outbox drop", ", ".join(checked))
    count = _with_rows(store, lambda rows: rows.drop(checked))
    if not count:
        raise CommandExit("no such message waits to be published; see: semel outbox list", NOT_FOUND)
    say(f"{_messages(count)} dropped.")


def _messages(count: int) -> str:
    return plural(count, "message")


def _check(ids: list[str]) -> list[str]:
    try:
        return [str(uuid.UUID(each)) for each in ids]
    except ValueError:
        raise CommandExit(f"{' '.join(ids)!a} is not the id of a message; ids are UUIDs", USAGE) from None


def _note(store: str | None, action: str, ids: str) -> None:
    """Write the action and its user into the audit of the same database, before the action."""
    from semel.outbox.tables import rows_for

    settings = settings_for(store=store)
    rows_for(settings.store)  # refuses a store that has no outbox
    with open_store(settings) as reach:
        reach.note("", action, ids=ids)


def _with_rows(store: str | None, work: "Callable[[Rows], Awaitable[T]]") -> T:
    """Open the outbox, run the action and close it. Does not create a missing file."""
    from semel.outbox.tables import rows_for

    settings = settings_for(store=store)
    rows = rows_for(settings.store)
    existing(settings)

    async def do() -> T:
        await rows.open()
        try:
            return await work(rows)
        finally:
            await rows.close()

    return asyncio.run(do())


def _row(entry: "Entry", now: int) -> tuple[str, ...]:
    row = entry.row
    return (
        row.id,
        row.event_type,
        entry.state,
        str(row.attempts),
        duration_text(max(0, now - row.created_at)),
        "/".join(row.aggregate or ()),
        row.destination,
        entry.error or "",
    )


def _document(entry: "Entry", now: int, *, payload: bool) -> dict[str, Any]:
    row = entry.row
    waits = entry.state == "pending" and entry.next_at > now
    document: dict[str, Any] = {
        "id": row.id,
        "type": row.event_type,
        "state": entry.state,
        "attempts": row.attempts,
        "error": entry.error,
        "aggregate": "/".join(row.aggregate) if row.aggregate else None,
        "destination": row.destination,
        "created": local_time(row.created_at),
        "not_before": None if entry.not_before is None else local_time(entry.not_before),
        "next_attempt": local_time(entry.next_at) if waits else None,
        "settled": None if entry.settled_at is None else local_time(entry.settled_at),
        "name": entry.name,
        "source": row.source,
        "subject": row.subject,
        "traceparent": row.traceparent,
        "content_type": row.content_type,
        "headers": row.headers,
        "bytes": len(row.payload),
    }
    if payload:
        document["payload"] = row.payload.decode(errors="backslashreplace")
    return document


SourceOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="URL",
        callback=text,
        help="The database with the outbox: postgresql://... or sqlite:///app.db. Setting: store.",
    ),
]
SinkOption = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="URL",
        callback=text,
        help="kafka://..., amqp://..., nats://..., sqs://..., redis://..., https://... or stdout:",
    ),
]
AttemptsOption = Annotated[
    int, typer.Option("--attempts", min=1, metavar="N", help="A message is dead after this many attempts.")
]
BackoffOption = Annotated[
    str, typer.Option("--backoff-max", metavar="DURATION", help="The longest wait between attempts.")
]
BatchOption = Annotated[
    int, typer.Option("--batch", min=1, max=10_000, metavar="N", help="Messages taken at once.")
]
KeepOption = Annotated[
    str, typer.Option("--keep", metavar="DURATION", help="The least time that published messages are kept.")
]
SecretOption = Annotated[
    Path | None,
    typer.Option(
        "--secret-file", metavar="FILE", help="For https: secrets to sign with, one per line, newest first."
    ),
]
PrivateOption = Annotated[
    bool, typer.Option("--private", help="For https: allow targets on private networks.")
]
AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="HOST|NETWORK",
        help="For https: the only allowed targets; repeat it for several. *.example.com, 10.1.0.0/16.",
    ),
]
SkipOption = Annotated[bool, typer.Option("--skip", help="Let messages pass a dead one of their aggregate.")]
EmptyOption = Annotated[bool, typer.Option("--until-empty", help="End when no message is due.")]


def relay(  # noqa: PLR0913, PLR0917 - one for each option
    source: SourceOption = None,
    to: SinkOption = "stdout:",
    attempts_max: AttemptsOption = 10,
    backoff_max: BackoffOption = "5m",
    rows_max: BatchOption = 500,
    keep: KeepOption = "7d",
    secret_file: SecretOption = None,
    allow: AllowOption = None,
    metrics: MetricsOption = None,
    log_format: LogFormatOption = None,
    *,
    private: PrivateOption = False,
    skip: SkipOption = False,
    until_empty: EmptyOption = False,
) -> int:
    """Publish the messages of an outbox, each at least once and those of an aggregate in order.

    Start as many as you like: they share the work. On SIGTERM it waits for the broker's answers, then ends.
    """
    from semel.outbox.relay import Relay
    from semel.outbox.sinks import sink_for
    from semel.outbox.tables import rows_for

    settings = settings_for(store=source, log_format=log_format or Globals.log_format)
    webhook = to.startswith(("https:", "http:"))
    options = {"secrets": _secrets(secret_file), "private": private, "allow": allow or ()} if webhook else {}
    rows = rows_for(settings.store)
    existing(settings, "--from")
    with observing(settings, metrics, adopts=True) as seen:
        running = Relay(
            rows,
            sink_for(to, **options),
            retrying=_retrying(attempts_max, backoff_max, skip=skip),
            rows_max=rows_max,
            keep=parse_duration_us(keep) / 1e6,
            hooks=seen.hooks,
            **_gauges(seen.metrics),
        )
        return _relay(running, until_empty=until_empty)


def _relay(running: "Relay", *, until_empty: bool) -> int:
    """Run the relay until a signal stops it."""
    received = stop_on_signals(running.stop)
    say(redact(f"Relaying from {running.rows.name} to {running.sink.name}."))
    totals = running.run(until_empty=until_empty)
    say(
        f"Published {totals.published:,}; {plural(totals.refused, 'attempt')} failed, {_messages(totals.died)} given"
        f" up, {plural(totals.cleaned, 'old one')} removed."
    )
    return INTERRUPTED if signal.SIGINT in received else OK


def _gauges(hook: "PrometheusHook | None") -> dict[str, Any]:
    """Return the callbacks that keep the metrics of an outbox."""
    if hook is None:
        return {}
    return {
        "on_step": hook.note_published,
        "on_counts": lambda counts: hook.note_outbox(counts.pending, counts.oldest_age_s),
    }


def _retrying(attempts_max: int, backoff_max: str, *, skip: bool) -> Retrying:
    return Retrying(attempts_max=attempts_max, max_s=parse_duration_us(backoff_max) / 1e6, skip=skip)


def _secrets(file: Path | None) -> list[str]:
    if file is None:
        raise CommandExit("a webhook must be signed; give its secret with --secret-file", BAD_CONFIGURATION)
    return read_lines(file)
