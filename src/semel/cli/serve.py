"""`semel serve`: the service over HTTP and WebSocket."""

import importlib.util
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semel.cli.options import (
    Globals,
    LogFormatOption,
    StoreOption,
    serve_options,
    settings_for,
    size_text,
    text,
)
from semel.cli.output import BAD_CONFIGURATION, OK, CommandExit, say
from semel.observe.formatting import duration_text, redact
from semel.runtime.extras import install_command
from semel.server.settings import Limits, ServeSettings
from semel.windows import duration_us, exact_text, window_us

__all__ = ["serve"]

if TYPE_CHECKING:
    from semel.cli.settings import ServeOptions
    from semel.server.service import Service


NEEDED = ("fastapi", "jinja2", "uvicorn", "websockets", "prometheus_client")
"""Modules that the extra `server` installs in addition to those of `cli`."""
DEFAULT = Limits()


def _option(name: str, metavar: str, about: str, default: object = None, **more: Any) -> Any:
    """An option that can also be set in the environment and in `semel.toml`; `ServeOptions` has the default."""
    shown = False if default is None else str(default)
    return typer.Option(f"--{name}", metavar=metavar, help=about, show_default=shown, **more)


Host = Annotated[
    str | None,
    _option("host", "ADDRESS", "Where to listen; beyond loopback, tokens are needed.", "127.0.0.1"),
]
Port = Annotated[int | None, _option("port", "N", "0: any that is free.", 8787, min=0, max=65535)]
Auth = Annotated[
    str | None,
    _option(
        "auth", "KIND", "tokens or none; none: for loopback, on a store that never had a token.", "tokens"
    ),
]
Audit = Annotated[
    str | None,
    _option(
        "audit",
        "KIND",
        "operators or all; all: also an entry for each request that writes, 90 days, one round trip more.",
        "operators",
    ),
]
Proxy = Annotated[
    str | None,
    _option(
        "proxy", "ADDRESS,...", "Proxies whose X-Forwarded-For and -Proto are believed; others' are not."
    ),
]
Cert = Annotated[str | None, _option("tls-cert", "FILE", "The certificate, in PEM.")]
CertKey = Annotated[str | None, _option("tls-key", "FILE", "Its key, in PEM.")]
Handler = Annotated[
    str | None, _option("handler", "MODULE:FUNCTION", "The function to call with each event of /v1/events.")
]
Errors = Annotated[
    str | None,
    _option(
        "errors",
        "keep|none|MODULE:FUNCTION",
        "What records keep of the errors of events: all, none, or what this function leaves.",
        "keep",
    ),
]
Sink = Annotated[
    str | None, _option("sink", "URL", "The sink for each event of /v1/events, as for relay --to.")
]
Persist = Annotated[
    str | None,
    _option(
        "persist",
        "URL",
        "Write each event into the table `events` of postgresql://... or sqlite:///..., after handler or sink.",
        "with neither, the store's own database",
    ),
]
EventsConsumer = Annotated[
    str | None, _option("events-consumer", "NAME", "The consumer of the events.", "events", callback=text)
]
EventsKey = Annotated[
    str | None, _option("events-key", "PATH", "The path of the id in an event's JSON.", "id", callback=text)
]
EventsLease = Annotated[
    str | None,
    _option("events-lease", "DURATION", "How often to take over the events of instances that died.", "30s"),
]
EventsTable = Annotated[str | None, _option("events-table", "NAME", "The table of --persist.", "events")]
EventsColumns = Annotated[
    str | None,
    typer.Option(
        "--events-columns",
        "--columns",
        metavar="NAMES",
        help="Column names for event_id, type, payload and tenant, such as type=event_type,tenant= (no tenants).",
        show_default=False,
    ),
]
BodyMax = Annotated[
    int | None, _option("body-max", "BYTES", "The longest request.", size_text(DEFAULT.body_bytes_max))
]
ValueMax = Annotated[
    int | None,
    _option(
        "value-max",
        "BYTES",
        "The largest value or event, up to 1 MiB.",
        size_text(DEFAULT.value_bytes_max),
    ),
]
AnswerMax = Annotated[
    int | None,
    _option(
        "answer-max",
        "BYTES",
        "The most bytes of stored values in an answer.",
        size_text(DEFAULT.answer_bytes_max),
    ),
]
BatchMax = Annotated[
    int | None,
    _option("batch-max", "N", "The most items, claims or events in a request.", DEFAULT.batch_items_max),
]
LeaseMax = Annotated[
    str | None,
    _option(
        "lease-max", "DURATION", "The longest lease that is granted.", duration_text(DEFAULT.lease_max_us)
    ),
]
WindowMax = Annotated[
    str | None,
    _option(
        "window-max",
        "WINDOW",
        "The longest window that callers may ask for.",
        exact_text(DEFAULT.window_max_us),
    ),
]
Rate = Annotated[
    float | None,
    _option("rate", "N", "Requests per second of one token; 0: no bound.", f"{DEFAULT.rate_per_s:g}", min=0),
]
ItemsRate = Annotated[
    float | None,
    _option(
        "items-rate",
        "N",
        "Items, claims and events per second of one tenant; 0: no bound.",
        f"{DEFAULT.items_per_s:.0f}",
        min=0,
    ),
]
BytesRate = Annotated[
    float | None,
    _option(
        "bytes-rate",
        "BYTES",
        "Sent and received per second by one tenant; 0: no bound.",
        size_text(round(DEFAULT.bytes_per_s)),
        min=0,
    ),
]
StoreShare = Annotated[
    float | None,
    _option(
        "store-share",
        "SECONDS",
        "The store's time per second for one tenant's requests; 0: no bound.",
        f"{DEFAULT.store_share:g}",
        min=0,
    ),
]
ScanShare = Annotated[
    float | None,
    _option(
        "scan-share",
        "SECONDS",
        "The same for its counts and scans alone; 0: no bound.",
        f"{DEFAULT.scan_share:g}",
        min=0,
    ),
]
ConsumersMax = Annotated[
    int | None,
    _option(
        "consumers-max", "N", "The most consumers, and stored windows, of a tenant.", DEFAULT.consumers_max
    ),
]
StepsMax = Annotated[int | None, _option("steps-max", "N", "The most steps of a record.", DEFAULT.steps_max)]
RenewalsMax = Annotated[
    int | None,
    _option("renewals-max", "N", "The most renewals of a claim within its lease.", DEFAULT.renewals_max),
]
ClaimsMax = Annotated[
    int | None,
    _option("claims-max", "N", "The most claims that one token holds at a time.", DEFAULT.live_claims_max),
]
ConnectionsMax = Annotated[
    int | None,
    _option("connections-max", "N", "The most connections at a time.", DEFAULT.connections_max),
]
HeadWait = Annotated[
    str | None,
    _option("head-wait", "DURATION", "The time for a request's head to arrive.", f"{DEFAULT.head_wait_s:g}s"),
]
BodyWait = Annotated[
    str | None,
    _option("body-wait", "DURATION", "The time for a request's body to arrive.", f"{DEFAULT.body_wait_s:g}s"),
]
WriteWait = Annotated[
    str | None,
    _option(
        "write-wait", "DURATION", "The time for a client to read its answer.", f"{DEFAULT.write_wait_s:g}s"
    ),
]
Drain = Annotated[
    str | None,
    _option("drain", "DURATION", "How long requests and handlers may take after SIGTERM.", "30s"),
]
Unready = Annotated[
    str | None,
    _option("unready", "DURATION", "How long to serve on after SIGTERM while /readyz says no.", "0s"),
]
DeadLetters = Annotated[
    list[str] | None,
    _option(
        "dead-letters",
        "URL",
        "A source, as for consume --from, whose dead letters the dashboard lists and replays; may be repeated.",
    ),
]
Dashboard = Annotated[
    bool | None,
    typer.Option("--dashboard/--no-dashboard", help="Pages at /ui for people.", show_default="dashboard"),
]


