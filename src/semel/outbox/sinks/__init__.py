"""Sinks, the destinations of a relay: their protocol, and the lookup by URL."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, Protocol

from semel.core.relay_flow import NotPublished, OutboxRow, Published, PublishRefused, Sent
from semel.errors import SinkRefused, SinkUnavailable, SinkUnknown
from semel.runtime.extras import install_command

__all__ = [
    "BEGIN_MAX_S",
    "HELD",
    "LATER",
    "NotPublished",
    "PublishRefused",
    "Published",
    "Sent",
    "Sink",
    "chains",
    "destination_of",
    "in_turns",
    "sink_for",
    "stretches",
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
    """A destination of one relay. Its driver may reconnect by itself."""

    name: str
    """For logs and errors; without secrets."""
    ordered: bool
    """Whether, within one batch, a row that fails blocks the later rows of its aggregate."""
    batch_max: int
    """How many rows it takes at once."""

    async def open(self) -> None:
        """Connect. Raises `SinkUnavailable`."""
        ...

    async def close(self) -> None:
        """Disconnect; idempotent."""
        ...

    async def publish(self, rows: Sequence[OutboxRow], /) -> list[Sent]:
        """Publish the rows and wait for the broker's answer to each; returns answers by position.

        Raises `SinkUnavailable` if no row has an answer.
        """
        ...


def sink_for(url: str, **options: Any) -> Sink:
    """Return the sink of a URL, not yet connected. Raises `SinkUnknown`."""
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


def destination_of(row: OutboxRow, default: str) -> str:
    """Return a row's destination: its own, else the relay's, else its type."""
    return row.destination or default or row.event_type


def unavailable(name: str, error: BaseException) -> SinkUnavailable:
    """Turn a driver's error into `SinkUnavailable`."""
    return SinkUnavailable(f"{name} did not answer: {type(error).__name__}: {error}".rstrip(": "))


def refusal(name: str, error: object) -> SinkRefused:
    """Return the error for a refusal that a retry cannot fix."""
    return SinkRefused(f"{name} refuses: {error}; check its credentials, rights and names")


BEGIN_MAX_S = 2.0
"""After this time no more rows of a batch are sent, so that confirmed ones are recorded soon and `stop()`
takes effect soon; the rest comes with the next batch."""
HELD = NotPublished("an earlier message of its aggregate was not published")
LATER = NotPublished("left for the next batch")


async def in_turns(
    rows: Sequence[OutboxRow],
    send: Callable[[OutboxRow], Awaitable[Sent]],
    *,
    begin_max_s: float = BEGIN_MAX_S,
) -> list[Sent]:
    """Send the rows of an aggregate one after another, and several aggregates concurrently.

    A row that fails blocks the later rows of its aggregate. A broker's own order is not enough for
    that: it may refuse a row in the middle of a batch and accept later ones.
    """
    answers: list[Sent] = [LATER] * len(rows)
    give_up_at = time.monotonic() + begin_max_s

    async def follow(places: Sequence[int]) -> None:
        for done, at in enumerate(places):
            answers[at] = await send(rows[at])
            if not isinstance(answers[at], Published):
                for behind in places[done + 1 :]:
                    answers[behind] = HELD
                return
            if time.monotonic() >= give_up_at:
                return

    await asyncio.gather(*map(follow, chains(rows)))
    return answers


def chains(rows: Sequence[OutboxRow]) -> Iterable[list[int]]:
    """Return the positions of each aggregate's rows; a row without an aggregate is alone."""
    made: dict[tuple[str, str] | int, list[int]] = {}
    for at, row in enumerate(rows):
        made.setdefault(at if row.aggregate is None else row.aggregate, []).append(at)
    return made.values()


def stretches(rows: Sequence[OutboxRow]) -> list[list[int]]:
    """Split the rows into rounds: in each, an aggregate's rows go to one destination."""
    made: list[list[int]] = [[]]
    reached: dict[tuple[str, str], tuple[int, str]] = {}
    for at, row in enumerate(rows):
        number = 0
        if row.aggregate is not None:
            number, where = reached.get(row.aggregate, (0, row.destination))
            number += where != row.destination
            reached[row.aggregate] = (number, row.destination)
        if number == len(made):
            made.append([])
        made[number].append(at)
    return made
