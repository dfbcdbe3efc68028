"""Read the store for pages: quick lookups by key, and slow scans that delay no other request."""

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
from semel.server.auth import permit_tenant
from semel.server.limits import PAYER, account_of
from semel.server.service import Service
from semel.server.slow_lane import send_to
from semel.types import Record, Stats, Unavailable

__all__ = ["DEFAULT_WINDOW_US", "StoreReader"]

DEFAULT_WINDOW_US = 24 * 3600 * 10**6
"""The default of a client."""
ITEMS_MAX = 400
"""Lookups in one round trip."""
COUNT_EVERY_S = 10.0
COUNT_SHARE = 0.05
"""The largest share of time for counting: slow counts are made seldom."""
COUNTS_MAX = 100
"""The most tenants with cached counts."""
FIRST_COUNT_S = 3.0
LANE = "dashboard"
"""The queue name of counts in the background."""


class StoreReader:
    """Reads the store for the pages.

    Lists and counts read every record: they go through the service's slow lane. Every item is checked against the
    tenant of the user whose request it serves.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stats: dict[str | None, tuple[float, Stats]] = {}
        self._due: dict[str | None, float] = {}
        self._counting: dict[str | None, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Cancel running counts."""
        for task in self._counting.values():
            task.cancel()
        await asyncio.gather(*self._counting.values(), return_exceptions=True)

    async def quick(self, items: Sequence[Item]) -> list[Answer]:
        """Read records by key, without batching with other callers. Raises `StoreUnavailable`, `HttpProblem`."""
        for item in items:
            _permit(item)
        return await self._send(items)

    async def ask_own(self, asking: Asking) -> Any:
        """Run a generator of items for semel's own records."""
        return await adrive(asking, self._send)

    async def _send(self, items: Sequence[Item]) -> list[Answer]:
        answers: list[Answer] = []
        store, charge = self._service.runtime.store, self._service.costs.charge_store
        for at in range(0, len(items), ITEMS_MAX):
            answers += await send_to(store, items[at : at + ITEMS_MAX], charge)
        return answers

    async def slow(self, item: Count | Scan) -> Any:
        """List or count. Raises `StoreUnavailable`, `HttpProblem`."""
        _permit(item)
        return await self.scan_own(item)

    async def scan_own(self, item: Count | Scan) -> Any:
        """List semel's own records. Raises `StoreUnavailable`."""
        payer = PAYER.get()
        answer, took_s = await self._service.slow.ask(LANE if payer is None else account_of(payer), item)
        self._service.costs.charge_scan(took_s)
        return answer_or_raise(answer)

    async def window_in_force(
        self, stored: Mapping[tuple[str, str, str], int], tenant: str, consumer: str
    ) -> WindowInForce:
        """Return the window of a consumer: stored, or from some of its finished records."""
        page = await self.slow(Scan(tenant, consumer, "done", limit=SAMPLE))
        return window_in_force(stored, tenant, consumer, page.records, DEFAULT_WINDOW_US)

    def stats(self, tenant: str | None) -> tuple[Stats | None, float]:
        """Return the last statistics and their age in seconds; refreshes them in the background."""
        known = self._stats.get(tenant)
        task = self._counting.get(tenant)
        now = time.monotonic()
        if now >= self._due.get(tenant, 0.0) and (task is None or task.done()):
            if len(self._counting) > COUNTS_MAX:
                self._counting = {who: each for who, each in self._counting.items() if not each.done()}
            self._counting[tenant] = asyncio.get_running_loop().create_task(self._count(tenant))
        return (None, 0.0) if known is None else (known[1], now - known[0])

    async def wait_for_stats(self, tenant: str | None) -> tuple[Stats | None, float]:
        """Return the same; waits shortly for the first count."""
        found = self.stats(tenant)
        if found[0] is None and (task := self._counting.get(tenant)) is not None:
            await asyncio.wait((task,), timeout=FIRST_COUNT_S)
            found = self.stats(tenant)
        return found

    def expire(self) -> None:
        """Invalidate the statistics."""
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


def _permit(item: Item) -> None:
    caller = PAYER.get()
    if caller is not None:
        permit_tenant(caller, item)


def records_of(answers: Sequence[Answer]) -> list[Record]:
    """Return the records among the answers, without semel's own. Raises `StoreUnavailable`."""
    found: list[Record] = []
    for answer in answers:
        if isinstance(answer, Unavailable):
            raise StoreUnavailable("the store gave no answer") from answer.error
        if isinstance(answer, Record) and not is_own(answer.tenant, answer.consumer):
            found.append(answer)
    return found
