"""Settings of the command line: flags, then `SEMEL_*`, then `*_FILE` secrets, then `semel.toml`, then defaults.

Settings of `semel serve` are in a table of their own, `[serve]`, and in variables `SEMEL_SERVE_*`.
"""

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import PrivateAttr, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from semel.cli.output import BAD_CONFIGURATION, USAGE, CommandExit
from semel.errors import PolicyInvalid
from semel.keys.limits import check_consumer
from semel.policy import LEASE_MAX_S, LEASE_MIN_S
from semel.server.settings import Limits
from semel.stores.tiered import url_of
from semel.types import Mode
from semel.windows import duration_us, exact_text, window_us

__all__ = ["CONFIG_FILE", "DEFAULT", "CliSettings", "ServeOptions", "load"]

PREFIX = "SEMEL_"
CONFIG_FILE = "semel.toml"
DEFAULT = "default"
"""The origin of a default value."""
NOT_AT_ALL = "0s"
"""Zero durations are invalid elsewhere; here they mean "do not wait"."""

SECRET_CHARS_MAX = 64 * 1024
"""A longer file is not a secret: its path is a mistake."""

_NOT_OURS = ("SEMEL_TEST_", "SEMEL_SERVICE_", "SEMEL_PORT_")
"""Variables of semel's own tests, and of Kubernetes for a service named semel."""
_NOT_SETTINGS = {"SEMEL_CONFIG", "SEMEL_PORT"}
LIMITS = Limits()
_FLAGS = {"source": "--from"}
"""Flags whose names differ from those of their settings."""


class Sourced(BaseSettings):
    """Settings with the origin of each value."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_ignore_empty=True, extra="forbid", frozen=True
    )
    table: ClassVar[str] = ""
    """The table of `semel.toml`; empty: the top level."""

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def origin(self, name: str) -> str:
        """Return the origin of a value: a flag, a variable, a file with its key, or `default`."""
        return self._origins.get(name, DEFAULT)

    def noting(self, origins: Mapping[str, str]) -> Self:
        """Store the origins of the values."""
        self._origins.update(origins)
        return self

    def is_set(self, name: str) -> bool:
        """Whether this value was set, that is, is not a default."""
        return name in self._origins

    @classmethod
    def prefix(cls) -> str:
        """The prefix of its variables."""
        return PREFIX + (f"{cls.table.upper()}_" if cls.table else "")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - pydantic-settings passes them all
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use only the values from `load`: it keeps the origins, which pydantic would drop."""
        return (init_settings,)


class CliSettings(Sourced):
    """The settings of every command."""

    store: str = "sqlite:///semel.db"
    """The URL of the store."""
    consumer: str | None = None
    """The name of the consumer."""
    tenant: str | None = None
    """The tenant of the records."""
    window: str | float = "24h"
    """How long a finished key is remembered."""
    lease: str | float = "30s"
    """How long a claim lasts without renewal."""
    mode: Mode = "lease"
    """The mode of the consumer."""
    source: str | None = None
    """The URL of the source."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """The lowest level of log lines on stderr."""
    log_format: Literal["text", "json"] = "text"
    """Log lines as text, or as one JSON object each."""
    hooks: str | list[str] = ""
    """Hooks of `consume`, `listen` and `relay`, as `module:name`; a list, or separated by commas."""
    rollups: bool = True
    """Whether `consume`, `listen` and `relay` write the figures that the dashboard shows into the store."""

    @field_validator("store", mode="before")
    @classmethod
    def _as_url(cls, store: Any) -> Any:
        """Turn a table of tiers into the equivalent URL."""
        return url_of(store) if isinstance(store, dict) else store

    @field_validator("store")
    @classmethod
    def _check_store(cls, store: str) -> str:
        if not store:
            raise ValueError("it is empty; write a URL such as sqlite:///events.db")
        return store

    @field_validator("consumer", "tenant")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        return None if name is None else check_consumer(name)

    @field_validator("window", "lease", mode="before")
    @classmethod
    def _no_switch(cls, duration: Any) -> Any:
        if isinstance(duration, bool):
            raise ValueError("it is a duration, such as '24h'")  # noqa: TRY004 - pydantic reports ValueErrors
        return duration

    @field_validator("window")
    @classmethod
    def _check_window(cls, window: str | float) -> str | float:
        window_us(window)
        return window

    @field_validator("lease")
    @classmethod
    def _check_lease(cls, lease: str | float) -> str | float:
        if not LEASE_MIN_S * 1e6 <= duration_us(lease) <= LEASE_MAX_S * 1e6:
            raise PolicyInvalid(f"a lease of {lease!r} is out of bounds; use {LEASE_MIN_S * 1000:g}ms to 12h")
        return lease


class ServeOptions(Sourced):
    """Options of `semel serve`; the server's settings check their bounds."""

    table: ClassVar[str] = "serve"

    host: str = "127.0.0.1"
    port: int = 8787
    auth: Literal["tokens", "none"] = "tokens"
    audit: Literal["operators", "all"] = "operators"
    proxy: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    handler: str = ""
    errors: str = "keep"
    sink: str = ""
    persist: str = ""
    events_consumer: str = "events"
    events_key: str = ""
    events_lease: str = "30s"
    events_table: str = "events"
    events_columns: str = ""
    body_max: int = LIMITS.body_bytes_max
    value_max: int = LIMITS.value_bytes_max
    answer_max: int = LIMITS.answer_bytes_max
    batch_max: int = LIMITS.batch_items_max
    lease_max: str = exact_text(LIMITS.lease_max_us)
    window_max: str = exact_text(LIMITS.window_max_us)
    rate: float = LIMITS.rate_per_s
    items_rate: float = LIMITS.items_per_s
    bytes_rate: float = LIMITS.bytes_per_s
    store_share: float = LIMITS.store_share
    scan_share: float = LIMITS.scan_share
    consumers_max: int = LIMITS.consumers_max
    steps_max: int = LIMITS.steps_max
    renewals_max: int = LIMITS.renewals_max
    claims_max: int = LIMITS.live_claims_max
    connections_max: int = LIMITS.connections_max
    head_wait: str = f"{LIMITS.head_wait_s:g}s"
    body_wait: str = f"{LIMITS.body_wait_s:g}s"
    write_wait: str = f"{LIMITS.write_wait_s:g}s"
    drain: str = "30s"
    unready: str = "0s"
    dead_letters: str | list[str] = ""
    """A list, or separated by spaces: a URL may contain commas."""
    dashboard: bool = True

    @field_validator("events_lease", "lease_max", "drain", "unready", "head_wait", "body_wait", "write_wait")
    @classmethod
    def _check_duration(cls, duration: str) -> str:
        if duration != NOT_AT_ALL:
            duration_us(duration)
        return duration

    @field_validator("window_max")
    @classmethod
    def _check_window(cls, window: str) -> str:
        window_us(window)
        return window


