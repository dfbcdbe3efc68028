"""`once.outbox(handle)`: write a message in the caller's own transaction."""

from collections.abc import Awaitable, Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote
from uuid import UUID

from semel.context import Context, _current
from semel.core.ports import AsyncStore, Store
from semel.errors import StoreRefused, UsageError
from semel.handles import AsyncCallerConnection, CallerConnection, Statement, Talk, code_of, handle_for
from semel.outbox import ids
from semel.outbox.message import Draft, Message, chosen_id, drafted
from semel.plans import ItemBuilder

__all__ = ["AsyncOutbox", "Outbox", "outbox_for"]

COLUMNS = "id, name, created_at, keep_us, " + ", ".join(Draft.__struct_fields__)
WRITTEN_MAX = 500
"""Messages in one statement: what every driver has parameters for."""
_NO_TABLE = frozenset(("42P01", "3F000"))
_NOW_SQLITE = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000"
_NOW_US = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
SCHEMA = "semel"

Ready: TypeAlias = Callable[[], Awaitable[Any]]


class Terms(NamedTuple):
    """What an outbox knows of its client."""

    schema: str
    source: str
    bytes_max: int
    keep_us: int
    """The window of its consumer: a handler may run again, and has to find its messages, as long."""


columns_of: Any = attrgetter(*Draft.__struct_fields__)


class _OutboxWriter:
    """What both colours write."""

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
        drafts = [drafted(each, terms.source, terms.bytes_max) for each in messages]
        chosen = [chosen_id(each) for each in messages]
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
        """Refuse an id under which another message lies in the outbox; the same one again is no second message."""
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
        context: Context | None = _current.get()
        if context is None or context._loose:  # noqa: SLF001 - without a claim there is no attempt to repeat
            if name is not None:
                self._name(name, self._named)
            return own or ids.minted()
        if name is None and own is not None:
            return own
        if name is None:
            raise UsageError(
                'inside a handler a message needs a name, which gives it the same id on every attempt: name="..."'
            )
        self._name(name, context._published)  # noqa: SLF001 - one attempt, whichever outbox writes
        return own or ids.derived(context._kept.claim.id, context.first_seen, name)  # noqa: SLF001

    @staticmethod
    def _name(name: str, used: set[str]) -> None:
        if not 0 < len(name.encode()) <= ids.ID_NAME_BYTES_MAX:
            raise UsageError(f"a message's name takes 1 to {ids.ID_NAME_BYTES_MAX} bytes, not {name!r:.100}")
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
        writes the same id; what an earlier attempt has committed stays as it is. Raises `UsageError` for a name
        used twice in one attempt, `NoTransaction` where nothing would hold message and effect together. One
        statement.

        With `Message(id=...)` the id is yours, and needs no name: the same message again is not written twice, and
        another one under that id is a `UsageError`. One statement more.
        """
        self._handle.require_transaction()
        return self._handle.run(self._write((message,), (name,)))[0]

    def publish_many(self, messages: Sequence[Message], *, names: Sequence[str] | None = None) -> list[str]:
        """Write many messages with one statement, in their order; their ids. Inside a handler each needs its name."""
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
        writes the same id; what an earlier attempt has committed stays as it is. Raises `UsageError` for a name
        used twice in one attempt, `NoTransaction` where nothing would hold message and effect together. One
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
        """Write many messages with one statement, in their order; their ids. Inside a handler each needs its name."""
        if self._ready is not None:
            await self._ready()
        await self._handle.require_transaction()
        return await self._handle.run(self._write(messages, names or [None] * len(messages)))


def outbox_for(given: Any, store: Store | AsyncStore, plan: ItemBuilder, ready: Ready | None = None) -> Any:
    """The outbox for this kind of handle; `ready` is awaited before the first message, where it can be."""
    handle = handle_for(given)
    place = getattr(store, "place", None)
    schema = place.schema if handle.dialect == "postgresql" and place is not None else SCHEMA
    source = quote(plan.consumer, safe="/:@!$&'()*+,;=~")
    terms = Terms(schema, source, plan.policy.value_bytes_max, plan.window_us({}, ""))
    if isinstance(handle, AsyncCallerConnection):
        return AsyncOutbox(handle, terms, ready)
    return Outbox(handle, terms)