def serve(  # noqa: PLR0913, PLR0917 - one for each option
    store: StoreOption = None,
    host: Host = None,
    port: Port = None,
    auth: Auth = None,
    audit: Audit = None,
    proxy: Proxy = None,
    tls_cert: Cert = None,
    tls_key: CertKey = None,
    handler: Handler = None,
    errors: Errors = None,
    sink: Sink = None,
    persist: Persist = None,
    events_consumer: EventsConsumer = None,
    events_key: EventsKey = None,
    events_lease: EventsLease = None,
    events_table: EventsTable = None,
    events_columns: EventsColumns = None,
    body_max: BodyMax = None,
    value_max: ValueMax = None,
    answer_max: AnswerMax = None,
    batch_max: BatchMax = None,
    lease_max: LeaseMax = None,
    window_max: WindowMax = None,
    rate: Rate = None,
    items_rate: ItemsRate = None,
    bytes_rate: BytesRate = None,
    store_share: StoreShare = None,
    scan_share: ScanShare = None,
    consumers_max: ConsumersMax = None,
    steps_max: StepsMax = None,
    renewals_max: RenewalsMax = None,
    claims_max: ClaimsMax = None,
    connections_max: ConnectionsMax = None,
    head_wait: HeadWait = None,
    body_wait: BodyWait = None,
    write_wait: WriteWait = None,
    drain: Drain = None,
    unready: Unready = None,
    dead_letters: DeadLetters = None,
    log_format: LogFormatOption = None,
    *,
    dashboard: Dashboard = None,
) -> int:
    """Serve a store over HTTP and WebSocket to programs in any language.

    Any number of instances may serve one store. Each option can also be set in the environment, as SEMEL_SERVE_HOST,
    and in the table [serve] of semel.toml, as host. On SIGTERM running requests finish, then it ends.
    """
    flags = {name: value for name, value in locals().items() if name not in ("store", "log_format")}
    said = serve_options(**flags | {"dead_letters": dead_letters or None})
    place = settings_for(store=store, log_format=log_format or Globals.log_format).store
    return _run(_settings(said, place))


