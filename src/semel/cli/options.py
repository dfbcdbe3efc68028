"""The options that several commands share, and their settings."""

import logging
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semel.cli.output import BAD_CONFIGURATION, USAGE, CommandExit
from semel.errors import PolicyInvalid
from semel.observe.log_format import JsonFormatter
from semel.policy import Policy
from semel.runtime.error_settings import read_error_settings
from semel.runtime.process import load_object
from semel.windows import duration_us

__all__ = [
    "ConsumerOption",
    "DrainOption",
    "DryRunOption",
    "ErrorsOption",
    "Globals",
    "JsonOption",
    "LeaseOption",
    "LogFormatOption",
    "ModeOption",
    "RetryDelayOption",
    "SourcesOption",
    "StoreOption",
    "TenantOption",
    "WindowOption",
    "YesOption",
    "client_options",
    "ending_on_signals",
    "handler_policy",
    "load_handler",
    "parse_bytes",
    "parse_duration_us",
    "read_lines",
    "serve_options",
    "settings_for",
    "size_text",
    "sources_of",
    "stop_on_signals",
    "text",
]

if TYPE_CHECKING:
    from semel.cli.settings import CliSettings, ServeOptions


FILE_CHARS_MAX = 8 * 1024


class Globals:
    """The options before the command: one object per process, set by the root command."""

    config: Path | None = None
    debug: bool = False
    log_level: str | None = None
    log_format: str | None = None


def text(value: str | None) -> str | None:
    """Return the argument. Refuses text that is not UTF-8, which no store can write."""
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
        help="The consumer's name. Setting: consumer.",
    ),
]
TenantOption = Annotated[
    str | None,
    typer.Option(
        "--tenant", metavar="NAME", callback=text, help="The tenant of the records. Setting: tenant."
    ),
]
WindowOption = Annotated[
    str | None,
    typer.Option(
        "--window",
        metavar="DURATION",
        callback=text,
        help="How long a finished key is remembered: 24h, a preset, forever, or off. Setting: window.",
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
    typer.Option("--mode", metavar="MODE", callback=text, help="The consumer's mode. Setting: mode."),
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
RetryDelayOption = Annotated[
    str,
    typer.Option(
        "--retry-delay", metavar="DURATION", help="The wait before the second attempt; it doubles each time."
    ),
]
ErrorsOption = Annotated[
    str,
    typer.Option(
        "--errors",
        metavar="keep|none|MODULE:FUNCTION",
        callback=text,
        help="What records keep of the errors of attempts: all, none, or what this function leaves.",
    ),
]
DrainOption = Annotated[
    str, typer.Option("--drain", metavar="DURATION", help="How long a stop waits for running handlers.")
]
LogFormatOption = Annotated[
    str | None,
    typer.Option(
        "--log-format",
        metavar="FORMAT",
        callback=text,
        help="text, or json: one object per line. Setting: log_format.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would be done; change nothing.")]


def settings_for(**flags: Any) -> "CliSettings":
    """Return the settings: these flags (`None`: not given), then environment, secrets, `semel.toml`, defaults."""
    from semel.cli.settings import CliSettings, load  # slow to import

    globals_ = {"log_level": Globals.log_level, "log_format": Globals.log_format}
    settings = load(CliSettings, globals_ | flags, Globals.config)
    logging.basicConfig(level=settings.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    if settings.log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
    return settings


def client_options(settings: "CliSettings", consumer: str) -> dict[str, Any]:
    """Return the arguments for a client of these settings; `consumer`: its name if they give none."""
    return {
        "consumer": settings.consumer or consumer,
        "tenant": settings.tenant or "",
        "window": settings.window,
        "lease": settings.lease,
    }


def read_lines(file: Path) -> list[str]:
    """Return the lines of a small file that are not empty. Raises `CommandExit` if it cannot be read."""
    try:
        with file.open(encoding="utf-8") as opened:
            lines = opened.read(FILE_CHARS_MAX).splitlines()
    except (OSError, UnicodeError) as error:
        raise CommandExit(f"{file} cannot be read: {error}", BAD_CONFIGURATION) from None
    return [line.strip() for line in lines if line.strip()]


def sources_of(given: list[str] | None, settings: "CliSettings") -> list[str]:
    """Return the sources of the flags, else the one of the settings, else none."""
    return given or ([settings.source] if settings.source else [])


def serve_options(**flags: Any) -> "ServeOptions":
    """Return the options of `semel serve`: these flags, environment, secrets, `[serve]` in `semel.toml`, defaults."""
    from semel.cli.settings import ServeOptions, load

    return load(ServeOptions, flags, Globals.config)


def one_of(given: dict[str, bool]) -> str:
    """Return the one switch that is on. Raises a usage error for none or several."""
    chosen = [name for name, on in given.items() if on]
    if len(chosen) != 1:
        raise CommandExit(f"give one of {', '.join(given)}", USAGE)
    return chosen[0]


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]*)", re.IGNORECASE)


def parse_bytes(text: str, option: str) -> int:
    """Parse a size option into bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise typer.BadParameter(
            f"{text!r} is not a size; write it like 64KiB, 16MiB or 1000", param_hint=repr(option)
        )
    return round(float(match[1]) * _UNITS[match[2].lower()])


def size_text(size_bytes: int) -> str:
    """Format a size in its largest binary unit: `64 KiB`."""
    size, units = float(size_bytes), ["bytes", "KiB", "MiB", "GiB"]
    while size >= 2**10 and len(units) > 1:
        size /= 2**10
        units.pop(0)
    return f"{size:.4g} {units[0]}"


class ending_on_signals:  # noqa: N801 - reads as what it does: with ending_on_signals()
    """Make SIGTERM and SIGHUP raise an error, `SystemExit` unless another is given. Ignored signals stay ignored."""

    def __init__(
        self, error: Callable[[int], BaseException] = lambda number: SystemExit(128 + number)
    ) -> None:
        self._error = error

    def __enter__(self) -> None:
        def end(number: int, _frame: object) -> None:
            raise self._error(number)

        heeded = [
            number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN
        ]
        self._before = {number: signal.signal(number, end) for number in heeded}

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def stop_on_signals(stop: Callable[[], None]) -> list[int]:
    """Make SIGTERM and SIGINT call `stop`; a second signal ends the process. Returns the list of signals received."""
    received: list[int] = []

    def heed(number: int, _frame: object) -> None:
        received.append(number)
        stop()
        signal.signal(number, signal.SIG_DFL)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, heed)
    return received


def load_handler(spec: str) -> Any:
    """Load the object `module:name`. Raises `CommandExit` for a malformed name, and `PolicyInvalid`."""
    module, colon, name = spec.partition(":")
    if not (module and colon and name):
        raise CommandExit(f"{spec!r} names no handler; write module:function, such as app:handle", USAGE)
    return load_object(spec)


def handler_policy(max_attempts: int, retry_delay: str, errors: str) -> Policy:
    """Return the policy of a command that runs a handler, from its options."""
    return Policy(
        max_attempts=max_attempts,
        retry_delay_s=parse_duration_us(retry_delay) / 1e6,
        **read_error_settings(errors),
    )
