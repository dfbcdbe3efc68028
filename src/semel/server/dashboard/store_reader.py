"""Look at the store beside the traffic: quick looks by key, and slow ones that nobody else waits for."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from semel.core.commands import Answer, Count, Item, Scan, answer_or_raise
from semel.core.ids import is_own
from semel.errors import StoreUnavailable
from semel.observe.rollups import Asking
from semel.observe.window_in_force import SAMPLE, WindowInForce, window_in_force
from semel.runtime.generators import adrive
from semel.server.limits import PAYER, account_of
from semel.server.service import Service
from semel.server.slow_lane import send_to
from semel.types import Record, Stats, Unavailable

__all__ = ["DEFAULT_WINDOW_US", "StoreReader"]

DEFAULT_WINDOW_US = 24 * 3600 * 10**6
"""Of a client that says nothing."""
ITEMS_MAX = 400
"""In one round trip."""
COUNT_EVERY_S = 10.0
COUNT_SHARE = 0.05
"""Of the time, at most, goes into counting: where it takes long it is done seldom."""
COUNTS_MAX = 100
"""Tenants whose counts are remembered."""
FIRST_COUNT_S = 3.0
LANE = "dashboard"
"""Whose turn counts wait for that no request asked for."""


class StoreReader:
    """What the pages ask of the store.

    To list or to count goes through every record: those go beside the traffic, in the service's slow lane.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stats: dict[str | None, tuple[float, Stats]] = {}
        self._due: dict[str | None, float] = {}
        self._counting: dict[str | None, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """End the counts that are under way."""
        for task in self._counting.values():
            task.cancel()
        await asyncio.gather(*self._counting.values(), return_exceptions=True)

    async def quick(self, items: Sequence[Item]) -> list[Answer]:
        """Look at records by their keys, past the gathering of callers. Raises `StoreUnavailable`."""
        answers: list[Answer] = []
        store, charge = self._service.runtime.store, self._service.costs.charge_store
        for at in range(0, len(items), ITEMS_MAX):
            answers += await send_to(store, items[at : at + ITEMS_MAX], charge)
        return answers

    async def ask(self, asking: Asking) -> Any:
        """Run what yields items, by quick looks."""
        return await adrive(asking, self.quick)

    async def slow(self, item: Count | Scan) -> Any:
        """List or count. Raises `StoreUnavailable`."""
        payer = PAYER.get()
        answer, took_s = await self._service.slow.ask(LANE if payer is None else account_of(payer), item)
        self._service.costs.charge_scan(took_s)
        return answer_or_raise(answer)

    async def window_in_force(
        self, stored: Mapping[tuple[str, str, str], int], tenant: str, consumer: str
    ) -> WindowInForce:
        """The window of a consumer: stored, or as some of its finished records show."""
        page = await self.slow(Scan(tenant, consumer, "done", limit=SAMPLE))
        return window_in_force(stored, tenant, consumer, page.records, DEFAULT_WINDOW_US)

    def stats(self, tenant: str | None) -> tuple[Stats | None, float]:
        """How much the store holds as last counted, and how many seconds ago; counted again behind the scenes."""
        known = self._stats.get(tenant)
        task = self._counting.get(tenant)
        now = time.monotonic()
        if now >= self._due.get(tenant, 0.0) and (task is None or task.done()):
            if len(self._counting) > COUNTS_MAX:
                self._counting = {who: each for who, each in self._counting.items() if not each.done()}
            self._counting[tenant] = asyncio.get_running_loop().create_task(self._count(tenant))
        return (None, 0.0) if known is None else (known[1], now - known[0])

    async def counted(self, tenant: str | None) -> tuple[Stats | None, float]:
        """The same; the first time it is waited for, for a moment."""
        found = self.stats(tenant)
        if found[0] is None and (task := self._counting.get(tenant)) is not None:
            await asyncio.wait((task,), timeout=FIRST_COUNT_S)
            found = self.stats(tenant)
        return found

    def expire(self) -> None:
        """Count again at the next look."""
        self._due.clear()

    async def _count(self, tenant: str | None) -> None:
        began = time.monotonic()
        try:
            stats: Stats = await self.slow(Count(tenant))
        except StoreUnavailable:
            self._due[tenant] = time.monotonic() + COUNT_EVERY_S
            return
        now = time.monotonic()
        self._stats[tenant] = (now, stats)
        self._due[tenant] = now + max(COUNT_EVERY_S, (now - began) / COUNT_SHARE)


def records_of(answers: Sequence[Answer]) -> list[Record]:
    """The records among the answers to lookups, semel's own left out. Raises `StoreUnavailable`."""
    found: list[Record] = []
    for answer in answers:
        if isinstance(answer, Unavailable):
            raise StoreUnavailable("the store gave no answer") from answer.error
        if isinstance(answer, Record) and not is_own(answer.tenant, answer.consumer):
            found.append(answer)
    return found
