"""Ask the live servers behind a store what only they know: clock, replicas, room, rights, indexes."""

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from semel.core.commands import Scan
from semel.core.ports import Store
from semel.observe.guarantees import Weakness
from semel.observe.sources import Keys
from semel.stores.tiered import TieredStore
from semel.types import Unavailable

__all__ = ["StoreFacts", "keys_of", "probe", "weaknesses"]

LAG_WARN_S = 1.0
"""A replica further behind than this loses more than the writes of a moment."""
SAMPLE = 200
"""So many records of a consumer are looked at to see how its keys are made."""
_FROM_CONTENT = re.compile(r"(?:[^:]+::)?(?:content|sliding):v\d+\.")
"""How keys begin that semel.keys made from the content, unless they were given another namespace."""
INDEXES: dict[str, tuple[str, ...]] = {
    "postgres": ("records_digest", "records_purge", "marks_digest", "timed_records_id", "outbox_unsettled"),
    "sqlite": ("semel_records_digest", "semel_records_purge", "semel_outbox_unsettled"),
}
"""Without these every claim reads the whole table."""
_PG_TABLES = ("records", "extras", "journal", "marks", "consumers", "windows", "outbox")
_PG = {
    "clock": "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint",
    "version": "SELECT current_setting('server_version')",
    "replicas": "SELECT application_name, sync_state, coalesce(extract(epoch FROM replay_lag), 0)::float8,"
    " pg_wal_lsn_diff(pg_current_wal_lsn(), replay_lsn)::bigint FROM pg_stat_replication",
    "invalid": "SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid"
    " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND NOT i.indisvalid",
    "idle": "SELECT setting::float8 / 1000 FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout'",
    "indexes": "SELECT indexname FROM pg_indexes WHERE schemaname = %s",
    "rights": "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s"
    " AND c.relname = ANY(%s) AND NOT (has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'INSERT')"
    " AND has_table_privilege(c.oid, 'UPDATE') AND has_table_privilege(c.oid, 'DELETE'))",
}


class Replica(Struct, frozen=True):
    """One that follows a server."""

    name: str
    synchronous: bool
    lag_s: float
    behind_bytes: int


class StoreFacts(Struct, frozen=True, kw_only=True):
    """What the servers of a store say; what a store has none of stays empty."""

    version: str = ""
    ahead_us: int | None = None
    """How far the server's clock is ahead of this computer's; `None`: it is the same clock."""
    replicas: tuple[Replica, ...] = ()
    missing_indexes: tuple[str, ...] = ()
    invalid_indexes: tuple[str, ...] = ()
    lacking_rights: tuple[str, ...] = ()
    """Tables that this user may not read and write."""
    idle_max_s: float | None = None
    """After how long the server ends a transaction in which nothing happens; 0: never. `None`: it has none."""
    evicted: int = 0
    """Keys that the server has dropped for want of memory, since it began."""
    memory_ratio: float | None = None
    """How much of its memory limit a server uses; `None`: it has no limit."""


def probe(store: Store) -> StoreFacts:
    """Look at the servers of an open store. Raises what the store raises when they do not answer."""
    if isinstance(store, TieredStore):
        return probe(store.truth)
    kind = store.name.partition(":")[0]
    looks: dict[str, Callable[[Any], StoreFacts]] = {
        "postgresql": _postgres,
        "sqlite": _sqlite,
        "redis": _redis,
        "rediss": _redis,
        "valkey": _redis,
        "valkeys": _redis,
    }
    look = looks.get(kind.partition("+")[0])
    return StoreFacts() if look is None else look(store)


def _postgres(store: Any) -> StoreFacts:
    import psycopg

    from semel.stores.postgres.trouble import translated

    try:
        with psycopg.connect(**store.place.parameters()) as line:
            return _look_at(line, store.place.schema)
    except psycopg.Error as error:
        raise translated(error, store.name) from error


