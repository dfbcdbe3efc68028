"""What is measured of any store: marks, claims with their completions, whole runs, duplicates, many callers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self

from semel.aclient import AsyncSemel
from semel.cli.gauge.measure import Fresh, Job
from semel.client import Semel
from semel.types import Delivery

__all__ = [
    "Crowd",
    "claiming",
    "marking",
    "marking_singly",
    "nothing",
    "replaying",
    "running",
    "running_many",
]


def nothing(_body: object = None) -> None:
    """A handler that does nothing: what remains is semel."""


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


class Crowd:
    """An async client in an event loop of its own, for many callers at once."""

    def __init__(self, client: AsyncSemel) -> None:
        self._client = client
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        self._runner.run(self._client.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def running(self, callers: int, count: int) -> Job:
        """`run` of new keys by so many tasks, each one by one."""

        async def handler() -> None:
            pass

        return self._spread(callers, count, lambda key: self._client.run(key, handler))

    def marking(self, callers: int, count: int) -> Job:
        """`mark` of new keys by so many tasks, each one by one."""
        return self._spread(callers, count, self._client.mark)

    def _spread(self, callers: int, count: int, call: Callable[[str], Awaitable[Any]]) -> Job:
        fresh = Fresh(count)
        return Job(lambda: self._runner.run(spread(callers, fresh.keys, call)), count, fresh)


async def spread(callers: int, keys: Sequence[str], call: Callable[[str], Awaitable[Any]]) -> None:
    """Have the keys shared among so many tasks."""

    async def work(at: int) -> None:
        for key in keys[at::callers]:
            await call(key)

    await asyncio.gather(*(work(at) for at in range(callers)))
