"""`semel serve`: the service over HTTP and WebSocket, until told to stop."""

import importlib.util
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semel.cli.help import App
from semel.cli.options import (
    JsonOption,
    StoreOption,
    TenantOption,
    YesOption,
    parse_duration_us,
    serve_options,
    settings_for,
    text,
)
from semel.cli.output import (
    BAD_CONFIGURATION,
    NOT_FOUND,
    OK,
    USAGE,
    CommandExit,
    confirm,
    print_json,
    print_rows,
    say,
)
from semel.cli.store_access import StoreAccess, opened
from semel.observe.formatting import duration_text, local_time, now_us, redacted
from semel.runtime.extras import install_command
from semel.server import tokens
from semel.server.tokens import Role, Token
from semel.windows import duration_us

__all__ = ["serve", "token"]

if TYPE_CHECKING:
    from semel.server.service import Service
    from semel.server.settings import ServeSettings


NEEDED = ("fastapi", "jinja2", "uvicorn", "websockets", "prometheus_client")
"""What the extra `server` installs beside the command line's own."""


def _option(name: str, metavar: str, about: str, default: object = None, **more: Any) -> Any:
    """An option that may also stand in the environment and in `semel.toml`, where its default is decided."""
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
Proxy = Annotated[
    str | None,
    _option(
        "proxy", "ADDRESS,...", "Proxies whose X-Forwarded-For and -Proto are believed; others' are not."
    ),
]
Cert = Annotated[str | None, _option("tls-cert", "FILE", "The certificate, in PEM.")]
CertKey = Annotated[str | None, _option("tls-key", "FILE", "Its key, in PEM.")]
Handler = Annotated[
    str | None, _option("handler", "MODULE:FUNCTION", "What is called with each event of /v1/events.")
]
Sink = Annotated[
    str | None, _option("sink", "URL", "Where each event of /v1/events is published, as of relay --to.")
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
    str | None, _option("events-consumer", "NAME", "Whose records the events are.", "events", callback=text)
]
EventsKey = Annotated[
    str | None, _option("events-key", "PATH", "Where an event's id is in its JSON.", "id", callback=text)
]
EventsLease = Annotated[
    str | None,
    _option("events-lease", "DURATION", "How soon events of an instance that died are taken over.", "30s"),
]
EventsTable = Annotated[
    str | None, _option("events-table", "NAME", "The table that they are written into.", "events")
]
BodyMax = Annotated[int | None, _option("body-max", "BYTES", "The longest request.", "4 MiB")]
ValueMax = Annotated[
    int | None, _option("value-max", "BYTES", "The largest value or event, up to 1 MiB.", "320 KiB")
]
BatchMax = Annotated[
    int | None, _option("batch-max", "N", "The most items, claims or events in a request.", 1000)
]
LeaseMax = Annotated[
    str | None, _option("lease-max", "DURATION", "The longest lease that is granted.", "15m")
]
Rate = Annotated[
    float | None, _option("rate", "N", "Requests per second of one token; 0: no bound.", 1000, min=0)
]
Drain = Annotated[
    str | None,
    _option("drain", "DURATION", "How long requests and handlers may take after SIGTERM.", "30s"),
]
Unready = Annotated[
    str | None,
    _option("unready", "DURATION", "How long to serve on after SIGTERM while /readyz says no.", "0s"),
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
    proxy: Proxy = None,
    tls_cert: Cert = None,
    tls_key: CertKey = None,
    handler: Handler = None,
    sink: Sink = None,
    persist: Persist = None,
    events_consumer: EventsConsumer = None,
    events_key: EventsKey = None,
    events_lease: EventsLease = None,
    events_table: EventsTable = None,
    body_max: BodyMax = None,
    value_max: ValueMax = None,
    batch_max: BatchMax = None,
    lease_max: LeaseMax = None,
    rate: Rate = None,
    drain: Drain = None,
    unready: Unready = None,
    *,
    dashboard: Dashboard = None,
) -> int:
    """Serve a store over HTTP and WebSocket to programs in any language.

    Any number of instances may serve one store. Each option may also stand in the environment, as SEMEL_SERVE_HOST,
    and in the table [serve] of semel.toml, as host. SIGTERM: finish what is under way, then end.
    """
    flags = {name: value for name, value in locals().items() if name != "store"}
    _be_installed()
    from semel.server.settings import Limits, ServeSettings

    said = serve_options(**flags)
    limits = Limits(
        body_bytes_max=said.body_max,
        value_bytes_max=said.value_max,
        batch_items_max=said.batch_max,
        lease_max_us=duration_us(said.lease_max),
        rate_per_s=said.rate,
    )
    settings = ServeSettings(
        store=settings_for(store=store).store,
        host=said.host,
        port=said.port,
        auth=said.auth,
        first_token=sys.stderr.isatty(),  # a secret is for a person, not for a log
        proxies=tuple(each.strip() for each in said.proxy.split(",") if each.strip()),
        tls_cert=said.tls_cert,
        tls_key=said.tls_key,
        drain_s=_seconds(said.drain),
        unready_s=_seconds(said.unready),
        events_consumer=said.events_consumer,
        events_key=said.events_key,
        events_lease=said.events_lease,
        events_table=said.events_table,
        handler=said.handler,
        sink=said.sink,
        persist=said.persist,
        dashboard=said.dashboard,
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
        _say_who_may(service, address)

    try:
        listen_and_serve(app, settings, listening)
    except SystemExit:
        raise service.failure or CommandExit("the service could not be started") from None
    return OK


def _say_who_may(service: "Service", address: str) -> None:
    if not service.needs_token:
        say("Nobody needs a token: --auth none, loopback only.")
        return
    if service.first_token:
        say("This store had no token yet. Here is one for an admin of all tenants; it is shown once:")
        say(service.first_token)
        say(f"Log in with it at {address}/ui/login, or send it: Authorization: Bearer TOKEN")
    else:
        say("Callers need a token: semel token create NAME")


def _seconds(duration: str) -> float:
    return 0.0 if duration == "0s" else duration_us(duration) / 1e6


def _be_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandExit(
            f"the service needs {', '.join(missing)}; install the extra: {install_command('server')}",
            BAD_CONFIGURATION,
        )


token: App = App()

TokenId = Annotated[str, typer.Argument(metavar="ID", help="As `semel token list` shows it.", callback=text)]
ExpiresOption = Annotated[
    int | None,
    typer.Option(
        "--expires",
        metavar="DURATION",
        parser=parse_duration_us,
        help="How long it is valid, such as 90d.",
        show_default="until revoked",
    ),
]
AllOption = Annotated[bool, typer.Option("--all-tenants", help="It may act for every tenant.")]


@token.command("create")
def create_token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Who gets it, for people.", callback=text)],
    role: Annotated[Role, typer.Option("--role", help="What it may do.")] = "write",
    store: StoreOption = None,
    tenant: TenantOption = None,
    expires: ExpiresOption = None,
    *,
    all_tenants: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a token for the service and print it, once: only its digest is kept.

    read: look records up. write: claim, complete and send events. admin: everything of its tenant. Without --tenant
    it reaches the records of no tenant.
    """
    settings = settings_for(store=store, tenant=tenant)
    if all_tenants and settings.tenant is not None:
        raise CommandExit("give --tenant or --all-tenants, not both", USAGE)
    with opened(settings, create=True) as reach:
        whose = None if all_tenants else settings.tenant or ""
        made, secret = reach.carry_out(tokens.create(name, whose, role, expires))
    _print_new(made, secret, as_json=as_json)


def _print_new(made: Token, secret: str, *, as_json: bool) -> None:
    if as_json:
        print_json({**_shown(made, {}), "token": secret})
        return
    until = f", until {local_time(made.expires_at, 'seconds')}" if made.expires_at else ""
    say(f"Token {made.id} for {made.name!r}, role {made.role}{until}. It is shown once:")
    print(secret)


@token.command("list")
def list_tokens(store: StoreOption = None, *, as_json: JsonOption = False) -> None:
    """List the tokens, never their secrets."""
    with opened(settings_for(store=store)) as reach:
        found: list[Token] = reach.carry_out(tokens.tokens())
        used: dict[str, int] = reach.carry_out(tokens.last_uses())
    if as_json:
        print_json({"tokens": [_shown(each, used) for each in found]})
        return
    if not found:
        say("There is no token yet: semel token create NAME")
        return
    headers = ("ID", "NAME", "ROLE", "TENANT", "CREATED", "EXPIRES", "LAST USED")
    rows = [
        (
            each.id,
            each.name,
            each.role,
            _whose(each),
            local_time(each.created_at, "seconds"),
            _expiry(each),
            local_time(used[each.id], "seconds") if each.id in used else "-",
        )
        for each in found
    ]
    print_rows(headers, rows)


@token.command("rotate")
def rotate_token(
    token_id: TokenId,
    store: StoreOption = None,
    grace: Annotated[
        int,
        typer.Option(
            "--grace",
            metavar="DURATION",
            parser=parse_duration_us,
            help="How long the old one stays valid.",
            show_default="24h",
        ),
    ] = tokens.GRACE_US,
    expires: ExpiresOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Make a new token in place of one, and print it, once: both are valid until the grace period ends.

    It has the same name, role and tenant, and lives as long as the old one was to live unless --expires says otherwise.
    """
    with opened(settings_for(store=store)) as reach:
        found = _found(reach, token_id)
        made, secret = reach.carry_out(tokens.rotate(found, expires, grace))
    _print_new(made, secret, as_json=as_json)
    if not as_json:
        say(f"The old one, {token_id}, is valid for another {duration_text(grace)}.")


@token.command("revoke")
def revoke_token(
    token_id: TokenId,
    store: StoreOption = None,
    *,
    yes: YesOption = False,
) -> None:
    """Make a token worthless, everywhere within seconds."""
    with opened(settings_for(store=store)) as reach:
        found = _found(reach, token_id)
        confirm(f"Revoke the token of {found.name!r}, role {found.role}?", yes=yes)
        reach.carry_out(tokens.revoke(token_id))
    say(f"Revoked the token {token_id} of {found.name!r}; servers refuse it within seconds.")


def _found(reach: StoreAccess, token_id: str) -> Token:
    found: Token | None = reach.carry_out(tokens.lookup(token_id))
    if found is None:
        raise CommandExit(f"there is no token {token_id!r}: semel token list", NOT_FOUND)
    return found


def _expiry(each: Token) -> str:
    if not each.expires_at:
        return "never"
    return "over" if each.is_over(now_us()) else local_time(each.expires_at, "seconds")


def _shown(each: Token, used: dict[str, int]) -> dict[str, Any]:
    return {
        "id": each.id,
        "name": each.name,
        "role": each.role,
        "tenant": each.tenant,
        "all_tenants": each.tenant is None,
        "created_at": local_time(each.created_at),
        "expires_at": local_time(each.expires_at) if each.expires_at else None,
        "last_used_at": local_time(used[each.id]) if each.id in used else None,
    }


def _whose(each: Token) -> str:
    return "(all)" if each.tenant is None else each.tenant or "(none)"
