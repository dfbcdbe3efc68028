"""The store: its capabilities, statistics, tiers and purging."""

from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from semel.core.commands import Purge
from semel.server.dashboard.auth import form_of
from semel.server.dashboard.state import Dashboard, range_of
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
        snapshot = await desk.snapshots.of(viewer.tenant).first()
        stats = None if snapshot is None else snapshot.stats
        powers = asdict(desk.service.runtime.store.capabilities)
        total = await desk.figures.whole(range_of(request))
        values = {
            "stats": stats,
            "snapshot": snapshot,
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
        desk.snapshots.expire()
        return RedirectResponse(f"/ui/stores?purged={purged.count}", 303)

    return [Route("/stores", stores), Route("/purge", purge, methods=["POST"])]


def tiers(counted: dict[str, float]) -> list[tuple[str, float, float | None]]:
    """Return facts, counts and shares of the tiers of a store."""
    whole = sum(counted.get(name, 0) for name in ANSWERING)
    return [
        (COUNTS.get(name, name), number, number / whole if whole and name in ANSWERING else None)
        for name, number in counted.items()
        if number or name in ANSWERING
    ]
