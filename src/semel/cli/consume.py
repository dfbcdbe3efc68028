"""`semel consume`: run a handler for each message of a broker, once for each key."""

import asyncio
import logging
import signal
from collections.abc import Sequence
from contextlib import suppress
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
    ModeOption,
    RetryDelayOption,
    SourcesOption,
    StoreOption,
    TenantOption,
    WindowOption,
    client_options,
    handler_policy,
    load_handler,
    parse_duration_us,
    settings_for,
    sources_of,
    text,
)
from semel.cli.output import OK, TRY_LATER, USAGE, CommandExit, say
from semel.client import deliver
from semel.client.client_async import AsyncSemel
from semel.errors import SemelError, SourceUnavailable, StoreError
from semel.observe.formatting import plural, redact
from semel.observe.limited_log import OutageLog
from semel.observe.probes import SourceFacts, window_warnings

if TYPE_CHECKING:
    from semel.brokers import Runner, RunnerLimits
    from semel.brokers.kafka.transactions import KafkaTransaction

__all__ = ["consume", "quiet_clients", "warn_of_short_windows"]

_log = logging.getLogger("semel.runner")

CLIENTS = ("aiormq", "aio_pika", "nats", "botocore", "aiobotocore")
"""Loggers of broker clients: they log each failed attempt as an error with a traceback."""


def quiet_clients() -> None:
    """Silence the broker clients' own logs, except with `--log-level debug`."""
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        for name in CLIENTS:
            logging.getLogger(name).setLevel(logging.CRITICAL)


ASK_S = 10.0
REFUSED_S = 5.0
"""How long to wait before a refused probe is reported: a runner that is refused as well ends with the reason."""
APPROXIMATE = ("sqs:",)
"""Sources whose count of messages in hand lags behind: it may still include what was just acknowledged."""


class ManagementOutages(dict[str, OutageLog]):
    """The outages of the brokers' management APIs, by the URL of the source: one log for all consumers."""

    def __missing__(self, url: str) -> OutageLog:
        """Add the log of another source."""
        from semel.brokers import source_for

        name = f"the management API of {source_for(url).name}"
        then = "asking again; until it answers, nobody knows for how long the broker may deliver again"
        self[url] = OutageLog(_log, name, event="management_outage", then=then)
        return self[url]


async def warn_of_short_windows(
    once: AsyncSemel, urls: Sequence[str], outages: ManagementOutages | None = None
) -> None:
    """Warn if a broker redelivers for longer than the window, or if its management API cannot tell.

    The runner reports a broker that does not answer.
    """
    if once.mode == "observe" or once.policy.inbox_table is not None:  # rows of such a table have no window
        return
    with suppress(StoreError):  # then the client's own window counts
        await deliver.refresh_windows(once)
    window_us = deliver.known_window_us(once)
    outages = ManagementOutages() if outages is None else outages
    await asyncio.gather(*(_warn_of_source(url, window_us, once.consumer, outages[url]) for url in urls))


async def _warn_of_source(url: str, window_us: int, consumer: str, outage: OutageLog) -> None:
    """Warn as soon as the broker has answered; a probe that it refuses leaves the horizon unknown."""
    from semel.brokers import source_for
    from semel.brokers.outages import outage_pause_s
    from semel.brokers.probes import ManagementUnavailable, look_at

    facts, reason, tries = None, "", 0
    while facts is None:
        try:
            facts = await asyncio.wait_for(look_at(url), ASK_S)
        except (SourceUnavailable, TimeoutError) as error:
            if isinstance(error, ManagementUnavailable):
                outage.report(error)
            await asyncio.sleep(outage_pause_s(tries))
            tries += 1
        except SemelError as error:
            await asyncio.sleep(REFUSED_S)
            facts, reason = SourceFacts(name=source_for(url).name), f" ({error})"
    outage.end()
    for line in window_warnings(facts, window_us, consumer):
        say(redact(f"warning: {line}{reason}"))


async def _count_left(url: str) -> tuple[int, int]:
    """Return how many messages consumers hold that live or died, and how many wait for their next attempt.

    0 for what the broker cannot say. Raises `SourceUnavailable` if it does not answer.
    """
    from semel.brokers.probes import look_at

    if url.startswith(APPROXIMATE):
        return 0, 0
    try:
        facts = await asyncio.wait_for(look_at(url), ASK_S)
    except TimeoutError as error:
        raise SourceUnavailable(f"no answer within {ASK_S:.0f} s") from error
    return facts.in_hand or 0, facts.delayed


