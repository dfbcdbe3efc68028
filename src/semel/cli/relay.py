"""`semel relay`: publish what lies in an outbox, until told to stop."""

import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from semel.cli.exits import BAD_CONFIGURATION, INTERRUPTED, OK, USAGE, CommandExit
from semel.cli.options import parse_duration_us, settings_for, text
from semel.cli.output import redacted, say
from semel.cli.reach import existing
from semel.core.relaying import Retrying

__all__ = ["relay"]

SECRETS_CHARS_MAX = 8 * 1024


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
    int, typer.Option("--attempts", min=1, metavar="N", help="Give a message up after so many.")
]
BackoffOption = Annotated[
    str, typer.Option("--backoff-max", metavar="DURATION", help="The longest wait between attempts.")
]
BatchOption = Annotated[
    int, typer.Option("--batch", min=1, max=10_000, metavar="N", help="Messages taken at once.")
]
KeepOption = Annotated[
    str, typer.Option("--keep", metavar="DURATION", help="How long published messages stay, at least.")
]
SecretOption = Annotated[
    Path | None,
    typer.Option(
        "--secret-file", metavar="FILE", help="For https: secrets to sign with, one per line, newest first."
    ),
]
PrivateOption = Annotated[
    bool, typer.Option("--private", help="For https: let the target be on a private network.")
]
AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="HOST|NETWORK",
        help="For https: the only targets there may be; again for each. *.example.com, 10.1.0.0/16.",
    ),
]
MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="[HOST:]PORT",
        callback=text,
        help="Answer Prometheus there, at /metrics; without a host, on this computer only.",
    ),
]
SkipOption = Annotated[bool, typer.Option("--skip", help="Let messages pass a dead one of their aggregate.")]
EmptyOption = Annotated[bool, typer.Option("--until-empty", help="End when nothing is left to be tried now.")]


def relay(  # noqa: PLR0913 - one for each option
    source: SourceOption = None,
    to: SinkOption = "stdout:",
    attempts_max: AttemptsOption = 10,
    backoff_max: BackoffOption = "5m",
    rows_max: BatchOption = 500,
    keep: KeepOption = "7d",
    secret_file: SecretOption = None,
    allow: AllowOption = None,
    metrics: MetricsOption = None,
    *,
    private: PrivateOption = False,
    skip: SkipOption = False,
    until_empty: EmptyOption = False,
) -> int:
    """Publish the messages of an outbox, each at least once and those of an aggregate in order.

    Start as many as you like: they share the work. SIGTERM: finish what the broker was given, then end.
    """
    from semel.outbox.relay import Relay
    from semel.outbox.rows import rows_for
    from semel.outbox.sinks import sink_for

    settings = settings_for(store=source)
    webhook = to.startswith(("https:", "http:"))
    options = {"secrets": _secrets(secret_file), "private": private, "allow": allow or ()} if webhook else {}
    rows = rows_for(settings.store)
    existing(settings, "--from")
    running = Relay(
        rows,
        sink_for(to, **options),
        retrying=_retrying(attempts_max, backoff_max, skip=skip),
        rows_max=rows_max,
        keep=parse_duration_us(keep) / 1e6,
        **_measured(metrics),
    )
    told: list[int] = []

    def stop(number: int, _frame: object) -> None:
        told.append(number)
        running.stop()
        signal.signal(number, signal.SIG_DFL)  # whoever asks twice means it

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)
    say(redacted(f"Relaying from {running.rows.name} to {running.sink.name}."))
    totals = running.run(until_empty=until_empty)
    say(
        f"Published {totals.published:,}; {totals.refused:,} attempts failed, {totals.died:,} messages given up,"
        f" {totals.cleaned:,} old ones removed."
    )
    return INTERRUPTED if signal.SIGINT in told else OK


def _measured(metrics: str | None) -> dict[str, Any]:
    """Serve metrics, and say whom the relay tells."""
    if metrics is None:
        return {}
    host, _, port = metrics.rpartition(":")
    if not port.isdecimal() or int(port) >= 2**16:
        raise CommandExit(f"{metrics!r} is no address; write --metrics 9000, or --metrics 0.0.0.0:9000", USAGE)
    try:
        from semel.observe.prometheus import PrometheusHook
    except ImportError as error:
        raise CommandExit(str(error), BAD_CONFIGURATION) from None
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    hook = PrometheusHook(registry)
    try:
        served, _thread = start_http_server(int(port), host.strip("[]") or "127.0.0.1", registry)
    except OSError as error:
        raise CommandExit(f"--metrics {metrics}: {error}", BAD_CONFIGURATION) from None
    say(f"Metrics at port {served.server_port}.")
    return {
        "on_step": hook.note_published,
        "on_counts": lambda counts: hook.note_outbox(counts.pending, counts.oldest_age_s),
    }


def _retrying(attempts_max: int, backoff_max: str, *, skip: bool) -> Retrying:
    return Retrying(attempts_max=attempts_max, max_s=parse_duration_us(backoff_max) / 1e6, skip=skip)


def _secrets(file: Path | None) -> list[str]:
    if file is None:
        raise CommandExit("a webhook is signed: name its secret with --secret-file", BAD_CONFIGURATION)
    try:
        with file.open(encoding="utf-8") as opened:
            lines = opened.read(SECRETS_CHARS_MAX).splitlines()
    except (OSError, UnicodeError) as error:
        raise CommandExit(f"{file} cannot be read: {error}", BAD_CONFIGURATION) from None
    return [line.strip() for line in lines if line.strip()]
