"""A sink on SQS: batches of ten; FIFO queues get the row's id to deduplicate by, and its aggregate as group."""

import asyncio
import base64
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError, ClientError

from semel.core.relaying import Published, Refused, Row, Sent, Unsent
from semel.outbox.message import attributes
from semel.outbox.sinks import destination_of, options_of, unavailable

__all__ = ["SqsSink", "from_url"]

WAIT_S = 10.0
ENTRIES_MAX = 10
BATCH_BYTES_MAX = 256 * 1024
CALLS_MAX = 8
ATTRIBUTES_MAX = 10


class SqsSink:
    """Queues of one region, by name or URL. Credentials are found as AWS's own tools find them."""

    ordered: bool = False
    batch_max: int = 200

    def __init__(self, *, queue: str = "", region: str | None = None, endpoint: str | None = None) -> None:
        self.name: str = f"sqs://{endpoint or region or 'aws'}/{queue}"
        self._queue = queue
        self._region = region
        self._endpoint = endpoint
        self._stack: AsyncExitStack | None = None
        self._client: Any = None
        self._urls: dict[str, str] = {}

    async def open(self) -> None:
        """Nothing is called yet."""
        config = AioConfig(connect_timeout=WAIT_S, read_timeout=WAIT_S, retries={"max_attempts": 0})
        self._stack = AsyncExitStack()
        try:
            self._client = await self._stack.enter_async_context(
                get_session().create_client(
                    "sqs", region_name=self._region, endpoint_url=self._endpoint, config=config
                )
            )
        except BotoCoreError as error:
            raise unavailable(self.name, error) from error

    async def close(self) -> None:
        """Close the connections."""
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.aclose()

    async def publish(self, rows: Sequence[Row]) -> list[Sent]:
        """Ten to a call, several calls at once."""
        answers: list[Sent] = [Unsent()] * len(rows)
        room = asyncio.Semaphore(CALLS_MAX)

        async def send(queue: str, places: list[int]) -> None:
            async with room:
                told = await self._send(queue, [rows[at] for at in places])
            for at, answer in zip(places, told, strict=True):
                answers[at] = answer

        by_queue: dict[str, list[list[int]]] = {}
        sizes: dict[str, int] = {}
        for at, row in enumerate(rows):
            queue = destination_of(row, self._queue)
            batches = by_queue.setdefault(queue, [[]])
            size = len(body_of(row)) + 2048
            if len(batches[-1]) == ENTRIES_MAX or sizes.get(queue, 0) + size > BATCH_BYTES_MAX:
                batches.append([])
                sizes[queue] = 0
            batches[-1].append(at)
            sizes[queue] = sizes.get(queue, 0) + size
        await asyncio.gather(
            *(send(queue, batch) for queue, batches in by_queue.items() for batch in batches if batch)
        )
        return answers

    async def _send(self, queue: str, rows: list[Row]) -> list[Sent]:
        try:
            url = await self._url(queue)
            entries = [entry_of(at, row, fifo=url.endswith(".fifo")) for at, row in enumerate(rows)]
            told = await self._client.send_message_batch(QueueUrl=url, Entries=entries)
        except ClientError as error:
            said = error.response.get("Error", {})
            return [Refused(f"{said.get('Code')}: {said.get('Message')}")] * len(rows)
        except (BotoCoreError, OSError, TimeoutError) as error:
            return [Unsent(f"{type(error).__name__}: {error}")] * len(rows)
        answers: list[Sent] = [Unsent()] * len(rows)
        for each in told.get("Successful", ()):
            answers[int(each["Id"])] = Published()
        for each in told.get("Failed", ()):
            of_message = bool(each.get("SenderFault"))
            answers[int(each["Id"])] = Refused(
                f"{each['Code']}: {each.get('Message')}", of_message=of_message
            )
        return answers

    async def _url(self, queue: str) -> str:
        if "://" in queue:
            return queue
        if queue not in self._urls:
            self._urls[queue] = (await self._client.get_queue_url(QueueName=queue))["QueueUrl"]
        return self._urls[queue]


def body_of(row: Row) -> str:
    """The payload as text: SQS takes nothing else."""
    try:
        return row.payload.decode()
    except UnicodeDecodeError:
        return base64.b64encode(row.payload).decode()


def entry_of(at: int, row: Row, *, fifo: bool) -> dict[str, Any]:
    """One entry of a batch. There is room for ten attributes; headers that do not fit go into one, as JSON."""
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
        group = row.id if row.aggregate is None else "/".join(row.aggregate)
        entry |= {"MessageDeduplicationId": row.id, "MessageGroupId": group[:128]}
    return entry


def from_url(url: str) -> SqsSink:
    """`sqs://eu-west-1/orders.fifo`, or `sqs://localhost:9324/orders?endpoint=http://localhost:9324&region=elasticmq`."""
    parts, options = options_of(url, ("endpoint", "region"))
    region = options.get("region") or (None if "endpoint" in options else parts.hostname)
    return SqsSink(queue=parts.path.strip("/"), region=region, endpoint=options.get("endpoint"))
