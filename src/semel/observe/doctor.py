"""Examine a store and its servers: find problems, and say how to fix them."""

import platform
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from semel.core.commands import Count, Lookup, ReadSettings, Renew, Scan
from semel.core.ids import is_own
from semel.core.protocols import Store
from semel.errors import SemelError, StoreError
from semel.observe.explain import of_store
from semel.observe.formatting import plural
from semel.observe.probes import LAG_WARN_S, SourceFacts, StoreFacts, of_patience, probe
from semel.observe.rollups import TENANT as ROLLUPS
from semel.runtime.process import new_owner
from semel.types import Id, Lost, Record, State, Stats, Unavailable

__all__ = ["Finding", "Level", "examine", "of_source"]

Level: TypeAlias = Literal["ok", "warning", "error"]

LATENCY_WARN_S = 0.05
"""Slower round trips are reported: a claim and a completion take two."""
LATENCY_TRIES = 7
SKEW_WARN_S = 1.0
"""Larger clock skew is reported. The store's clock decides, but times in logs and of events are then wrong."""
SKEW_ERROR_S = 60.0
PURGE_LAG_WARN_S = 3600.0
STUCK_S = 900.0
"""The default run time of a handler: an older claim hangs, or has a longer `run_max_s`."""
ORPHAN_S = 60.0
MEMORY_WARN = 0.8
PAGE_ROWS = 1000
LOOK_MAX = 100_000
"""The most records that one check reads; it reports if there are more."""
NAMED = 3
"""Keys that a finding names."""
NOBODY = ("", "semel.doctor", "semel.doctor: no such key")
"""A key without a record: reading or renewing it changes nothing."""


class Finding(Struct, frozen=True):
    """The result of one check."""

    check: str
    level: Level
    what: str
    fix: str = ""
    records: tuple[Id, ...] = ()
    """Some of the records that it is about, for links."""


def examine(store: Store) -> Iterator[Finding]:
    """Connect, and run every check; a check that fails is a finding too. Changes no record."""
    yield Finding("semel", "ok", f"semel {version('semel')} on Python {platform.python_version()}")
    try:
        store.open()
    except SemelError as error:
        yield Finding("connection", "error", str(error), "fix this first; the other checks need the store")
        return
    try:
        yield Finding("connection", "ok", f"{store.name} answers, and its schema is up to date")
        checks: tuple[Callable[[Store], Iterator[Finding]], ...] = (
            _servers, _latency, _rights, _durability, _settings, _inboxes, _purging, _claims, _unknown_records,
        )  # fmt: skip
        for check in checks:
            yield from _run_check(check, store)
    finally:
        store.close()


def _run_check(check: Callable[[Store], Iterator[Finding]], store: Store) -> Iterator[Finding]:
    name = check.__name__.strip("_")
    try:
        yield from check(store)
    except StoreError as error:
        yield Finding(name, "error", str(error), "check that the store is up and that this user may read it")
    except Exception as error:  # noqa: BLE001 - a driver's error in one check must not hide the other checks
        yield Finding(
            name, "error", f"{type(error).__name__}: {error}".strip(), "check that this user may read it"
        )


def _ask(store: Store, item: Any) -> Any:
    (answer,) = store.send((item,))
    if isinstance(answer, Unavailable):
        raise answer.error
    return answer


