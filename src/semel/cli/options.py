"""The options that several commands share, and the settings that they stand for."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semel.cli.exits import USAGE, CommandExit
from semel.errors import PolicyInvalid
from semel.windows import duration_us

if TYPE_CHECKING:
    from semel.cli.settings import ServeOptions, CliSettings

__all__ = [
    "ConsumerOption",
    "DryRunOption",
    "Globals",
    "JsonOption",
    "LeaseOption",
    "ModeOption",
    "SourcesOption",
    "StoreOption",
    "TenantOption",
    "WindowOption",
    "YesOption",
    "parse_duration_us",
    "serve_options",
    "settings_for",
    "sources_of",
    "text",
]


class Globals:
    """What stands before the command: one per process, set by the root command."""

    config: Path | None = None
    debug: bool = False
    log_level: str | None = None


def text(value: str | None) -> str | None:
    """Refuse an argument that is not UTF-8: no store could write it."""
    if value is not None and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise typer.BadParameter(f"{value!a} is not UTF-8") from None
    return value


def parse_duration_us(value: str, option: str | None = None) -> int:
    """The microseconds of a duration option such as `24h`."""
    try:
        return duration_us(value)
    except PolicyInvalid as error:
        raise typer.BadParameter(str(error), param_hint=None if option is None else repr(option)) from None


StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        "-s",
        metavar="URL",
        callback=text,
        help="Where the records live, such as sqlite:///events.db. Setting: store.",
    ),
]
ConsumerOption = Annotated[
    str | None,
    typer.Option(
        "--consumer",
        "-c",
        metavar="NAME",
        callback=text,
        help="Who processes the events. Setting: consumer.",
    ),
]
TenantOption = Annotated[
    str | None,
    typer.Option("--tenant", metavar="NAME", callback=text, help="Whose records. Setting: tenant."),
]
WindowOption = Annotated[
    str | None,
    typer.Option(
        "--window",
        metavar="DURATION",
        callback=text,
        help="How long a finished key is remembered: 24h, a preset, or off. Setting: window.",
    ),
]
LeaseOption = Annotated[
    str | None,
    typer.Option(
        "--lease",
        metavar="DURATION",
        callback=text,
        help="How long a claim lasts without renewal: 30s. Setting: lease.",
    ),
]
ModeOption = Annotated[
    str | None,
    typer.Option("--mode", metavar="MODE", callback=text, help="How the consumer works. Setting: mode."),
]
SourcesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        metavar="URL",
        show_default=False,
        help="Where deliveries come from, such as redis://localhost/0?stream=orders&group=billing."
        " Repeat it for several. Setting: source.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]


def settings_for(**flags: Any) -> "CliSettings":
    """The settings: these flags (`None`: not given), then environment, secrets, `semel.toml`, defaults."""
    from semel.cli.settings import CliSettings, load  # a quarter of a second: not for --help

    settings = load(CliSettings, {"log_level": Globals.log_level, **flags}, Globals.config)
    logging.basicConfig(level=settings.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    return settings


def sources_of(given: list[str] | None, settings: "CliSettings") -> list[str]:
    """The sources of the flags, else the one of the settings, else none."""
    return given or ([settings.source] if settings.source else [])


def serve_options(**flags: Any) -> "ServeOptions":
    """What `semel serve` alone is told: these flags, environment, secrets, `[serve]` in `semel.toml`, defaults."""
    from semel.cli.settings import ServeOptions, load

    return load(ServeOptions, flags, Globals.config)


def one_of(given: dict[str, bool]) -> str:
    """The one switch that is on. Raises a usage error for none or several."""
    chosen = [name for name, on in given.items() if on]
    if len(chosen) != 1:
        raise CommandExit(f"give one of {', '.join(given)}", USAGE)
    return chosen[0]
