"""The outbox in PostgreSQL: relays share the aggregates by advisory locks on shards."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

import psycopg

from semel.core.relay_flow import OutboxRow, RowFailure
from semel.errors import StoreRefused
from semel.outbox.tables import (
    COLUMNS,
    ENTRY_COLUMNS,
    FOREVER,
    KEEP_US,
    STATES,
    Entry,
    OutboxCounts,
    State,
    entry_of,
    row_of,
)
from semel.runtime.jitter import jitter
from semel.runtime.tasks import end_tasks
from semel.stores.postgres.errors import to_store_error
from semel.stores.postgres.pool_async import AsyncPostgresConnection
from semel.stores.postgres.pool_base import CONTEXT
from semel.stores.postgres.schema import outbox_channel_of
from semel.stores.postgres.store import PostgresStore

__all__ = ["PostgresRows"]

SHARDS = 64
"""As in the table: the largest number of relays, and few enough to be locked one by one."""
SILENT_MAX_S = 60.0
"""The server ends a session that is idle for this long, and its shards go to other relays."""
BEATS = 4
"""Keep-alive queries in that time, while a broker is slow."""
_IDLE_TIMEOUT_SINCE = 140000

_T = "WITH t AS MATERIALIZED (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now)"
"""One time for a whole statement: with two, a row could miss an earlier row that waits."""
_SELECTED = COLUMNS.replace("id,", "id::text,", 1)
_TAKE = """
{t}
SELECT {columns} FROM (
    SELECT *, sum(octet_length(payload)) OVER (ORDER BY seq) AS bytes, row_number() OVER (ORDER BY seq) AS number
    FROM (
        SELECT o.* FROM {table} AS o, t
        WHERE o.settled_at IS NULL AND o.shard = ANY(%(shards)s::smallint[]) AND o.state = 0 AND o.next_at <= t.now
            AND (o.not_before IS NULL OR o.not_before <= t.now)
            AND NOT EXISTS (
                SELECT FROM {table} AS b
                WHERE b.aggregate_type = o.aggregate_type AND b.aggregate_id = o.aggregate_id AND b.seq < o.seq
                    AND b.settled_at IS NULL AND b.next_at > 0 AND b.next_at > t.now)
        ORDER BY o.seq
        LIMIT %(rows)s
    ) AS ready
) AS summed
WHERE bytes <= %(bytes)s OR number = 1
ORDER BY seq
"""
_PUBLISHED = """
{t}
UPDATE {table} SET
    state = 1, settled_at = t.now, gone_at = t.now + greatest(keep_us, %(keep)s), next_at = 0, error = NULL
FROM t
WHERE id = ANY(%(ids)s::uuid[]) AND settled_at IS NULL
"""
_FAILED = """
{t}
UPDATE {table} AS o SET
    attempts = least(o.attempts + (f.reason IS NOT NULL)::int, 32767),
    error = coalesce(f.reason, o.error),
    state = CASE WHEN f.dead THEN 2 ELSE 0 END,
    next_at = CASE WHEN f.passed THEN 0 WHEN f.dead THEN %(forever)s ELSE t.now + f.delay END
FROM t,
    unnest(%(ids)s::uuid[], %(delays)s::bigint[], %(reasons)s::text[], %(dead)s::bool[], %(passed)s::bool[])
        AS f (id, delay, reason, dead, passed)
WHERE o.id = f.id AND o.settled_at IS NULL AND o.state = 0
"""
_CLEAN = """
{t}
DELETE FROM {table} WHERE id IN (
    SELECT id FROM {table}, t
    WHERE gone_at <= t.now AND settled_at <= t.now - (SELECT coalesce(max(window_us), 0) FROM {schema}.windows)
    ORDER BY gone_at LIMIT %(rows)s FOR UPDATE OF outbox SKIP LOCKED)
"""
_COUNTS = """
{t}
SELECT count(*) FILTER (WHERE state = 0), count(*) FILTER (WHERE state = 2),
    coalesce(max(t.now - created_at) FILTER (WHERE state = 0), 0)
