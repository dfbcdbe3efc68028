"""Claims in flight: the age of each, and its lease."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from semel.core.commands import Page, Scan
from semel.core.ids import is_own
from semel.observe.formatting import claim_of, now_us
from semel.server.dashboard.auth import Viewer
from semel.server.dashboard.records import address
from semel.server.dashboard.state import Dashboard
from semel.types import Record

__all__ = ["routes"]

ROWS_MAX = 200
LIVE_S = 1.5
SLOW_SHARE = 10.0
"""A listing is cached for this many times its duration."""


def routes(desk: Dashboard) -> list[Route]:
    """The pages."""
    known: dict[str | None, tuple[float, list[Record]]] = {}

    async def claims(viewer: Viewer) -> dict[str, Any]:
        until, records = known.get(viewer.tenant, (0.0, []))
        if time.monotonic() >= until:
            began = time.monotonic()
            page: Page = await desk.looks.slow(Scan(viewer.tenant, None, "claimed", limit=ROWS_MAX))
            records = [each for each in page.records if not is_own(each.tenant, each.consumer)]
            took_s = time.monotonic() - began
            if len(known) > ROWS_MAX:
                known.clear()
            known[viewer.tenant] = (time.monotonic() + max(LIVE_S, SLOW_SHARE * took_s), records)
        now = now_us()
        rows = sorted((_row(viewer, each, now) for each in records), key=lambda row: -row["age_s"])
        return {"claims": rows, "address": address, "rows_max": ROWS_MAX}

    async def flight(request: Request) -> Response:
        viewer = await desk.viewer(request)
        return await desk.page(request, viewer, "flight.html", await claims(viewer))

    async def part(request: Request) -> Response:
        viewer = await desk.viewer(request)
        return await desk.page(request, viewer, "_flight.html", await claims(viewer))

    return [Route("/flight", flight), Route("/parts/flight", part)]


def _row(viewer: Viewer, record: Record, now: int) -> dict[str, Any]:
    began = max(
        record.fence, record.first_seen_us
    )  # the fence of a claim is its time, unless clocks went back
    age_s, left_s = max(0.0, (now - began) / 1e6), (record.lease_until_us - now) / 1e6
    whole_s = age_s + max(0.0, left_s)
    return {
        "id": record.id,
        "key": viewer.key(record.id),
        "what": claim_of(record, now),
        "attempt": record.attempt,
        "age_s": age_s,
        "left_s": left_s,
        "share": 1.0 if left_s <= 0 else age_s / whole_s if whole_s else 0.0,
        "journaled": record.journal is not None,
    }
