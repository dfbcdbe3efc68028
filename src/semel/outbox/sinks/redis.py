"""A sink on Redis Streams: one script call per stream and batch."""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any
from urllib.parse import urlunsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, RedisError, ResponseError

from semel.core.relay_flow import NotPublished, OutboxRow, Published, PublishRefused, Sent
from semel.errors import PolicyInvalid
from semel.outbox.message import attributes
from semel.outbox.sinks import HELD, destination_of, refusal, stretches, unavailable
from semel.runtime.urls import parse_url, port_of, read_options

__all__ = ["RedisSink", "from_url"]

WAIT_S = 10.0
_SCRIPT = (files("semel.outbox.sinks") / "redis_publish.lua").read_text(encoding="utf-8")
_UNWELL = ("OOM", "MISCONF", "READONLY", "LOADING", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS")
"""Errors about the server's state; they are not about a row."""


class RedisSink:
    """Streams of one server. Fields: `message_id`, `ce_*`, the headers, `data`."""

    ordered: bool = True
    batch_max: int = 500

    def __init__(self, url: str, *, stream: str = "", length_max: int = 0, name: str = "redis") -> None:
        if length_max < 0:
            raise PolicyInvalid(
                f"length_max is {length_max}; it must be a number of entries, or 0 for no limit"
            )
        self.name: str = name
        self._url = url
        self._stream = stream
        self._length_max = length_max
        self._client: Any = None
        self._script: Any = None

    async def open(self) -> None:
        """Connect, and check that the server answers."""
        self._client = redis.asyncio.Redis.from_url(
            self._url,
            socket_timeout=WAIT_S,
            socket_connect_timeout=WAIT_S,
            retry=Retry(NoBackoff(), 0),  # the relay decides about retries
        )
        self._script = self._client.register_script(_SCRIPT)
        try:
            await self._client.ping()
        except (AuthenticationError, AuthorizationError) as error:
            raise refusal(self.name, error) from error
        except (RedisError, OSError) as error:
            raise unavailable(self.name, error) from error

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def publish(self, rows: Sequence[OutboxRow]) -> list[Sent]:
        """Publish with one round trip per stream; a row is published when the server has confirmed it."""
        answers: list[Sent] = [HELD] * len(rows)
        stopped: set[tuple[str, str] | None] = set()
        for places in stretches(rows):
            by_stream: dict[str, list[int]] = {}
            for at in places:
                if rows[at].aggregate not in stopped:
                    by_stream.setdefault(destination_of(rows[at], self._stream), []).append(at)
            for stream, due in by_stream.items():
                for at, answer in zip(due, await self._add(stream, [rows[at] for at in due]), strict=True):
                    answers[at] = answer
                    if not isinstance(answer, Published):
                        stopped.add(rows[at].aggregate)
            stopped.discard(None)
        return answers

    async def _add(self, stream: str, rows: list[OutboxRow]) -> list[Sent]:
        arguments: list[str | bytes | int] = [self._length_max]
        numbers: dict[tuple[str, str] | None, int] = {None: 0}
        for row in rows:
            fields = fields_of(row)
            arguments += [numbers.setdefault(row.aggregate, len(numbers)), len(fields), *fields]
        try:
            told = await self._script(keys=[stream], args=arguments)
        except ResponseError as error:
            return [_answer(str(error))] * len(rows)
        except (RedisError, OSError) as error:
            return [NotPublished(f"{type(error).__name__}: {error}")] * len(rows)
        return [_answer(each.decode(errors="replace")) for each in told]


def _answer(told: str) -> Sent:
    if not told:
        return Published()
    if told == "-":
        return HELD
    return NotPublished(told) if told.startswith(_UNWELL) else PublishRefused(told)


def fields_of(row: OutboxRow) -> list[str | bytes]:
    """Return the entry's fields and values, alternating."""
    fields: list[str | bytes] = ["message_id", row.id]
    for name, value in attributes(row).items():
        fields += [f"ce_{name}", value]
    fields += ["ce_datacontenttype", row.content_type]
    if row.traceparent is not None:
        fields += ["traceparent", row.traceparent]
    for name, value in row.headers.items():
        fields += [name, value]
    return [*fields, "data", row.payload]


def from_url(url: str) -> RedisSink:
    """`redis://host:6379/0?stream=orders&length_max=100000`."""
    parts, options = parse_url(url), read_options(url, {"stream": str, "length_max": int})
    scheme = parts.scheme.replace("valkey", "redis")
    bare = urlunsplit((scheme, parts.netloc, parts.path, "", ""))
    where = f"{parts.scheme}://{parts.hostname}:{port_of(parts, 6379)}{parts.path}"
    return RedisSink(bare, name=where, **options)
