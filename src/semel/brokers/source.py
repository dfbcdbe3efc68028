"""What a broker has to offer: deliveries in hand, and the four things that can be said about them."""

import base64
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import msgspec

from semel.errors import UsageError
from semel.keys.message import Envelope
from semel.runtime.extras import install_command

__all__ = [
    "Arrival",
    "DeadLetterInfo",
    "Source",
    "decode_body",
    "expand_headers",
    "load_scheme_function",
    "source_for",
]


class Arrival(Envelope, frozen=True, kw_only=True):
    """One delivery in hand: what came, and what it takes to answer the broker for it."""

    lane: str = ""
    """Deliveries of one lane came in order: a partition, a message group. Empty: there is no order."""
    deliveries: int = 0
    """How often the broker says it has delivered this message, this time included; 0: it does not say."""
    handle: Any = None
    """What the source itself needs to acknowledge it."""


def decode_body(body: str, encoding: str | None) -> bytes:
    """The bytes of a body that had to travel as text; the relay says `base64` of what is none."""
    if encoding == "base64":
        with suppress(ValueError):
            return base64.b64decode(body, validate=True)
    return body.encode()


def expand_headers(headers: dict[str, str]) -> dict[str, str]:
    """The headers one by one; where there is room for ten alone, the relay puts its message's own into one, as JSON."""
    with suppress(KeyError, msgspec.MsgspecError):
        own = msgspec.json.decode(headers["headers"], type=dict[str, str])
        return {**own, **{name: value for name, value in headers.items() if name != "headers"}}
    return headers


class DeadLetterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Why a message was given up, for whoever reads it at the dead-letter destination."""

    reason: str
    """`failed`, `unknown`, `mismatch`, `late` or `no-key`."""
    consumer: str
    key: str = ""
    fence: int = 0
    """Of the record that says so: a replay forgets that record and no later one."""
    attempts: int = 0
    error: str = ""
    stack: str = ""
    body_at: str = ""
    """Where the body is (topic, partition and offset; queue and id), if it was too large to be copied."""


@runtime_checkable
class Source(Protocol):
    """Where deliveries come from. One event loop uses it; nothing of it blocks.

    Raises `SourceUnavailable` where the broker cannot be reached: the runner backs off and opens it again. A source
    whose `receive` may be empty although there is something, as while it joins a group, says so by `caught_up: bool`.
    """

    @property
    def name(self) -> str:
        """For messages and metrics, without credentials."""
        ...

    @property
    def deadline_s(self) -> float | None:
        """How long the broker waits for an answer or an `extend` before it delivers again; `None`: for ever."""
        ...

    @property
    def redelivers(self) -> bool:
        """Whether `nack` brings a message back. A log such as Kafka does not: the runner keeps it in hand."""
        ...

    async def open(self) -> None:
        """Connect, or connect again. What was in hand before a reconnection is no longer.

        Makes the dead-letter destination where there is none; raises `UsageError` where that is not allowed.
        """
        ...

    async def receive(self, limit: int, wait_s: float) -> Sequence[Arrival]:
        """Up to `limit` deliveries; none when nothing came within `wait_s`."""
        ...

    async def ack(self, arrivals: Sequence[Arrival]) -> None:
        """They are dealt with, durably: never deliver them again."""
        ...

    async def nack(self, arrivals: Sequence[Arrival], delay_s: float) -> None:
        """They are not: deliver them again, not before `delay_s`, to whoever asks."""
        ...

    async def extend(self, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        """They are still being worked on; returns those that are no longer ours."""
        ...

    async def dead_letter(self, arrival: Arrival, letter: DeadLetterInfo) -> None:
        """Put a copy at the dead-letter destination; returns when the broker has confirmed it.

        Raises `MessageTooLarge` where the letter makes it too large; it is called again with an empty body.
        """
        ...

    async def close(self) -> None:
        """Let go of the connection. What was not acknowledged is delivered again, to somebody else."""
        ...


_BUILT_IN: dict[str, str] = {
    "amqp": "semel.brokers.rabbitmq:from_url",
    "amqps": "semel.brokers.rabbitmq:from_url",
    "kafka": "semel.brokers.kafka.source:from_url",
    "nats": "semel.brokers.nats:from_url",
    "sqs": "semel.brokers.sqs:from_url",
    "redis": "semel.brokers.redis_streams:from_url",
    "rediss": "semel.brokers.redis_streams:from_url",
    "valkey": "semel.brokers.redis_streams:from_url",
    "valkeys": "semel.brokers.redis_streams:from_url",
}


def source_for(url: str) -> Source:
    """The source that a URL names, not yet connected. Raises `UsageError` with what to do."""
    source: Source = load_scheme_function(url, _BUILT_IN)(url)
    return source


def load_scheme_function(url: str, functions: Mapping[str, str]) -> Any:
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
