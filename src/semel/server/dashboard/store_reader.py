"""Read the store for pages: quick lookups by key, and slow scans that delay no other request."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from semel.core.commands import Answer, Count, Item, Page, Scan, answer_or_raise
from semel.core.ids import is_own
from semel.errors import StoreUnavailable
from semel.observe.rollups import Asking
from semel.observe.window_in_force import SAMPLE, WindowInForce, window_in_force
from semel.runtime.generators import adrive
from semel.server.auth import permit_tenant
from semel.server.dashboard.refreshed import FIRST_S, Refreshed
from semel.server.limits import PAYER, account_of
from semel.server.service import Service
from semel.server.slow_lane import SlowLane, send_to
from semel.types import Record, Unavailable

__all__ = ["DEFAULT_WINDOW_US", "StoreReader"]

DEFAULT_WINDOW_US = 24 * 3600 * 10**6
"""The default of a client."""
ITEMS_MAX = 400
"""Lookups in one round trip."""
EVERY_S = 2.0
AT_ONCE = 8
"""Consumers whose records are looked for at the same time: fewer than may wait in the slow lane."""
CONSUMERS_MAX = 200
"""The most consumers with finished records in memory."""
LANE = "dashboard"
"""The queue name of counts in the background."""


class StoreReader:
    """Reads the store for the pages.

    Lists and counts read every record: they go through the service's slow lane. Every item is checked against the
    tenant of the user whose request it serves.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._finished: dict[tuple[str, str], Refreshed[Page]] = {}
        """Some finished records of each consumer that somebody looks at."""

    async def quick(self, items: Sequence[Item]) -> list[Answer]:
        """Read records by key, without batching with other callers. Raises `StoreUnavailable`, `HttpProblem`."""
        for item in items:
            _permit(item)
        return await self._send(items)

    async def ask_own(self, asking: Asking) -> Any:
        """Run a generator of items for semel's own records."""
        return await adrive(asking, self._send)

    async def _send(self, items: Sequence[Item]) -> list[Answer]:
        """Send items. A tenant's user pays; an operator of the whole store sees pages also while the store is slow."""
        answers: list[Answer] = []
        payer, store = PAYER.get(), self._service.runtime.store
        charge = (self._service.costs.charge_store,) if payer is not None and payer.tenant is not None else ()
        for at in range(0, len(items), ITEMS_MAX):
            answers += await send_to(store, items[at : at + ITEMS_MAX], *charge)
        return answers

    async def slow(self, item: Count | Scan) -> Any:
        """List or count. Raises `StoreUnavailable`, `HttpProblem`."""
        _permit(item)
        return await self.scan_own(item)

    async def in_background(self, item: Count | Scan) -> Any:
        """List or count for all pages, beside the slow lane. Raises `StoreUnavailable`, `HttpProblem`."""
        _permit(item)
        return await self._ask(self._service.background, item)

    async def scan_own(self, item: Count | Scan) -> Any:
        """List semel's own records. Raises `StoreUnavailable`."""
        return await self._ask(self._service.slow, item)

    async def _ask(self, lane: SlowLane, item: Count | Scan) -> Any:
        """Ask a lane. A tenant's user pays; an operator of the whole store is never refused a page for its size."""
        payer = PAYER.get()
        answer, took_s = await lane.ask(LANE if payer is None else account_of(payer), item)
        if payer is not None and payer.tenant is not None:
            self._service.costs.charge_scan(took_s)
        return answer_or_raise(answer)

    async def windows_in_force(
        self, stored: Mapping[tuple[str, str, str], int], places: Sequence[tuple[str, str]]
    ) -> list[WindowInForce]:
        """Return the window of each consumer; waits shortly for all of them together."""
        began, found = time.monotonic(), list[WindowInForce]()
        for at in range(0, len(places), AT_ONCE):
            waits = time.monotonic() < began + FIRST_S
            found += await asyncio.gather(
                *(self.window_in_force(stored, *place, waits=waits) for place in places[at : at + AT_ONCE])
            )
        return found

    async def window_in_force(
        self, stored: Mapping[tuple[str, str, str], int], tenant: str, consumer: str, *, waits: bool = True
    ) -> WindowInForce:
        """Return the window of a consumer: stored, or from some of its finished records.

        A large store may take long to find records of a consumer with few: pages wait shortly.
        """
        item = Scan(tenant, consumer, "done", limit=SAMPLE)
        _permit(item)
        if (tenant, consumer, "") in stored:
            return window_in_force(stored, tenant, consumer, (), DEFAULT_WINDOW_US)
        if (tenant, consumer) not in self._finished:
            for name in [name for name, each in self._finished.items() if not each.is_reading]:
                if len(self._finished) >= CONSUMERS_MAX:
                    del self._finished[name]
            self._finished[tenant, consumer] = Refreshed(lambda: self.scan_own(item), EVERY_S)
        finished = self._finished[tenant, consumer]
        page = await finished.first() if waits else finished.last()
        if page is None:
            return WindowInForce(DEFAULT_WINDOW_US, "unread")
        return window_in_force(stored, tenant, consumer, page.records, DEFAULT_WINDOW_US)

    async def close(self) -> None:
        """Cancel running reads."""
        for each in self._finished.values():
            await each.close()


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
