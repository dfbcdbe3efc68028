"""`once.outbox(handle)`: write a message in the caller's own transaction."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from operator import attrgetter
from threading import Lock, Thread
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias
from urllib.parse import quote
from uuid import UUID

import msgspec

from semel.client.items import ItemBuilder
from semel.connections import AsyncCallerConnection, CallerConnection, Statement, Talk, code_of, handle_for
from semel.core.protocols import AsyncStore, Store
from semel.core.relay_flow import OutboxRow, Published, PublishRefused, waves
from semel.errors import SinkUnavailable, StoreRefused, UsageError
from semel.outbox import message as outbox_message
from semel.outbox.message import Draft, Message, check_id, make_draft
from semel.outbox.sinks import Sink, sink_for
from semel.runtime.context import running

__all__ = ["AsyncOutbox", "AsyncProducer", "Outbox", "Producer", "aproducer", "outbox_for", "producer"]

COLUMNS = "id, name, created_at, keep_us, " + ", ".join(Draft.__struct_fields__)
WRITTEN_MAX = 500
"""The most messages in one statement, limited by the drivers' parameters."""
_NO_TABLE = frozenset(("42P01", "3F000"))
_NOW_SQLITE = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000"
_NOW_US = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
SCHEMA = "semel"

Ready: TypeAlias = Callable[[], Awaitable[Any]]


class Terms(NamedTuple):
    """The client's settings for its outbox."""

    schema: str
    source: str
    bytes_max: int
    keep_us: int
    """The window of its consumer: rows stay this long, because a repeated handler must find its messages."""


columns_of: Any = attrgetter(*Draft.__struct_fields__)


class _OutboxWriter:
    """Code that the sync and the async outbox share."""

    def __init__(self, dialect: str, terms: "Terms") -> None:
        self._terms = terms
        self._named: set[str] = set()
        self._sqlite = dialect == "sqlite"
        self._table = "semel_outbox" if self._sqlite else f'"{terms.schema}".outbox'
        self._head = f"INSERT INTO {self._table} ({COLUMNS}) VALUES "

    def _write(self, messages: Sequence[Message], names: Sequence[str | None]) -> Talk[list[str]]:
        if len(messages) != len(names):
            raise UsageError(f"{len(messages)} messages have {len(names)} names; give one for each")
        terms = self._terms
        drafts = [make_draft(each, terms.source, terms.bytes_max) for each in messages]
        chosen = [check_id(each) for each in messages]
        ids = [str(self._id_for(name, own)) for name, own in zip(names, chosen, strict=True)]
        for at in range(0, len(drafts), WRITTEN_MAX):
            some = drafts[at : at + WRITTEN_MAX]
            values: list[Any] = []
            for message_id, name, draft in zip(ids[at:], names[at:], some, strict=False):
                values += (message_id, name, terms.keep_us, *columns_of(draft))
            try:
                yield Statement(self._text(len(some)), tuple(values))
            except Exception as error:
                if code_of(error) in _NO_TABLE or "no such table" in str(error):
                    raise StoreRefused(
                        f"this database has no outbox of semel's ({error}); make its tables with:"
                        " semel migrate --store ..."
                    ) from error
                raise
        for message_id, own, draft in zip(ids, chosen, drafts, strict=True):
            if own is not None:
                yield from self._compare(message_id, draft)
        return ids

    def _compare(self, message_id: str, draft: Draft) -> Talk[None]:
        """Raise `UsageError` if the outbox has another message with this id; the same message again is fine."""
        mark = "?" if self._sqlite else "$1"
        rows = yield Statement(
            f"SELECT event_type, payload FROM {self._table} WHERE id = {mark}", (message_id,)
        )
        if rows and (rows[0][0], bytes(rows[0][1])) != (draft.event_type, draft.payload):
            raise UsageError(
                f"the outbox has another message with the id {message_id}; choose another id, and undo the transaction"
            )

    def _text(self, count: int) -> str:
        width = len(Draft.__struct_fields__) + 3
        rows = []
        for row in range(count):
            first = row * width + 1
            each = ["?"] * width if self._sqlite else [f"${number}" for number in range(first, first + width)]
            each.insert(2, _NOW_SQLITE if self._sqlite else _NOW_US)
            rows.append(f"({', '.join(each)})")
        return f"{self._head}{', '.join(rows)} ON CONFLICT (id) DO NOTHING"

    def _id_for(self, name: str | None, own: UUID | None) -> UUID:
        run = running.get()
        if run is None or run.unclaimed:  # without a claim there is no attempt to repeat
            if name is not None:
                self._name(name, self._named)
            return own or outbox_message.new_id()
        if name is None and own is not None:
            return own
        if name is None:
            raise UsageError(
                'inside a handler a message needs a name, which gives it the same id on every attempt: name="..."'
            )
        self._name(name, run.published)  # of one attempt, whichever outbox writes
        return own or outbox_message.id_for_event(run.kept.claim.id, run.granted.first_seen_us, name)

    @staticmethod
    def _name(name: str, used: set[str]) -> None:
        if not 0 < len(name.encode()) <= outbox_message.ID_NAME_BYTES_MAX:
            raise UsageError(
                f"a message's name takes 1 to {outbox_message.ID_NAME_BYTES_MAX} bytes, not {name!r:.100}"
            )
        if name in used:
            raise UsageError(
                f"a message {name!r} was already published in this attempt; give each message its own name, such as"
                f" {name + '-2'!r}"
            )
        used.add(name)


