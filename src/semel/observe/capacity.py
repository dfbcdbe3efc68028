"""Plan a store for a rate and a window, from measured bytes and processor time: memory, disk, partitions, shards."""

import re
from collections.abc import Sequence
from math import ceil
from typing import Literal

from msgspec import Struct

from semel.errors import UsageError
from semel.observe.formatting import plural
from semel.windows import is_endless

__all__ = ["LAYOUTS", "Plan", "StoreLayout", "parse_rate", "plan"]

HEADROOM = 2.0
"""The factor between the processor time that is needed and what is planned: peaks, purges, backups."""
SERVER_CORES = 16
"""The cores of one PostgreSQL server in a plan, unless the caller says otherwise."""
SERVER_MEMORY_BYTES = 64 * 2**30
"""The memory that one server gives to a store in memory, unless the caller says otherwise."""
PLAIN_MAX_PER_DAY = 10_000_000
"""Up to here a plain table with a cleaner is enough: removing 10 million records under load took five minutes."""
OUTAGE_S = 7 * 86400
"""The longest outage that partitions are planned for: they live for the window and this."""
AHEAD_DAYS = 7
"""Partitions are created this far ahead."""
PARTITIONS_GOAL = 60
"""A plan with more partitions takes longer ones: every statement considers all of them."""
DAY_S = 86400.0
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKmMbBgG]?)\s*(?:/|\s+per\s+)?\s*([a-z]*)\s*")
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
_PERIODS = {
    "": 1.0, "s": 1.0, "sec": 1.0, "second": 1.0, "m": 60.0, "min": 60.0, "minute": 60.0,
    "h": 3600.0, "hour": 3600.0, "d": DAY_S, "day": DAY_S,
}  # fmt: skip
RATE_MAX_PER_S = 10**9


class StoreLayout(Struct, frozen=True, kw_only=True):
    """One way to keep events in a store, with what was measured for it. `docs/explain/scale.md` has the sources."""

    store: str
    """The scheme of its URLs."""
    name: str
    bytes_each: int
    """On the disk, or in memory where records live there."""
    index_bytes: int = 0
    """The part that random keys touch everywhere, so that it has to be in memory."""
    in_memory: bool = False
    client_us: float = 0.0
    """Processor time of a client for one new event, in batches of 500."""
    server_us: float = 0.0
    """Processor time of the server for one new event; 0: there is none."""
    one_core: bool = False
    """Whether one core serves all callers: more of it needs another server, file or process."""
    partitioned: bool = False
    by_arrival: bool = False
    """Whether partitions are by arrival: they need not outlive an outage."""
    look_up_us: float = 0.0
    """What the server needs more for each further partition of the window, in which a key may be."""
    held_max: int = 0
    """How many records were ever measured with it; more is an extrapolation."""
    note: str = ""


