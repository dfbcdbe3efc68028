"""Settings of the command line: flags, then `SEMEL_*`, then `*_FILE` secrets, then `semel.toml`, then defaults."""

import os
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import PrivateAttr, ValidationError, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from semel.cli.exits import BAD_CONFIGURATION, USAGE, Stop
from semel.errors import PolicyInvalid
from semel.keys.limits import check_consumer
from semel.policy import LEASE_MAX_S, LEASE_MIN_S
from semel.stores.tiered import url_of
from semel.types import Mode
from semel.windows import duration_us, window_us

__all__ = ["CONFIG_FILE", "DEFAULT", "Settings", "load"]

PREFIX = "SEMEL_"
CONFIG_FILE = "semel.toml"
DEFAULT = "default"
"""The origin of a value that nobody set."""

SECRET_CHARS_MAX = 64 * 1024
"""A longer secret is another file, named by mistake."""

_NOT_OURS = ("SEMEL_TEST_", "SEMEL_SERVICE_", "SEMEL_PORT_", "SEMEL_SERVE_")
"""Set by semel's own tests, by Kubernetes for a service that is called semel, and for `semel serve` alone."""
_NOT_SETTINGS = {"SEMEL_CONFIG", "SEMEL_PORT"}
_FLAGS = {"source": "--from"}
"""Flags that are not called as their settings are."""


class Settings(BaseSettings):
    """What every command may need; each value knows where it came from."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    store: str = "sqlite:///semel.db"
    """Where the records live."""
    consumer: str | None = None
    """Who processes."""
    tenant: str | None = None
    """Whose records."""
    window: str | float = "24h"
    """How long a finished key is remembered."""
    lease: str | float = "30s"
    """How long a claim lasts without renewal."""
    mode: Mode = "lease"
    """How the consumer works."""
    source: str | None = None
    """Where deliveries come from."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """The least important log line that is shown on stderr."""

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def origin(self, name: str) -> str:
        """Where a value came from: a flag, a variable, a file with its key, or `default`."""
        return self._origins.get(name, DEFAULT)

    def noting(self, origins: Mapping[str, str]) -> Self:
        """Remember where the values came from."""
        self._origins.update(origins)
        return self

    def given(self, name: str) -> bool:
        """Whether anybody set this value."""
        return name in self._origins

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - pydantic-settings passes them all
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` has gathered: it keeps the origins, which pydantic would drop."""
        return (init_settings,)

    @field_validator("store", mode="before")
    @classmethod
    def _as_url(cls, store: Any) -> Any:
        """A table of tiers as the URL that says the same."""
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


NAMES: tuple[str, ...] = tuple(Settings.model_fields)


def load(flags: Mapping[str, Any], config: Path | None = None) -> Settings:
    """The settings, each from the first source that has it. Raises `Stop` with the origin of what is wrong."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for found in (_from_flags(flags), _from_environment(), _from_secrets(), _from_file(config)):
        for name, (value, origin) in found.items():
            if name not in values:
                values[name], origins[name] = value, origin
    try:
        settings = Settings(**values)
    except ValidationError as error:
        raise _explained(error, origins) from None
    return settings.noting(origins)


Found = dict[str, tuple[Any, str]]
"""Values with their origins, by name."""


def _from_flags(flags: Mapping[str, Any]) -> Found:
    return {
        name: (value, _FLAGS.get(name) or f"--{name.replace('_', '-')}")
        for name, value in flags.items()
        if value is not None
    }


def _from_environment() -> Found:
    for name in os.environ:
        if name.startswith(PREFIX) and not name.startswith(_NOT_OURS) and name not in _NOT_SETTINGS:
            known = name.removeprefix(PREFIX).removesuffix("_FILE").lower()
            if known not in NAMES:
                hint = _hint(known, lambda near: f"{PREFIX}{near.upper()}")
                raise Stop(
                    f"the environment variable {name} is no setting of semel; {hint}", BAD_CONFIGURATION
                )
    return {name: (value, f"{PREFIX}{name.upper()}") for name, value in EnvSettingsSource(Settings)().items()}


def _from_secrets() -> Found:
    found: Found = {}
    for name in NAMES:
        variable = f"{PREFIX}{name.upper()}_FILE"
        path = os.environ.get(variable)
        if path:
            try:
                with Path(path).open(encoding="utf-8") as file:
                    secret = file.read(SECRET_CHARS_MAX + 1).rstrip("\r\n")
            except (OSError, UnicodeError) as error:
                raise Stop(
                    f"{variable} names {path}, which cannot be read: {error}", BAD_CONFIGURATION
                ) from None
            if len(secret) > SECRET_CHARS_MAX:
                raise Stop(f"{variable} names {path}, which is too long for a setting", BAD_CONFIGURATION)
            found[name] = (secret, f"{variable} ({path})")
    return found


def _from_file(config: Path | None) -> Found:
    path = config or Path(CONFIG_FILE)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if config is None:
            return {}
        raise Stop(f"the configuration {path} does not exist", BAD_CONFIGURATION) from None
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
        raise Stop(f"the configuration {path} cannot be read: {error}", BAD_CONFIGURATION) from None
    for name in content:
        if name not in NAMES:
            raise Stop(f"{path}: {name!r} is no setting of semel; {_hint(name, str)}", BAD_CONFIGURATION)
    return {name: (value, f"{path}: {name}") for name, value in content.items()}


def _hint(name: str, spelled: Callable[[str], str]) -> str:
    near = get_close_matches(name, NAMES, 1)
    if near:
        return f"did you mean {spelled(near[0])}?"
    return f"there are {', '.join(spelled(each) for each in NAMES)}"


def _explained(error: ValidationError, origins: Mapping[str, str]) -> Stop:
    """The first thing that is wrong, with the place to mend it. A flag is a usage error."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    origin = origins.get(name, name)
    cause = first.get("ctx", {}).get("error")
    message = (
        str(cause) if isinstance(cause, Exception) else first["msg"].replace("Input should", "it should")
    )
    return Stop(f"{origin}: {message}", USAGE if origin.startswith("--") else BAD_CONFIGURATION)
