"""A store with a day behind it, for pictures and tests of pages: what happened is made up, the records are real."""

import math
import random
import time
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from semel.codec import encode
from semel.core.commands import Admit, Answer, Claim, Settle
from semel.core.protocols import Store
from semel.observe.counters import ConsumerCounters, CounterHook, MinuteCounts, StoreCounts
from semel.observe.dedup_progress import InstanceFigures, ProgressWriter
from semel.observe.rollups import Writer
from semel.observe.workers import Heartbeat
from semel.runtime.process import new_owner
from semel.stores.sqlite import SqliteStore
from semel.testing import ManualClock
from semel.types import ErrorInfo, Mode

CONSUMERS: tuple[tuple[str, Mode, float, float], ...] = (
    ("billing", "lease", 42.0, 0.002),
    ("notifications", "lease", 95.0, 0.0065),
    ("wallet", "quarantine", 12.0, 0.001),
    ("warehouse", "lease", 28.0, 0.004),
    ("analytics", "observe", 60.0, 0.0055),
)
"""Name, mode, events per second, share of duplicates."""
DAY_US = 86400 * 10**6
AHEAD = 8
"""Minutes that are still to come while pictures are taken."""


def ask(store: Store, asking: Any) -> Any:
    """Run what yields batches of items."""
    answers: Sequence[Answer] | None = None
    try:
        while True:
            answers = store.send(asking.send(answers))
    except StopIteration as end:
        return end.value