OutputOption = Annotated[
    str | None,
    typer.Option(
        "--output",
        metavar="TOPIC",
        callback=text,
        help="Mode transaction: the topic for the handler's results.",
    ),
]
MarksOption = Annotated[
    str | None,
    typer.Option(
        "--marks",
        metavar="TOPIC",
        callback=text,
        help="Mode transaction: a compacted topic in which committed keys are kept.",
    ),
]
HandlerArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:NAME",
        callback=text,
        help="A handler, or a list of semel.brokers.Route. In mode inbox the first argument is the open transaction.",
    ),
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--key",
        "-k",
        metavar="PATH",
        callback=text,
        help="Where the key is in the body; else the headers and the broker's own field are searched.",
    ),
]
ConcurrencyOption = Annotated[
    int, typer.Option("--concurrency", min=1, help="How many handlers run at once.")
]
BatchOption = Annotated[
    int,
    typer.Option("--batch", min=1, help="How many deliveries are claimed together, or share a transaction."),
]
AttemptsOption = Annotated[
    int, typer.Option("--max-attempts", min=1, help="After this many attempts the message is dead-lettered.")
]
OrderOption = Annotated[bool, typer.Option("--order", help="Keep the order within a partition or group.")]
RefuseOption = Annotated[
    bool,
    typer.Option("--refuse-no-key", help="Stop at a message without a key, instead of dead-lettering it."),
]
UntilIdleOption = Annotated[
    bool,
    typer.Option(
        "--until-idle",
        help="End when nothing is left to receive; exit code 75: some failed, or another consumer holds some.",
    ),
]


def consume(  # noqa: PLR0913, PLR0917 - one parameter for each option
    handler: HandlerArgument,
    source: SourcesOption = None,
    store: StoreOption = None,
    consumer: ConsumerOption = None,
    tenant: TenantOption = None,
    window: WindowOption = None,
    lease: LeaseOption = None,
    mode: ModeOption = None,
    key: KeyOption = None,
    concurrency: ConcurrencyOption = 10,
    batch: BatchOption = 200,
    max_attempts: AttemptsOption = 10,
    retry_delay: RetryDelayOption = "1s",
    errors: ErrorsOption = "keep",
    drain: DrainOption = "30s",
    order: OrderOption = False,  # noqa: FBT002 - a switch
    refuse_no_key: RefuseOption = False,  # noqa: FBT002 - a switch
    output: OutputOption = None,
    marks: MarksOption = None,
    until_idle: UntilIdleOption = False,  # noqa: FBT002 - a switch
    metrics: MetricsOption = None,
    log_format: LogFormatOption = None,
) -> int:
    """Run a handler for each message that a broker delivers, once for each key.

    A message is acknowledged after its effect is recorded. On SIGTERM or Ctrl-C running handlers finish, and
    the other messages go back to the broker.
    """
    from semel.brokers import RunnerLimits

    target = load_handler(handler)
    settings = settings_for(
        store=store,
        consumer=consumer,
        tenant=tenant,
        window=window,
        lease=lease,
        mode=mode,
        log_format=log_format or Globals.log_format,
    )
    sources = sources_of(source, settings)
    if not sources:
        raise CommandExit(
            "name the source with --from, such as redis://localhost/0?stream=orders&group=billing", USAGE
        )
    policy = handler_policy(max_attempts, retry_delay, errors)
    pace = RunnerLimits(
        batch=batch,
        concurrency=concurrency,
        order=order,
        drain_s=parse_duration_us(drain) / 1e6,
        no_key="refuse" if refuse_no_key else "dead_letter",
    )
    where = None if key is None else semel.keys.body(key)
    with observing(settings, metrics, adopts=settings.mode == "inbox") as seen:
        seen.name_sources(sources)
        once = semel.aopen(
            settings.store,
            mode=settings.mode,
            policy=policy,
            hooks=seen.hooks,
            **client_options(settings, "consume"),
        )
        if once.mode == "transaction":
            transactions = _transactions(target, sources, once, pace, where, output or "", marks or "")
            return asyncio.run(_consume(once, transactions, sources, until_idle=until_idle))
        if output or marks:
            raise CommandExit("--output and --marks are for --mode transaction", USAGE)
        runners = _runners(target, sources, once, pace, where)
        return asyncio.run(_consume(once, runners, sources, until_idle=until_idle))


