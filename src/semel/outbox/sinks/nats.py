"""A sink on NATS JetStream: each message is confirmed by its stream, which drops repeats of its id."""

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlunsplit

import nats
import nats.errors
import nats.js.errors

from semel.core.relay_flow import NotPublished, OutboxRow, Published, PublishRefused, Sent
from semel.outbox.message import attributes
from semel.outbox.sinks import destination_of, in_turns, refusal, unavailable
from semel.runtime.urls import parse_url, port_of, read_options

__all__ = ["NatsSink", "from_url"]

WAIT_S = 10.0
HEADER_FREE = str.maketrans({"\r": " ", "\n": " "})


class NatsSink:
    """Subjects that a stream of the server takes. `Nats-Msg-Id` is the row's id."""

    ordered: bool = True
    batch_max: int = 500

    def __init__(self, url: str, *, subject: str = "", name: str = "nats") -> None:
        self.name: str = name
        self._url = url
        self._subject = subject
        self._client: Any = None
        self._stream: Any = None

    async def open(self) -> None:
        """Connect once; a lost connection raises an error, and the relay reconnects."""
        try:
            async with asyncio.timeout(WAIT_S):
                self._client = await nats.connect(
                    self._url,
                    name="semel-relay",
                    connect_timeout=round(WAIT_S),
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    error_cb=_quiet,
                )
        except (nats.errors.Error, OSError, TimeoutError) as error:
            if "authorization" in str(error).lower():
                raise refusal(self.name, error) from error
            raise unavailable(self.name, error) from error
        self._stream = self._client.jetstream(timeout=WAIT_S)

    async def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def publish(self, rows: Sequence[OutboxRow]) -> list[Sent]:
        """Publish aggregates concurrently; each row is confirmed on its own."""
        return await in_turns(rows, self._send)

    async def _send(self, row: OutboxRow) -> Sent:
        subject = destination_of(row, self._subject)
        try:
            await self._stream.publish(subject, row.payload, headers=headers_of(row))
        except nats.js.errors.NoStreamResponseError:
            return PublishRefused(f"no stream takes the subject {subject}")
        except (
            nats.errors.MaxPayloadError,
            nats.errors.BadSubjectError,
            nats.errors.BadHeaderError,
        ) as error:
            return PublishRefused(f"{type(error).__name__}: {error}", of_message=True)
        except nats.js.errors.APIError as error:
            return PublishRefused(f"{error.code}: {error.description}")
        except (nats.errors.Error, OSError, TimeoutError) as error:
            return NotPublished(f"{type(error).__name__}: {error}")
        return Published()


async def _quiet(_error: Exception) -> None:
    """Ignore the client's error callback: the failed call raises the error."""


def headers_of(row: OutboxRow) -> dict[str, str]:
    """Return the message's headers."""
    headers = {"Nats-Msg-Id": row.id, "message_id": row.id, **row.headers}
    for name, value in attributes(row).items():
        headers[f"ce-{name}"] = value.translate(HEADER_FREE)
    headers["content-type"] = row.content_type
    if row.traceparent is not None:
        headers["traceparent"] = row.traceparent
    return headers


def from_url(url: str) -> NatsSink:
    """`nats://host:4222?subject=orders.created`."""
    parts, options = parse_url(url), read_options(url, {"subject": str})
    bare = urlunsplit((parts.scheme, parts.netloc, "", "", ""))
    where = f"{parts.scheme}://{parts.hostname}:{port_of(parts, 4222)}"
    return NatsSink(bare, name=where, **options)