FROM {table}, t WHERE settled_at IS NULL
"""
_RETRY = """
UPDATE {table} SET state = 0, attempts = 0, next_at = 0
WHERE settled_at IS NULL AND state = 2 AND (%(ids)s::uuid[] IS NULL OR id = ANY(%(ids)s::uuid[]))
"""
_DROP = """
{t}
UPDATE {table} SET state = 3, settled_at = t.now, gone_at = t.now + greatest(keep_us, %(keep)s), next_at = 0 FROM t
WHERE id = ANY(%(ids)s::uuid[]) AND settled_at IS NULL
"""
_HELD = """
SELECT objid::int, pid = pg_backend_pid() FROM pg_locks
WHERE locktype = 'advisory' AND objsubid = 2 AND classid = %(space)s AND granted
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
_GREET = """
WITH gone AS (
    DELETE FROM {schema}.outbox_idle AS i WHERE NOT EXISTS (
        SELECT FROM pg_stat_activity AS a WHERE a.pid = i.pid AND a.backend_start <= i.since)
)
SELECT pg_try_advisory_lock_shared(%(space)s, %(present)s)
"""
_REST = """
INSERT INTO {schema}.outbox_idle (pid, since) VALUES (pg_backend_pid(), clock_timestamp()) ON CONFLICT DO NOTHING
"""
_WORK = "DELETE FROM {schema}.outbox_idle WHERE pid = pg_backend_pid()"


