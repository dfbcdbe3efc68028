"""RabbitMQ: manual acks, confirms, and retries that wait in delay queues instead of spinning.

A message to retry later goes to a delay queue, whose messages expire into the work queue. It is published there and
confirmed before the original is acknowledged, so a crash in between repeats it and loses nothing.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic
from traceback import walk_tb
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import aio_pika
import msgspec
from aio_pika.abc import AbstractIncomingMessage
from aio_pika.exceptions import (
    AMQPError,
    AuthenticationError,
    ChannelInvalidStateError,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    DeliveryError,
    ProbableAuthenticationError,
)
from aiormq.exceptions import ChannelAccessRefused, ConnectionClosed, ConnectionNotAllowed, InvalidFrameError
from pamqp.commands import Connection

from semel.brokers.dead_letters import DeadLetter, headers_of
from semel.brokers.source import Arrival, DeadLetterInfo
from semel.errors import PolicyInvalid, SemelError, SourceRefused, SourceUnavailable, UsageError
from semel.runtime.urls import parse_url, struct_options

__all__ = ["RabbitConnection", "RabbitQueue", "RabbitmqOptions", "from_url", "is_refusal"]

CONNECT_S = 10.0
HEARTBEAT_S = 20
"""The heartbeat of the connection: the client notices within three of them that the server has vanished."""
CANCELS_MAX, CANCEL_S = 3, 0.1
"""How often a close is cancelled, and how long it has to end: at its first cancellation it waits for a confirmation."""
ASK_AFTER_S = 5.0
"""A server that has sent nothing for this time is asked whether it still answers."""
STEPS_S = (1, 5, 30, 120, 600, 3600)
"""The delays of the delay queues: a message waits in the queue with the shortest sufficient delay."""
DELIVERIES = "semel-deliveries"
"""The header of a postponed copy with the deliveries of its originals: the server's own count starts again."""
NO_ID = "semel-no-id"
"""The header of a copy whose original had no id: the client library invented the id of the copy."""
UNREACHABLE = (AMQPError, ChannelInvalidStateError, ConnectionError, TimeoutError, OSError, RuntimeError)
REFUSALS = (
    AuthenticationError,
    ProbableAuthenticationError,
    ConnectionNotAllowed,
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
)
"""Errors that a retry cannot fix: credentials, permissions, a queue that is missing or declared otherwise."""
NOT_ALLOWED = "NOT_ALLOWED"
"""The prefix of the server's reason for closing a connection to a virtual host."""


class RabbitConnection(aio_pika.Connection):
    """The driver's connection, closed also if it could not be opened, or if its close was cancelled.

    Otherwise its destructor closes it: in the thread of the garbage collector, which may have no event loop.
    """

    async def connect(self, *given: Any, **named: Any) -> None:
        """Connect once."""
        try:
            await super().connect(*given, **named)
        except BaseException:
            await self.close()
            raise

    async def close(self, *reason: Any) -> None:
        """Close the connection. It may be cancelled: the driver's own close would then wait for ever."""
        closing = asyncio.ensure_future(super().close(*reason))
        try:
            await asyncio.wait([closing])
            closing.result()
        finally:
            for _ in range(CANCELS_MAX):
                if closing.done():
                    break
                closing.cancel()
                await asyncio.wait([closing], timeout=CANCEL_S)
            if not self.is_closed:
                await super().close()


class RabbitmqOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options in the URL."""

    queue: str
    prefetch: int = 200
    """The most unacknowledged messages that the server delivers."""
    dead: str = ""
    """The queue for dead letters; by default the queue's name with `.dead`."""
    kind: Literal["quorum", "classic", "existing"] = "quorum"
    """How to declare the queue; `existing`: the queue exists, and nothing is declared."""
    management: str = ""
    """The management API, such as http://localhost:15672: only `semel explain` and `semel doctor` use it."""

    def __post_init__(self) -> None:
        if not self.queue:
            raise PolicyInvalid("a queue is needed: amqp://localhost/?queue=orders")
        if not 1 <= self.prefetch <= 65535:  # noqa: PLR2004 - the protocol's
            raise PolicyInvalid(f"prefetch is {self.prefetch}; it must lie between 1 and 65535")
        if self.management and not self.management.startswith(("http://", "https://")):
            raise PolicyInvalid("management is an address such as http://localhost:15672")