def a_day(store: Store, minutes: int = 24 * 60, seed: int = 7) -> None:
    """Rollups of the minutes that have passed: waves, noise, and a storm of redeliveries half an hour ago."""
    chance = random.Random(seed)
    for consumer, mode, _, _ in CONSUMERS:
        store.send((Admit("", consumer, mode),))
    tally = CounterHook()
    writer = Writer(tally)
    now = int(time.time() // 60)
    for minute in range(now - minutes, now + AHEAD):
        part = _part(minute, now - minute, chance)
        writer._pending.append((f"{minute}.scene", part))
        if len(writer._pending) >= 60:
            assert ask(store, writer.flush())
    assert ask(store, writer.close()) is None


def _part(minute: int, ago: int, chance: random.Random) -> MinuteCounts:
    wave = 1 + 0.45 * math.sin(2 * math.pi * (minute % 1440) / 1440 - 2) + 0.12 * math.sin(minute / 17)
    storm = 6.0 * math.exp(-(((ago - 34) / 5) ** 2))
    consumers = []
    for number, (name, mode, per_s, share) in enumerate(CONSUMERS):
        first = max(0, round(chance.gauss(per_s * 60 * wave, per_s * 2)))
        copies = round(first * share * (1 + (storm if number == 1 else 0)) * chance.uniform(0.6, 1.5))
        counts = ConsumerCounters(received=first + copies, processed=first - round(first * 0.0008))
        counts.redelivery, counts.producer = round(copies * 0.72), round(copies * 0.17)
        counts.race = max(0, copies - counts.redelivery - counts.producer)
        counts.observed = copies if mode == "observe" else 0
        counts.errored = first - counts.processed
        if counts.errored:
            kinds = ("Unavailable", "CardRefused", "ReadTimeout")
            counts.errors = {kind: max(1, counts.errored >> (at + 1)) for at, kind in enumerate(kinds)}
        for _ in range(60):
            at = min(30, max(0, round(chance.gauss(13 + number + storm / 4, 2.4))))
            counts.took[at] = counts.took.get(at, 0) + first // 60
        for _ in range(min(copies, 40)):
            at = min(25, max(0, round(chance.gauss(9, 3.2))))
            counts.lags[at] = counts.lags.get(at, 0) + max(1, copies // 40)
        consumers.append(("", name, counts))
    took: dict[int, int] = {}
    for _ in range(200):
        at = min(30, max(0, round(chance.gauss(6 + storm / 3, 2.2) + (8 if chance.random() < 0.012 else 0))))
        took[at] = took.get(at, 0) + 60
    return MinuteCounts(minute, consumers, StoreCounts(took=took), chance.randrange(4, 14), 2.0, "scene")


def some_records(store: Store, count: int = 300) -> None:
    """Finished, failed, running and unknown events."""
    window = DAY_US
    for number in range(count):
        consumer = CONSUMERS[number % 4][0]
        place, owner = ("", consumer, f"ord_{2026111600 + number}"), new_owner()
        kind = {"billing": "payment.captured", "wallet": "wallet.credited"}.get(consumer, "order.placed")
        (granted,) = store.send(
            (Claim(place, owner, 30_000_000, window, event_type=kind, quarantine=consumer == "wallet"),)
        )
        value = encode(
            {
                "order": place[2],
                "amount": f"{number % 90 + 9}.90",
                "currency": "EUR",
                "receipt": owner.hex()[:12],
            }
        )
        store.send((Settle(place, owner, granted.fence, "done", value, window, 30_000_000),))
    for number, (consumer, lease_s) in enumerate(
        [("billing", 30), ("notifications", 30), ("warehouse", 60), ("billing", 90), ("notifications", 15)]
    ):
        place = ("", consumer, f"ord_{2026119900 + number}")
        store.send((Claim(place, new_owner(), lease_s * 10**6, window, event_type="order.placed"),))
    place, owner = ("", "wallet", "ord_2026118800"), new_owner()
    (granted,) = store.send((Claim(place, owner, 10**6, window, quarantine=True),))
    store.send((Settle(place, owner, granted.fence, "unknown"),))


REFUSED = "  shop/billing/handlers.py:42 in charge\n  shop/bank.py:17 in send"
Ending: TypeAlias = Literal["failed", "released", "unknown"]
FAILURES: tuple[tuple[str, Ending, int, str, str, tuple[str, ...]], ...] = (
    ("wallet", "unknown", 3, "httpx.ReadTimeout", "no answer from the ledger within 10 s", ("pay-1:311:5f3a9c02",)),
    ("billing", "failed", 12, "shop.bank.CardRefused", "card 4111 was refused: no such account",
     ("web-1:4711:8be40d71", "web-2:312:77aa01f3")),
    ("billing", "released", 31, "shop.bank.Unavailable", "the bank answered 503 Service Unavailable",
     ("web-2:312:77aa01f3", "web-1:4711:8be40d71")),
    ("notifications", "released", 4, "smtplib.SMTPServerDisconnected", "Connection unexpectedly closed",
     ("mail-1:90:1c0ffee0",)),
    ("warehouse", "failed", 1, "KeyError", "'sku'", ("web-1:4711:8be40d71",)),
)  # fmt: skip
"""Consumer, how its attempts ended, how many events, the error, and the workers."""


def troubles(path: Any, hours: float = 3.0) -> None:
    """Events that have failed in the last hours, each kind over some time; written before anything else."""
    clock = ManualClock(round(1e6 * (time.time() - 3600 * hours)))
    store = SqliteStore(path, synchronous="NORMAL", clock=clock)
    store.open()
    for consumer, mode, _, _ in CONSUMERS:
        store.send((Admit("", consumer, mode),))
    whole = sum(each[2] for each in FAILURES)
    for number, (consumer, to, count, kind, message, workers) in enumerate(FAILURES):
        for at in range(count):
            clock.advance(3500 * hours / whole)
            place, owner = ("", consumer, f"ord_{2026117700 + 50 * number + at}"), new_owner()
            claim = Claim(
                place, owner, 30_000_000, DAY_US, event_type="order.placed", quarantine=consumer == "wallet"
            )
            (granted,) = store.send((claim,))
            error = ErrorInfo(kind, message, REFUSED, workers[at % len(workers)])
            value = encode([kind, message]) if to == "failed" else None
            delay_us = round(3600e6 * hours) if at % 3 == 0 else 0
            store.send(
                (
                    Settle(
                        place,
                        owner,
                        granted.fence,
                        to,
                        value,
                        DAY_US,
                        30_000_000,
                        delay_us=delay_us,
                        error=error,
                    ),
                )
            )
    store.send(
        (
            Claim(
                ("", "billing", "whk_8812"),
                new_owner(),
                10**6,
                DAY_US,
                event_type="invoice.paid",
                journal=b"j{}",
            ),
        )
    )
    store.close()


def some_dedups(store: Store) -> None:
    """Two instances of one deduplication, of which one restores, and one of another that was heard of long ago."""
    orders = "kafka://kafka:9092/orders?group=dedup"
    for host, name, figures in (
        ("dedup-1", orders, InstanceFigures(received=900, passed=800, duplicates=95, late=5, rate=300, lag=7,
                                            partitions=3, index_bytes=2_000_000)),
        ("dedup-2", orders, InstanceFigures(received=100, passed=100, partitions=1, restoring=1, lag=40,
                                            restore_left=250_000, restore_total=1_000_000, aborts=2)),
        ("dedup-9", "kafka://kafka:9092/clicks?group=once", InstanceFigures(received=1, passed=1)),
    ):  # fmt: skip
        writer = ProgressWriter(store, name, "24h")
        writer._state.host = host
        writer.set(figures)
        writer._write()


def some_workers(store: Store) -> None:
    """Heartbeats of three workers."""
    for host, pid, consumers, in_flight in (
        ("web-1", 4711, ("billing", "warehouse"), 3),
        ("web-2", 312, ("billing",), 2),
        ("mail-1", 90, ("notifications",), 1),
    ):
        heartbeat = Heartbeat(CounterHook())
        heartbeat._state.host, heartbeat._state.pid = host, pid
        tally = heartbeat._tally
        tally._known.update(("", each) for each in consumers)
        tally._sources.update({("", each): {"orders": None} for each in consumers})
        tally._held.update({bytes([number]): 0.0 for number in range(in_flight)})
        assert ask(store, heartbeat.beat())
