"""The statements of an inbox on PostgreSQL."""

from collections.abc import Sequence
from typing import Any

from semel.client.items import ItemBuilder
from semel.connections import AsyncCallerConnection, CallerConnection, Statement, Talk, code_of
from semel.core.ids import digest, digests_of, holds_time, time_in
from semel.core.moves import check_moves
from semel.errors import (
    LateEvent,
    ModeMismatch,
    OutcomeUnknown,
    StillRunning,
    StoreUnavailable,
    WrongDatabase,
)
from semel.inbox.base import InboxStatements, PartitionMissing, Value, Windows
from semel.stores.postgres import encoding
from semel.stores.postgres.batch import SendCalls
from semel.stores.postgres.batch import Talk as StoreTalk
from semel.stores.postgres.partitions import make
from semel.stores.postgres.schema import VERSION
from semel.stores.postgres.store import PostgresStore
from semel.stores.postgres.store_async import AsyncPostgresStore

__all__ = ["PostgresInboxStatements", "TimedPostgresInboxStatements", "statements_for"]

MISSING = frozenset(("42883", "42P01", "3F000"))
"""No such function, table or schema: this is not the database that holds the store."""
LOCK_TIMEOUT = "55P03"

FIRST = (
    "SELECT verdict, detail, place, firsts FROM {schema}.inbox_first($1::text, $2::text, $3::text, $4::text, $5::text,"
    " $6::text, $7::bigint, $8::bytea, $9::integer, $10::bytea)"
)
FIRST_ONE = (
    "SELECT {schema}.inbox_first_one($1::text, $2::text, $3::text, $4::text::uuid, $5::text, $6::text, $7::bigint,"
    " $8::bytea, $9::integer, $10::bytea)"
)
HAS_TABLES = "SELECT to_regclass($1::text) IS NOT NULL"
SCHEMA_VERSION = "SELECT value FROM {schema}.meta WHERE name = 'schema_version'"
CONSUMER = (
    "SELECT {schema}.identity(), mode, coalesce(ids, '') FROM {schema}.consumers"
    " WHERE tenant = $1::text AND consumer = $2::text"
)
WINDOWS = "SELECT tenant, consumer, event_type, window_us FROM {schema}.windows"
WAITED = -1
UNMARK = (
    "DELETE FROM {schema}.{table} WHERE {time}digest = ANY($1::text::uuid[]) AND state & 7 = 1"
    " AND owner = $2::bytea"
)
NOW = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
STORE = (
    "UPDATE {schema}.{table} SET value = $1::bytea WHERE {time}digest = $2::text::uuid AND state & 7 = 1"
    f" AND (expires_at IS NULL OR expires_at > {NOW}) AND {{schema}}.identity() = $3::text RETURNING 1"
)
REPLAY = (
    "SELECT {schema}.identity(), r.state IS NOT NULL, r.value FROM (SELECT 1) AS one LEFT JOIN {schema}.{table} AS r"
    f" ON {{time}}r.digest = $1::text::uuid AND r.state & 7 = 1 AND (r.expires_at IS NULL OR r.expires_at > {NOW})"
)


def _on_table(text: str, table: str, time: str = "") -> str:
    """Return a statement for one of the two tables; `time`: the condition that leads to a partition."""
    return text.replace("{table}", table).replace("{time}", time)


