"""A sink on SQS: batches of ten; FIFO queues get the row's id as deduplication id, and its aggregate as group."""

import asyncio
import base64
import re
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from hashlib import sha256
from typing import Any

import msgspec
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError, ClientError

from semel.brokers.sqs import REFUSALS
from semel.core.relay_flow import NotPublished, OutboxRow, Published, PublishRefused, Sent
from semel.outbox.message import attributes
from semel.outbox.sinks import BEGIN_MAX_S, HELD, LATER, destination_of, refusal, unavailable
from semel.runtime.urls import parse_url, read_options

__all__ = ["SqsSink", "from_url"]

WAIT_S = 10.0
ENTRIES_MAX = 10
BATCH_BYTES_MAX = 256 * 1024
CALLS_MAX = 8
ATTRIBUTES_MAX = 10
FIFO = ".fifo"
_GROUP = re.compile(r"[!-~]{1,128}")


class SqsSink:
    """Queues of one region, by name or URL. Credentials come from the usual places of AWS tools."""

    ordered: bool = True
    batch_max: int = 200

    def __init__(self, *, queue: str = "", region: str | None = None, endpoint: str | None = None) -> None:
        self.name: str = f"sqs://{region or 'aws'}/{queue}"
        self._queue = queue
        self._region = region
        self._endpoint = endpoint
        self._stack: AsyncExitStack | None = None
        self._client: Any = None
        self._urls: dict[str, str] = {}

    async def open(self) -> None:
        """Create the client; no call yet."""
        config = AioConfig(connect_timeout=WAIT_S, read_timeout=WAIT_S, retries={"max_attempts": 0})
        self._stack = AsyncExitStack()
        try:
            self._client = await self._stack.enter_async_context(
                get_session().create_client(
                    "sqs", region_name=self._region, endpoint_url=self._endpoint, config=config
                )
            )
        except REFUSALS as error:
            raise refusal(self.name, error) from error
        except BotoCoreError as error:
            raise unavailable(self.name, error) from error

    async def close(self) -> None:
        """Close the connections."""
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.aclose()

    async def publish(self, rows: Sequence[OutboxRow]) -> list[Sent]:
        """Publish ten rows per call, several calls at once; to a FIFO queue, one row of an aggregate at a time.

        Even a FIFO queue may refuse a row of a batch and accept later ones. A standard queue keeps no
        order, so none is kept towards it.
        """
        answers: list[Sent] = [LATER] * len(rows)
        left = list(range(len(rows)))
        give_up_at = time.monotonic() + BEGIN_MAX_S
        while left:
            due, left = self._round(rows, left)
            await self._call_all(rows, due, answers)
            stopped = {rows[at].aggregate for at in due if not isinstance(answers[at], Published)} - {None}
            for at in left:
                if rows[at].aggregate in stopped:
                    answers[at] = HELD
            left = [at for at in left if rows[at].aggregate not in stopped]
            if time.monotonic() >= give_up_at:
                break
        return answers

    def _round(self, rows: Sequence[OutboxRow], places: list[int]) -> tuple[list[int], list[int]]:
        """Return the rows to send now, and the rows that must wait for them."""
        due: list[int] = []
        later: list[int] = []
        begun: set[tuple[str, str]] = set()
        for at in places:
            aggregate = rows[at].aggregate
            if aggregate is None or not destination_of(rows[at], self._queue).endswith(FIFO):
                due.append(at)
            elif aggregate in begun:
                later.append(at)
            else:
                begun.add(aggregate)
                due.append(at)
        return due, later

    async def _call_all(self, rows: Sequence[OutboxRow], places: list[int], answers: list[Sent]) -> None:
        room = asyncio.Semaphore(CALLS_MAX)

        async def send(queue: str, some: list[int]) -> None:
            async with room:
                told = await self._send(queue, [rows[at] for at in some])
            for at, answer in zip(some, told, strict=True):
                answers[at] = answer

        batches: dict[str, list[list[int]]] = {}
        sizes: dict[str, int] = {}
        for at in places:
            queue = destination_of(rows[at], self._queue)
            size = len(body_of(rows[at])) + 2048
            made = batches.setdefault(queue, [[]])
            if len(made[-1]) == ENTRIES_MAX or sizes.get(queue, 0) + size > BATCH_BYTES_MAX:
                made.append([])
                sizes[queue] = 0
            made[-1].append(at)
            sizes[queue] = sizes.get(queue, 0) + size
        await asyncio.gather(*(send(queue, some) for queue, made in batches.items() for some in made if some))

    async def _send(self, queue: str, rows: list[OutboxRow]) -> list[Sent]:
        try:
            url = await self._url(queue)
            entries = [entry_of(at, row, fifo=url.endswith(FIFO)) for at, row in enumerate(rows)]
            told = await self._client.send_message_batch(QueueUrl=url, Entries=entries)
        except ClientError as error:
            said = error.response.get("Error", {})
            return [PublishRefused(f"{queue}: {said.get('Code')}: {said.get('Message')}")] * len(rows)
        except (BotoCoreError, OSError, TimeoutError) as error:
            return [NotPublished(f"{type(error).__name__}: {error}")] * len(rows)
        answers: list[Sent] = [NotPublished()] * len(rows)
        for each in told.get("Successful", ()):
            answers[int(each["Id"])] = Published()
        for each in told.get("Failed", ()):
            of_message = bool(each.get("SenderFault"))
            answers[int(each["Id"])] = PublishRefused(
                f"{each['Code']}: {each.get('Message')}", of_message=of_message
            )
        return answers

    async def _url(self, queue: str) -> str:
        if "://" in queue:
            return queue
        if queue not in self._urls:
            self._urls[queue] = (await self._client.get_queue_url(QueueName=queue))["QueueUrl"]
        return self._urls[queue]


