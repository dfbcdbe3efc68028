"""Where a relay publishes to: what every sink is, and which one a URL names."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol
from urllib.parse import SplitResult, parse_qsl, urlsplit

from semel.core.relaying import Published, PublishRefused, OutboxRow, Sent, NotPublished
from semel.errors import PolicyInvalid, SinkRefused, SinkUnavailable, SinkUnknown
from semel.extras import install_command

__all__ = [
    "Published",
    "PublishRefused",
    "Sent",
    "Sink",
    "NotPublished",
    "destination_of",
    "options_of",
    "sink_for",
    "unavailable",
]

_SINKS: dict[str, tuple[str, str]] = {
    "stdout": ("stdout", ""),
    "redis": ("redis", "redis"),
    "rediss": ("redis", "redis"),
    "valkey": ("redis", "redis"),
    "valkeys": ("redis", "redis"),
    "https": ("webhook", "webhook"),
    "http": ("webhook", "webhook"),
    "nats": ("nats", "nats"),
    "tls": ("nats", "nats"),
    "amqp": ("rabbitmq", "rabbitmq"),
    "amqps": ("rabbitmq", "rabbitmq"),
    "kafka": ("kafka", "kafka"),
    "sqs": ("sqs", "sqs"),
}
"""The module of each scheme, and the extra that it needs."""


class Sink(Protocol):
    """A broker. For one relay; its driver's own reconnecting is its own affair."""

    name: str
    """For logs and errors; without secrets."""
    ordered: bool
    """Within one batch, nothing of an aggregate goes out behind a row that did not."""
    batch_max: int
    """How many rows it takes at once."""

    async def open(self) -> None:
        """Connect. Raises `SinkUnavailable`."""
        ...

    async def close(self) -> None:
        """Let go; idempotent."""
        ...

    async def publish(self, rows: Sequence[OutboxRow], /) -> list[Sent]:
        """Hand over the rows and wait for the broker's word on each; answers by position.

        Raises `SinkUnavailable` where nothing is known of any of them.
        """
        ...


def sink_for(url: str, **options: Any) -> Sink:
    """The sink that a URL names, not yet connected. Raises `SinkUnknown` with what to do."""
    scheme, colon, _ = url.partition(":")
    if not colon or scheme not in _SINKS:
        raise SinkUnknown(
            f"no sink answers to {scheme if colon else url!r}; there are {', '.join(f'{each}:' for each in _SINKS)}"
        )
    module, extra = _SINKS[scheme]
    try:
        made: Sink = import_module(f"semel.outbox.sinks.{module}").from_url(url, **options)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("semel"):
            raise
        raise SinkUnknown(
            f"{scheme}: needs {error.name}; install the extra: {install_command(extra)}"
        ) from error
    return made


def options_of(url: str, known: Sequence[str]) -> tuple[SplitResult, dict[str, str]]:
    """The parts of a sink's URL, and its own options. Raises `PolicyInvalid` for one that it does not know."""
    parts = urlsplit(url)
    found = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in found:
        if name not in known:
            there = f"it has {', '.join(known)}" if known else "it has none"
            raise PolicyInvalid(f"{parts.scheme}: has no option {name}; {there}")
    return parts, found


def destination_of(row: OutboxRow, default: str) -> str:
    """Where a row goes: its own destination, else the relay's, else its type."""
    return row.destination or default or row.event_type


def unavailable(name: str, error: BaseException) -> SinkUnavailable:
    """The error to raise for one of a driver's."""
    return SinkUnavailable(f"{name} gave no answer: {type(error).__name__}: {error}".rstrip(": "))


def refused(name: str, error: object) -> SinkRefused:
    """The error to raise for what no repetition cures."""
    return SinkRefused(f"{name} refuses: {error}; check its credentials, rights and names")