def _servers(store: Store) -> Iterator[Finding]:
    facts = probe(store)
    if facts.version:
        yield Finding("version", "ok", facts.version)
    yield from _clock(facts)
    for replica in facts.replicas:
        late = replica.lag_s > LAG_WARN_S
        kept = replica.synchronous or replica.awaited
        how = "synchronous" if replica.synchronous else "settles wait for it" if kept else "follows behind"
        yield Finding(
            "replica",
            "warning" if late or not kept else "ok",
            f"replica {replica.name or '(no name)'}: {how}, {replica.lag_s:.1f} s, {replica.behind_bytes:,} bytes",
            "" if kept else "synchronous replication, or wait_replicas on Redis, survives a failover",
        )
    for name in facts.missing_indexes:
        yield Finding("indexes", "error", f"the index {name} is missing", "semel migrate --sql prints it")
    for name in facts.invalid_indexes:
        yield Finding(
            "indexes", "error", f"the index {name} is not valid", f"REINDEX INDEX CONCURRENTLY {name}"
        )
    for name in facts.lacking_rights:
        yield Finding(
            "permissions",
            "error",
            f"this user may not read and write the table {name}",
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON {name}",
        )
    if facts.evicted:
        yield Finding(
            "memory",
            "error",
            f"{plural(facts.evicted, 'key was', 'keys were')} evicted for want of memory: events whose records were"
            " among them run again",
            "CONFIG SET maxmemory-policy noeviction, and enough memory",
        )
    if facts.memory_ratio is not None:
        yield Finding(
            "memory",
            "warning" if facts.memory_ratio > MEMORY_WARN else "ok",
            f"{facts.memory_ratio:.0%} of the memory limit is used",
            ""
            if facts.memory_ratio <= MEMORY_WARN
            else "a higher maxmemory, shorter windows, or semel purge",
        )


def _clock(facts: StoreFacts) -> Iterator[Finding]:
    if facts.ahead_us is None:
        return
    skew_s = abs(facts.ahead_us) / 1e6
    level: Level = "ok" if skew_s < SKEW_WARN_S else "warning" if skew_s < SKEW_ERROR_S else "error"
    side = "ahead of" if facts.ahead_us > 0 else "behind"
    what = f"the store's clock is {skew_s:.3f} s {side} this computer's"
    yield Finding(
        "clock", level, what, "" if level == "ok" else "let NTP set both clocks; the store's decides"
    )


def _latency(store: Store) -> Iterator[Finding]:
    took: list[float] = []
    for _ in range(LATENCY_TRIES):
        began = time.perf_counter()
        _ask(store, Lookup(NOBODY))
        took.append(time.perf_counter() - began)
    median_s = statistics.median(took)
    slow = median_s > LATENCY_WARN_S
    yield Finding(
        "latency",
        "warning" if slow else "ok",
        f"a round trip takes {median_s * 1000:.2f} ms (median of {LATENCY_TRIES})",
        "use a nearer store, run_many, which shares round trips, or a cache, which answers duplicates"
        if slow
        else "",
    )


def _rights(store: Store) -> Iterator[Finding]:
    """Renew a claim that does not exist: it needs the right to write, and writes nothing."""
    answer = _ask(store, Renew(NOBODY, new_owner(), 1, 1_000_000))
    assert isinstance(answer, Lost)
    yield Finding("permissions", "ok", "this user may write records")


def _durability(store: Store) -> Iterator[Finding]:
    found = [each for each in of_store(getattr(store, "truth", store)) if each.breaks or each.fix]
    for weakness in found:
        yield Finding("durability", "error" if weakness.breaks else "warning", weakness.what, weakness.fix)
    if not any(weakness.breaks for weakness in found):
        yield Finding("durability", "ok", "confirmed writes are durable")


def _settings(store: Store) -> Iterator[Finding]:
    settings = _ask(store, ReadSettings())
    modes: dict[str, int] = {}
    for scope, mode in settings.modes.items():
        if not is_own(*scope):
            modes[mode] = modes.get(mode, 0) + 1
    told = ", ".join(f"{number} in mode {mode}" for mode, number in sorted(modes.items())) or "none yet"
    yield Finding("consumers", "ok", f"consumers: {told}")
    mixed = sorted({name for tenant, name in settings.modes if tenant and ("", name) in settings.modes})
    for name in mixed:
        yield Finding(
            "tenants",
            "warning",
            f"consumer {name} works both with tenants and without one",
            "name the tenant everywhere: without it, equal keys of two tenants are one event",
        )


def _inboxes(store: Store) -> Iterator[Finding]:
    """Check for a timeout of idle transactions: a process that hangs in one holds the locks of its keys."""
    if "inbox" in _ask(store, ReadSettings()).modes.values() and probe(store).idle_max_s == 0:
        yield Finding(
            "inbox",
            "warning",
            "idle transactions have no timeout: a process that hangs in one keeps its keys locked",
            "ALTER ROLE ... SET idle_in_transaction_session_timeout = '60s', for the application's role",
        )