def _settings(said: "ServeOptions", store: str) -> ServeSettings:
    urls = said.dead_letters.split() if isinstance(said.dead_letters, str) else said.dead_letters
    return ServeSettings(
        store=store,
        host=said.host,
        port=said.port,
        auth=said.auth,
        audit=said.audit,
        first_token=sys.stderr.isatty(),  # print a secret to people, never to a log
        proxies=tuple(each.strip() for each in said.proxy.split(",") if each.strip()),
        tls_cert=said.tls_cert,
        tls_key=said.tls_key,
        drain_s=_seconds(said.drain),
        unready_s=_seconds(said.unready),
        events_consumer=said.events_consumer,
        events_key=said.events_key,
        events_lease=said.events_lease,
        events_table=said.events_table,
        events_columns=said.events_columns,
        errors=said.errors,
        handler=said.handler,
        sink=said.sink,
        persist=said.persist,
        dead_letters=tuple(urls),
        dashboard=said.dashboard,
        limits=_limits(said),
    )


def _limits(said: "ServeOptions") -> Limits:
    return Limits(
        body_bytes_max=said.body_max,
        value_bytes_max=said.value_max,
        answer_bytes_max=said.answer_max,
        batch_items_max=said.batch_max,
        lease_max_us=duration_us(said.lease_max),
        window_max_us=window_us(said.window_max),
        rate_per_s=said.rate,
        items_per_s=said.items_rate,
        bytes_per_s=said.bytes_rate,
        store_share=said.store_share,
        scan_share=said.scan_share,
        consumers_max=said.consumers_max,
        steps_max=said.steps_max,
        renewals_max=said.renewals_max,
        live_claims_max=said.claims_max,
        connections_max=said.connections_max,
        head_wait_s=_seconds(said.head_wait),
        body_wait_s=_seconds(said.body_wait),
        write_wait_s=_seconds(said.write_wait),
    )


def _run(settings: ServeSettings) -> int:
    _be_installed()
    from semel.server.app import create_app
    from semel.server.serving import serve as listen_and_serve

    app = create_app(settings)
    service = app.state.service

    def listening(address: str) -> None:
        say(redact(f"Serving {service.runtime.store.name} at {address} (endpoints: {address}/docs)"))
        if settings.dashboard:
            say(f"Dashboard: {address}/ui/")
        _say_who_may(service, address)
        _warn_of_loss(service)

    try:
        listen_and_serve(app, settings, listening)
    except SystemExit:
        raise service.failure or CommandExit("the service could not be started") from None
    return OK


def _say_who_may(service: "Service", address: str) -> None:
    if not service.needs_token:
        say("No token is needed: --auth none, loopback only.")
        return
    if service.first_token:
        say("This store had no token yet. Here is one for an admin of all tenants; it is shown once:")
        say(service.first_token)
        say(f"Log in with it at {address}/ui/login, or send it: Authorization: Bearer TOKEN")
    else:
        say("Callers need a token: semel token create NAME")


def _warn_of_loss(service: "Service") -> None:
    """Warn if the store may lose records: callers rely on claims that a restart of the store forgets."""
    from semel.observe.explain import of_store

    for weakness in of_store(service.runtime.store):
        if weakness.breaks:
            fix = f" Change: {weakness.fix}." if weakness.fix else ""
            say(redact(f"warning: {weakness.what}{fix}"))


def _seconds(duration: str) -> float:
    return 0.0 if duration == "0s" else duration_us(duration) / 1e6


def _be_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandExit(
            f"the service needs {', '.join(missing)}; install the extra: {install_command('server')}",
            BAD_CONFIGURATION,
        )
