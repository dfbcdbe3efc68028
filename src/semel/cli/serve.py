"""`semel serve`: the service over HTTP and WebSocket, until told to stop."""

import importlib.util
import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semel.cli.exits import BAD_CONFIGURATION, OK, Stop
from semel.cli.options import StoreOption, parse_duration_us, settings_for, text
from semel.cli.output import redacted, say

if TYPE_CHECKING:
    from semel.server.settings import ServeSettings

__all__ = ["serve"]

NEEDED = ("fastapi", "jinja2", "uvicorn", "websockets", "prometheus_client")
"""What the extra `server` installs beside the command line's own."""
PREFIX = "SEMEL_SERVE_"


def _option(name: str, metavar: str, about: str, **more: Any) -> Any:
    """An option that may also stand in the environment."""
    variable = PREFIX + name.replace("-", "_").upper()
    return typer.Option(f"--{name}", metavar=metavar, help=about, envvar=variable, **more)


Host = Annotated[str, _option("host", "ADDRESS", "Where to listen; beyond loopback, tokens are needed.")]
Port = Annotated[int, _option("port", "N", "0: any that is free.", min=0, max=65535)]
Auth = Annotated[str | None, _option("auth", "KIND", "tokens or none; none is for loopback only.")]
Cert = Annotated[Path | None, _option("tls-cert", "FILE", "The certificate, in PEM.")]
CertKey = Annotated[Path | None, _option("tls-key", "FILE", "Its key, in PEM.")]
Handler = Annotated[
    str, _option("handler", "MODULE:FUNCTION", "What is called with each event of /v1/events.")
]
Sink = Annotated[
    str, _option("sink", "URL", "Where each event of /v1/events is published, as of relay --to.")
]
EventsConsumer = Annotated[
    str, _option("events-consumer", "NAME", "Whose records the events are.", callback=text)
]
EventsKey = Annotated[
    str, _option("events-key", "PATH", "Where an event's id is in its JSON, if not in 'id'.", callback=text)
]
BodyMax = Annotated[int, _option("body-max", "BYTES", "The longest request.")]
ValueMax = Annotated[int, _option("value-max", "BYTES", "The largest value or event, up to 1 MiB.")]
BatchMax = Annotated[int, _option("batch-max", "N", "The most items, claims or events in a request.")]
LeaseMax = Annotated[str, _option("lease-max", "DURATION", "The longest lease that is granted.")]
Rate = Annotated[float, _option("rate", "N", "Requests per second of one token; 0: no bound.", min=0)]
Drain = Annotated[str, _option("drain", "DURATION", "How long requests under way may take after SIGTERM.")]
Unready = Annotated[
    str, _option("unready", "DURATION", "How long to serve on after SIGTERM while /readyz says no.")
]
Dashboard = Annotated[
    bool,
    typer.Option("--dashboard/--no-dashboard", help="Pages at /ui for people.", envvar=f"{PREFIX}DASHBOARD"),
]


def serve(  # noqa: PLR0913, PLR0917 - one for each option
    store: StoreOption = None,
    host: Host = "127.0.0.1",
    port: Port = 8787,
    auth: Auth = None,
    tls_cert: Cert = None,
    tls_key: CertKey = None,
    handler: Handler = "",
    sink: Sink = "",
    events_consumer: EventsConsumer = "events",
    events_key: EventsKey = "",
    body_max: BodyMax = 4 * 2**20,
    value_max: ValueMax = 256 * 2**10,
    batch_max: BatchMax = 1000,
    lease_max: LeaseMax = "15m",
    rate: Rate = 1000.0,
    drain: Drain = "30s",
    unready: Unready = "0s",
    *,
    dashboard: Dashboard = True,
) -> int:
    """Serve a store over HTTP and WebSocket to programs in any language.

    Any number of instances may serve one store. Each option may also stand in the environment, as SEMEL_SERVE_HOST.
    SIGTERM: finish what is under way, then end.
    """
    _be_installed()
    _know_the_environment()
    from semel.server.settings import Limits, ServeSettings

    if auth not in (None, "tokens", "none"):
        raise typer.BadParameter(f"{auth!r} is neither tokens nor none", param_hint="'--auth'")
    limits = Limits(
        body_bytes_max=body_max,
        value_bytes_max=value_max,
        batch_items_max=batch_max,
        lease_max_us=parse_duration_us(lease_max, "--lease-max"),
        rate_per_s=rate,
    )
    settings = ServeSettings(
        store=settings_for(store=store).store,
        host=host,
        port=port,
        auth=auth,  # type: ignore[arg-type]  # looked at above
        tls_cert=str(tls_cert or ""),
        tls_key=str(tls_key or ""),
        drain_s=_seconds(drain, "--drain"),
        unready_s=_seconds(unready, "--unready"),
        events_consumer=events_consumer,
        events_key=events_key,
        handler=handler,
        sink=sink,
        dashboard=dashboard,
        limits=limits,
    )
    return _run(settings)


def _run(settings: "ServeSettings") -> int:
    from semel.server.app import create_app
    from semel.server.serving import serve as listen_and_serve

    app = create_app(settings)
    service = app.state.service

    def listening(address: str) -> None:
        say(redacted(f"Serving {service.runtime.store.name} at {address} (endpoints: {address}/docs)"))
        if settings.dashboard:
            say(f"Dashboard: {address}/ui/")
        if service.needs_token:
            say("Callers need a token: semel token create NAME")
        else:
            say("Nobody needs a token: loopback only.")

    try:
        listen_and_serve(app, settings, listening)
    except SystemExit:
        raise service.failure or Stop("the service could not be started") from None
    return OK


def _seconds(duration: str, option: str) -> float:
    return 0.0 if duration in ("0", "0s") else parse_duration_us(duration, option) / 1e6


def _be_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Stop(
            f"the service needs {', '.join(missing)}; install the extra: pip install 'semel[server]'",
            BAD_CONFIGURATION,
        )


def _know_the_environment() -> None:
    """A misspelled variable must not be passed over in silence."""
    known = {PREFIX + name.upper() for name in inspect.signature(serve).parameters if name != "store"}
    for name in os.environ:
        if name.startswith(PREFIX) and name not in known:
            raise Stop(f"the environment variable {name} is no option of semel serve", BAD_CONFIGURATION)
