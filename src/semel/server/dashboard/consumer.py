"""The page of one consumer: throughput, duplicates, durations, errors, window, guarantee and workers."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from semel.errors import PolicyInvalid
from semel.keys.limits import CONSUMER_BYTES_MAX
from semel.observe.counters import TOOK_S, ConsumerCounters, quantile
from semel.observe.explain import Explanation
from semel.observe.guarantees import WINDOWS
from semel.observe.workers import ALIVE_US
from semel.server.dashboard.auth import Viewer
from semel.server.dashboard.failures import STATUSES, groups_of
from semel.server.dashboard.figures import advice, is_alarming
from semel.server.dashboard.snapshots import CASE_STATUSES
from semel.server.dashboard.state import Dashboard, range_of
from semel.server.problems import HttpProblem
from semel.types import Mode

__all__ = ["routes"]

WORKERS_SHOWN = 100
REASONS = {
    "redelivery": "the source sent it again",
    "producer": "the producer made it again",
    "race": "it came while the first one ran",
    "reuse": "the key, with another payload",
}


def routes(desk: Dashboard) -> list[Route]:
    """The pages."""

    async def page(request: Request) -> Response:
        viewer = await desk.viewer(request)
        return await desk.page(request, viewer, "consumer.html", await _values(desk, viewer, request))

    async def workers(request: Request) -> Response:
        viewer = await desk.viewer(request)
        place = _place(viewer, request)
        return await desk.page(request, viewer, "_workers.html", await _workers(desk, viewer, place))

    return [
        Route("/consumer/{consumer:path}", page),
        Route("/parts/workers/{consumer:path}", workers),
    ]


def _place(viewer: Viewer, request: Request) -> tuple[str, str]:
    """Return the tenant and the consumer of a path: a user of one tenant only reaches that tenant."""
    named = request.query_params.get("tenant", "")[:CONSUMER_BYTES_MAX]
    return named if viewer.tenant is None else viewer.tenant, request.path_params["consumer"]


async def _values(desk: Dashboard, viewer: Viewer, request: Request) -> dict[str, Any]:
    place = _place(viewer, request)
    settings = await desk.figures.settings()
    whole = await desk.figures.whole(range_of(request))
    if place not in settings.modes and place not in whole.consumers:
        raise HttpProblem(404, "absent", f"no consumer {place[1]!a} has used this store")
    counts = whole.consumers.get(place, ConsumerCounters())
    mode = settings.modes.get(place)
    window = await desk.looks.window_in_force(settings.windows, *place)
    seen, span_s = await desk.figures.lags(*place)
    advised, why_not = advice(seen, span_s, window.us)
    snapshot = await desk.snapshots.of(viewer.tenant).first()
    cases = [case for case in (snapshot.cases if snapshot else ()) if case.id[:2] == place]
    return {
        "tenant": place[0],
        "consumer": place[1],
        "counts": counts,
        "alarm": is_alarming(counts.duplicates, counts.received),
        "rate": counts.duplicates / counts.received if counts.received else None,
        "handled": sum(counts.took.values()),
        "p50_s": quantile(counts.took, TOOK_S, 0.5),
        "p95_s": quantile(counts.took, TOOK_S, 0.95),
        "errors": sorted(counts.errors.items(), key=lambda each: -each[1]),
        "reasons": [(name, getattr(counts, name), words) for name, words in REASONS.items()],
        "mode": mode,
        "window": window,
        "advice": advised,
        "why_not": why_not,
        "span_s": span_s,
        "told": await _explain(desk, viewer, mode, window.us),
        "crashes": WINDOWS,
        "groups": groups_of(cases)[:5],
        "statuses": STATUSES,
        "held": snapshot
        and {
            "running": sum(case.status == "running" for case in cases),
            "waiting": sum(not case.owner and case.status in ("waiting", "journaled") for case in cases),
            "failing": sum(case.is_failing for case in cases),
        },
        "bounded": {status for status in CASE_STATUSES if snapshot and snapshot.is_bounded(status)},
        "snapshot": snapshot,
        **await _workers(desk, viewer, place),
    }


async def _workers(desk: Dashboard, viewer: Viewer, place: tuple[str, str]) -> dict[str, Any]:
    """Return the processes that have worked for the consumer, the latest heartbeat first."""
    now = desk.now_us
    rows = [
        {
            "host": worker.host,
            "pid": worker.pid,
            "version": worker.version,
            "seen_us": worker.seen_us,
            "ago_s": max(0.0, (now - worker.seen_us) / 1e6),
            "is_alive": worker.seen_us + ALIVE_US > now,
            # Claims of a process are not counted by tenant.
            "in_flight": worker.in_flight if viewer.sees_all else None,
            "others": len(worker.consumers) - 1 if viewer.sees_all else 0,
            "sources": [source for *of, source in worker.sources if tuple(of) == place],
        }
        for worker in await desk.workers.first() or ()
        if place in worker.consumers
    ]
    return {
        "workers": rows[:WORKERS_SHOWN],
        "workers_more": max(0, len(rows) - WORKERS_SHOWN),
        "place": place,
    }


async def _explain(desk: Dashboard, viewer: Viewer, mode: Mode | None, window_us: int) -> Explanation | None:
    if mode is None:
        return None
    try:
        return await desk.explainer.explain(mode, window_us, with_servers=viewer.sees_all)
    except PolicyInvalid:  # the mode does not fit the store: the check page says why
        return None
