"""The workloads that `semel bench` measures, one comparison after the other."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self, TypeAlias

from semel.cli.bench.measure import REPEATS, Fresh, Job, Measurement, Scratch, compare
from semel.client import client
from semel.client.client import Semel
from semel.client.client_async import AsyncSemel
from semel.types import Delivery

__all__ = [
    "SIZES",
    "AsyncBenchClient",
    "Measure",
    "claiming",
    "marking",
    "marking_singly",
    "measures",
    "nothing",
    "replaying",
    "running",
    "running_many",
]


def nothing(_body: object = None) -> None:
    """A handler that does nothing, so only semel's cost is measured."""


def marking(marks: Semel, count: int, size: int) -> Job:
    """`mark_many` of new keys in batches."""
    fresh = Fresh(count)

    def run() -> None:
        for batch in fresh.batches(size):
            marks.mark_many(batch)

    return Job(run, count, fresh)


def marking_singly(marks: Semel, count: int) -> Job:
    """`mark` of new keys, one by one."""
    fresh = Fresh(count)

    def run() -> None:
        for key in fresh.keys:
            marks.mark(key)

    return Job(run, count, fresh)


def claiming(leases: Semel, count: int, size: int) -> Job:
    """Claims and their completions in batches: two round trips each."""
    fresh = Fresh(count)

    def run() -> None:
        for batch in fresh.batches(size):
            leases.complete_many(leases.claim_many(batch))  # type: ignore[arg-type]

    return Job(run, count, fresh)


def running(leases: Semel, count: int) -> Job:
    """`run` of new keys, one by one."""
    fresh = Fresh(count)

    def run() -> None:
        for key in fresh.keys:
            leases.run(key, nothing)

    return Job(run, count, fresh)


def running_many(leases: Semel, count: int, size: int) -> Job:
    """`run_many` of new keys in batches."""
    fresh = Fresh(count)
    return Job(lambda: _pour(leases, fresh, size), count, fresh)


def replaying(leases: Semel, count: int, size: int) -> Job:
    """`run_many` of keys that are done, in batches: duplicates."""
    fresh = Fresh(count)

    def make_done() -> None:
        fresh()
        _pour(leases, fresh, size)

    return Job(lambda: _pour(leases, fresh, size), count, make_done)


def _pour(leases: Semel, fresh: Fresh, size: int) -> None:
    for batch in fresh.batches(size):
        leases.run_many([Delivery(key=key, body=None) for key in batch], nothing)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Block signals: a client or an event loop that an interrupt leaves half open cannot be closed."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class AsyncBenchClient:
    """An async client in an event loop of its own, for many callers at once."""

    def __init__(self, client: AsyncSemel) -> None:
        self._client = client
        self._runner = asyncio.Runner()
        # An interrupt ends every task and the command reports it, so the loop does not.
        self._runner.get_loop().set_exception_handler(lambda _loop, _context: None)

    def __enter__(self) -> Self:
        self._runner.run(self._client.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def running(self, callers: int, count: int) -> Job:
        """`run` of new keys by `CALLERS` tasks, each one by one."""

        async def handler() -> None:
            pass

        return self._spread(callers, count, lambda key: self._client.run(key, handler))

    def marking(self, callers: int, count: int) -> Job:
        """`mark` of new keys by `CALLERS` tasks, each one by one."""
        return self._spread(callers, count, self._client.mark)

    def _spread(self, callers: int, count: int, call: Callable[[str], Awaitable[Any]]) -> Job:
        fresh = Fresh(count)
        return Job(lambda: self._runner.run(spread(callers, fresh.keys, call)), count, fresh)


async def spread(callers: int, keys: Sequence[str], call: Callable[[str], Awaitable[Any]]) -> None:
    """Share the keys among the tasks."""

    async def work(at: int) -> None:
        for key in keys[at::callers]:
            await call(key)

    await asyncio.gather(*(work(at) for at in range(callers)))


SIZES = (1, 10, 100, 500, 1000)
BATCH = 500
CALLERS = 50
SINGLES = 25
ROWS_MAX = 1_000
"""Keys per turn; turns repeat until the time is over."""
WINDOW = "10m"
"""Records expire soon, in case the cleanup is interrupted."""

Measure: TypeAlias = tuple[str, Callable[[float], Measurement]]
"""The name of a workload, and the function that measures it for a number of seconds."""


@contextmanager
def measures(scratch: Scratch) -> Iterator[list[Measure]]:
    """Yield all comparisons; the clients stay open until the end."""
    with ExitStack() as stack:
        with _signals_held():  # a client that an interrupt leaves half open goes on writing
            marks = stack.enter_context(
                client.open(scratch.target, consumer="marks", mode="mark", window=WINDOW)
            )
            leases = stack.enter_context(client.open(scratch.target, consumer="leases", window=WINDOW))
            crowd = stack.enter_context(
                AsyncBenchClient(client.aopen(scratch.target, consumer="crowd", window=WINDOW))
            )
        singles = [
            ("run, one by one", running(leases, SINGLES)),
            (f"run, {CALLERS} at once", crowd.running(CALLERS, CALLERS * 2)),
            ("mark, one by one", marking_singly(marks, SINGLES)),
        ]
        batches = [
            ("mark_many of 500", marking(marks, ROWS_MAX, BATCH), BATCH),
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
                scratch.kind, "replay of 500", replaying(leases, ROWS_MAX, BATCH),
                "run_many of 500", running_many(leases, ROWS_MAX, BATCH),
            ),
        ]  # fmt: skip


def _claiming(leases: client.Semel, size: int) -> Job:
    return claiming(leases, min(ROWS_MAX, SINGLES * size), size)


def _measure(kind: str, what: str, job: Job, limit: str, limit_job: Job) -> Measure:
    def run(seconds: float) -> Measurement:
        return compare(kind, what, job, limit, limit_job, seconds=seconds / (2 * REPEATS))

    return what, run
