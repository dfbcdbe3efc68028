"""Query the live servers of a store: clock, replicas, memory, rights, indexes."""

import re
import time
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from semel.core.commands import Scan
from semel.core.protocols import Store
from semel.observe.guarantees import Weakness
from semel.stores.tiered import TieredStore
from semel.types import Mode, Unavailable
from semel.windows import exact_text, is_endless

__all__ = [
    "Keys",
    "SourceFacts",
    "SourceProbe",
    "StoreFacts",
    "keys_of",
    "of_circumstances",
    "of_patience",
    "of_windows",
    "probe",
    "weaknesses",
    "window_warnings",
]

Keys: TypeAlias = Literal["given", "content", "position"]
"""How the key is made: the producer's own id, a hash of the content, or the position in the source."""

ATTEMPTS = 10
"""The default number of attempts before semel gives an event up."""
_DAY_S = 86400.0


class SourceFacts(Struct, frozen=True, kw_only=True):
    """A broker's settings of one source. Unknown is `None`; endless is `math.inf`."""

    name: str = "the source"
    version: str = ""
    deadline_s: float | None = None
    """How long it waits for an ack or a heartbeat before it delivers again."""
    deadline_name: str = "the visibility timeout"
    """The name of that setting at the broker."""
    horizon_s: float | None = None
    """How long after the first delivery it may redeliver."""
    horizon_name: str = "the retention"
    redrive_s: float | None = None
    """How long after the first delivery a dead letter of it may be put back."""
    redrive_name: str = "the retention of the dead letters"
    deliveries_max: int | None = None
    """The broker gives a message up after this many deliveries; `None`: never."""
    buries: str = ""
    """Where it then puts the message; empty: nowhere."""
    dedupe_s: float | None = None
    """How long the broker drops a producer's duplicates; `None`: it does not."""
    content_ids: bool = False
    """Whether the broker makes ids from the content of messages without one."""
    durable: bool | None = None
    """Whether a confirmed message survives the end of the broker's process."""
    weaknesses: tuple[Weakness, ...] = ()
    """Other settings that weaken the guarantee."""
    notes: tuple[str, ...] = ()
    """Facts that weaken nothing."""
    waiting: int | None = None
    in_hand: int | None = None
    delayed: int = 0
    """Messages that wait for their next attempt in a place of their own, neither waiting nor in hand."""


class SourceProbe(Struct, frozen=True, kw_only=True):
    """The surroundings of a store: the sources of deliveries, and the kind of keys."""

    sources: tuple[SourceFacts, ...] = ()
    keys: Keys = "given"
    tenants: bool = False
    """Whether several tenants use the same consumer."""
    tenant: str = ""
    consumer: str = ""

    @property
    def horizon_known(self) -> bool:
        """Whether the redelivery time of every source is known."""
        return bool(self.sources) and all(source.horizon_s is not None for source in self.sources)


def of_circumstances(around: SourceProbe, mode: Mode, window_us: int, lease_us: int) -> Iterator[Weakness]:
    """Yield the weaknesses from sources, keys and tenants."""
    yield from of_windows(around, window_us)
    for source in around.sources:
        yield from of_patience(source, lease_us if mode in ("lease", "quarantine") else 0)
        yield from source.weaknesses
    if around.keys == "content" or any(source.content_ids for source in around.sources):
        yield Weakness(
            "Keys are hashes of the content: two different events with equal content are taken for one, and the"
            " second has no effect.",
            breaks=True,
            fix="a key that the producer chose for the event",
        )
    elif around.keys == "position":
        yield Weakness(
            "Keys are positions in the source: an event that its producer sends twice has two, and runs twice.",
            fix="a key that the producer chose for the event",
        )
    if around.tenants and not around.tenant:
        yield Weakness(
            "Several tenants share the consumer and none is named: equal keys of two tenants are taken for one"
            " event, and the second has no effect.",
            breaks=True,
            fix="open(..., tenant=...) with the caller's own",
        )


def of_windows(around: SourceProbe, window_us: int) -> Iterator[Weakness]:
    """Yield sources that may redeliver after the window. A window that is off is reported once, elsewhere."""
    if window_us:
        for source in around.sources:
            yield from _too_short(source, window_us, around.consumer or "CONSUMER")


