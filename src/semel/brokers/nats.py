"""NATS JetStream: pull consumers, `in_progress` as the heartbeat, and confirmed acks."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlunsplit

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoServersError
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StreamConfig
from nats.js.errors import APIError, NotFoundError

from semel.brokers.dead_letters import DeadLetter, headers_of
from semel.brokers.source import Arrival, DeadLetterInfo
from semel.errors import MessageTooLarge, PolicyInvalid, SourceRefused, SourceUnavailable, UsageError
from semel.runtime.urls import parse_url, struct_options

__all__ = ["JetStream", "NatsOptions", "connect", "from_url"]

CONNECT_S = 10.0
ASK_S = 5.0
HEADER_BYTES = 16
"""An upper bound of a header's overhead beside its name and value, and of the line before all headers."""
PING_S = 10.0
"""How often the connection is tested: a server that vanished without closing it is noticed within two intervals."""
SUBJECT = "semel-nats-subject"
"""The header of a dead letter that keeps the subject of its message: a stream may have many, or patterns."""
UNREACHABLE = (NatsError, ConnectionError, TimeoutError, OSError)


class NatsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options in the URL."""

    stream: str
    durable: str
    """The name of the pull consumer: processes with the same name share the work."""
    subject: str = ""
    """Only this subject of the stream; it may have wildcards."""
    deadline_s: float = 30.0
    """The `ack_wait` of a consumer that semel creates: the time without an answer before a redelivery."""
    dead: str = ""
    """The subject for dead letters, in a stream of its own; by default the stream's name with `-dead`: streams
    often take every subject that begins with their name and a dot."""

    def __post_init__(self) -> None:
        if not self.stream or not self.durable:
            raise PolicyInvalid(
                "a stream and a durable are needed: nats://localhost?stream=ORDERS&durable=billing"
            )


def from_url(url: str) -> "JetStream":
    """Return the source of a URL such as `nats://host:4222?stream=ORDERS&durable=billing`; commas separate hosts."""
    parts = parse_url(url)
    return JetStream(urlunsplit((parts.scheme, parts.netloc, "", "", "")), struct_options(url, NatsOptions))


class JetStream:
    """One member of a durable pull consumer."""

    redelivers: bool = True

    def __init__(self, server: str, options: NatsOptions) -> None:
        self.server: str = server
        self.options: NatsOptions = options
        self.deadline_s: float | None = options.deadline_s
        self.keeps_acked: bool = False
        """Whether the stream keeps acknowledged messages, until its limits remove them: a work queue does not."""
        self._nats: Any = None
        self._jetstream: Any = None
        self._pull: Any = None

    @property
    def name(self) -> str:
        """The stream and the consumer, without credentials."""
        host = self.server.rpartition("@")[2].removeprefix("nats://")
        return f"nats://{host}?stream={self.options.stream}&durable={self.options.durable}"

    async def open(self) -> None:
        """Connect, and create a missing consumer. The next `open` replaces a broken connection."""
        options = self.options
        try:
            if self._nats is None or self._nats.is_closed:
                await self.close()
                self._nats = await connect(self.server)
                self._jetstream = self._nats.jetstream(timeout=ASK_S)
            try:
                found = await self._jetstream.consumer_info(options.stream, options.durable)
            except NotFoundError:
                found = await self._create_consumer()
            if found.config.ack_policy != AckPolicy.EXPLICIT:
                raise UsageError(
                    f"the consumer {options.durable} has no explicit acks; use another consumer, or set its ack policy"
                    " to explicit"
                )
            self.deadline_s = found.config.ack_wait or options.deadline_s
            stream = await self._jetstream.stream_info(options.stream)
            self.keeps_acked = stream.config.retention == RetentionPolicy.LIMITS
            await self._make_dead_letter_place()
            self._pull = await self._jetstream.pull_subscribe_bind(options.durable, options.stream)
        except UNREACHABLE as error:
            raise unavailable(error) from error

    async def _create_consumer(self) -> Any:
        options = self.options
        config = ConsumerConfig(
            durable_name=options.durable,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=options.deadline_s,
            max_deliver=-1,  # the record counts the attempts and ends them
            max_ack_pending=10_000,
            filter_subject=options.subject or None,
        )
        try:
            return await self._jetstream.add_consumer(options.stream, config)
        except NotFoundError:
            raise SourceRefused(f"{self.name}: there is no such stream; create it first") from None

    async def receive(self, limit: int, wait_s: float) -> Sequence[Arrival]:
        """Return messages of the consumer; waits for the first."""
        if self._pull is None or self._nats is None or self._nats.is_closed:
            raise SourceUnavailable("the connection is closed")
        try:
            found = await self._pull.fetch(limit, timeout=max(0.05, wait_s))
        except TimeoutError:
            return []
        except UNREACHABLE as error:
            raise unavailable(error) from error
        return [self._arrival(message) for message in found]

    async def ping(self) -> None:
        """Return when the server has answered. Raises `SourceUnavailable`."""
        if self._nats is None:
            raise SourceUnavailable("not open")
        try:
            await self._nats.flush(timeout=ASK_S)
        except UNREACHABLE as error:
            raise unavailable(error) from error

    def _arrival(self, message: Msg) -> Arrival:
        metadata = message.metadata
        return Arrival(
            headers=message.headers or {},
            body=message.data,
            position=f"{self.options.stream}/{metadata.sequence.stream}",
            transport="nats",
            deliveries=metadata.num_delivered,
            handle=message,
        )

    async def _reply(self, arrivals: Sequence[Arrival], reply: bytes) -> None:
        """Reply to messages on the current connection; they may have arrived on an earlier one."""
        if self._nats is None:
            raise SourceUnavailable("not open")
        try:
            for arrival in arrivals:
                await self._nats.publish(arrival.handle.reply, reply)
        except UNREACHABLE as error:
            raise unavailable(error) from error

    async def ack(self, arrivals: Sequence[Arrival]) -> None:
        """Acknowledge messages, and wait until the server has confirmed it."""
        if self._nats is None:
            raise SourceUnavailable("not open")
        try:
            await asyncio.gather(
                *(self._nats.request(each.handle.reply, Msg.Ack.Ack, timeout=ASK_S) for each in arrivals)
            )
        except UNREACHABLE as error:
            raise unavailable(error) from error

    async def nack(self, arrivals: Sequence[Arrival], delay_s: float) -> None:
        """Have messages delivered again after the delay."""
        delay = msgspec.json.encode({"delay": round(delay_s * 1e9)}) if delay_s else b""
        await self._reply(arrivals, b" ".join(part for part in (Msg.Ack.Nak, delay) if part))

    async def extend(self, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        """Send `in_progress` for messages. The server does not report those that it gave to another consumer."""
        await self._reply(arrivals, Msg.Ack.Progress)
        return []

    async def dead_letter(self, arrival: Arrival, letter: DeadLetterInfo) -> None:
        """Publish a copy with its information to the dead-letter stream; creates a missing stream."""
        headers = {**dict(arrival.handle.headers or {}), **headers_of(letter)}
        id_ = headers.pop("Nats-Msg-Id", None)  # with it the server would drop a second letter of one message
        if id_ is not None:
            headers["Message-Id"] = id_
        headers[SUBJECT] = arrival.handle.subject
        await self._publish(self._dead_subject, arrival.body, headers)

    @property
    def _dead_subject(self) -> str:
        return self.options.dead or f"{self.options.stream}-dead"

    async def _find_dead_stream(self) -> str:
        """Return the stream that takes dead letters; raises `UsageError` if it is the source's own."""
        name = await self._jetstream.find_stream_name_by_subject(self._dead_subject)
        if name == self.options.stream:
            raise UsageError(
                f"stream {name} takes the subject {self._dead_subject} itself, so its dead letters would be consumed"
                " again; name another subject with dead="
            )
        return str(name)

    async def _make_dead_letter_place(self) -> None:
        """Create a missing dead-letter stream. Raises `UsageError` if no stream takes dead letters."""
        try:
            await self._find_dead_stream()
        except NotFoundError:
            try:
                name = self._dead_subject.replace(".", "-")
                await self._jetstream.add_stream(StreamConfig(name=name, subjects=[self._dead_subject]))
            except APIError as error:
                raise UsageError(
                    f"no stream takes dead letters at {self._dead_subject}, and none can be made ({error.description});"
                    " create one, or name another subject with dead="
                ) from error

    async def _publish(self, subject: str, body: bytes, headers: Mapping[str, Any]) -> None:
        size = len(body) + sum(len(name) + len(str(value)) + HEADER_BYTES for name, value in headers.items())
        if size + HEADER_BYTES > self._nats.max_payload:
            raise MessageTooLarge(
                f"{size:,} bytes, and the server takes {self._nats.max_payload:,}; raise its max_payload"
            )
        try:
            if subject == self._dead_subject:
                await self._make_dead_letter_place()
            await self._jetstream.publish(subject, body, timeout=ASK_S, headers=dict(headers))
        except UNREACHABLE as error:
            raise SourceUnavailable(f"{subject} did not confirm: {error}") from error

    async def look(self, limit: int) -> Sequence[DeadLetter]:
        """Return the oldest dead letters."""
        found: list[DeadLetter] = []
        try:
            stream = await self._find_dead_stream()
            state = (await self._jetstream.stream_info(stream)).state
        except NotFoundError:
            return found
        for sequence in range(
            max(1, state.first_seq), state.last_seq + 1
        ):  # 0 while nothing was ever written
            if len(found) == limit:
                break
            try:
                message = await self._jetstream.get_msg(stream, sequence)
            except NotFoundError:  # removed
                continue
            if message.subject != self._dead_subject:  # a stream with other subjects, too
                continue
            found.append(DeadLetter.from_message(str(sequence), message.headers or {}, message.data or b""))
        return found

    async def republish(self, headers: Mapping[str, str], body: bytes | None) -> None:
        """Publish a message to its old subject, without the server's own deduplication: semel's decides."""
        own = dict(headers)
        subject = own.pop(SUBJECT, "") or self.options.subject
        if not subject:
            stream = await self._jetstream.stream_info(self.options.stream)
            subject = stream.config.subjects[0]
        if "*" in subject or ">" in subject:
            raise UsageError(f"{subject!r} is a pattern; name the subject to publish to with subject=")
        await self._publish(subject, body or b"", own)

    async def remove(self, dead: DeadLetter) -> None:
        """Delete a dead letter."""
        await self._jetstream.delete_msg(await self._find_dead_stream(), int(dead.id))

    async def close(self) -> None:
        """Close the connection; unacknowledged messages are delivered again after their deadline."""
        connection, self._nats, self._pull = self._nats, None, None
        if connection is not None:
            await connection.close_socket()


