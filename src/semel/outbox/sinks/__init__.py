"""Where a relay publishes to: what every sink is, and which one a URL names."""

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


def destination_of(row: OutboxRow, default: str) -> str:
    """Where a row goes: its own destination, else the relay's, else its type."""
    return row.destination or default or row.event_type


def unavailable(name: str, error: BaseException) -> SinkUnavailable:
    """The error to raise for one of a driver's."""
    return SinkUnavailable(f"{name} gave no answer: {type(error).__name__}: {error}".rstrip(": "))


def refusal(name: str, error: object) -> SinkRefused:
    """The error to raise for what no repetition cures."""
    return SinkRefused(f"{name} refuses: {error}; check its credentials, rights and names")


BEGIN_MAX_S = 2.0
"""After that nothing more of a batch is begun, so that what is confirmed is marked, and a relay that is told to
stop, soon; the rest comes with the next batch."""
HELD = NotPublished("an earlier one of its aggregate was not published")
LATER = NotPublished("left for the next batch")


async def in_turns(
    rows: Sequence[OutboxRow],
    send: Callable[[OutboxRow], Awaitable[Sent]],
    *,
    begin_max_s: float = BEGIN_MAX_S,
) -> list[Sent]:
    """Send each aggregate's rows one after another, and the aggregates beside one another.

    Behind a row that is not published, none of its aggregate is sent. A broker's own order is not enough for
    that: what was sent in one go may be refused in the middle and taken at the end.
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
    """The places of each aggregate's rows; a row without one is alone."""
    made: dict[tuple[str, str] | int, list[int]] = {}
    for at, row in enumerate(rows):
        made.setdefault(at if row.aggregate is None else row.aggregate, []).append(at)
    return made.values()


def stretches(rows: Sequence[OutboxRow]) -> list[list[int]]:
    """The places of the rows in rounds: in each, an aggregate's rows go to one destination."""
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