def window_warnings(facts: SourceFacts, window_us: int, consumer: str) -> list[str]:
    """Return the warnings of `semel consume` about one source and the window in force."""
    if not window_us:
        return [
            f"the window is off: a message that is done, and that {facts.name} delivers again, runs again"
        ]
    if facts.horizon_s is None and not is_endless(window_us):
        after = f"a duplicate that comes after the window of {exact_text(window_us)} runs again"
        return [f"how long {facts.name} may deliver a message again is unknown: {after}"]
    around = SourceProbe(sources=(facts,), consumer=consumer)
    return [f"{each.what} Change: {each.fix}." for each in of_windows(around, window_us)]


def of_patience(source: SourceFacts, lease_us: int) -> Iterator[Weakness]:
    """Yield conflicts with the broker's deadline and delivery limit. `lease_us` 0: no lease."""
    yield from _too_long(source, lease_us)
    yield from _broker_gives_up_first(source)


def _too_short(source: SourceFacts, window_us: int, consumer: str) -> Iterator[Weakness]:
    """Report a window that is shorter than the source's redelivery time."""
    for lasting_s, name, who in (
        (source.horizon_s, source.horizon_name, f"{source.name} may send again"),
        (source.redrive_s, source.redrive_name, f"dead letters of {source.name} may be put back"),
    ):
        if lasting_s is None or is_endless(window_us) or window_us >= lasting_s * 1e6:
            continue
        text = exact_text(window_us)
        if lasting_s == inf:
            yield Weakness(
                f"The window of {text} ends, but {who} for ever ({name} has no end): what was done and not acknowledged"
                " when everything stopped, and comes after the window, runs again.",
                breaks=True,
                fix="--window forever, or a window longer than your longest outage, whose length `semel explain"
                " --redelivers-for` is told",
            )
        else:
            longer = exact_text(_longer_us(lasting_s))
            yield Weakness(
                f"The window of {text} is shorter than the {exact_text(round(lasting_s * 1e6))} for which {who}"
                f" ({name}): what comes after the window runs again.",
                breaks=True,
                fix=f"semel window set {consumer} {longer} (that and a tenth)",
            )


def _too_long(source: SourceFacts, lease_us: int) -> Iterator[Weakness]:
    """Report a lease that is longer than the source's deadline."""
    deadline_s = source.deadline_s
    if deadline_s is None or lease_us <= deadline_s * 1e6:
        return
    spent = source.deliveries_max is not None and source.deliveries_max * deadline_s * 1e6 <= lease_us
    end = (
        f"and {source.name} gives up after {source.deliveries_max} deliveries, all of them within the lease: the event"
        " is given up without having run."
        if spent
        else "is turned away, and may use up the deliveries that the source allows without having run."
    )
    yield Weakness(
        f"The lease of {exact_text(lease_us)} is longer than the {exact_text(round(deadline_s * 1e6))} after"
        f" which {source.name} sends again ({source.deadline_name}): after a crash the event comes back while the dead"
        f" attempt's lease still runs, {end}",
        breaks=spent,
        fix=f"--lease {exact_text(round(deadline_s * 1e6))} or shorter, or a longer time for {source.deadline_name}",
    )


def _broker_gives_up_first(source: SourceFacts) -> Iterator[Weakness]:
    """Report a broker that gives a message up before semel does."""
    if source.deliveries_max is None:
        return
    told = f"{source.name} gives a message up after {source.deliveries_max} deliveries"
    if not source.buries:
        yield Weakness(
            f"{told} and puts it nowhere: an event whose workers were killed, or were busy, that often is lost.",
            breaks=source.deliveries_max <= ATTEMPTS,
            fix="no limit at the broker (semel counts attempts itself), or a place for dead letters there",
        )
    elif source.deliveries_max <= ATTEMPTS:
        yield Weakness(
            f"{told}, not more than the {ATTEMPTS} attempts after which semel does: it goes to {source.buries} without"
            " semel's account of why.",
            fix=f"more deliveries than max_attempts ({ATTEMPTS} unless said otherwise)",
        )


