"""Measure a rate, and compare it with a limit measured beside it."""

import gc
import time
from collections.abc import Callable
from statistics import median

from msgspec import Struct

REPEATS = 5


class Row(Struct, frozen=True, kw_only=True):
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


def rate(job: Job) -> float:
    """Operations per second of one run."""
    job.fresh()
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    job.run()
    elapsed = time.perf_counter() - start
    gc.enable()
    return job.count / elapsed


def compare(store: str, what: str, subject: Job, limit: str, limit_job: Job, aim: float | None = None) -> Row:
    """Measure both in turns, so that whatever else the computer does hits both alike; medians."""
    pairs = [(rate(limit_job), rate(subject)) for _ in range(REPEATS)]
    return Row(
        store=store,
        what=what,
        rate=median(mine for _, mine in pairs),
        limit=limit,
        limit_rate=median(theirs for theirs, _ in pairs),
        aim=aim,
    )
