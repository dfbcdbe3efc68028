"""The commands of `semel`, and what stands before each of them."""

import importlib
import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from semel.cli.options import Globals

__all__ = ["app"]

COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("demo", "semel.cli.demo", "demo"),
    ("filter", "semel.cli.filter", "filter_lines"),
    ("once", "semel.cli.once", "once"),
)


class Root(TyperGroup):
    """Lets a broken pipe pass, which the framework would end with a failure."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a reader that has had enough is no failure."""
        from semel.cli.output import quiet_stdout

        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            quiet_stdout()
            return 0


app = typer.Typer(
    name="semel",
    cls=Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Events arrive many times; semel makes their effect happen once.",
    epilog="Exit codes: 0 done or new, 1 failed, 2 usage, 3 duplicate (where asked for), 5 not found,"
    " 69 store unavailable, 75 in flight or try later, 78 bad configuration, 130 interrupted.",
)


def _version(asked: bool) -> None:  # noqa: FBT001 - typer calls it so
    if asked:
        from importlib.metadata import version

        print(f"semel {version('semel')}")
        raise typer.Exit


@app.callback()
def root(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", envvar="SEMEL_CONFIG", metavar="FILE", help="Settings to read instead of ./semel.toml."
        ),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,  # noqa: FBT002
    _version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,  # noqa: FBT002
) -> None:
    """Events arrive many times; semel makes their effect happen once."""
    Globals.config, Globals.log_level, Globals.debug = config, log_level, debug


for _name, _module, _function in COMMANDS:
    if importlib.util.find_spec(_module) is not None:
        app.command(_name)(getattr(importlib.import_module(_module), _function))