def _look_at(line: Any, schema: str) -> StoreFacts:
    def ask(name: str, *parameters: Any) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = line.execute(_PG[name], parameters or None).fetchall()
        return rows

    before = time.time_ns()
    ((clock_us,),) = ask("clock")
    ahead_us = clock_us - (before + time.time_ns()) // 2000
    made = {name for (name,) in ask("indexes", schema)}
    return StoreFacts(
        version=f"PostgreSQL {ask('version')[0][0]}",
        ahead_us=ahead_us,
        replicas=tuple(
            Replica(name, state in ("sync", "quorum"), lag_s, behind or 0)
            for name, state, lag_s, behind in ask("replicas")
        ),
        missing_indexes=tuple(name for name in INDEXES["postgres"] if name not in made),
        invalid_indexes=tuple(name for (name,) in ask("invalid", schema)),
        idle_max_s=ask("idle")[0][0],
        lacking_rights=tuple(sorted(name for (name,) in ask("rights", schema, list(_PG_TABLES)))),
    )


def _sqlite(store: Any) -> StoreFacts:
    import sqlite3
    from contextlib import closing
    from pathlib import Path

    with closing(sqlite3.connect(f"{Path(store.path).absolute().as_uri()}?mode=ro", uri=True)) as line:
        made = {name for (name,) in line.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
    return StoreFacts(
        version=f"SQLite {sqlite3.sqlite_version}",
        missing_indexes=tuple(name for name in INDEXES["sqlite"] if name not in made),
    )


def _redis(store: Any) -> StoreFacts:
    from semel.stores.redis.checks import version_text

    before = time.time_ns()
    told: list[dict[str, str]] = store.say()
    middle_us = (before + time.time_ns()) // 2000
    ratios = [
        int(each["used_memory"]) / int(each["maxmemory"]) for each in told if int(each.get("maxmemory", "0"))
    ]
    return StoreFacts(
        version=version_text(told[0]),
        ahead_us=max((int(each["time_us"]) - middle_us for each in told), key=abs),
        replicas=tuple(replica for each in told for replica in _redis_replicas(each)),
        memory_ratio=max(ratios, default=None),
        evicted=sum(int(each.get("evicted_keys", "0")) for each in told),
    )


def _redis_replicas(told: dict[str, str]) -> Iterator[Replica]:
    """The replicas of one master, from lines such as `slave0:ip=...,offset=...,lag=1`."""
    written = int(told.get("master_repl_offset", "0"))
    for number in range(int(told.get("connected_slaves", "0"))):
        fields = dict(part.partition("=")[::2] for part in told.get(f"slave{number}", "").split(","))
        behind = written - int(fields.get("offset", "0"))
        yield Replica(
            f"{fields.get('ip', '?')}:{fields.get('port', '?')}",
            synchronous=False,
            lag_s=float(fields.get("lag", "0")),
            behind_bytes=max(0, behind),
        )


def keys_of(store: Store, tenant: str, consumer: str) -> Keys:
    """What makes this consumer's keys, as its latest records show: `content` where one was made from a body."""
    (page,) = store.send((Scan(tenant, consumer, limit=SAMPLE),))
    if isinstance(page, Unavailable):
        raise page.error
    hashed = any(record.sliding or _FROM_CONTENT.match(record.key) for record in page.records)
    return "content" if hashed else "given"


def weaknesses(store: Store) -> list[Weakness]:
    """What the live servers add to what a store knows of itself: replicas, and how far they are behind."""
    return [_of_replica(replica) for replica in probe(store).replicas if not replica.synchronous]


def _of_replica(replica: Replica) -> Weakness:
    behind = f"{replica.lag_s:.1f} s, {replica.behind_bytes:,} bytes"
    text = (
        f"The replica {replica.name or 'without a name'} follows behind ({behind} now): a failover to it forgets what"
        " has not reached it, and that is done again."
    )
    return Weakness(text, fix="synchronous replication: synchronous_standby_names, or wait_replicas on Redis")