class PostgresRows:
    """The outbox in a store's schema, over one session that holds the locks."""

    def __init__(self, store: PostgresStore, *, silent_max_s: float = SILENT_MAX_S) -> None:
        self._store = store
        self._silent_max_s = silent_max_s
        self._place = store.place
        self.name: str = store.name
        self._line: AsyncPostgresConnection | None = None
        self._beat: asyncio.Task[None] | None = None
        self._shards: set[int] = set()
        self._resting = False
        self._space = int.from_bytes(sha256(f"outbox {self._place.schema}".encode()).digest()[:4]) >> 1

    async def open(self) -> None:
        """Run the store's start checks, then open a session."""
        if self._place.pooler:
            raise StoreRefused(
                f"{self.name} is behind a pooler, which keeps no session; let the relay connect to the server itself"
            )
        twin = self._store.twin()
        await twin.aopen()
        await twin.aclose()
        try:
            line = await AsyncPostgresConnection.connect(**self._place.parameters(), context=CONTEXT)
        except psycopg.Error as error:
            raise to_store_error(error, self.name) from error
        line.wait_s = self._place.wait_s
        self._line, self._shards, self._resting = line, set(), False
        # If a server crash loses an update, the message is published once more, which is harmless.
        await self._ask("SET synchronous_commit = off")
        if line.info.server_version >= _IDLE_TIMEOUT_SINCE:
            await self._ask(f"SET idle_session_timeout = {round(self._silent_max_s * 1000)}")

    async def close(self) -> None:
        """Close the session, which releases its locks."""
        line, self._line = self._line, None
        beat, self._beat = self._beat, None
        await end_tasks(beat)
        if line is not None:
            if self._resting and not line.closed:
                with suppress(psycopg.Error):
                    await line.execute(self._fill(_WORK))
            await line.close()

    async def share(self) -> bool:
        """Take up to 64 / n free shards, rounded up, for n relays."""
        if self._beat is None:
            await self._join()
        held = await self._ask(_HELD, space=self._space)
        relays = sum(shard == SHARDS for shard, _ in held)
        fair = -(-SHARDS // max(relays, 1))
        if len(self._shards) > fair:
            surplus = jitter.sample(sorted(self._shards), len(self._shards) - fair)
            await self._ask(
                "SELECT pg_advisory_unlock(%(space)s, s) FROM unnest(%(shards)s::int[]) AS s",
                space=self._space,
                shards=surplus,
            )
            self._shards.difference_update(surplus)
        elif len(self._shards) < fair:
            free = sorted(set(range(SHARDS)) - {shard for shard, _ in held})
            wanted = jitter.sample(free, min(len(free), fair - len(self._shards)))
            got = await self._ask(
                "SELECT s, pg_try_advisory_lock(%(space)s, s) FROM unnest(%(shards)s::int[]) AS s",
                space=self._space,
                shards=wanted,
            )
            self._shards.update(shard for shard, mine in got if mine)
        return bool(self._shards)

    async def _join(self) -> None:
        """Register as a relay, LISTEN, and send keep-alive queries while a broker is slow."""
        await self._ask(_GREET, space=self._space, present=SHARDS)
        await self._ask(f'LISTEN "{outbox_channel_of(self._place.schema)}"')
        self._beat = asyncio.create_task(self._keep_alive(), name="semel-relay-beat")

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._silent_max_s / BEATS)
            line = self._line
            if line is None or line.closed:
                return
            with suppress(psycopg.Error):  # the next user of the session gets the error
                await line.execute("SELECT 1")

    async def take(self, rows_max: int, bytes_max: int) -> list[OutboxRow]:
        """Take rows with one statement. After a full batch we need no notification, because we come back at once."""
        found = await self._ask(
            _TAKE, columns=_SELECTED, shards=sorted(self._shards), rows=rows_max, bytes=bytes_max
        )
        if self._resting and len(found) >= rows_max:
            await self._ask(_WORK)
            self._resting = False
        return [row_of(values) for values in found]

    async def settle(self, published: Sequence[str], failures: Sequence[RowFailure], keep_us: int) -> None:
        """Write results: one statement for published rows, one for the others."""
        if published:
            await self._ask(
                _PUBLISHED, ids="{" + ",".join(published) + "}", keep=keep_us
            )  # faster than a list
        if failures:
            await self._ask(
                _FAILED,
                ids=[each.id for each in failures],
                delays=[each.delay_us for each in failures],
                reasons=[each.reason for each in failures],
                dead=[each.dead for each in failures],
                passed=[each.passed for each in failures],
                forever=FOREVER,
            )

    async def wait(self, wait_s: float) -> None:
        """Wait for a notification. The first call only registers: the caller looks once more before it sleeps."""
        if not self._resting:
            await self._ask(_REST)
            self._resting = True
            return
        line = self._connect()
        try:
            async for _ in line.notifies(timeout=min(wait_s, self._place.wait_s / 2), stop_after=1):
                pass
        except psycopg.Error as error:
            raise to_store_error(error, self.name) from error

    async def clean(self, rows_max: int) -> int:
        """Remove old rows; only the relay with the first shard does so."""
        return await self._change(_CLEAN, rows=rows_max) if 0 in self._shards else 0

    # --- for operators ---

    async def counts(self) -> OutboxCounts:
        """Count by the index of unsettled rows."""
        ((pending, dead, age_us),) = await self._ask(_COUNTS)
        return OutboxCounts(pending, dead, age_us / 1e6)

    async def entries(self, state: State | None, after: int, rows_max: int) -> list[Entry]:
        """List rows. Without a state, or with a settled one, all rows are sorted."""
        chosen = "true" if state is None else f"state = {STATES.index(state)}"
        if state in ("pending", "dead"):
            chosen += " AND settled_at IS NULL"
        text = f"SELECT {{columns}} FROM {{table}} WHERE {chosen} AND seq > %(after)s ORDER BY seq LIMIT %(rows)s"
        columns = ENTRY_COLUMNS.replace("id,", "id::text,", 1)
        return [entry_of(row) for row in await self._ask(text, columns=columns, after=after, rows=rows_max)]

    async def entry(self, message_id: str) -> Entry | None:
        """Find a row by the index of ids."""
        columns = ENTRY_COLUMNS.replace("id,", "id::text,", 1)
        text = "SELECT {columns} FROM {table} WHERE id = %(id)s::uuid"
        found = await self._ask(text, columns=columns, id=message_id)
        return entry_of(found[0]) if found else None

    async def retry(self, message_ids: Sequence[str] | None) -> int:
        """One statement."""
        return await self._change(_RETRY, ids=None if message_ids is None else list(message_ids))

    async def drop(self, message_ids: Sequence[str]) -> int:
        """One statement."""
        return await self._change(_DROP, ids=list(message_ids), keep=KEEP_US)

    # --- the session ---

    def _connect(self) -> AsyncPostgresConnection:
        if self._line is None:
            raise StoreRefused(f"the outbox in {self.name} is not open")
        return self._line

    def _fill(self, text: str, columns: str = "") -> str:
        schema = f'"{self._place.schema}"'
        return text.format(schema=schema, table=f"{schema}.outbox", t=_T, columns=columns)

    async def _ask(self, text: str, *, columns: str = "", **parameters: Any) -> list[Any]:
        cursor = await self._execute(text, columns, parameters)
        return await cursor.fetchall() if cursor.description else []

    async def _change(self, text: str, **parameters: Any) -> int:
        changed: int = (await self._execute(text, "", parameters)).rowcount
        return changed

    async def _execute(self, text: str, columns: str, parameters: dict[str, Any]) -> Any:
        line = self._connect()
        try:
            return await line.execute(self._fill(text, columns), parameters or None, binary=True)
        except psycopg.Error as error:
            raise to_store_error(error, self.name) from error
