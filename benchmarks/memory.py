"""Memory: against plain dicts and sets, and against the protocol written out by hand."""

import time
from collections.abc import Callable
from pathlib import Path

import semel
from semel.cli.bench import workloads
from semel.cli.bench.measure import Fresh, Job, Measurement, compare
from semel.cli.bench.raw_memory import RawMemory
from semel.cli.bench.workloads import nothing
from semel.codec import encode
from semel.core.commands import Claim, Granted, Settle
from semel.keys import check
from semel.runtime.context import HandlerRun, running
from semel.runtime.keeper import LiveClaim
from semel.runtime.process import new_owner
from semel.stores import MemoryStore
from semel.types import Done

COUNT = 20_000
BATCH = 500
WINDOW_US = 86_400_000_000
LEASE_US = 30_000_000


def rows(_folder: Path) -> list[Measurement]:
    """All comparisons in memory."""
    raw = RawMemory(COUNT)
    return [
        compare(
            "memory", "mark, one by one", workloads.marking_singly(client("m", mode="mark"), COUNT),
            raw.single_limit, raw.single(), 0.9,
        ),
        compare(
            "memory", "mark_many of 500", workloads.marking(client("m", mode="mark"), COUNT, BATCH),
            raw.batch_limit, raw.batch(BATCH), 0.8,
        ),
        compact_mark(),
        run(),
        replay(),
        *[claim_complete(size) for size in (1, 10, 100, 500, 1000)],
    ]  # fmt: skip


def client(consumer: str, **options: object) -> semel.Semel:
    """Return an open client on its own store."""
    made = semel.open(MemoryStore(records_max=10**7), consumer=consumer, **options)  # type: ignore[arg-type]
    made.mark("warm") if options.get("mode") == "mark" else made.run("warm", nothing)
    return made


def compact_mark() -> Measurement:
    """Packed marks of 500, against those in a set: the price of a fifth of the space."""
    packed = semel.open(MemoryStore(records_max=10**7, compact=True), consumer="m", mode="mark")
    packed.mark("warm")
    return compare(
        "memory", "mark_many of 500, compact", workloads.marking(packed, COUNT, BATCH),
        "mark_many of 500", workloads.marking(client("m", mode="mark"), COUNT, BATCH),
    )  # fmt: skip


def by_hand(client: semel.Semel, key: str, handler: Callable[[], object]) -> Done[object]:
    """The steps of `run`, written out without flows or drivers: shows the price of having the protocol in one place."""
    store, keeper = client._runtime.store, client._runtime.keeper
    record_id, owner, sent_at = ("", "twin", check(key)), new_owner(), time.monotonic()
    claim = Claim(record_id, owner, LEASE_US, WINDOW_US)
    granted = store.send((claim,))[0]  # type: ignore[union-attr]
    assert isinstance(granted, Granted)
    kept = LiveClaim.since(claim, granted, sent_at, 900.0)
    keeper.keep(kept)
    token = running.set(HandlerRun(kept, granted, None, 0))
    try:
        value = handler()
    finally:
        running.reset(token)
    settle = Settle(record_id, owner, granted.fence, "done", encode(value), WINDOW_US, LEASE_US)
    store.send((settle,))  # type: ignore[union-attr]
    keeper.drop(owner)
    return Done(value)


def run() -> Measurement:
    """`run` of a handler that does nothing, against the same by hand on the same store."""
    theirs = Fresh(COUNT)
    leases = client("r")

    def limit() -> None:
        for key in theirs.keys:
            by_hand(leases, key, nothing)

    return compare(
        "memory",
        "run, one by one",
        workloads.running(leases, COUNT),
        "by hand",
        Job(limit, COUNT, theirs),
        0.6,
    )


def replay() -> Measurement:
    """`run` of a duplicate, against `run` of a new event."""
    mine = Fresh(COUNT)
    leases = client("r")

    def subject() -> None:
        for key in mine.keys:
            leases.run(key, nothing)

    def fresh() -> None:
        mine()
        subject()

    return compare(
        "memory",
        "replay, one by one",
        Job(subject, COUNT, fresh),
        "run",
        workloads.running(leases, COUNT),
        1.0,
    )


def claim_complete(size: int) -> Measurement:
    """Claims and completions in batches, against the same with batches of one."""
    leases = client("b")
    return compare(
        "memory", f"claim + complete of {size}", workloads.claiming(leases, COUNT, size),
        "of 1", workloads.claiming(leases, COUNT, 1),
    )  # fmt: skip
