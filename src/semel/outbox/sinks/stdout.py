"""A sink that prints one CloudEvent as JSON per line, for pipes and for tests."""

import base64
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

import msgspec

from semel.core.relay_flow import OutboxRow, Published, Sent
from semel.errors import PolicyInvalid
from semel.outbox.message import attributes

__all__ = ["StdoutSink", "event_of", "from_url"]


class StdoutSink:
    """Writes to a stream; a row is published when it is flushed. A closed pipe ends the relay."""

    name: str = "stdout"
    ordered: bool = True
    batch_max: int = 500

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self._stream = stream

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing: the caller owns the stream."""

    async def publish(self, rows: Sequence[OutboxRow]) -> list[Sent]:
        """Write all rows at once."""
        stream = self._stream or sys.stdout.buffer
        stream.write(b"".join(msgspec.json.encode(event_of(row)) + b"\n" for row in rows))
        stream.flush()
        return [Published()] * len(rows)


def event_of(row: OutboxRow) -> dict[str, Any]:
    """Return the row as a CloudEvent in structured mode."""
    event: dict[str, Any] = {**attributes(row), "datacontenttype": row.content_type}
    if row.traceparent is not None:
        event["traceparent"] = row.traceparent
    if row.destination:
        event["destination"] = row.destination
    if row.headers:
        event["headers"] = row.headers
    try:
        return event | {"data": _data(row)}
    except (UnicodeDecodeError, msgspec.DecodeError):
        return event | {"data_base64": base64.b64encode(row.payload).decode()}


def _data(row: OutboxRow) -> Any:
    kind = row.content_type.partition(";")[0]
    if kind == "application/json":
        msgspec.json.decode(row.payload)
        return msgspec.Raw(row.payload)  # keep numbers exactly as written
    if kind.startswith("text/"):
        return row.payload.decode()
    raise msgspec.DecodeError(f"{kind} is not text")


def from_url(url: str) -> StdoutSink:
    """`stdout:`."""
    if url not in ("stdout:", "stdout://"):
        raise PolicyInvalid(f"{url!r}: write stdout:, it has no options")
    return StdoutSink()
