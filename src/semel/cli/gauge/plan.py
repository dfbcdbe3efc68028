"""What `semel bench` measures on a scratch place, one comparison after the other."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

from semel import client
from semel.cli.gauge import subjects
from semel.cli.gauge.measure import REPEATS, Job, Measurement, compare
from semel.cli.gauge.scratch import Scratch

__all__ = ["SIZES", "Measure", "measures"]

SIZES = (1, 10, 100, 500, 1000)
BATCH = 500
CALLERS = 50
SINGLES = 25
ROWS_MAX = 1_000
"""Of one turn; as many turns are taken as there is time for."""
WINDOW = "10m"
"""What an interrupted cleanup might leave expires soon."""

Measure: TypeAlias = tuple[str, Callable[[float], Measurement]]
"""What is measured, and the way to do it within so many seconds."""


@contextmanager
def measures(scratch: Scratch) -> Iterator[list[Measure]]:
    """All comparisons; clients are open meanwhile."""
    with ExitStack() as stack:
        marks = stack.enter_context(client.open(scratch.target, consumer="marks", mode="mark", window=WINDOW))
        leases = stack.enter_context(client.open(scratch.target, consumer="leases", window=WINDOW))
        crowd = stack.enter_context(
            subjects.Crowd(client.aopen(scratch.target, consumer="crowd", window=WINDOW))
        )
        singles = [
            ("run, one by one", subjects.running(leases, SINGLES)),
            (f"run, {CALLERS} at once", crowd.running(CALLERS, CALLERS * 2)),
            ("mark, one by one", subjects.marking_singly(marks, SINGLES)),
        ]
        batches = [
            ("mark_many of 500", subjects.marking(marks, ROWS_MAX, BATCH), BATCH),
            *((f"claim + complete of {size}", _claiming(leases, size), size) for size in SIZES),
        ]
        yield [
            *(
                _measure(scratch.kind, what, job, scratch.single_limit, scratch.single())
                for what, job in singles
            ),
            *(
                _measure(scratch.kind, what, job, scratch.batch_limit.format(size=size), scratch.batch(size))
                for what, job, size in batches
            ),
            _measure(
                scratch.kind, "replay of 500", subjects.replaying(leases, ROWS_MAX, BATCH),
                "run_many of 500", subjects.running_many(leases, ROWS_MAX, BATCH),
            ),
        ]  # fmt: skip


def _claiming(leases: client.Semel, size: int) -> Job:
    return subjects.claiming(leases, min(ROWS_MAX, SINGLES * size), size)


def _measure(kind: str, what: str, job: Job, limit: str, limit_job: Job) -> Measure:
    def run(seconds: float) -> Measurement:
        return compare(kind, what, job, limit, limit_job, seconds=seconds / (2 * REPEATS))

    return what, run