NAMES: tuple[str, ...] = tuple(CliSettings.model_fields)
TABLES: tuple[type[Sourced], ...] = (ServeOptions,)
"""The tables of `semel.toml`, besides its top level."""
AnySettings = TypeVar("AnySettings", bound=Sourced)


def load(model: type[AnySettings], flags: Mapping[str, Any], config: Path | None = None) -> AnySettings:
    """Load the settings, each from the first source that has it. Raises `CommandExit` for a bad value."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    sources = (_from_flags(flags), _from_environment(model), _from_secrets(model), _from_file(config, model))
    for found in sources:
        for name, (value, origin) in found.items():
            if name not in values:
                values[name], origins[name] = value, origin
    try:
        settings = model(**values)
    except ValidationError as error:
        raise _first_error(error, origins) from None
    return settings.noting(origins)


Found = dict[str, tuple[Any, str]]
"""Values with their origins, by name."""


def _from_flags(flags: Mapping[str, Any]) -> Found:
    return {
        name: (value, _FLAGS.get(name) or f"--{name.replace('_', '-')}")
        for name, value in flags.items()
        if value is not None
    }


def _from_environment(model: type[Sourced]) -> Found:
    prefix, names = model.prefix(), tuple(model.model_fields)
    others = () if model.table else (*_NOT_OURS, *(each.prefix() for each in TABLES))
    found: Found = {}
    for variable, value in os.environ.items():
        if not variable.startswith(prefix) or variable.startswith(others) or variable in _NOT_SETTINGS:
            continue
        name = variable.removeprefix(prefix).lower()
        if name.removesuffix("_file") not in names and name not in names:
            hint = _hint(name.removesuffix("_file"), names, lambda near: f"{prefix}{near.upper()}")
            raise CommandExit(
                f"the environment variable {variable} is not a setting of semel; {hint}", BAD_CONFIGURATION
            )
        if value and name in names:
            found[name] = (value, variable)
    return found


def _from_secrets(model: type[Sourced]) -> Found:
    found: Found = {}
    for name in model.model_fields:
        variable = f"{model.prefix()}{name.upper()}_FILE"
        path = os.environ.get(variable)
        if path:
            try:
                with Path(path).open(encoding="utf-8") as file:
                    secret = file.read(SECRET_CHARS_MAX + 1).rstrip("\r\n")
            except (OSError, UnicodeError) as error:
                raise CommandExit(
                    f"{variable} names {path}, which cannot be read: {error}", BAD_CONFIGURATION
                ) from None
            if len(secret) > SECRET_CHARS_MAX:
                raise CommandExit(
                    f"{variable} names {path}, which is too long for a setting", BAD_CONFIGURATION
                )
            found[name] = (secret, f"{variable} ({path})")
    return found


def _from_file(config: Path | None, model: type[Sourced]) -> Found:
    path = config or Path(CONFIG_FILE)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if config is None:
            return {}
        raise CommandExit(f"the configuration {path} does not exist", BAD_CONFIGURATION) from None
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
        raise CommandExit(f"the configuration {path} cannot be read: {error}", BAD_CONFIGURATION) from None
    tables = {each.table: content.pop(each.table, {}) for each in TABLES}
    if model.table:
        content = tables[model.table]
        if not isinstance(content, dict):
            raise CommandExit(
                f"{path}: {model.table} is a table; write [{model.table}] above it", BAD_CONFIGURATION
            )
    known, begin = tuple(model.model_fields), f"{model.table}." if model.table else ""
    for name in content:
        if name not in known:
            hint = _hint(name, known, lambda near: begin + near)
            raise CommandExit(
                f"{path}: {begin + name!r} is not a setting of semel; {hint}", BAD_CONFIGURATION
            )
    return {name: (value, f"{path}: {begin}{name}") for name, value in content.items()}


def _hint(name: str, known: Sequence[str], spelled: Callable[[str], str]) -> str:
    near = get_close_matches(name, known, 1)
    if near:
        return f"did you mean {spelled(near[0])}?"
    return f"there are {', '.join(spelled(each) for each in known)}"


def _first_error(error: ValidationError, origins: Mapping[str, str]) -> CommandExit:
    """Turn the first validation error into a message with the origin of the value. A flag is a usage error."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    origin = origins.get(name, name)
    cause = first.get("ctx", {}).get("error")
    message = (
        str(cause) if isinstance(cause, Exception) else first["msg"].replace("Input should", "it should")
    )
    return CommandExit(f"{origin}: {message}", USAGE if origin.startswith("--") else BAD_CONFIGURATION)
