"""Marks in batches of 500 while a store grows: rate, processor time of client and server, bytes per mark.

Random ids, all new, in one process. The figures at each size are those of the last tenth before it, or 5,000.
"""

import contextlib
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

import semel
from benchmarks.contender import server_cpu_s
from benchmarks.stored_bytes import stored_bytes

__all__ = ["Point", "best", "curves", "losses"]

BATCH = 500
MEASURED_MIN = 5_000
"""Fewer marks would measure the disturbances of the moment."""
BAR = 30
"""Characters of the progress bar."""
SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000)
STORES = ("sqlite", "redis", "redis, compact", "redis, compact, ten times the expected", "postgresql")
LOSS = 0.25
"""The smallest loss that is reported: the ratio of two sizes varies more than that of two contenders."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One store at one size."""

    store: str
    held: int
    rate: float
    client_us: float
    server_us: float
    bytes_each: float
    kept: float
    """Processor time per mark at the first size, divided by that here: 1 is flat."""


def curves(folder: Path, largest: int, stores: tuple[str, ...], note_load: Callable[[], None]) -> list[Point]:
    """Fill each store up to `largest` marks."""
    return [point for store in stores for point in _curve(store, folder, largest, note_load)]


def _curve(store: str, folder: Path, largest: int, note_load: Callable[[], None]) -> Iterator[Point]:
    from tests.services import postgres, redis

    with contextlib.ExitStack() as stack:
        place, options = folder / f"growth-{store}", ""
        place.mkdir(mode=0o755)
        if store == "sqlite":
            url, pid = f"sqlite:///{place}/growth.db", 0
        elif store == "postgresql":
            server = stack.enter_context(postgres.own(place))
            url, pid = server.url, server.state["pids"][0]
        else:
            started = stack.enter_context(redis.own(place))
            url, pid = started.url, started.pid
            expected = largest // 10 if "ten times" in store else largest
            options = f"?marks=compact&marks_expected={expected}" if "compact" in store else ""
        for point in _fill(store, url, pid, largest, options):
            note_load()
            yield point
    shutil.rmtree(place)


def _fill(store: str, url: str, pid: int, largest: int, options: str) -> Iterator[Point]:
    first: Point | None = None
    with semel.open(url + options, consumer="growth", mode="mark", window="7d") as once:
        once.mark_many([str(uuid.uuid4()) for _ in range(BATCH)])
        empty, held = stored_bytes(url), 0
        for size in (size for size in SIZES if size <= largest):
            progress(f"growth: {store}, {size:,}")
            while held < size - max(size // 10, MEASURED_MIN):
                once.mark_many([str(uuid.uuid4()) for _ in range(BATCH)])
                held += BATCH
                if sys.stderr.isatty():
                    progress(f"{'#' * (BAR * held // largest):.<{BAR}} {store}, {held:,} of {largest:,}")
            batches = [[str(uuid.uuid4()) for _ in range(BATCH)] for _ in range((size - held) // BATCH)]
            count = len(batches) * BATCH
            server, client, clock = server_cpu_s(pid), time.process_time(), time.perf_counter()
            for batch in batches:
                once.mark_many(batch)
            wall, client = time.perf_counter() - clock, time.process_time() - client
            server = server_cpu_s(pid) - server
            held += count
            point = _point(store, held, count, (wall, client, server), stored_bytes(url) - empty, first)
            first = first or point
            yield point


def _point(store: str, held: int, count: int, spent: Any, stored: int, first: Point | None) -> Point:
    wall, client, server = spent
    each_us = (client + server) * 1e6 / count
    first_us = first.client_us + first.server_us if first else each_us
    return Point(
        store=store, held=held, rate=round(count / wall), client_us=round(client * 1e6 / count, 2),
        server_us=round(server * 1e6 / count, 2), bytes_each=round(stored / held, 1), kept=round(first_us / each_us, 2),
    )  # fmt: skip


def best(rounds: list[list[Point]]) -> list[Point]:
    """Return each point from the round in which it kept most: a real loss is in every round, a disturbance is not."""
    found: dict[tuple[str, int], Point] = {}
    for point in (point for points in rounds for point in points):
        known = found.get((point.store, point.held))
        if known is None or point.kept > known.kept:
            found[point.store, point.held] = point
    return list(found.values())


def losses(kept: list[Point], now: list[Point]) -> list[str]:
    """Return a line for each store that keeps less of its rate at a size than in the stored figures.

    Compact marks are laid out for the number at the end of the curve, so two curves of other lengths do not compare.
    More than 1 is chance: nothing gets cheaper as it grows.
    """
    ends = [max((point.held for point in points), default=0) for points in (kept, now)]
    before = {
        (point.store, point.held): min(point.kept, 1.0)
        for point in kept
        if ends[0] == ends[1] or "compact" not in point.store
    }
    return [
        f"{point.store} at {point.held:,} marks: keeps {point.kept:.2f}, was {before[point.store, point.held]:.2f}"
        for point in now
        if point.kept < before.get((point.store, point.held), 0.0) * (1 - LOSS)
    ]


def progress(text: str) -> None:
    """Show what is measured now, and how busy the computer is."""
    line = f"{text} (load {os.getloadavg()[0]:.0f})"
    print(f"{line:90}", end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
