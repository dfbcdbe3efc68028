"""The part of a source's contract that is about brokers that do not answer, or refuse: said, and never waited for.

A suite names sources of an address where nobody listens, and sources that the broker refuses. Both are optional:
without them these scenarios are left out.
"""

import asyncio
import logging
from collections.abc import Sequence
from time import monotonic
from typing import Any, Self

from semel.brokers.runner import Runner
from semel.brokers.source import Arrival, Source
from semel.client.client import aopen
from semel.client.client_async import AsyncSemel
from semel.errors import SourceRefused
from semel.stores.memory.store import MemoryStore
from semel.testing.contract.harness import check, equal

__all__ = ["Outages", "Reports"]

REPORTED_WITHIN_S = 15.0
"""An outage is reported within three seconds; the rest is for a computer that is busy with other tests."""
QUIET_S = 3.0
"""So long nothing more is reported: the runner tries several times meanwhile."""
STOPPED_WITHIN_S = 3.0
"""A stop is heard within a second; the rest is for a busy computer."""
REFUSED_WITHIN_S = 30.0


class Reports(logging.Handler):
    """What a runner logs as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.first: asyncio.Event = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self.lines.append(record.getMessage())
        self.first.set()

    def __enter__(self) -> Self:
        logging.getLogger("semel").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("semel").removeHandler(self)


class Outages:
    """Scenarios of outages, for pytest to collect with a broker's suite."""

    def away(self) -> Source | None:
        """A source at an address where nobody listens; `None` leaves the scenario out."""
        return None

    def refused(self) -> Sequence[Source]:
        """Sources that the broker refuses, whatever the time: wrong credentials, a missing queue or stream."""
        return ()

    def test_an_outage_is_reported_once_and_a_stop_is_heard(self) -> None:
        """A broker that is away at the start: one line at once, no flood, and a stop within a second."""
        source = self.away()
        if source is not None:
            asyncio.run(_outage(source))

    def test_what_no_time_heals_ends_the_runner(self) -> None:
        """Wrong credentials, or no such queue: the runner ends with the reason instead of trying for ever."""
        for source in self.refused():
            asyncio.run(_refusal(source))


def _client() -> AsyncSemel:
    return aopen(MemoryStore(), consumer="contract")


async def _nothing(_message: Arrival) -> Any:
    raise AssertionError("nothing can be delivered")


async def _outage(source: Source) -> None:
    async with _client() as once:
        runner = Runner(source, _nothing, once=once)
        with Reports() as reports:
            task = asyncio.create_task(runner.run())
            async with asyncio.timeout(REPORTED_WITHIN_S):
                await reports.first.wait()
            await asyncio.sleep(QUIET_S)
            equal(len(reports.lines), 1, f"lines about the outage: {reports.lines}")
            check(source.name in reports.lines[0], f"the line names the source: {reports.lines[0]}")
            stopped_at = monotonic()
            runner.stop()
            async with asyncio.timeout(REFUSED_WITHIN_S):
                await task
    took_s = monotonic() - stopped_at
    check(took_s < STOPPED_WITHIN_S, f"a stop took {took_s:.1f} s while {source.name} was away")


async def _refusal(source: Source) -> None:
    async with _client() as once:
        runner = Runner(source, _nothing, once=once)
        try:
            async with asyncio.timeout(REFUSED_WITHIN_S):
                await runner.run()
        except SourceRefused as error:
            check(bool(str(error)), "a refusal says what is refused")
        except TimeoutError:
            raise AssertionError(f"{source.name} is refused, and tried again for ever") from None
        else:
            raise AssertionError(f"{source.name} is refused, and the runner ended without a reason")
