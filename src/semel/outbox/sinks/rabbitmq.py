"""A sink on RabbitMQ: persistent messages, publisher confirms, and errors for messages that no queue takes."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlunsplit

import aio_pika
from aio_pika.abc import DeliveryMode
from aio_pika.exceptions import AMQPException, ChannelClosed, DeliveryError

from semel.brokers.rabbitmq import is_refusal
from semel.core.relay_flow import NotPublished, OutboxRow, Published, PublishRefused, Sent
from semel.outbox.message import attributes
from semel.outbox.sinks import destination_of, in_turns, refusal, unavailable
from semel.runtime.urls import parse_url, port_of, read_options

__all__ = ["RabbitmqSink", "from_url"]

WAIT_S = 10.0


class RabbitmqSink:
    """An exchange of one server; without a name, the default exchange, which routes by queue name."""

    ordered: bool = True
    batch_max: int = 500

    def __init__(self, url: str, *, exchange: str = "", routing_key: str = "", name: str = "amqp") -> None:
        self.name: str = name
        self._url = url
        self._exchange_name = exchange
        self._routing_key = routing_key
        self._connection: Any = None
        self._exchange: Any = None

    async def open(self) -> None:
        """Connect, and check that the exchange exists."""
        try:
            self._connection = await aio_pika.connect(
                self._url, timeout=WAIT_S, client_properties={"connection_name": "semel-relay"}
            )
            channel = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
            self._exchange = (
                await channel.get_exchange(self._exchange_name)
                if self._exchange_name
                else channel.default_exchange
            )
        except (AMQPException, OSError, TimeoutError) as error:
            raise (refusal if is_refusal(error) else unavailable)(self.name, error) from error

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def publish(self, rows: Sequence[OutboxRow]) -> list[Sent]:
        """Publish aggregates concurrently; each row is confirmed on its own."""
        return await in_turns(rows, self._send)

    async def _send(self, row: OutboxRow) -> Sent:
        key = destination_of(row, self._routing_key)
        try:
            await self._exchange.publish(message_of(row), key, mandatory=True, timeout=WAIT_S)
        except DeliveryError as error:
            returned = type(error.frame).__name__
            return PublishRefused(
                f"no queue took {key!r}" if "Return" in returned else f"the server answered {returned}"
            )
        except ChannelClosed as error:
            return NotPublished(f"the channel was closed: {error}")
        except (AMQPException, OSError, TimeoutError, RuntimeError) as error:
            return NotPublished(f"{type(error).__name__}: {error}")
        return Published()


def message_of(row: OutboxRow) -> aio_pika.Message:
    """Return the row as a persistent message."""
    headers: dict[str, Any] = {**row.headers}
    for name, value in attributes(row).items():
        headers[f"cloudEvents:{name}"] = value
    if row.traceparent is not None:
        headers["traceparent"] = row.traceparent
    return aio_pika.Message(
        row.payload,
        headers=headers,
        content_type=row.content_type,
        delivery_mode=DeliveryMode.PERSISTENT,
        message_id=row.id,
        timestamp=datetime.fromtimestamp(row.created_at / 1e6, UTC),
        type=row.event_type,
    )


def from_url(url: str) -> RabbitmqSink:
    """`amqp://user:password@host:5672/vhost?exchange=orders&routing_key=created`."""
    parts, options = parse_url(url), read_options(url, {"exchange": str, "routing_key": str})
    bare = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    where = f"{parts.scheme}://{parts.hostname}:{port_of(parts, 5672)}{parts.path}"
    return RabbitmqSink(bare, name=where, **options)