def from_url(url: str) -> "RabbitQueue":
    """Return the source of a URL such as `amqp://user:password@host/vhost?queue=orders`."""
    parts = parse_url(url)
    return RabbitQueue(
        urlunsplit((parts.scheme, parts.netloc, parts.path or "/", "", "")),
        struct_options(url, RabbitmqOptions),
    )


class RabbitQueue:
    """One consumer of a queue."""

    redelivers: bool = True
    deadline_s: float | None = None

    def __init__(self, server: str, options: RabbitmqOptions) -> None:
        self.server: str = server
        self.options: RabbitmqOptions = options
        self._connection: Any = None
        self._channel: Any = None
        self._delays: set[int] = set()
        self._inbox: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
        self._heard_at = 0.0

    @property
    def name(self) -> str:
        """The host and the queue, without credentials."""
        return f"amqp://{urlsplit(self.server).hostname or 'localhost'}/?queue={self.options.queue}"

    async def open(self) -> None:
        """Open a new connection; the server redelivers the messages that an earlier connection held."""
        queue = await self.visit()
        try:
            await self._channel.set_qos(self.options.prefetch)
            await queue.consume(self._inbox.put)
        except UNREACHABLE as error:
            await self.close()
            raise self.error_of(error) from error

    async def visit(self) -> Any:
        """Connect for dead letters only: a consumer would withhold prefetched messages from the workers."""
        await self.close()
        self._inbox = asyncio.Queue()
        self._delays = set()
        try:
            address = f"{self.server}?heartbeat={HEARTBEAT_S}"
            self._connection = await aio_pika.connect(
                address, timeout=CONNECT_S, connection_class=RabbitConnection
            )
            # The server confirms a message that no queue takes, after it has returned it: that must be an error.
            self._channel = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
            self._heard_at = monotonic()
            return await self._declare()
        except UNREACHABLE as error:
            await self.close()
            raise self.error_of(error) from error

    def error_of(self, error: BaseException) -> SemelError:
        """Return the error to raise after a failed connection: `SourceUnavailable` if a retry may help."""
        text = _reason(error) or str(error) or type(error).__name__
        if is_refusal(error):
            todo = (
                "the queue exists and was declared otherwise: add kind=existing to the URL"
                if isinstance(error, ChannelPreconditionFailed)
                else "check the credentials, the virtual host and the queue"
            )
            return SourceRefused(f"{self.name}: {text}; {todo}")
        return SourceUnavailable(text)

    async def _declare(self) -> Any:
        options = self.options
        await self._make_dead_letter_place()
        if options.kind == "existing":
            return await self._channel.get_queue(options.queue)
        return await self._channel.declare_queue(
            options.queue, durable=True, arguments={"x-queue-type": options.kind}
        )

    async def _make_dead_letter_place(self) -> None:
        """Create a missing dead-letter queue; a queue that was declared otherwise is used as it is.

        On a channel of its own: a refusal closes the channel, and with it its consumer.
        """
        with suppress(ChannelPreconditionFailed):
            async with self._connection.channel() as channel:
                await channel.declare_queue(
                    self._dead_queue, durable=True, arguments={"x-queue-type": "classic"}
                )

    async def receive(self, limit: int, wait_s: float) -> Sequence[Arrival]:
        """Return arrived messages; waits for the first."""
        if self._channel is None or self._channel.is_closed:
            raise SourceUnavailable("the connection is gone")
        found = []
        try:
            async with asyncio.timeout(wait_s):
                found.append(await self._inbox.get())
        except TimeoutError:
            pass
        while len(found) < limit and not self._inbox.empty():
            found.append(self._inbox.get_nowait())
        if found:
            self._heard_at = monotonic()
        elif monotonic() - self._heard_at > ASK_AFTER_S:
            await self.ping()
        return [self._arrival(message) for message in found]

    async def ping(self) -> None:
        """Ask for the queue: a server that is gone without closing the connection looks like an empty queue.

        Returns when the server has answered. Raises `SourceUnavailable`.
        """
        if self._channel is None:
            raise SourceUnavailable("not open")
        try:
            await self._channel.declare_queue(self.options.queue, passive=True, timeout=CONNECT_S)
        except UNREACHABLE as error:
            raise self.error_of(error) from error
        self._heard_at = monotonic()

    def _arrival(self, message: AbstractIncomingMessage) -> Arrival:
        headers = {name: _text(value) for name, value in message.headers.items()}
        if message.content_type:
            headers.setdefault("content-type", message.content_type)
        return Arrival(
            headers=headers,
            body=message.body,
            broker_id=_id_of(message),
            position=f"{self.options.queue}/{message.delivery_tag}",
            transport="rabbitmq",
            deliveries=_deliveries(message),
            handle=(self._channel, message),
        )

    async def ack(self, arrivals: Sequence[Arrival]) -> None:
        """Acknowledge messages; the server redelivers those of an earlier connection."""
        await self._each(arrivals, lambda message: message.ack())

    async def _each(self, arrivals: Sequence[Arrival], say: Any) -> None:
        for arrival in arrivals:
            channel, message = arrival.handle
            if channel is self._channel:
                try:
                    await say(message)
                except UNREACHABLE as error:
                    raise SourceUnavailable(str(error)) from error

    async def nack(self, arrivals: Sequence[Arrival], delay_s: float) -> None:
        """Return messages to the queue: at once, or through a delay queue."""
        if delay_s <= 0:
            await self._each(arrivals, lambda message: message.nack(requeue=True))
            return
        step_s = next((step for step in STEPS_S if step >= delay_s), STEPS_S[-1])
        # Each is published and confirmed: side by side, as one after the other would wait for each confirmation.
        postponed = (self._each([each], lambda message: self._postpone(message, step_s)) for each in arrivals)
        for failed in await asyncio.gather(*postponed, return_exceptions=True):
            if failed is not None:
                raise failed

    async def _postpone(self, message: AbstractIncomingMessage, step_s: int) -> None:
        name = self._delay_queue(step_s)
        if step_s not in self._delays:
            await self._make_delay_queue(name, step_s)
        copy = _copy(message)
        copy.headers[DELIVERIES] = _deliveries(message)
        try:
            await self._publish(name, copy)
        except SourceUnavailable as error:
            if not isinstance(error.__cause__, DeliveryError):
                raise
            await self._make_delay_queue(name, step_s)  # it was removed meanwhile
            await self._publish(name, copy)
        await message.ack()

    async def _make_delay_queue(self, name: str, step_s: int) -> None:
        await self._channel.declare_queue(
            name,
            durable=True,
            arguments={
                "x-queue-type": "classic",
                "x-message-ttl": step_s * 1000,
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": self.options.queue,
            },
        )
        self._delays.add(step_s)

    async def extend(self, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        """Return the messages of an earlier connection: they are no longer in hand."""
        return [arrival for arrival in arrivals if arrival.handle[0] is not self._channel]

    async def dead_letter(self, arrival: Arrival, letter: DeadLetterInfo) -> None:
        """Publish a copy with its information to the dead-letter queue."""
        copy = _copy(arrival.handle[1])
        copy.body = bytes(arrival.body)
        copy.headers.update(headers_of(letter))
        try:
            await self._publish(self._dead_queue, copy)
        except SourceUnavailable as error:
            if not isinstance(error.__cause__, DeliveryError):
                raise
            await self._make_dead_letter_place()  # it was removed meanwhile
            await self._publish(self._dead_queue, copy)

    async def _publish(self, queue: str, message: aio_pika.Message) -> None:
        if self._channel is None:
            raise SourceUnavailable("not open")
        try:
            await self._channel.default_exchange.publish(
                message, routing_key=queue, mandatory=True, timeout=CONNECT_S
            )
        except UNREACHABLE as error:
            raise SourceUnavailable(f"{queue} did not confirm: {error}") from error

    def _delay_queue(self, step_s: int) -> str:
        return f"{self.options.queue}.retry.{step_s}s"

    @property
    def delay_queues(self) -> list[str]:
        """Return the names of the delay queues, of which not all need exist."""
        return [self._delay_queue(step_s) for step_s in STEPS_S]

    @property
    def _dead_queue(self) -> str:
        return self.options.dead or f"{self.options.queue}.dead"

    # --- dead letters: a queue shows its messages only to a consumer, so they are received and returned ---

    async def look(self, limit: int) -> Sequence[DeadLetter]:
        """Return the oldest dead letters; they go back to their places in the queue when the connection closes."""
        queue = await self._channel.get_queue(self._dead_queue)
        found: list[DeadLetter] = []
        self._looked_at: dict[str, Any] = {}
        while len(found) < limit:
            message = await queue.get(fail=False)
            if message is None:
                break
            id_ = message.message_id or str(message.delivery_tag)
            while id_ in self._looked_at:  # another letter about the same event
                id_ += "+"
            self._looked_at[id_] = message
            headers = {name: _text(value) for name, value in message.headers.items()}
            if _id_of(message) is not None:
                headers.setdefault("message_id", str(message.message_id))
            found.append(DeadLetter.from_message(id_, headers, message.body))
        return found

    async def republish(self, headers: Mapping[str, str], body: bytes | None) -> None:
        """Publish a message to the queue itself."""
        message = aio_pika.Message(
            body or b"",
            headers=dict(headers),
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        message.message_id = headers.get("message_id")
        await self._publish(self.options.queue, message)

    async def remove(self, dead: DeadLetter) -> None:
        """Remove a dead letter that `look` returned on this connection. Raises `UsageError` for any other."""
        message = self._looked_at.get(dead.id)
        if message is None:
            raise UsageError(f"dead letter {dead.id!r} was not looked at on this connection")
        await message.ack()

    async def close(self) -> None:
        """Close the connection; the server delivers unacknowledged messages to another consumer."""
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            try:
                await connection.close()
            except UNREACHABLE:
                return


def is_refusal(error: BaseException) -> bool:
    """Whether a retry cannot fix the error. A missing virtual host has the same code as one that is full for now."""
    reason = _reason(error)
    if reason.startswith(NOT_ALLOWED):
        return "limit" not in reason
    return isinstance(error, REFUSALS)


def _reason(error: BaseException) -> str:
    """Return the server's reason for closing the connection; empty: it did not close it, or gave no reason.

    While a connection opens, the error of the client library only names an unexpected frame. The frame itself is
    found only in the traceback.
    """
    if isinstance(error, InvalidFrameError):
        for place, _ in walk_tb(error.__traceback__):
            frame = place.f_locals.get("frame")
            if isinstance(frame, Connection.Close):
                return str(frame.reply_text)
    return str(error.args[1]) if isinstance(error, ConnectionClosed) and len(error.args) > 1 else ""


def _copy(message: AbstractIncomingMessage) -> aio_pika.Message:
    """Copy the message as the producer sent it, without the server's additions."""
    headers = {name: value for name, value in message.headers.items() if not name.startswith("x-death")}
    for ours in ("x-delivery-count", DELIVERIES):
        headers.pop(ours, None)
    copy = aio_pika.Message(
        message.body,
        headers=headers,
        content_type=message.content_type,
        correlation_id=message.correlation_id,
        timestamp=message.timestamp,
        type=message.type,
        app_id=message.app_id,
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
    )
    if _id_of(message) is None:
        copy.headers[NO_ID] = "1"
    else:
        copy.message_id = message.message_id
    return copy


def _deliveries(message: AbstractIncomingMessage) -> int:
    """Return the number of deliveries, including this one and those of its earlier copies."""
    before, count = message.headers.get(DELIVERIES, 0), message.headers.get("x-delivery-count")
    now = count + 1 if isinstance(count, int) else 2 if message.redelivered else 1
    return now + (before if isinstance(before, int) else 0)


def _id_of(message: AbstractIncomingMessage) -> str | None:
    """Return the id from the producer: the client library invents one for a message without."""
    return None if NO_ID in message.headers else message.message_id


def _text(value: Any) -> Any:
    return value if isinstance(value, str | bytes) else str(value)
