"""The store: its capabilities, statistics, tiers and purging; the outbox in its database."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from semel.core.commands import Purge
from semel.errors import StoreUnknown, UsageError
from semel.outbox.tables import Entry, Rows, rows_for
from semel.server.dashboard.auth import form_of
from semel.server.dashboard.state import Dashboard, range_of
from semel.server.problems import HttpProblem
from semel.stores.tiered.rules import COUNTS

__all__ = ["routes"]

PURGE_ROWS = 5000
ANSWERING = ("cache_hits", "truth_asked")
"""Counters of keys by the tier that answered."""
POWERS = {
    "durable": "a confirmed write survives the end of every process",
    "exact": "its answers are facts, not guesses",
    "fenced": "a late worker cannot overwrite its successor",
    "transactional": "an inbox can live in your own transaction",
    "shared": "other processes see the same records",
    "notifies": "duplicates that wait are woken, not only polled",
}


def routes(desk: Dashboard) -> list[Route]:
    """The pages."""

    async def stores(request: Request) -> Response:
        viewer = await desk.viewer(request)
        stats, age_s = await desk.looks.wait_for_stats(viewer.tenant)
        powers = asdict(desk.service.runtime.store.capabilities)
        total = await desk.figures.whole(range_of(request))
        values = {
            "stats": stats,
            "stats_age_s": age_s,
            "powers": [(name, powers[name], words) for name, words in POWERS.items()],
            "tiers": tiers(stats.tiers if stats else {}),
            "took": total.store,
            "purged": request.query_params.get("purged", ""),
        }
        return await desk.page(request, viewer, "stores.html", values)

    async def purge(request: Request) -> Response:
        viewer = await desk.viewer(request)
        await form_of(request)
        purged = await desk.service.one(viewer.caller, Purge(PURGE_ROWS))
        desk.looks.expire()
        return RedirectResponse(f"/ui/stores?purged={purged.count}", 303)

    return [*_outbox_routes(desk), Route("/stores", stores), Route("/purge", purge, methods=["POST"])]


def tiers(counted: dict[str, float]) -> list[tuple[str, float, float | None]]:
    """Return facts, counts and shares of the tiers of a store."""
    whole = sum(counted.get(name, 0) for name in ANSWERING)
    return [
        (COUNTS.get(name, name), number, number / whole if whole and name in ANSWERING else None)
        for name, number in counted.items()
        if number or name in ANSWERING
    ]


T = TypeVar("T")
OUTBOX_ROWS_MAX = 100


def _outbox_routes(desk: Dashboard) -> list[Route]:
    """The pages of the outbox in the store's database."""
    box = OutboxReader(desk)

    async def outbox(request: Request) -> Response:
        viewer = await desk.overseer(request)
        values: dict[str, Any] = {"there": box.is_there, "done": request.query_params.get("done", "")}
        if box.is_there:
            values |= await box.use(_gather)
        return await desk.page(request, viewer, "outbox.html", values)

    async def act(request: Request) -> Response:
        viewer = await desk.overseer(request)
        form = await form_of(request)
        viewer.require("admin")
        verb, ids = form.get("verb", ""), _ids(form.get("id", ""))
        if verb not in ("retry", "drop") or not box.is_there or (verb == "drop" and ids is None):
            raise HttpProblem(422, "invalid", "choose a message, and retry or drop")
        said = ", ".join(ids) if ids else "all that are dead"
        await desk.service.note(viewer.caller, "", f"outbox {verb}", ids=said)
        count: int = await box.use(lambda rows: rows.retry(ids) if verb == "retry" else rows.drop(ids or []))
        return RedirectResponse(f"/ui/outbox?done={count}", 303)

    return [Route("/outbox", outbox), Route("/outbox", act, methods=["POST"])]


def _ids(text: str) -> list[str] | None:
    if not text:
        return None
    try:
        return [str(uuid.UUID(text))]
    except ValueError:
        raise HttpProblem(422, "invalid", "that is not the id of a message") from None


class OutboxReader:
    """Reads the outbox in the store's database; opened for each request."""

    def __init__(self, desk: Dashboard) -> None:
        self._url = desk.service.settings.store
        self._lock = asyncio.Lock()
        try:
            rows_for(self._url)
            self.is_there: bool = True
        except (StoreUnknown, UsageError):
            self.is_there = False

    async def use(self, work: Callable[[Rows], Awaitable[T]]) -> T:
        """Open the outbox, run the action, close it."""
        async with self._lock:
            rows = rows_for(self._url)
            await rows.open()
            try:
                return await work(rows)
            finally:
                await rows.close()


async def _gather(rows: Rows) -> dict[str, Any]:
    dead: list[Entry] = await rows.entries("dead", 0, OUTBOX_ROWS_MAX)
    pending = await rows.entries("pending", 0, OUTBOX_ROWS_MAX)
    return {"counts": await rows.counts(), "dead": dead, "pending": pending, "rows_max": OUTBOX_ROWS_MAX}