class Outbox(_OutboxWriter):
    """An outbox on a connection that blocks. It joins the caller's transaction and never ends it."""

    def __init__(self, handle: CallerConnection, terms: Terms) -> None:
        super().__init__(handle.dialect, terms)
        self._handle = handle

    def publish(self, message: Message, *, name: str | None = None) -> str:
        """Write the message; a relay publishes it once the transaction has committed. Returns its id.

        Inside a handler that semel runs, the id follows from the event's key and `name`, so that another attempt
        writes the same id; a message that an earlier attempt committed stays as it is. Raises `UsageError` for a name
        used twice in one attempt, `NoTransaction` if message and effect would not commit together. One
        statement.

        With `Message(id=...)` the id is yours, and needs no name: the same message again is not written twice, and
        another one under that id is a `UsageError`. One statement more.
        """
        self._handle.require_transaction()
        return self._handle.run(self._write((message,), (name,)))[0]

    def publish_many(self, messages: Sequence[Message], *, names: Sequence[str] | None = None) -> list[str]:
        """Write many messages with one statement, in order. Returns their ids. Inside a handler each needs a name."""
        self._handle.require_transaction()
        return self._handle.run(self._write(messages, names or [None] * len(messages)))


class AsyncOutbox(_OutboxWriter):
    """An outbox on a connection whose calls are awaited."""

    def __init__(self, handle: AsyncCallerConnection, terms: Terms, ready: Ready | None) -> None:
        super().__init__(handle.dialect, terms)
        self._handle = handle
        self._ready = ready

    async def publish(self, message: Message, *, name: str | None = None) -> str:
        """Write the message; a relay publishes it once the transaction has committed. Returns its id.

        Inside a handler that semel runs, the id follows from the event's key and `name`, so that another attempt
        writes the same id; a message that an earlier attempt committed stays as it is. Raises `UsageError` for a name
        used twice in one attempt, `NoTransaction` if message and effect would not commit together. One
        statement.

        With `Message(id=...)` the id is yours, and needs no name: the same message again is not written twice, and
        another one under that id is a `UsageError`. One statement more.
        """
        if self._ready is not None:
            await self._ready()
        await self._handle.require_transaction()
        return (await self._handle.run(self._write((message,), (name,))))[0]

    async def publish_many(
        self, messages: Sequence[Message], *, names: Sequence[str] | None = None
    ) -> list[str]:
        """Write many messages with one statement, in order. Returns their ids. Inside a handler each needs a name."""
        if self._ready is not None:
            await self._ready()
        await self._handle.require_transaction()
        return await self._handle.run(self._write(messages, names or [None] * len(messages)))


def outbox_for(given: Any, store: Store | AsyncStore, plan: ItemBuilder, ready: Ready | None = None) -> Any:
    """Return the outbox for this kind of connection; an async one awaits `ready` before the first message."""
    handle = handle_for(given)
    place = getattr(store, "place", None)
    schema = place.schema if handle.dialect == "postgresql" and place is not None else SCHEMA
    source = quote(plan.consumer, safe="/:@!$&'()*+,;=~")
    terms = Terms(schema, source, plan.policy.value_bytes_max, plan.window_us({}, ""))
    if isinstance(handle, AsyncCallerConnection):
        return AsyncOutbox(handle, terms, ready)
    return Outbox(handle, terms)


BYTES_MAX = 1024 * 1024
WAIT_S = 30.0
PAUSE_FIRST_S, PAUSE_MAX_S = 0.05, 2.0


class AsyncProducer:
    """A producer for event loops. The first `send` connects; `close` disconnects."""

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

        It retries for `wait_s` with one id, which is in every field by which brokers and consumers recognize
        duplicates. Raises `SinkUnavailable` without a confirmation by then: the message may have been published or
        not, so send it again with the same `message_id`. Raises `UsageError` if the broker refuses the message.
        """
        return (await self.send_many([message], message_ids=None if message_id is None else [message_id]))[0]

    async def send_many(
        self, messages: Sequence[Message], *, message_ids: Sequence[str] | None = None
    ) -> list[str]:
        """Publish several, as many in one round trip as the broker takes. Returns their ids in input order."""
        names = [str(outbox_message.new_id()) for _ in messages] if message_ids is None else list(message_ids)
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
        """Try once; returns the rows that are not published, and the reason."""
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
                    break  # a row that fails blocks the later rows of its aggregate
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
            raise UsageError("a producer cannot delay a message: use an outbox for not_before")
        draft = make_draft(message, self._source, BYTES_MAX)
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
        """Close the connection; idempotent."""
        if self._opened:
            self._opened = False
            await self._sink.close()


class Producer:
    """A blocking producer, for any number of threads. Its connection has a thread of its own."""

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
        """Close the connection and end the thread; idempotent."""
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
    """Return a producer for the broker of a URL, for event loops. No I/O yet."""
    return AsyncProducer(sink_for(sink) if isinstance(sink, str) else sink, source=source, wait_s=wait_s)


def producer(sink: str | Sink, *, source: str = "semel", wait_s: float = WAIT_S) -> Producer:
    """Return a producer for the broker of a URL, such as `kafka://localhost:9092?topic=orders`. No I/O yet."""
    return Producer(aproducer(sink, source=source, wait_s=wait_s))
