"""SQS: long polling, visibility timeouts extended for all messages in hand, and ordered groups."""

import asyncio
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

import msgspec
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
)

from semel.brokers.dead_letters import DeadLetter, headers_of
from semel.brokers.source import Arrival, DeadLetterInfo, decode_body, expand_headers
from semel.errors import (
    MessageTooLarge,
    PolicyInvalid,
    SemelError,
    SourceRefused,
    SourceUnavailable,
    UsageError,
)
from semel.runtime.urls import option_texts, parse_url, struct_options

__all__ = ["SqsOptions", "SqsQueue", "from_url"]

RETRIES: dict[str, Any] = {"mode": "standard", "total_max_attempts": 3}
"""The client's own retries: for throttled calls. More of them would hide for long why the service is away."""
BATCH_MAX = 10
"""The most entries in one call of the service."""
VISIBLE_MAX_S = 43_200
"""Twelve hours after its receipt a message is visible again, whatever its extensions."""
ATTRIBUTES_MAX = 10
COMPRESSED = "(compressed)"
"""The text of a dead letter whose body is compressed, in an attribute: the service takes other bytes only there."""
BYTES_MAX = 262_144
"""The message size limit of a queue that does not report one."""
LOOK_S = 30
"""How long dead letters are hidden from others after `look`, unless the source is closed before."""
UNREACHABLE = (BotoCoreError, HTTPClientError, ConnectionError, TimeoutError, OSError)
REFUSALS = (NoCredentialsError, NoRegionError, PartialCredentialsError)
REFUSED_STATUS = (400, 401, 403, 404)
PASSING_CODES = (
    "Throttling",
    "RequestThrottled",
    "KmsThrottled",
    "OverLimit",
    "RequestExpired",
    "ExpiredToken",
)
"""Prefixes of error codes with such a status that a retry may fix: the client fetches new credentials."""


class SqsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options in the URL."""

    queue: str = ""
    """The queue's name; it may be in the path instead: sqs://eu-west-1/orders."""
    region: str = ""
    endpoint: str = ""
    """An endpoint other than AWS's own, such as http://localhost:9324."""
    deadline_s: float = 30.0
    """The visibility timeout of received messages."""
    dead: str = ""
    """The queue for dead letters; by default the queue's name with `-dead`."""

    def __post_init__(self) -> None:
        if not 1 <= self.deadline_s <= VISIBLE_MAX_S:
            raise PolicyInvalid(
                f"deadline_s is {self.deadline_s:g}; it must lie between 1 and {VISIBLE_MAX_S}"
            )


def from_url(url: str) -> "SqsQueue":
    """Return the source of a URL such as `sqs://eu-west-1/orders`; credentials are found as AWS's own tools do it."""
    parts = parse_url(url)
    given = {"queue": parts.path.strip("/"), "region": "" if "region" in option_texts(url) else parts.netloc}
    options = struct_options(url, SqsOptions, {name: text for name, text in given.items() if text})
    if not options.queue:
        raise UsageError("a queue is needed: sqs://eu-west-1/orders")
    return SqsQueue(options)