def _longer_us(lasting_s: float) -> int:
    """Return a tenth more, in whole hours, or minutes below a day."""
    unit = 3600 if lasting_s >= _DAY_S else 60
    return -int(-lasting_s * 1.1 // unit) * unit * 10**6


LAG_WARN_S = 1.0
"""A replica with a larger lag is reported."""
SAMPLE = 200
"""How many records of a consumer are read to see how its keys are made."""
_FROM_CONTENT = re.compile(r"(?:[^:]+::)?(?:content|sliding):v\d+\.")
"""The default prefix of keys that `semel.keys` makes from content."""
INDEXES: dict[str, tuple[str, ...]] = {
    "postgres": ("records_digest", "records_purge", "marks_digest", "timed_records_id", "outbox_unsettled"),
    "sqlite": ("semel_records_digest", "semel_records_purge", "semel_outbox_unsettled"),
}
"""Required indexes: without them every claim reads the whole table."""
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
    """A replica of a server."""

    name: str
    synchronous: bool
    lag_s: float
    behind_bytes: int
    awaited: bool = False
    """It follows behind, but the store waits for replicas after each settle (`wait_replicas`)."""


class StoreFacts(Struct, frozen=True, kw_only=True):
    """Facts from the servers of a store; fields that do not apply stay empty."""

    version: str = ""
    ahead_us: int | None = None
    """How far the server's clock is ahead of this computer's; `None`: it is the same clock."""
    replicas: tuple[Replica, ...] = ()
    missing_indexes: tuple[str, ...] = ()
    invalid_indexes: tuple[str, ...] = ()
    lacking_rights: tuple[str, ...] = ()
    """Tables that this user may not read and write."""
    idle_max_s: float | None = None
    """The server's timeout of idle transactions; 0: none. `None`: the store has no such setting."""
    evicted: int = 0
    """Keys that the server has evicted since its start."""
    memory_ratio: float | None = None
    """How much of its memory limit a server uses; `None`: it has no limit."""


def probe(store: Store) -> StoreFacts:
    """Query the servers of an open store. Raises the store's error if they do not answer."""
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

    from semel.stores.postgres.errors import to_store_error

    try:
        with psycopg.connect(**store.place.parameters()) as line:
            return _look_at(line, store.place.schema)
    except psycopg.Error as error:
        raise to_store_error(error, store.name) from error


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
    from semel.stores.redis.server_checks import version_text

    before = time.time_ns()
    told: list[dict[str, str]] = store.read_info()
    middle_us = (before + time.time_ns()) // 2000
    ratios = [
        int(each["used_memory"]) / int(each["maxmemory"]) for each in told if int(each.get("maxmemory", "0"))
    ]
    return StoreFacts(
        version=version_text(told[0]),
        ahead_us=max((int(each["time_us"]) - middle_us for each in told), key=abs),
        replicas=tuple(
            replica
            for each in told
            for replica in _redis_replicas(each, awaited=store.core.options.replicas_awaited > 0)
        ),
        memory_ratio=max(ratios, default=None),
        evicted=sum(int(each.get("evicted_keys", "0")) for each in told),
    )


def _redis_replicas(told: dict[str, str], *, awaited: bool) -> Iterator[Replica]:
    """Parse the replicas of one master, from lines such as `slave0:ip=...,offset=...,lag=1`."""
    written = int(told.get("master_repl_offset", "0"))
    for number in range(int(told.get("connected_slaves", "0"))):
        fields = dict(part.partition("=")[::2] for part in told.get(f"slave{number}", "").split(","))
        behind = written - int(fields.get("offset", "0"))
        yield Replica(
            f"{fields.get('ip', '?')}:{fields.get('port', '?')}",
            synchronous=False,
            lag_s=float(fields.get("lag", "0")),
            behind_bytes=max(0, behind),
            awaited=awaited,
        )


def keys_of(store: Store, tenant: str, consumer: str) -> Keys:
    """Return how this consumer's keys are made, from its latest records: `content` if one is a hash."""
    (page,) = store.send((Scan(tenant, consumer, limit=SAMPLE),))
    if isinstance(page, Unavailable):
        raise page.error
    hashed = any(record.sliding or _FROM_CONTENT.match(record.key) for record in page.records)
    return "content" if hashed else "given"


def weaknesses(store: Store) -> list[Weakness]:
    """Return the weaknesses that only live servers show: replicas and their lag.

    What is left of them where settles wait for replicas, the store says itself.
    """
    return [
        _of_replica(replica)
        for replica in probe(store).replicas
        if not (replica.synchronous or replica.awaited)
    ]


def _of_replica(replica: Replica) -> Weakness:
    behind = f"{replica.lag_s:.1f} s, {replica.behind_bytes:,} bytes"
    text = (
        f"The replica {replica.name or 'without a name'} follows behind ({behind} now): a failover to it forgets what"
        " has not reached it, and that is done again."
    )
    return Weakness(text, fix="synchronous replication: synchronous_standby_names, or wait_replicas on Redis")