def body_of(row: OutboxRow) -> str:
    """Return the payload as text, as SQS requires."""
    try:
        return row.payload.decode()
    except UnicodeDecodeError:
        return base64.b64encode(row.payload).decode()


def entry_of(at: int, row: OutboxRow, *, fifo: bool) -> dict[str, Any]:
    """Return one entry of a batch. It has at most ten attributes; further headers go into one of them as JSON."""
    body = body_of(row)
    told = {"message_id": row.id, "content_type": row.content_type}
    if body.encode() != row.payload:
        told["encoding"] = "base64"
    for name, value in attributes(row).items():
        if name in ("specversion", "id", "source", "type"):
            told[f"ce_{name}"] = value
    if row.traceparent is not None:
        told["traceparent"] = row.traceparent
    if len(told) + len(row.headers) <= ATTRIBUTES_MAX:
        told |= row.headers
    else:
        told["headers"] = msgspec.json.encode(row.headers).decode()
    entry: dict[str, Any] = {
        "Id": str(at),
        "MessageBody": body,
        "MessageAttributes": {
            name: {"DataType": "String", "StringValue": value} for name, value in told.items() if value
        },
    }
    if fifo:
        entry |= {"MessageDeduplicationId": row.id, "MessageGroupId": group_of(row)}
    return entry


def group_of(row: OutboxRow) -> str:
    """Return the aggregate as a group name, or a digest if SQS does not accept it."""
    group = row.id if row.aggregate is None else "/".join(row.aggregate)
    return group if _GROUP.fullmatch(group) else sha256(group.encode()).hexdigest()


def from_url(url: str) -> SqsSink:
    """`sqs://eu-west-1/orders.fifo`, or `sqs://eu-west-1/orders?endpoint=http://localhost:9324`."""
    parts, options = parse_url(url), read_options(url, {"endpoint": str, "region": str})
    region = options.get("region") or parts.hostname
    return SqsSink(queue=parts.path.strip("/"), region=region, endpoint=options.get("endpoint"))
