"""`once.outbox(handle)`: write a message in the caller's own transaction."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias
from urllib.parse import quote

from semel.context import Context, _current
from semel.core.ports import AsyncStore, Store
from semel.errors import StoreRefused, UsageError
from semel.handles import AsyncHandle, Handle, Statement, Talk, code_of, handle_for
from semel.outbox import ids
from semel.outbox.message import Draft, Message, drafted

__all__ = ["AsyncOutbox", "Outbox", "outbox_for"]

COLUMNS = "id, name, created_at, " + ", ".join(Draft.__struct_fields__)
_NO_TABLE = frozenset(("42P01", "3F000"))
_NOW_US = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
SCHEMA = "semel"

Ready: TypeAlias = Callable[[], Awaitable[Any]]


class _Writer:
    """What both colours write."""

    def __init__(self, dialect: str, schema: str, source: str, bytes_max: int) -> None:
        self._schema = schema
        self._source = source
        self._bytes_max = bytes_max
        self._named: set[str] = set()
        count = len(Draft.__struct_fields__)
        if dialect == "sqlite":
            now = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000"
            table, places = "semel_outbox", f"?, ?, {now}, {', '.join('?' * count)}"
        else:
            numbered = ", ".join(f"${number}" for number in range(3, count + 3))
            table, places = f'"{schema}".outbox', f"$1, $2, {_NOW_US}, {numbered}"
        self._text = f"INSERT INTO {table} ({COLUMNS}) VALUES ({places}) ON CONFLICT (id) DO NOTHING"

    def _write(self, message: Message, name: str | None) -> Talk[str]:
        draft = drafted(message, self._source, self._bytes_max)
        message_id = self._id_for(name)
        written: tuple[Any, ...] = tuple(getattr(draft, each) for each in Draft.__struct_fields__)
        try:
            yield Statement(self._text, (str(message_id), name, *written))
        except Exception as error:
            if code_of(error) in _NO_TABLE or "no such table" in str(error):
                raise StoreRefused(
                    f"this database has no outbox of semel's ({error}); make its tables with: semel migrate --store ..."
                ) from error
            raise
        return str(message_id)

    def _id_for(self, name: str | None) -> Any:
        context: Context | None = _current.get()
        if context is None or context._loose:  # noqa: SLF001 - without a claim there is no attempt to repeat
            if name is not None:
                self._name(name, self._named)
            return ids.minted()
        if name is None:
            raise UsageError(
                'inside a handler a message needs a name, which gives it the same id on every attempt: name="..."'
            )
        self._name(name, context._published)  # noqa: SLF001 - one attempt, whichever outbox writes
        return ids.derived(context._kept.claim.id, context.first_seen, name)  # noqa: SLF001

    @staticmethod
    def _name(name: str, used: set[str]) -> None:
        if not 0 < len(name.encode()) <= ids.NAME_BYTES_MAX:
            raise UsageError(f"a message's name takes 1 to {ids.NAME_BYTES_MAX} bytes, not {name!r:.100}")
        if name in used:
            raise UsageError(
                f"a message {name!r} was already published in this attempt; give each message its own name, such as"
                f" {name + '-2'!r}"
            )
        used.add(name)


class Outbox(_Writer):
    """An outbox on a connection that blocks. It joins the caller's transaction and never ends it."""

    def __init__(self, handle: Handle, schema: str, source: str, bytes_max: int) -> None:
        super().__init__(handle.dialect, schema, source, bytes_max)
        self._handle = handle

    def publish(self, message: Message, *, name: str | None = None) -> str:
        """Write the message; a relay publishes it once the transaction has committed. Returns its id.

        Inside a handler that semel runs, the id follows from the event's key and `name`, so that another attempt
        writes the same id; what an earlier attempt has committed stays as it is. Raises `UsageError` for a name
        used twice in one attempt, `NoTransaction` where nothing would hold message and effect together. One
        statement.
        """
        self._handle.require_transaction()
        return self._handle.run(self._write(message, name))


class AsyncOutbox(_Writer):
    """An outbox on a connection whose calls are awaited."""

    def __init__(
        self, handle: AsyncHandle, schema: str, source: str, bytes_max: int, ready: Ready | None
    ) -> None:
        super().__init__(handle.dialect, schema, source, bytes_max)
        self._handle = handle
        self._ready = ready

    async def publish(self, message: Message, *, name: str | None = None) -> str:
        """Write the message; a relay publishes it once the transaction has committed. Returns its id.

        Inside a handler that semel runs, the id follows from the event's key and `name`, so that another attempt
        writes the same id; what an earlier attempt has committed stays as it is. Raises `UsageError` for a name
        used twice in one attempt, `NoTransaction` where nothing would hold message and effect together. One
        statement.
        """
        if self._ready is not None:
            await self._ready()
        await self._handle.require_transaction()
        return await self._handle.run(self._write(message, name))


def outbox_for(
    given: Any, store: Store | AsyncStore, consumer: str, bytes_max: int, ready: Ready | None = None
) -> Any:
    """The outbox for this kind of handle; `ready` is awaited before the first message, where it can be."""
    handle = handle_for(given)
    place = getattr(store, "place", None)
    schema = place.schema if handle.dialect == "postgresql" and place is not None else SCHEMA
    source = quote(consumer, safe="/:@!$&'()*+,;=~")
    if isinstance(handle, AsyncHandle):
        return AsyncOutbox(handle, schema, source, bytes_max, ready)
    return Outbox(handle, schema, source, bytes_max)
