"""Sources by URL: `kafka://host/topic?group=billing`. Drivers are imported when their URL is opened, not before."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from semel.brokers.source import Source
from semel.errors import UsageError
from semel.extras import install_command

__all__ = ["named", "options_of", "source_for"]

_BUILT_IN: dict[str, str] = {
    "amqp": "semel.brokers.rabbitmq:from_url",
    "amqps": "semel.brokers.rabbitmq:from_url",
    "kafka": "semel.brokers.kafka:from_url",
    "nats": "semel.brokers.nats:from_url",
    "sqs": "semel.brokers.sqs:from_url",
    "redis": "semel.brokers.redis_streams:from_url",
    "rediss": "semel.brokers.redis_streams:from_url",
    "valkey": "semel.brokers.redis_streams:from_url",
    "valkeys": "semel.brokers.redis_streams:from_url",
}


def source_for(url: str) -> Source:
    """The source that a URL names, not yet connected. Raises `UsageError` with what to do."""
    source: Source = named(url, _BUILT_IN)(url)
    return source


def named(url: str, functions: Mapping[str, str]) -> Any:
    """The function for a URL's scheme, imported with its driver. Raises `UsageError` with what to do."""
    scheme, colon, _ = url.partition(":")
    if not colon or scheme not in functions:
        known = ", ".join(f"{name}:" for name in functions)
        raise UsageError(f"no source answers to {scheme}:; known are {known}")
    module, _, function = functions[scheme].partition(":")
    try:
        return getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        extra = module.rpartition(".")[2].partition("_")[0]
        raise UsageError(f"{scheme}: needs {error.name}; install it: {install_command(extra)}") from error


def options_of(url: str, kind: type[msgspec.Struct], given: Mapping[str, Any] | None = None) -> Any:
    """What a URL's query says, as the options of a source. Raises `UsageError` for an unknown or wrong one."""
    said = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True)) | dict(given or {})
    unknown = set(said) - {field.name for field in msgspec.structs.fields(kind)}
    if unknown:
        from difflib import get_close_matches

        names = [field.name for field in msgspec.structs.fields(kind)]
        name = min(unknown)
        near = get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
        raise UsageError(f"{name} is no option of this source; {hint}")
    try:
        return msgspec.convert(said, kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"in the source's URL: {error}") from error
