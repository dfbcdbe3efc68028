"""Publish without an outbox: confirmed, and under one id however often it is tried.

For messages that belong to no transaction of a database. What does belong to one goes through the outbox, which
cannot be torn from it by a crash.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from threading import Lock, Thread
from types import TracebackType
from typing import Any, Self

import msgspec

from semel.core.relaying import Published, PublishRefused, OutboxRow, waves
from semel.errors import SinkUnavailable, UsageError
from semel.outbox import ids
from semel.outbox.message import Message, drafted
from semel.outbox.sinks import Sink, sink_for

__all__ = ["AsyncProducer", "Producer", "aproducer", "producer"]

BYTES_MAX = 1024 * 1024
WAIT_S = 30.0
PAUSE_FIRST_S, PAUSE_MAX_S = 0.05, 2.0


class AsyncProducer:
    """A producer that is awaited. The first `send` connects; `close` lets go."""

    def __init__(self, sink: Sink, *, source: str, wait_s: float) -> None:
        self._sink = sink
        self._source = source
        self._wait_s = wait_s
        self._opened = False
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def send(self, message: Message, *, message_id: str | None = None) -> str:
        """Publish, and return the message's id once the broker has confirmed it.

        It is tried for `wait_s` under one id, which stands in every field by which brokers and consumers tell
        duplicates. Raises `SinkUnavailable` when there was no confirmation by then: it may have been published or
        not, so send it again with the same `message_id`; and `UsageError` for what the broker refuses.
        """
        return (await self.send_many([message], message_ids=None if message_id is None else [message_id]))[0]

    async def send_many(
        self, messages: Sequence[Message], *, message_ids: Sequence[str] | None = None
    ) -> list[str]:
        """Publish several, as many in one round trip as the broker takes; their ids in input order."""
        names = [str(ids.minted()) for _ in messages] if message_ids is None else list(message_ids)
        rows = [self._row(*pair) for pair in zip(messages, names, strict=True)]
        give_up_at, pause_s = time.monotonic() + self._wait_s, PAUSE_FIRST_S
        while True:
            rows, reason = await self._try(rows)
            if not rows:
                return names
            if time.monotonic() + pause_s >= give_up_at:
                raise SinkUnavailable(
                    f"{self._sink.name} did not confirm {rows[0].id} within {self._wait_s:g} s: {reason}; it may"
                    " have been published or not: send it again with the same message_id"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    async def _try(self, rows: list[OutboxRow]) -> tuple[list[OutboxRow], str]:
        """What is left to be published, and why."""
        done: set[str] = set()
        reason = ""
        try:
            await self._open()
            for some in self._batches(rows):
                for row, sent in zip(some, await self._sink.publish(some), strict=True):
                    if isinstance(sent, PublishRefused):
                        raise UsageError(f"{self._sink.name} refused the message {row.id}: {sent.reason}")
                    if isinstance(sent, Published):
                        done.add(row.id)
                    else:
                        reason = sent.reason
                if reason:
                    break  # nothing of an aggregate goes out behind one that did not
        except SinkUnavailable as error:
            reason = str(error)
        return [row for row in rows if row.id not in done], reason

    def _batches(self, rows: list[OutboxRow]) -> Iterator[list[OutboxRow]]:
        for wave in [rows] if self._sink.ordered else waves(rows):
            for at in range(0, len(wave), self._sink.batch_max):
                yield list(wave[at : at + self._sink.batch_max])

    async def _open(self) -> None:
        async with self._opening:
            if not self._opened:
                await self._sink.open()
                self._opened = True

    def _row(self, message: Message, name: str) -> OutboxRow:
        if message.not_before is not None:
            raise UsageError("not_before needs somewhere to wait: publish it through an outbox")
        draft = drafted(message, self._source, BYTES_MAX)
        return OutboxRow(
            seq=0,
            id=name,
            created_at=time.time_ns() // 1000,
            attempts=0,
            aggregate=message.aggregate,
            event_type=draft.event_type,
            source=draft.source,
            subject=draft.subject,
            destination=draft.destination,
            content_type=draft.content_type,
            traceparent=draft.traceparent,
            headers=msgspec.json.decode(draft.headers, type=dict[str, str]),
            payload=draft.payload,
        )

    async def close(self) -> None:
        """Let go of the connection; idempotent."""
        if self._opened:
            self._opened = False
            await self._sink.close()


class Producer:
    """A producer that blocks, for any number of threads. Its connection lives in a thread of its own."""

    def __init__(self, made: AsyncProducer) -> None:
        self._made = made
        self._lock = Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(self, message: Message, *, message_id: str | None = None) -> str:
        """As `AsyncProducer.send`, blocking."""
        found: str = self._run(self._made.send(message, message_id=message_id))
        return found

    def send_many(
        self, messages: Sequence[Message], *, message_ids: Sequence[str] | None = None
    ) -> list[str]:
        """As `AsyncProducer.send_many`, blocking."""
        found: list[str] = self._run(self._made.send_many(messages, message_ids=message_ids))
        return found

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = Thread(target=self._loop.run_forever, name="semel-producer", daemon=True)
                self._thread.start()
            loop = self._loop
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    def close(self) -> None:
        """Let go of the connection, and end the thread; idempotent."""
        with self._lock:
            loop, self._loop = self._loop, None
            thread, self._thread = self._thread, None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._made.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def aproducer(sink: str | Sink, *, source: str = "semel", wait_s: float = WAIT_S) -> AsyncProducer:
    """A producer to the broker that a URL names, for an event loop. No I/O yet."""
    return AsyncProducer(sink_for(sink) if isinstance(sink, str) else sink, source=source, wait_s=wait_s)


def producer(sink: str | Sink, *, source: str = "semel", wait_s: float = WAIT_S) -> Producer:
    """A producer to the broker that a URL names, such as `kafka://localhost:9092?topic=orders`. No I/O yet."""
    return Producer(aproducer(sink, source=source, wait_s=wait_s))
