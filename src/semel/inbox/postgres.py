"""The statements of an inbox on PostgreSQL."""

from collections.abc import Sequence
from typing import Any

from semel.client.items import ItemBuilder
from semel.connections import Statement, Talk, code_of
from semel.core.ids import digest, digests_of
from semel.errors import ModeMismatch, OutcomeUnknown, StillRunning, StoreUnavailable, WrongDatabase
from semel.inbox.base import InboxStatements, Value
from semel.stores.postgres import encoding
from semel.stores.postgres.batch import SendCalls
from semel.stores.postgres.batch import Talk as StoreTalk
from semel.stores.postgres.store import PostgresStore
from semel.stores.postgres.store_async import AsyncPostgresStore

__all__ = ["PostgresInboxStatements"]

MISSING = frozenset(("42883", "42P01", "3F000"))
"""No such function, table or schema: this is not the database that holds the store."""
LOCK_TIMEOUT = "55P03"

FIRST = (
    "SELECT verdict, detail, place, firsts FROM {schema}.inbox_first($1::text, $2::text, $3::text, $4::text, $5::text,"
    " $6::text, $7::bigint, $8::bytea, $9::integer, $10::bytea)"
)
UNMARK = "DELETE FROM {schema}.records WHERE digest = ANY($1::text::uuid[]) AND state & 7 = 1 AND owner = $2::bytea"
NOW = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
STORE = (
    "UPDATE {schema}.records SET value = $1::bytea WHERE digest = $2::text::uuid AND state & 7 = 1"
    f" AND (expires_at IS NULL OR expires_at > {NOW}) AND {{schema}}.identity() = $3::text RETURNING 1"
)
REPLAY = (
    "SELECT {schema}.identity(), r.state IS NOT NULL, r.value FROM (SELECT 1) AS one LEFT JOIN {schema}.records AS r"
    f" ON r.digest = $1::text::uuid AND r.state & 7 = 1 AND (r.expires_at IS NULL OR r.expires_at > {NOW})"
)


class PostgresInboxStatements(InboxStatements):
    """Marks by a function in the database: one statement and one round trip, with every driver."""

    def __init__(self, store: PostgresStore | AsyncPostgresStore, plan: ItemBuilder) -> None:
        super().__init__(plan)
        self._store = store
        self._schema = f'"{store.place.schema}"'

    def first_many(
        self, keys: Sequence[str], event_type: str, window_us: int, fingerprint: bytes | None = None
    ) -> Talk[list[bool]]:
        """Mark distinct keys in the order of their digests, to avoid deadlocks."""
        digests = digests_of(self.tenant, self.consumer, keys)
        places = sorted(range(len(keys)), key=digests.__getitem__)
        names = None
        if self._store.place.readable_keys:
            names = array([encoding.storable(keys[place]) for place in places])
        ((verdict, detail, place, firsts),) = yield from self._say(
            FIRST,
            self._store.identity,
            encoding.storable(self.tenant),
            encoding.storable(self.consumer),
            "{" + ",".join([digests[place].hex() for place in places]) + "}",
            names,
            encoding.storable(event_type) or None,
            window_us,
            self.attempt,
            self.wait_ms,
            fingerprint,
        )
        if verdict != "marked":
            key = "one of the keys" if place is None else repr(keys[places[place - 1]])
            raise self._refusal(verdict, detail, key)
        answers = [False] * len(keys)
        for at, first in zip(places, firsts, strict=True):
            answers[at] = first == "1"
        return answers

    def unmark(self, keys: Sequence[str]) -> Talk[None]:
        """Remove marks of this transaction."""
        yield from self._say(UNMARK, "{" + ",".join([self._hex(key) for key in keys]) + "}", self.attempt)

    def store(self, key: str, encoded: bytes) -> Talk[None]:
        """Store a value with the mark."""
        rows = yield from self._say(STORE, encoded, self._hex(key), self._store.identity)
        if not rows:
            raise self.not_marked(key)

    def replay(self, key: str) -> Talk[Value | None]:
        """Return the value stored with the mark."""
        ((identity, marked, value),) = yield from self._say(REPLAY, self._hex(key))
        if identity != self._store.identity:
            raise self._elsewhere()
        return Value(None if value is None else bytes(value)) if marked else None

    # --- on the store's own connection ---

    def committed(self, key: str) -> bool:
        """Whether the mark of this attempt is committed."""
        assert isinstance(self._store, PostgresStore)
        try:
            return self._store.converse(self._look(key))
        except StoreUnavailable as error:
            raise self._still_open(key, error) from error

    async def acommitted(self, key: str) -> bool:
        """The same for event loops."""
        assert isinstance(self._store, AsyncPostgresStore)
        try:
            return await self._store.aconverse(self._look(key))
        except StoreUnavailable as error:
            raise self._still_open(key, error) from error

    def _look(self, key: str) -> StoreTalk[bool]:
        """Write the key to wait for a transaction that marks it, then roll back and read."""
        parameters = {"digest": self._hex(key)}
        yield SendCalls("begin")
        yield SendCalls("patience", {"wait_ms": str(self.wait_ms)})
        yield SendCalls("await_key", parameters)
        rows = yield SendCalls("marked_by", parameters)
        return bool(rows) and bytes(rows[0][0]) == self.attempt

    def _still_open(self, key: str, error: StoreUnavailable) -> Exception:
        if code_of(error) != LOCK_TIMEOUT:
            return error
        return StillRunning(f"a transaction that marks {key!r} is still open after {self.lock_wait_s:g} s")

    # --- inside ---

    def _say(self, text: str, *parameters: str | int | bytes | None) -> Talk[list[tuple[Any, ...]]]:
        try:
            return (yield Statement(text.replace("{schema}", self._schema), parameters))
        except Exception as error:
            if code_of(error) in MISSING:
                raise self._elsewhere() from error
            raise

    def _refusal(self, verdict: str, detail: str | None, key: str) -> Exception:
        if verdict == "elsewhere":
            return self._elsewhere()
        if verdict == "mode":
            return ModeMismatch(f"consumer {self.consumer!r} works in mode {detail!r}, not 'inbox'")
        if verdict == "waited":
            return StillRunning(
                f"another transaction has marked one of these keys, and is still open after {self.lock_wait_s:g} s"
            )
        if verdict == "unknown":
            return OutcomeUnknown(f"{key} is quarantined: resolve it first")
        if verdict == "mismatch":
            return self.mismatch(key)
        assert verdict == "claimed", verdict
        rest_s = int(detail or 0) / 1e6
        return StillRunning(f"another attempt holds {key} for {rest_s:.3f} s", rest_s)

    def _elsewhere(self) -> WrongDatabase:
        return WrongDatabase(
            f"the connection is not to the database of {self._store.name}; use one database for both"
        )

    def _hex(self, key: str) -> str:
        return digest((self.tenant, self.consumer, key)).hex()


def array(texts: Sequence[str]) -> str:
    """Return the literal of an array of texts, which every driver can pass."""
    quoted = ['"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' for text in texts]
    return "{" + ",".join(quoted) + "}"
