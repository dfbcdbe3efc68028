"""Claims in flight: those that run now, those whose worker went silent, and those that wait for their next try."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from semel.core.commands import Settle
from semel.server.auth import permit
from semel.server.dashboard.auth import Viewer
from semel.server.dashboard.snapshots import Case
from semel.server.dashboard.state import Dashboard
from semel.types import Completed, ErrorInfo, Id

__all__ = ["release", "routes"]

ROWS_SHOWN = 200
RELEASED = "released by hand"


def routes(desk: Dashboard) -> list[Route]:
    """The pages."""

    async def flight(request: Request) -> Response:
        viewer = await desk.viewer(request)
        return await desk.page(request, viewer, "flight.html", await _lists(desk, viewer, request))

    async def part(request: Request) -> Response:
        viewer = await desk.viewer(request)
        return await desk.page(request, viewer, "_flight.html", await _lists(desk, viewer, request))

    return [Route("/flight", flight), Route("/parts/flight", part)]


async def _lists(desk: Dashboard, viewer: Viewer, request: Request) -> dict[str, Any]:
    """Return the claims in three lists, those that have waited longest or are due first at the top."""
    snapshot = await desk.snapshots.of(viewer.tenant).first()
    consumer, now = request.query_params.get("consumer", ""), desk.now_us
    cases = [] if snapshot is None else list(snapshot.cases)
    if consumer:
        cases = [case for case in cases if case.id[1] == consumer]
    running = sorted((case for case in cases if case.status == "running"), key=lambda case: case.renewed_us)
    silent = [case for case in cases if case.owner and case.status in ("silent", "journaled")]
    waiting = [case for case in cases if not case.owner and case.status in ("waiting", "journaled")]
    return {
        "running": [_row(viewer, case, now) for case in running[:ROWS_SHOWN]],
        "silent": [_row(viewer, case, now) for case in sorted(silent, key=_until)[:ROWS_SHOWN]],
        "waiting": [_row(viewer, case, now) for case in sorted(waiting, key=_until)[:ROWS_SHOWN]],
        "counts": {"running": len(running), "silent": len(silent), "waiting": len(waiting)},
        "snapshot": snapshot,
        "counted_us": snapshot.taken_us if snapshot else 0,
        "sampled": snapshot is not None and "claimed" in snapshot.sampled,
        "consumer": consumer,
        "rows_max": ROWS_SHOWN,
    }


def _until(case: Case) -> int:
    return case.until_us


def _row(viewer: Viewer, case: Case, now: int) -> dict[str, Any]:
    age_s, left_s = max(0.0, (now - case.renewed_us) / 1e6), (case.until_us - now) / 1e6
    whole_s = age_s + max(0.0, left_s)
    return {
        "id": case.id,
        "key": viewer.key(case.id),
        "attempt": case.attempt,
        "age_s": age_s,
        "left_s": left_s,
        "until_us": case.until_us,
        "share": 1.0 if left_s <= 0 else age_s / whole_s if whole_s else 0.0,
        "journaled": case.is_journaled,
        "kind": case.kind,
        "message": case.message if viewer.is_admin else "",
        "worker": case.worker,
    }


async def release(desk: Dashboard, viewer: Viewer, record_id: Id, owner: bytes, fence: int) -> bool:
    """Take a claim away from its owner, so that the next delivery runs; returns whether it was still this claim.

    The audit is written first. The late completion of the owner is refused.
    """
    viewer.require("admin")
    item = Settle(
        record_id, owner, fence, "released", error=ErrorInfo(RELEASED, f"by {viewer.label}, on the dashboard")
    )
    permit(viewer.caller, item)
    await desk.service.note(
        viewer.caller,
        record_id[0],
        "release",
        consumer=record_id[1],
        key=record_id[2],
        fence=fence,
        owner=owner.hex(),
    )
    return isinstance(await desk.service.one(viewer.caller, item), Completed)