LAYOUTS: tuple[StoreLayout, ...] = (
    StoreLayout(
        store="memory", name="packed marks", bytes_each=24, in_memory=True, client_us=1.8, one_core=True,
        held_max=1_000_000, note="forgets on exit; one process",
    ),
    StoreLayout(
        store="sqlite", name="records", bytes_each=205, client_us=36, one_core=True, held_max=1_000_000,
        note="one writer at a time, and random keys slow down as the file outgrows memory",
    ),
    StoreLayout(
        store="sqlite", name="records, digests only", bytes_each=130, client_us=36, one_core=True,
        held_max=1_000_000, note="readable_keys=false, keep_value=False",
    ),
    StoreLayout(
        store="sqlite", name="marks", bytes_each=33, client_us=14.2, one_core=True, held_max=1_000_000,
        note="0.40 of the speed at 10,000 marks",
    ),
    StoreLayout(
        store="redis", name="records", bytes_each=303, in_memory=True, client_us=8.4, server_us=9.3,
        one_core=True, held_max=100_000, note="the append-only file comes on top; it was not measured",
    ),
    StoreLayout(
        store="redis", name="records, digests only", bytes_each=197, in_memory=True, client_us=8.4,
        server_us=9.3, one_core=True, held_max=100_000, note="readable_keys=false, keep_value=False",
    ),
    StoreLayout(
        store="redis", name="marks", bytes_each=151, in_memory=True, client_us=1.8, server_us=3.1,
        one_core=True, held_max=1_000_000,
    ),
    StoreLayout(
        store="redis", name="compact marks", bytes_each=10, in_memory=True, client_us=2.8, server_us=5.1,
        one_core=True, held_max=1_000_000, note="marks=compact; remembered for one to two windows",
    ),
    StoreLayout(
        store="postgresql", name="records", bytes_each=434, index_bytes=54, client_us=28.4, server_us=21,
        held_max=10_000_000,
    ),
    StoreLayout(
        store="postgresql", name="records, digests only", bytes_each=285, index_bytes=54, client_us=28.4,
        server_us=21, held_max=10_000_000, note="readable_keys=false, keep_value=False",
    ),
    StoreLayout(
        store="postgresql", name="records in partitions", bytes_each=434, index_bytes=54, client_us=28.4,
        server_us=23, partitioned=True, held_max=10_000_000,
        note="ids=uuid7, ulid, ksuid or snowflake; also of an inbox",
    ),
    StoreLayout(
        store="postgresql", name="marks", bytes_each=103, index_bytes=42, client_us=6, server_us=13,
        held_max=1_000_000,
    ),
    StoreLayout(
        store="postgresql", name="marks in partitions", bytes_each=121, index_bytes=52, client_us=6,
        server_us=14, look_up_us=3, partitioned=True, by_arrival=True, held_max=400_000,
        note="ids=opaque, or uuid7, ulid, ksuid or snowflake",
    ),
    StoreLayout(
        store="kafka", name="dedup", bytes_each=35, index_bytes=2, client_us=16.1, one_core=True,
        held_max=41_000_000,
        note="semel dedup: disk of its local indexes; the topic needs a partition for each shard, and 28 bytes"
        " for each mark and replica",
    ),
)  # fmt: skip


class Plan(Struct, frozen=True, kw_only=True):
    """What one layout needs for a rate and a window."""

    store: str
    layout: str
    held: int
    """Records at a time; 0: without end."""
    memory_bytes: int | None
    """In the servers; `None`: not measured."""
    disk_bytes: int | None
    """`None`: it has no disk, or what it writes there was not measured."""
    grows_bytes_per_day: int
    """How much it takes for each day of events; with a window without end it never gives that back."""
    partitions: int = 0
    partition_step: str = ""
    partition_live_s: float = 0.0
    """How long partitions live: the window and the longest outage; those of marks the window and one step."""
    shards: int = 1
    """Servers, files or processes that share the keys."""
    server_cores: int = 0
    client_processes: int = 1
    connections: int = 0
    """To all servers together: one for items and one for notifications in each process."""
    fits: Literal["yes", "unmeasured", "no"] = "yes"
    """`unmeasured`: it holds more than was ever measured, so its speed is an extrapolation."""
    notes: tuple[str, ...] = ()


def parse_rate(text: str) -> float:
    """Return events per second of `12k/s`, `1B/day`, `500` or `3M/h`. Raises `UsageError`."""
    found = _RATE.fullmatch(text)
    period = found and _PERIODS.get(found[3].removesuffix("s") if len(found[3]) > 1 else found[3])
    if not found or not period:
        raise UsageError(f"{text!r} is not a rate; write it like 12k/s, 500/s, 3M/h or 1B/day")
    rate = float(found[1]) * _SCALES[found[2].lower()] / period
    if not 0 < rate <= RATE_MAX_PER_S:
        raise UsageError(f"a rate of {text!r} is out of bounds; give more than 0 and at most 1B/s")
    return rate


