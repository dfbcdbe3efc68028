"""The protocol of a broker: receive deliveries, then ack, nack, extend or dead-letter them."""

import base64
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import msgspec

from semel.errors import SemelError, SourceUnavailable, UsageError
from semel.keys.message import Envelope
from semel.runtime.extras import install_command

__all__ = [
    "Arrival",
    "DeadLetterInfo",
    "Source",
    "decode_body",
    "expand_headers",
    "load_scheme_function",
    "no_answer",
    "source_for",
]


class Arrival(Envelope, frozen=True, kw_only=True):
    """One received delivery: the message, and the data that an answer to the broker needs."""

    lane: str = ""
    """Deliveries of one lane came in order: a partition, a message group. Empty: there is no order."""
    deliveries: int = 0
    """The broker's count of deliveries of this message, including this one; 0: it does not count."""
    handle: Any = None
    """The source's own data for acknowledging it."""


def decode_body(body: str, encoding: str | None) -> bytes:
    """Return the bytes of a body that was sent as text; the relay sends other bytes with the encoding `base64`."""
    if encoding == "base64":
        with suppress(ValueError):
            return base64.b64decode(body, validate=True)
    return body.encode()


def expand_headers(headers: dict[str, str]) -> dict[str, str]:
    """Return single headers. If a broker takes only ten, the relay packs the message's headers into one, as JSON."""
    with suppress(KeyError, msgspec.MsgspecError):
        own = msgspec.json.decode(headers["headers"], type=dict[str, str])
        return {**own, **{name: value for name, value in headers.items() if name != "headers"}}
    return headers


class DeadLetterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Why a message was given up, for readers of the dead-letter destination."""

    reason: str
    """`failed`, `unknown`, `mismatch`, `late` or `no-key`."""
    consumer: str
    key: str = ""
    fence: int = 0
    """The fence of its record: a replay forgets that record and no later one."""
    attempts: int = 0
    error: str = ""
    stack: str = ""
    worker: str = ""
    """The process whose attempt was the last one: host, process id and a random id."""
    at: str = ""
    """When it was given up, by that process's clock: ISO 8601."""
    body_at: str = ""
    """Where the body is (topic, partition and offset), if it was too large to be copied and the broker keeps it."""
    body_encoding: str = ""
    """`zlib`: the body is compressed, because it was too large with this information."""


@runtime_checkable
class Source(Protocol):
    """A source of deliveries. One event loop uses it; no method blocks.

    Methods raise `SourceUnavailable` if the broker cannot be reached: the runner backs off and opens the source again.
    If `receive` may return nothing although there are messages, as while joining a group, the source has an attribute
    `caught_up: bool`. If `receive` may return nothing without an answer of the broker, the source has a method
    `async ping()`, which returns when the broker has answered. If the broker keeps a message after its ack, as a log
    does, the source has an attribute `keeps_acked: bool`: a dead letter may then say where the body is.
    """

    @property
    def name(self) -> str:
        """The name for messages and metrics, without credentials."""
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
        """Connect, or reconnect. Deliveries of an earlier connection are no longer in hand.

        Creates a missing dead-letter destination; raises `UsageError` if that is not allowed.
        """
        ...

    async def receive(self, limit: int, wait_s: float) -> Sequence[Arrival]:
        """Return up to `limit` deliveries; none if nothing arrived within `wait_s`."""
        ...

    async def ack(self, arrivals: Sequence[Arrival]) -> None:
        """Acknowledge deliveries: they are durably processed and must not be delivered again."""
        ...

    async def nack(self, arrivals: Sequence[Arrival], delay_s: float) -> None:
        """Return deliveries: the broker delivers them again to any consumer, not before `delay_s`."""
        ...

    async def extend(self, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        """Extend the deadline of deliveries; returns those that this consumer no longer holds."""
        ...

    async def dead_letter(self, arrival: Arrival, letter: DeadLetterInfo) -> None:
        """Put a copy at the dead-letter destination; returns when the broker has confirmed it.

        Raises `MessageTooLarge` if the letter makes it too large; it is called again with a compressed body (see
        `DeadLetterInfo.body_encoding`), or with an empty one if the broker keeps the message itself.
        """
        ...

    async def close(self) -> None:
        """Close the connection. Unacknowledged deliveries are delivered again to another consumer."""
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


def no_answer(name: str, error: SemelError) -> SemelError:
    """Return the error of a probe: it names the source if the broker does not answer. A refusal says so itself."""
    return (
        SourceUnavailable(f"{name} does not answer: {error}")
        if isinstance(error, SourceUnavailable)
        else error
    )


def source_for(url: str) -> Source:
    """Return the source of a URL, not yet connected. Raises `UsageError` with what to do."""
    source: Source = load_scheme_function(url, _BUILT_IN)(url)
    return source


def load_scheme_function(url: str, functions: Mapping[str, str]) -> Any:
    """Return the function for a URL's scheme, imported with its driver. Raises `UsageError` with what to do."""
    scheme, colon, _ = url.partition(":")
    if not colon or scheme not in functions:
        known = ", ".join(f"{name}:" for name in functions)
        raise UsageError(f"there is no source for {scheme}:; known are {known}")
    module, _, function = functions[scheme].partition(":")
    try:
        return getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        extra = module.rpartition(".")[2].partition("_")[0]
        raise UsageError(f"{scheme}: needs {error.name}; install it: {install_command(extra)}") from error
