"""Windows: show, advise and change them."""

import math
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from semel.core.commands import SetWindow
from semel.core.ids import is_own
from semel.errors import SemelError
from semel.keys.limits import check_consumer
from semel.observe.advise import Advice
from semel.observe.counters import LAGS_S, ConsumerCounters
from semel.server.dashboard.auth import Viewer, form_of
from semel.server.dashboard.figures import advice
from semel.server.dashboard.state import Dashboard
from semel.server.dashboard.store_reader import DEFAULT_WINDOW_US
from semel.server.problems import HttpProblem, problem_of
from semel.windows import PRESETS, window_us

__all__ = ["routes"]

WIDE, HIGH = 720, 190
LEFT, BOTTOM = 8, 26
TICKS = ((1, "1 s"), (60, "1 min"), (3600, "1 h"), (86400, "1 d"), (7 * 86400, "7 d"), (30 * 86400, "30 d"))
TYPE_CHARS_MAX = 128
SHOWN_MAX = 30
"""The most consumers whose effective window is read: some records each."""


def routes(desk: Dashboard) -> list[Route]:
    """The pages."""

    async def windows(request: Request) -> Response:
        viewer = await desk.viewer(request)
        consumer = request.query_params.get("consumer", "")
        settings = await desk.figures.settings()
        counts, span_s = await desk.figures.lags(viewer.tenant, consumer)
        stored = [
            (place, us)
            for place, us in sorted(settings.windows.items())
            if viewer.tenant in (None, place[0]) and not is_own(place[0], place[1])
        ]
        names = sorted(place for place in settings.modes if viewer.tenant in (None, place[0]))
        shown = names[:SHOWN_MAX]
        found = await desk.looks.windows_in_force(settings.windows, shown)
        in_force = list(zip(shown, found, strict=True))
        mine = next((window.us for place, window in in_force if place[1] == consumer), DEFAULT_WINDOW_US)
        advised, why_not = advice(counts, span_s, mine)
        values: dict[str, Any] = {
            "stored": stored,
            "consumer": consumer,
            "in_force": in_force,
            "current_us": mine,
            "advice": advised,
            "span_s": span_s,
            "why_not": why_not,
            "picture": histogram(counts, mine, advised),
            "names": sorted({name for _, name in names}),
            "presets": PRESETS,
            "done": request.query_params.get("done", ""),
        }
        return await desk.page(request, viewer, "windows.html", values)

    async def change(request: Request) -> Response:
        viewer = await desk.viewer(request)
        form = await form_of(request)
        viewer.require("admin")
        await _set(desk, viewer, form)
        return RedirectResponse(f"/ui/windows?done=yes&consumer={quote(form.get('consumer', ''))}", 303)

    return [Route("/windows", windows), Route("/windows", change, methods=["POST"])]


async def _set(desk: Dashboard, viewer: Viewer, form: dict[str, str]) -> None:
    consumer, event_type = form.get("consumer", "").strip(), form.get("event_type", "").strip()
    tenant = form.get("tenant") or viewer.tenant or ""
    existing = form.get("existing") == "yes"
    try:
        check_consumer(consumer)
        us = None if form.get("remove") == "yes" else window_us(form.get("window", "").strip())
    except SemelError as error:
        raise problem_of(error) from error
    if len(event_type) > TYPE_CHARS_MAX:
        raise HttpProblem(422, "invalid", f"an event type has {TYPE_CHARS_MAX} characters at most")
    await desk.service.one(viewer.caller, SetWindow(tenant, consumer, event_type, us, existing))
    desk.service.runtime.expire_settings()
    desk.figures.expire()


def histogram(counts: ConsumerCounters, current_us: int, advised: Advice | None) -> dict[str, Any] | None:
    """Return bars of the lags on a logarithmic axis, and the position of the window; `None` without lags."""
    if not counts.lags:
        return None
    most = max(counts.lags.values())
    each = (WIDE - 2 * LEFT) / len(LAGS_S)
    current_s = current_us / 1e6
    bars = [
        {
            "x": round(LEFT + at * each + 1, 1),
            "width": round(each - 2, 1),
            "height": round(max(2.0, (HIGH - BOTTOM - 24) * number / most), 1),
            "count": number,
            "up_to_s": LAGS_S[at],
            "missed": bool(current_s) and LAGS_S[at] > current_s,
        }
        for at, number in sorted(counts.lags.items())
    ]
    return {
        "wide": WIDE,
        "high": HIGH,
        "base": HIGH - BOTTOM,
        "bars": bars,
        "ticks": [{"x": _x(second), "text": text} for second, text in TICKS],
        "now_x": _x(current_s) if current_s else None,
        "wanted_x": None if advised is None else _x(advised.suggested_s),
        "wanted_dx": 5 if advised is not None and advised.suggested_s > current_s else -5,
    }


def _x(second: float) -> float:
    """Return the position of a lag on the axis: the right edge of its bar."""
    each = (WIDE - 2 * LEFT) / len(LAGS_S)
    place = math.log2(max(second, LAGS_S[0])) - math.log2(LAGS_S[0]) + 1
    return round(min(WIDE - LEFT, LEFT + place * each), 1)