def _runners(target: Any, urls: Sequence[str], once: Any, pace: "RunnerLimits", key: Any) -> "list[Runner]":
    from semel.brokers import Route, Runner, source_for

    routes = [Route(target, once=once, key=key)] if callable(target) else list(target)
    return [Runner(source_for(url), routes, pace=pace) for url in urls]


def _transactions(
    handler: Any, urls: Sequence[str], once: Any, pace: "RunnerLimits", key: Any, output: str, marks: str
) -> "list[KafkaTransaction]":
    """Build consumers that write their results in the transaction that moves their offsets."""
    from semel.brokers.kafka.transactions import KafkaTransaction

    if not callable(handler) or not all(url.startswith("kafka:") for url in urls):
        raise CommandExit("--mode transaction takes one handler and --from kafka://...", USAGE)
    return [
        KafkaTransaction(url, handler, once=once, output=output, marks=marks, key=key, pace=pace)
        for url in urls
    ]


def _clients(runners: "Sequence[Runner | KafkaTransaction]", once: AsyncSemel) -> list[AsyncSemel]:
    """Return one client for each consumer: those of the routes, else `once`."""
    clients = [route.once for runner in runners for route in getattr(runner, "routes", ())] or [once]
    return list({(each.tenant, each.consumer): each for each in clients}.values())


async def _consume(
    once: AsyncSemel,
    runners: "Sequence[Runner | KafkaTransaction]",
    urls: Sequence[str],
    *,
    until_idle: bool,
) -> int:

    quiet_clients()
    _stop_on_signals(asyncio.get_running_loop(), runners)
    async with once:
        for runner in runners:
            whose = "; ".join(f"{each.consumer!r}, mode {each.mode}" for each in _clients([runner], once))
            say(f"consuming {runner.source.name} as {whose}")
        if until_idle:
            for runner in runners:
                runner.stop_when_idle()
        outages = ManagementOutages()
        warnings = [
            asyncio.create_task(warn_of_short_windows(each, urls, outages))
            for each in _clients(runners, once)
        ]
        try:
            await asyncio.gather(*(runner.run() for runner in runners))
        finally:
            for warning in warnings:
                warning.cancel()
    for runner in runners:
        counts = runner.counts
        say(
            f"{runner.source.name}: {counts.received:,} received, {counts.acked:,} acknowledged,"
            f" {plural(counts.duplicates, 'duplicate')}, {plural(counts.dead_lettered, 'dead letter')}"
        )
    return await _say_what_is_left(runners, urls) if until_idle else OK


async def _say_what_is_left(runners: "Sequence[Runner | KafkaTransaction]", urls: Sequence[str]) -> int:
    """Return the exit code of `--until-idle`: 0 only if no message is left that will be delivered again."""
    failed = others = waiting = 0
    unknown = False
    for runner, url in zip(runners, urls, strict=True):
        held, delayed = 0, 0
        try:
            held, delayed = await _count_left(url)
        except SemelError as error:
            say(redact(f"{runner.source.name}: how many messages other consumers hold is not known: {error}"))
            unknown |= isinstance(error, SourceUnavailable)
        failed += runner.left
        waiting += max(0, delayed - runner.left)
        others += max(0, held - runner.left)
    if failed:
        say(
            f"{plural(failed, 'message failed and is', 'messages failed and are')} left with the broker,"
            " to be delivered again"
        )
    if others:
        say(
            f"{plural(others, 'message is', 'messages are')} held by another consumer, or by one that died:"
            " the broker delivers them again unless that one acknowledges them"
        )
    if waiting:
        say(
            f"{plural(waiting, 'message of an earlier run waits', 'messages of earlier runs wait')} for another attempt"
        )
    return TRY_LATER if failed or others or waiting or unknown else OK


def _stop_on_signals(loop: Any, runners: "Sequence[Runner | KafkaTransaction]") -> None:
    def stop() -> None:
        for runner in runners:
            runner.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
