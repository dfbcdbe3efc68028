"""The commands of `semel`, and the options before the command."""

from pathlib import Path
from typing import Annotated, Any

import typer

from semel.cli.advise import advise
from semel.cli.audit.command import audit
from semel.cli.bench.command import bench
from semel.cli.chaos import chaos
from semel.cli.consume import consume
from semel.cli.consumers import consumer, window
from semel.cli.dedup import dedup
from semel.cli.demo.command import demo
from semel.cli.dlq import dlq
from semel.cli.doctor import doctor
from semel.cli.explain import explain
from semel.cli.filter import filter_lines
from semel.cli.help import App, HelpGroup
from semel.cli.imports.command import import_keys
from semel.cli.listen import listen
from semel.cli.maintenance import migrate, purge, stats
from semel.cli.move import move
from semel.cli.once import once
from semel.cli.options import (
    ConsumerOption,
    Globals,
    JsonOption,
    LeaseOption,
    LogFormatOption,
    ModeOption,
    StoreOption,
    TenantOption,
    WindowOption,
    serve_options,
    settings_for,
)
from semel.cli.outbox import outbox, relay
from semel.cli.output import print_json, print_rows, quiet_stdout
from semel.cli.records import forget, history, list_records, resolve, show
from semel.cli.serve import serve
from semel.cli.tokens import token
from semel.observe.formatting import redact

__all__ = ["app", "config"]

config: App = App()


@config.callback()
def _config() -> None:
    """Look at the settings."""


@config.command("show")
def show_config(
    store: StoreOption = None,
    consumer: ConsumerOption = None,
    tenant: TenantOption = None,
    window: WindowOption = None,
    lease: LeaseOption = None,
    mode: ModeOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Show every setting with its value and its origin; passwords in URLs are hidden.

    The first that has a value wins: flag, SEMEL_* variable, file named by a SEMEL_*_FILE variable, semel.toml, default.
    """
    settings = settings_for(
        store=store, consumer=consumer, tenant=tenant, window=window, lease=lease, mode=mode
    )
    shown = {
        begin + name: (redact(value) if isinstance(value, str) else value, found.origin(name))
        for begin, found in (("", settings), ("serve.", serve_options()))
        for name, value in found.model_dump().items()
    }
    if as_json:
        print_json({name: {"value": value, "origin": origin} for name, (value, origin) in shown.items()})
        return
    rows = [(name, "" if value is None else str(value), origin) for name, (value, origin) in shown.items()]
    print_rows(("SETTING", "VALUE", "FROM"), rows)


class Root(HelpGroup):
    """The root group. A broken pipe ends the program quietly; the framework would report a failure.

    A command whose output is its result catches `BrokenPipeError` itself.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command. A closed pipe is not a failure."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            quiet_stdout()
            return 0


app: App = App(
    cls=Root,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
    epilog="Exit codes: 0 done or new, 1 failed, 2 usage, 3 duplicate (where asked for), 5 not found,"
    " 69 store unavailable, 75 in flight or try later, 78 bad configuration, 130 interrupted.",
)


def _print_version(asked: bool) -> None:  # noqa: FBT001 - typer calls it so
    if asked:
        from importlib.metadata import version

        print(f"semel {version('semel')}")
        raise typer.Exit


@app.callback()
def root(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            envvar="SEMEL_CONFIG",
            metavar="FILE",
            help="Settings to read instead of ./semel.toml.",
        ),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
    ] = None,
    log_format: LogFormatOption = None,
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Events arrive many times; semel makes their effect happen once.

    Settings come from flags, SEMEL_* variables, SEMEL_*_FILE secrets, semel.toml and defaults, in this order.
    """
    del version
    Globals.config, Globals.log_level, Globals.debug = config, log_level, debug
    Globals.log_format = log_format


app.command("demo")(demo)
app.command("filter")(filter_lines)
# Options after the command to run belong to that command: `semel once --key K ls -l`.
app.command("once", context_settings={"allow_interspersed_args": False})(once)
app.command("consume")(consume)
app.command("dedup")(dedup)
app.command("show")(show)
app.command("list")(list_records)
app.command("forget")(forget)
app.command("resolve")(resolve)
app.command("purge")(purge)
app.command("stats")(stats)
app.add_typer(window, name="window", help="How long finished keys are remembered: data, changed at run time.")
app.add_typer(consumer, name="consumer", help="Consumers and their modes.")
app.add_typer(config, name="config")
app.add_typer(dlq, name="dlq", help="Dead letters: list, show, replay and drop them.")
app.command("relay")(relay)
app.command("listen")(listen)
app.add_typer(outbox, name="outbox", help="Messages that wait to be published, or were given up.")
app.command("serve")(serve)
app.add_typer(token, name="token", help="Who may use the service, for which tenant, in which role.")
app.command("migrate")(migrate)
app.command("import")(import_keys)
app.add_typer(move, name="move", help="Move consumers from one store to another.")
app.command("explain")(explain)
app.command("doctor")(doctor)
app.command("advise")(advise)
app.command("audit")(audit)
app.command("history")(history)
app.command("bench")(bench)
app.command("chaos")(chaos)