class SqsQueue:
    """One consumer of a queue."""

    redelivers: bool = True

    def __init__(self, options: SqsOptions) -> None:
        self._options = options
        self._entered: Any = None
        self._client: Any = None
        self._urls: dict[str, str] = {}
        self._limits: dict[str, int] = {}
        self._receipts: dict[str, str] = {}
        """The receipts of the dead letters that `look` returned."""

    @property
    def name(self) -> str:
        """The region and the queue."""
        return f"sqs://{self._options.region}/{self._options.queue}"

    @property
    def deadline_s(self) -> float:
        """The visibility timeout."""
        return self._options.deadline_s

    @property
    def _is_fifo(self) -> bool:
        """Whether groups keep their order: in a standard queue groups only share capacity fairly."""
        return self._options.queue.endswith(".fifo")

    async def visit(self) -> None:
        """Create a client, and find the queue. Creates nothing on the server."""
        if self._client is None:
            options = self._options
            self._entered = get_session().create_client(
                "sqs",
                region_name=options.region or None,
                endpoint_url=options.endpoint or None,
                config=AioConfig(retries=RETRIES),
            )
            try:
                self._client = await self._entered.__aenter__()
            except UNREACHABLE as error:
                raise self._error(error) from error
        await self._url(self._options.queue)

    async def open(self) -> None:
        """Connect, and create a missing dead-letter queue."""
        await self.visit()
        await self._make_dead_letter_place()

    async def _make_dead_letter_place(self) -> None:
        """Create a missing dead-letter queue. Raises `UsageError` if the service refuses that."""
        try:
            await self._url(self.dead_letter_name)
        except SourceRefused:
            attributes = {"FifoQueue": "true"} if self.dead_letter_name.endswith(".fifo") else {}
            try:
                made = await self._ask("create_queue", QueueName=self.dead_letter_name, Attributes=attributes)
            except SourceRefused as error:
                raise UsageError(
                    f"there is no queue {self.dead_letter_name} for dead letters, and it cannot be made ({error});"
                    " create it, or name another with dead="
                ) from error
            self._urls[self.dead_letter_name] = made["QueueUrl"]

    def _error(self, error: BaseException) -> SemelError:
        """Return the error to raise: `SourceUnavailable` if a retry may help."""
        if isinstance(error, REFUSALS):
            return SourceRefused(f"{self.name}: {error}")
        if isinstance(error, ClientError):
            code = str(error.response.get("Error", {}).get("Code", ""))
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if status in REFUSED_STATUS and not code.rpartition(".")[2].startswith(PASSING_CODES):
                return SourceRefused(
                    f"{self.name}: {error}; create the queue first, or check its name, its region and your rights"
                )
        return SourceUnavailable(str(error))

    async def _url(self, queue: str) -> str:
        if queue not in self._urls:
            self._urls[queue] = (await self._ask("get_queue_url", QueueName=queue))["QueueUrl"]
        return self._urls[queue]

    async def attributes(self, queue: str = "") -> Mapping[str, str]:
        """Return the attributes of the queue, or of another one. Raises `SourceRefused` if it does not exist."""
        url = await self._url(queue or self._options.queue)
        answer = await self._ask("get_queue_attributes", QueueUrl=url, AttributeNames=["All"])
        attributes: Mapping[str, str] = answer["Attributes"]
        return attributes

    async def _ask(self, operation: str, **arguments: Any) -> Any:
        if self._client is None:
            raise SourceUnavailable("not open")
        try:
            return await getattr(self._client, operation)(**arguments)
        except (ClientError, *UNREACHABLE) as error:
            raise self._error(error) from error

    async def receive(self, limit: int, wait_s: float) -> Sequence[Arrival]:
        """Return visible messages; waits for the first, in whole seconds, as the service requires."""
        asked_at = monotonic()
        answer = await self._ask(
            "receive_message",
            QueueUrl=await self._url(self._options.queue),
            MaxNumberOfMessages=min(limit, BATCH_MAX),
            WaitTimeSeconds=1 if wait_s > 0 else 0,
            VisibilityTimeout=round(self.deadline_s),
            MessageSystemAttributeNames=["All"],
            MessageAttributeNames=["All"],
        )
        return [self._arrival(message, asked_at) for message in answer.get("Messages", ())]

    def _arrival(self, message: Mapping[str, Any], asked_at: float) -> Arrival:
        system, headers = message.get("Attributes", {}), expand_headers(_headers(message))
        return Arrival(
            headers=headers,
            body=decode_body(message["Body"], headers.get("encoding")),
            broker_id=system.get("MessageDeduplicationId"),
            position=f"{self._options.queue}/{message['MessageId']}",
            transport="sqs",
            lane=system.get("MessageGroupId", "") if self._is_fifo else "",
            deliveries=int(system.get("ApproximateReceiveCount", 0)),
            handle=_SqsReceipt(message["ReceiptHandle"], message, asked_at),
        )

    async def ack(self, arrivals: Sequence[Arrival]) -> None:
        """Delete messages. An expired receipt deletes nothing; the message is redelivered as a duplicate."""
        await self._batches("delete_message_batch", arrivals, {})

    async def nack(self, arrivals: Sequence[Arrival], delay_s: float) -> None:
        """Make messages visible again after the delay."""
        await self._batches(
            "change_message_visibility_batch", arrivals, {"VisibilityTimeout": _whole(delay_s)}
        )

    async def extend(self, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        """Keep messages invisible; returns those whose receipt has expired, or whose twelve hours are over."""
        now = monotonic()
        old = [each for each in arrivals if now + self.deadline_s > each.handle.asked_at + VISIBLE_MAX_S]
        young = [each for each in arrivals if each not in old]
        return old + await self._batches(
            "change_message_visibility_batch", young, {"VisibilityTimeout": round(self.deadline_s)}
        )

    async def _batches(
        self, operation: str, arrivals: Sequence[Arrival], more: dict[str, Any]
    ) -> list[Arrival]:
        """Call the service for all messages, ten with each call, side by side; returns those that it refused."""
        url = await self._url(self._options.queue)

        async def ask(batch: Sequence[Arrival]) -> list[Arrival]:
            entries = [
                {"Id": str(number), "ReceiptHandle": each.handle.receipt, **more}
                for number, each in enumerate(batch)
            ]
            answer = await self._ask(operation, QueueUrl=url, Entries=entries)
            return [batch[int(each["Id"])] for each in answer.get("Failed", ())]

        batches = [arrivals[at : at + BATCH_MAX] for at in range(0, len(arrivals), BATCH_MAX)]
        refused: list[Arrival] = []
        for found in await asyncio.gather(*map(ask, batches), return_exceptions=True):
            if isinstance(found, BaseException):
                raise found
            refused += found
        return refused

    # --- dead letters ---

    async def dead_letter(self, arrival: Arrival, letter: DeadLetterInfo) -> None:
        """Send a copy with its information in one attribute: a message has at most ten."""
        message = arrival.handle.message
        own, body = list(message.get("MessageAttributes", {}).items()), message["Body"]
        ours: dict[str, Mapping[str, Any]] = {}
        if letter.body_encoding:
            # The service's own text of the body: of 250 kB of any text that it accepts, this saves 10 kB or more.
            ours[BODY] = {"DataType": "Binary", "BinaryValue": zlib.compress(body.encode())}
            body = COMPRESSED
        most = ATTRIBUTES_MAX - 1 - len(ours)
        system = message.get("Attributes", {})
        information = {
            **{name: value["StringValue"] for name, value in own[most:] if "StringValue" in value},
            **headers_of(letter),
            **{name: system[of] for of, name in KEPT.items() if of in system},
        }
        ours[LETTER] = _attribute(msgspec.json.encode(information).decode())
        attributes = {**dict(own[:most]), **ours}
        await self._send(self.dead_letter_name, body, attributes, system.get("MessageGroupId", ""))

    async def _send(self, queue: str, body: str, attributes: Mapping[str, Any], group: str) -> None:
        message: dict[str, Any] = {"MessageBody": body, "MessageAttributes": dict(attributes)}
        if queue.endswith(".fifo"):
            message["MessageGroupId"] = group or "semel"
            # Each dead letter or replay is a message of its own: the record decides whether its effect happens again.
            message["MessageDeduplicationId"] = os.urandom(16).hex()
        size = len(body.encode()) + sum(_size(name, value) for name, value in attributes.items())
        if size > await self._bytes_max(queue):
            del self._limits[queue]  # it may have been raised since
            if size > (most := await self._bytes_max(queue)):
                raise MessageTooLarge(
                    f"{size:,} bytes with its attributes, and {queue} takes {most:,}; raise its MaximumMessageSize"
                )
        await self._ask("send_message", QueueUrl=await self._url(queue), **message)

    async def _bytes_max(self, queue: str) -> int:
        """Return the size limit of a message of the queue, with its attributes. Requested if it is not known."""
        if queue not in self._limits:
            attributes = await self.attributes(queue)
            self._limits[queue] = int(attributes.get("MaximumMessageSize", BYTES_MAX))
        return self._limits[queue]

    @property
    def dead_letter_name(self) -> str:
        """The dead-letter queue."""
        queue = self._options.queue
        if self._options.dead:
            return self._options.dead
        return f"{queue.removesuffix('.fifo')}-dead.fifo" if queue.endswith(".fifo") else f"{queue}-dead"

    async def look(self, limit: int) -> Sequence[DeadLetter]:
        """Return dead letters, in no order; closing this source makes them visible to others again."""
        found: dict[str, DeadLetter] = {}
        while len(found) < limit:
            answer = await self._ask(
                "receive_message",
                QueueUrl=await self._url(self.dead_letter_name),
                MaxNumberOfMessages=BATCH_MAX,
                VisibilityTimeout=LOOK_S,
                WaitTimeSeconds=0,
                MessageSystemAttributeNames=["All"],
                MessageAttributeNames=["All"],
            )
            messages = answer.get("Messages", ())
            if not messages or all(each["MessageId"] in found for each in messages):
                break
            for each in messages:
                headers = _headers(each)
                headers.update(msgspec.json.decode(headers.pop(LETTER, "{}")))
                if ID in headers:  # by which its key was found, unless another field came before it
                    headers.setdefault(IDEMPOTENCY_KEY, headers.pop(ID))
                packed = each.get("MessageAttributes", {}).get(BODY, {}).get("BinaryValue")
                body = each["Body"].encode() if packed is None else packed
                found[each["MessageId"]] = DeadLetter.from_message(each["MessageId"], headers, body)
                self._receipts[each["MessageId"]] = each["ReceiptHandle"]
        return list(found.values())[:limit]

    async def republish(self, headers: Mapping[str, str], body: bytes | None) -> None:
        """Send a message to the queue itself, to its old group."""
        own = dict(headers)
        group = own.pop(GROUP, "")
        if self._is_fifo and "message_id" in own:
            # The service wants a new id of its own, which would be taken for the key: the old one goes before it.
            own = {IDEMPOTENCY_KEY: own["message_id"], **own}
        attributes = {name: _attribute(value) for name, value in list(own.items())[:ATTRIBUTES_MAX]}
        await self._send(self._options.queue, (body or b"").decode(), attributes, group)

    async def remove(self, dead: DeadLetter) -> None:
        """Delete a dead letter that `look` returned before."""
        await self._ask(
            "delete_message",
            QueueUrl=await self._url(self.dead_letter_name),
            ReceiptHandle=self._receipts.pop(dead.id),
        )

    async def _put_back(self) -> None:
        """Make the dead letters that `look` returned visible again."""
        receipts, self._receipts = self._receipts, {}
        with suppress(SourceUnavailable):  # they become visible after their timeout
            for receipt in receipts.values():
                await self._ask(
                    "change_message_visibility",
                    QueueUrl=await self._url(self.dead_letter_name),
                    ReceiptHandle=receipt,
                    VisibilityTimeout=0,
                )

    async def close(self) -> None:
        """Close the client; messages in hand become visible again after their timeout."""
        await self._put_back()
        entered, self._entered, self._client = self._entered, None, None
        self._urls.clear()
        if entered is not None:
            await entered.__aexit__(None, None, None)


LETTER, BODY = "semel-dead-letter", "semel-dead-body"
ID, GROUP = "semel-sqs-id", "semel-sqs-group"
KEPT = {"MessageDeduplicationId": ID, "MessageGroupId": GROUP}
"""Attributes that identify a message in a FIFO queue; its copy has no other place for them."""
IDEMPOTENCY_KEY = "Idempotency-Key"


class _SqsReceipt(msgspec.Struct, frozen=True, eq=False):
    receipt: str
    message: Mapping[str, Any]
    asked_at: float


def _headers(message: Mapping[str, Any]) -> dict[str, str]:
    attributes = message.get("MessageAttributes", {})
    return {name: value["StringValue"] for name, value in attributes.items() if "StringValue" in value}


def _size(name: str, value: Mapping[str, Any]) -> int:
    """Return the bytes of an attribute as the service counts them: name, type and value."""
    text = value.get("StringValue", "")
    return (
        len(name.encode()) + len(value["DataType"]) + len(text.encode()) + len(value.get("BinaryValue", b""))
    )


def _attribute(value: str) -> dict[str, str]:
    return {"DataType": "String", "StringValue": value}


def _whole(delay_s: float) -> int:
    """Return whole seconds, rounded up, as the service requires."""
    return min(VISIBLE_MAX_S, -int(-delay_s // 1))