def _purging(store: Store) -> Iterator[Finding]:
    stats: Stats = _ask(store, Count(None))
    behind = stats.purge_lag_s > PURGE_LAG_WARN_S
    waiting = plural(stats.expired, "expired record waits", "expired records wait")
    yield Finding(
        "clean-up",
        "warning" if behind else "ok",
        f"{waiting}, the oldest for {stats.purge_lag_s:.0f} s",
        "semel purge --watch, or semel.Cleaner in a service" if behind else "",
    )


def _pages_of(store: Store, state: State) -> Iterator[list[Record]]:
    """Yield the records of a state in pages, up to `LOOK_MAX`."""
    cursor, looked = None, 0
    while looked < LOOK_MAX:
        page = _ask(store, Scan(state=state, limit=PAGE_ROWS, cursor=cursor))
        yield page.records
        looked += len(page.records)
        cursor = page.cursor
        if cursor is None:
            return


class _Sample:
    """A count, and the first records."""

    def __init__(self) -> None:
        self.number = 0
        self.ids: list[Id] = []

    @property
    def keys(self) -> str:
        """The keys of the first records, as text."""
        return ", ".join(key for _, _, key in self.ids)

    def add(self, record: Record) -> None:
        """Count one."""
        self.number += 1
        if len(self.ids) < NAMED:
            self.ids.append(record.id)


def _claims(store: Store) -> Iterator[Finding]:
    now: int = _ask(store, Count(None)).now_us
    stuck, orphans, running, looked = _Sample(), _Sample(), 0, 0
    for page in _pages_of(store, "claimed"):
        looked += len(page)
        for each in page:
            if each.tenant == ROLLUPS or not each.owner:  # rollup records are held for an hour each
                continue
            if each.lease_until_us < now - ORPHAN_S * 1e6:
                orphans.add(each)
            elif each.lease_until_us >= now:
                running += 1
                if now - each.fence > STUCK_S * 1e6:
                    stuck.add(each)
    for found, one, many, fix in (
        (
            stuck,
            "has been running for more than 15 minutes",
            "have been running for more than 15 minutes",
            "look for a handler that hangs; semel show KEY names its owner",
        ),
        (
            orphans,
            "belongs to a worker that is gone",
            "belong to workers that are gone",
            "they run when they are delivered again; is their source alive?",
        ),
    ):
        if found.number:
            what = f"{plural(found.number, f'claim {one}', f'claims {many}')}: {found.keys}"
            yield Finding("claims", "warning", what, fix, tuple(found.ids))
    if not stuck.number and not orphans.number:
        among = f" (of the first {looked:,}; there are more)" if looked >= LOOK_MAX else ""
        yield Finding(
            "claims",
            "ok",
            f"{plural(running, 'claim is', 'claims are')} running, none of them is stuck{among}",
        )


def _unknown_records(store: Store) -> Iterator[Finding]:
    found = _Sample()
    for page in _pages_of(store, "unknown"):
        for each in page:
            found.add(each)
    if found.number:
        least = "at least " if found.number >= LOOK_MAX else ""
        yield Finding(
            "unknown",
            "warning",
            f"to be decided: {least}{found.number:,}, such as {found.keys}",
            "find out whether their effect happened, then: semel resolve KEY --fence N --done (or --absent)",
            tuple(found.ids),
        )


def of_source(source: SourceFacts, took_s: float, lease_us: int) -> Iterator[Finding]:
    """Report a broker's answer about a source. `explain` compares it with the window."""
    version = f" ({source.version})" if source.version else ""
    yield Finding("source", "ok", f"{source.name}{version} answered all questions in {took_s * 1000:.0f} ms")
    for weakness in (*source.weaknesses, *of_patience(source, lease_us)):
        yield Finding("source", "error" if weakness.breaks else "warning", weakness.what, weakness.fix)
    for note in source.notes:
        yield Finding("source", "ok", note)
    if source.waiting is not None:
        held = "" if source.in_hand is None else f", {plural(source.in_hand, 'is in hand', 'are in hand')}"
        later = f", {plural(source.delayed, 'waits', 'wait')} for another attempt" if source.delayed else ""
        waits = plural(source.waiting, "message waits", "messages wait")
        yield Finding("source", "ok", f"{waits}{held}{later}")