class PostgresInboxStatements(InboxStatements):
    """Marks by a function in the database: one statement and one round trip, with every driver."""

    first_text: str = FIRST
    first_one_text: str = FIRST_ONE
    unmark_text: str = _on_table(UNMARK, "records")
    store_text: str = _on_table(STORE, "records")
    replay_text: str = _on_table(REPLAY, "records")
    timed: str = ""
    """What the names of the store's statements end with."""

    def __init__(self, store: PostgresStore | AsyncPostgresStore, plan: ItemBuilder) -> None:
        super().__init__(plan)
        self._store = store
        self._ids = plan.ids
        self._schema = f'"{store.place.schema}"'
        self._found_identity = ""
        """Of the caller's own connection, before the store is open."""

    @property
    def _identity(self) -> str:
        return self._store.identity or self._found_identity

    def may_read_settings(self, handle: CallerConnection | AsyncCallerConnection) -> bool:
        """Behind a pooler, whose connections the callers may all hold, and if both lead to the same server."""
        place = self._store.place
        if not place.pooler:
            return False  # the driver takes longer to say the address than to build the whole statement
        address = handle.address
        return address is not None and address == place.address

    def read_settings(self) -> Talk[Windows | None]:
        """Return the stored windows of a consumer that is recorded in mode inbox, in tables of this version."""
        ((made,),) = yield from self._say(HAS_TABLES, f"{self._schema}.meta")
        if not made:
            return None
        versions = yield from self._say(SCHEMA_VERSION)
        if [int(each) for (each,) in versions] != [VERSION]:
            return None
        found = yield from self._say(
            CONSUMER, encoding.storable(self.tenant), encoding.storable(self.consumer)
        )
        if not found or found[0][1:] != ("inbox", self._ids):
            return None
        windows = {
            (encoding.original(tenant), encoding.original(consumer), encoding.original(event_type)): window_us
            for tenant, consumer, event_type, window_us in (yield from self._say(WINDOWS))
        }
        check_moves(windows, [(self.tenant, self.consumer)])
        self._found_identity = found[0][0]
        return windows

    def first_many(
        self, keys: Sequence[str], event_type: str, window_us: int, fingerprint: bytes | None = None
    ) -> Talk[list[bool]]:
        """Mark distinct keys in the order of their digests, to avoid deadlocks."""
        if len(keys) == 1:
            first = yield from self._first_one(keys[0], event_type, window_us, fingerprint)
            if first is not None:
                return [first]
        digests = digests_of(self.tenant, self.consumer, keys)
        places = sorted(range(len(keys)), key=digests.__getitem__)
        names = None
        if self._store.place.readable_keys:
            names = array([encoding.storable(keys[place]) for place in places])
        in_order = "{" + ",".join([digests[place].hex() for place in places]) + "}"
        ((verdict, detail, place, firsts),) = yield from self._say(
            self.first_text,
            *self._marking(in_order, names, event_type, window_us, fingerprint),
            *self._times_of([keys[place] for place in places]),
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
        digests = "{" + ",".join([self._hex(key) for key in keys]) + "}"
        yield from self._say(self.unmark_text, digests, self.attempt, *self._times_of(keys)[:1])

    def store(self, key: str, encoded: bytes) -> Talk[None]:
        """Store a value with the mark."""
        rows = yield from self._say(
            self.store_text, encoded, self._hex(key), self._identity, *self._time_of(key)
        )
        if not rows:
            raise self.not_marked(key)

    def replay(self, key: str) -> Talk[Value | None]:
        """Return the value stored with the mark."""
        ((identity, marked, value),) = yield from self._say(
            self.replay_text, self._hex(key), *self._time_of(key)
        )
        if identity != self._identity:
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
        parameters: dict[str, Any] = {"digest": self._hex(key)}
        for time in self._time_of(key):
            parameters["id_time"] = time
        yield SendCalls("begin")
        yield SendCalls("patience", {"wait_ms": str(self.wait_ms)})
        yield SendCalls(f"await_key{self.timed}", parameters)
        rows = yield SendCalls(f"marked_by{self.timed}", parameters)
        return bool(rows) and bytes(rows[0][0]) == self.attempt

    def _still_open(self, key: str, error: StoreUnavailable) -> Exception:
        if code_of(error) != LOCK_TIMEOUT:
            return error
        return StillRunning(f"a transaction that marks {key!r} is still open after {self.lock_wait_s:g} s")

    # --- inside ---

    def _times_of(self, keys: Sequence[str]) -> tuple[str | int | None, ...]:
        """Return the further parameters of the statements for many keys."""
        del keys
        return ()

    def _time_of(self, key: str) -> tuple[int, ...]:
        """Return the time inside an id, if its record is in a partition."""
        del key
        return ()

    def _moment(self) -> tuple[int | None, ...]:
        return ()

    def _first_one(
        self, key: str, event_type: str, window_us: int, fingerprint: bytes | None
    ) -> Talk[bool | None]:
        """Mark one key, if it is new or done; `None`: the statement for many keys must decide."""
        name = encoding.storable(key) if self._store.place.readable_keys else None
        ((answer,),) = yield from self._say(
            self.first_one_text,
            *self._marking(self._hex(key), name, event_type, window_us, fingerprint),
            *self._time_of(key),
            *self._moment(),
        )
        if answer == WAITED:
            raise self._refusal("waited", None, key)
        return None if answer is None else answer == 1

    def _marking(
        self, digests: str, names: str | None, event_type: str, window_us: int, fingerprint: bytes | None
    ) -> tuple[str | int | bytes | None, ...]:
        """Return the parameters of both functions that mark."""
        return (
            self._identity,
            encoding.storable(self.tenant),
            encoding.storable(self.consumer),
            digests,
            names,
            encoding.storable(event_type) or None,
            window_us,
            self.attempt,
            self.wait_ms,
            fingerprint,
        )

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
        if verdict == "late":
            return late_error(key, int(detail or 0) / 1e6)
        if verdict == "unplaced":
            return PartitionMissing(
                "there is no partition for the time inside one of these ids; create partitions with: semel purge, as"
                " their owner, and begin the transaction again"
            )
        assert verdict == "claimed", verdict
        rest_s = int(detail or 0) / 1e6
        return StillRunning(f"another attempt holds {key} for {rest_s:.3f} s", rest_s)

    def _elsewhere(self) -> WrongDatabase:
        return WrongDatabase(
            f"the connection is not to the database of {self._store.name}; use one database for both"
        )

    def _hex(self, key: str) -> str:
        return digest((self.tenant, self.consumer, key)).hex()


class TimedPostgresInboxStatements(PostgresInboxStatements):
    """The same for a consumer whose ids contain their time: each record is in the partition of that time."""

    first_text: str = FIRST.replace("inbox_first(", "inbox_first_timed(").replace(
        "$10::bytea", "$10::bytea, $11::text, $12::bigint"
    )
    first_one_text: str = FIRST_ONE.replace("inbox_first_one(", "inbox_first_one_timed(").replace(
        "$10::bytea", "$10::bytea, $11::bigint, $12::bigint"
    )
    unmark_text: str = _on_table(UNMARK, "timed_records", "id_time = ANY($3::text::bigint[]) AND ")
    store_text: str = _on_table(STORE, "timed_records", "id_time = $4::bigint AND ")
    replay_text: str = _on_table(REPLAY, "timed_records", "r.id_time = $2::bigint AND ")
    timed: str = "_timed"

    def make_partitions(self) -> None:
        """Create the partitions of the next days on the store's own connection, as a claim does that finds none."""
        assert isinstance(self._store, PostgresStore)
        try:
            self._store.converse(make(self._store.batch(()), self._store.place.schema))
        except StoreUnavailable as error:
            raise PartitionMissing(str(error)) from error

    async def amake_partitions(self) -> None:
        """The same for event loops."""
        assert isinstance(self._store, AsyncPostgresStore)
        try:
            await self._store.aconverse(make(self._store.batch(()), self._store.place.schema))
        except StoreUnavailable as error:
            raise PartitionMissing(str(error)) from error

    def _times_of(self, keys: Sequence[str]) -> tuple[str | int | None, ...]:
        times = ",".join([str(time_in(self._ids, key)) for key in keys])
        return ("{" + times + "}", *self._moment())

    def _time_of(self, key: str) -> tuple[int, ...]:
        return (time_in(self._ids, key),)

    def _moment(self) -> tuple[int | None, ...]:
        clock = self._store.clock
        return (None if clock is None else clock.now_us(),)


def statements_for(store: PostgresStore | AsyncPostgresStore, plan: ItemBuilder) -> PostgresInboxStatements:
    """Return the statements for the table that holds the records of this consumer."""
    return (TimedPostgresInboxStatements if holds_time(plan.ids) else PostgresInboxStatements)(store, plan)


def late_error(key: str, age_s: float) -> LateEvent:
    """Return the error for an id that is too old or too new to be looked up."""
    if age_s < 0:
        return LateEvent(f"{key} is {-age_s:.0f} s ahead of the store's clock; set its producer's", age_s)
    return LateEvent(
        f"{key} is {age_s:.0f} s old, older than what is remembered; whether it ran is not known", age_s
    )


def array(texts: Sequence[str]) -> str:
    """Return the literal of an array of texts, which every driver can pass."""
    quoted = ['"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' for text in texts]
    return "{" + ",".join(quoted) + "}"
