"""The first page and its live parts: charts, consumers, and the counters in every header."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from semel.errors import StoreError
from semel.server.dashboard.auth import LoginNeeded, Viewer
from semel.server.dashboard.state import Dashboard, range_of
from semel.server.problems import HttpProblem

__all__ = ["routes"]

TICK_S = 1.0
QUIET_TICKS = 15
"""After this many silent ticks a comment is sent, so that proxies keep the connection open."""
NAME_CHARS_MAX = 128

_encode = msgspec.json.encode


def routes(desk: Dashboard) -> list[Route]:
    """The pages."""

    async def overview(request: Request) -> Response:
        viewer = await desk.viewer(request)
        chosen = range_of(request)
        rows = await desk.figures.rows(chosen, viewer.tenant)
        total = await desk.figures.counts(chosen, viewer.tenant)
        values = {"rows": rows, "total": total, "snapshot": desk.snapshots.of(viewer.tenant).last()}
        return await desk.page(request, viewer, "overview.html", values)

    async def consumers(request: Request) -> Response:
        viewer = await desk.viewer(request)
        rows = await desk.figures.rows(range_of(request), viewer.tenant)
        return await desk.page(request, viewer, "_consumers.html", {"rows": rows})

    async def holdings(request: Request) -> Response:
        viewer = await desk.viewer(request)
        values = {"snapshot": desk.snapshots.of(viewer.tenant).last()}
        return await desk.page(request, viewer, "_held.html", values)

    async def data(request: Request) -> Response:
        viewer = await desk.viewer(request)
        consumer = request.query_params.get("consumer", "")[:NAME_CHARS_MAX]
        tenant = viewer.tenant
        if tenant is None and "tenant" in request.query_params:
            tenant = request.query_params["tenant"][:NAME_CHARS_MAX]
        lines = await desk.figures.lines(range_of(request), tenant, consumer)
        return Response(_encode(lines), media_type="application/json")

    async def live(request: Request) -> Response:
        viewer = await desk.viewer(request)
        if desk.is_full(viewer):
            raise HttpProblem(429, "too-many", "too many pages are live already; this one does not update")
        return StreamingResponse(_ticks(desk, request, viewer), media_type="text/event-stream")

    return [
        Route("/", overview),
        Route("/parts/consumers", consumers),
        Route("/parts/held", holdings),
        Route("/data", data),
        Route("/live", live),
    ]


async def _ticks(desk: Dashboard, request: Request, viewer: Viewer) -> AsyncIterator[bytes]:
    """Send the header's counters whenever they change, until the service drains or the token is revoked."""
    if desk.is_full(viewer):  # many may have passed the first check at once
        return
    name = viewer.caller.name
    desk.listeners[name] += 1
    said, quiet = b"", 0
    try:
        await desk.snapshots.of(viewer.tenant).first()
        while not desk.service.draining:
            try:
                viewer = await desk.viewer(request)
                now = _encode(await desk.header(viewer))  # changes only if a figure does
            except LoginNeeded:
                return
            except (
                HttpProblem,
                StoreError,
            ):  # the store does not answer: the page keeps its last figures
                now = said
            quiet = 0 if now != said or quiet >= QUIET_TICKS else quiet + 1
            if not quiet and now:
                said = now
                yield b"event: tick\ndata: " + now + b"\n\n"
            await asyncio.sleep(TICK_S)
    finally:
        desk.listeners[name] -= 1
        if not desk.listeners[name]:
            del desk.listeners[name]