def plan(
    rate_per_s: float,
    window_us: int,
    *,
    stores: Sequence[str] = (),
    server_cores: int = SERVER_CORES,
    server_memory_bytes: int = SERVER_MEMORY_BYTES,
) -> list[Plan]:
    """Return what each layout needs. `stores`: only those, by scheme. The rate is that of new events."""
    return [
        _plan(layout, rate_per_s, window_us, server_cores, server_memory_bytes)
        for layout in LAYOUTS
        if not stores or layout.store in stores
    ]


def _plan(
    layout: StoreLayout, rate_per_s: float, window_us: int, server_cores: int, server_memory_bytes: int
) -> Plan:
    endless, window_s = is_endless(window_us), window_us / 1e6
    notes = [layout.note] if layout.note else []
    partitions, step, live_s = 0, "", 0.0
    kept_s = touched_s = window_s
    server_us = layout.server_us
    fits: Literal["yes", "unmeasured", "no"] = "yes"
    if layout.partitioned:
        live_s = window_s + (0 if layout.by_arrival else OUTAGE_S)
        partitions, step, step_s = _partitions(live_s)
        kept_s, touched_s = live_s + step_s, window_s + step_s  # by the time in the id, so old indexes rest
        if layout.by_arrival:
            live_s = kept_s
            server_us += layout.look_up_us * max(0, ceil(window_s / step_s) - 1)
        notes.append(
            f"{layout.name.split()[0]} stay until their partition is removed, not only for the window"
        )
    elif layout.store == "postgresql" and rate_per_s * DAY_S > PLAIN_MAX_PER_DAY and not endless:
        notes.append("beyond 10 million a day use partitions, or purge all the time")
    if endless and (layout.partitioned or layout.store == "memory"):
        fits = "no"
        notes.append("cannot promise a window without end")
    held = 0 if endless else round(rate_per_s * kept_s)
    if fits == "yes" and (endless or held > layout.held_max):
        fits = "unmeasured"
        notes.append(f"measured up to {plural(layout.held_max, 'record')} only")
    busy = (server_us or layout.client_us) * rate_per_s / 1e6 * HEADROOM
    cores = max(1, ceil(busy))
    size = None if endless else held * layout.bytes_each
    shards = cores if layout.one_core else ceil(cores / server_cores)
    if layout.in_memory and size is not None:
        shards = max(shards, ceil(size / server_memory_bytes))
    if shards > 1 and layout.store in ("sqlite", "memory"):
        fits = "no"
        notes.append(
            f"one {'file' if layout.store == 'sqlite' else 'process'} is not enough: you would have to split"
            f" the keys over {shards} yourself"
        )
    elif shards > 1 and layout.store == "postgresql":
        notes.append(f"you would have to split the keys over {shards} databases yourself")
    processes = max(1, ceil(layout.client_us * rate_per_s / 1e6 * HEADROOM))
    index = None if endless or not layout.index_bytes else round(rate_per_s * touched_s * layout.index_bytes)
    return Plan(
        store=layout.store,
        layout=layout.name,
        held=held,
        memory_bytes=size if layout.in_memory else index,
        disk_bytes=None if layout.in_memory else size,
        grows_bytes_per_day=round(rate_per_s * DAY_S * layout.bytes_each),
        partitions=partitions,
        partition_step=step,
        partition_live_s=live_s,
        shards=shards,
        server_cores=cores if layout.server_us else 0,
        client_processes=processes,
        connections=2 * processes * shards if layout.server_us else 0,
        fits=fits,
        notes=tuple(notes),
    )


def _partitions(live_s: float) -> tuple[int, str, float]:
    """Return how many partitions there are, and the shortest step for which that is few enough."""
    *shorter, longest = (
        ("1 day", DAY_S),
        ("1 week", 7 * DAY_S),
        ("1 month", 30 * DAY_S),
        ("1 year", 365 * DAY_S),
    )
    chosen = next((each for each in shorter if _count(live_s, each[1]) <= PARTITIONS_GOAL), longest)
    return _count(live_s, chosen[1]), *chosen


def _count(live_s: float, step_s: float) -> int:
    return ceil(live_s / step_s) + 1 + ceil(AHEAD_DAYS * DAY_S / step_s)