class NatsClient(Client):
    """The driver's client, which can close its socket."""

    async def close_socket(self) -> None:
        """Close the client and its socket, which a cancelled `close` leaves open."""
        try:
            with suppress(NatsError):
                await self.close()
        finally:
            if self._transport is not None:
                self._transport.close()  # type: ignore[no-untyped-call]


async def connect(server: str) -> Any:
    """Connect once, trying each server of the URL; the caller connects again when the connection is closed.

    Raises `SourceRefused` if the server refuses the credentials, and the client's own errors.
    """
    errors: list[Exception] = []

    async def note(error: Exception) -> None:
        errors.append(error)

    client: Any = NatsClient()
    try:
        await client.connect(
            server,
            connect_timeout=CONNECT_S,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            ping_interval=PING_S,
            max_outstanding_pings=1,
            error_cb=note,
        )
        return client
    except asyncio.CancelledError:  # by a stop
        await client.close_socket()
        raise
    except NatsError as error:
        await client.close_socket()
        if any("authorization" in str(each).lower() for each in (error, *errors)):
            raise SourceRefused(f"the server refuses these credentials: {error}") from error
        if isinstance(error, NoServersError) and errors:  # the reason, not that there is no further server
            raise errors[-1] from None
        raise


def unavailable(error: BaseException) -> SourceUnavailable:
    """Return the error to raise while the server does not answer."""
    return SourceUnavailable(str(error) or type(error).__name__)
