"""Measure a rate, and compare it with a limit measured beside it."""

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from statistics import median

from msgspec import Struct

__all__ = ["REPEATS", "Fresh", "Job", "Measurement", "compare", "rate"]

REPEATS = 5
_round = itertools.count()


class Measurement(Struct, frozen=True, kw_only=True):
    """One comparison: what was measured, against what, and what we aim at."""

    store: str
    what: str
    rate: float
    """Per second."""
    limit: str
    limit_rate: float
    aim: float | None = None
    """The ratio to reach; `None`: shown without an aim."""

    @property
    def ratio(self) -> float:
        """How much of the limit is reached."""
        return self.rate / self.limit_rate


class Job(Struct, frozen=True):
    """Something that does `count` operations each time it is called; `fresh` makes it ready, untimed."""

    run: Callable[[], object]
    count: int
    fresh: Callable[[], object] = lambda: None


class Fresh:
    """Ids that were never used before, 36 characters each, made before the clock starts."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.keys: list[str] = []

    def __call__(self) -> None:
        """Make new ones."""
        turn = next(_round)
        self.keys = [
            f"0198c0de-{turn >> 16 & 0xFFFF:04x}-7000-{turn & 0xFFFF:04x}-{at:012x}"
            for at in range(self.count)
        ]

    def batches(self, size: int) -> Iterator[list[str]]:
        """The ids, some at a time."""
        for at in range(0, len(self.keys), size):
            yield self.keys[at : at + size]


def rate(job: Job, seconds: float = 0.0) -> float:
    """Operations per second: of one run, or of as many as fit into `seconds`."""
    done, spent = 0, 0.0
    while not done or spent < seconds:
        job.fresh()
        gc.disable()
        try:
            start = time.perf_counter()
            job.run()
            spent += time.perf_counter() - start
        finally:
            gc.enable()
        done += job.count
    return done / spent


def compare(
    store: str,
    what: str,
    subject: Job,
    limit: str,
    limit_job: Job,
    aim: float | None = None,
    seconds: float = 0.0,
) -> Measurement:
    """Measure both in turns, so that whatever else the computer does hits both alike; medians."""
    gc.collect()
    pairs = [(rate(limit_job, seconds), rate(subject, seconds)) for _ in range(REPEATS)]
    return Measurement(
        store=store,
        what=what,
        rate=median(mine for _, mine in pairs),
        limit=limit,
        limit_rate=median(theirs for theirs, _ in pairs),
        aim=aim,
    )
