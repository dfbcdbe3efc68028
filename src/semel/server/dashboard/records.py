"""Search, the timeline of one event, the actions of operators, and claims in flight."""

import asyncio
import re
import time
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from semel.codec import encode
from semel.core.commands import Forget, Lookup, Page, Resolve, Scan, answer_or_raise
from semel.core.ids import is_own
from semel.errors import KeyInvalid, StoreUnavailable
from semel.keys.limits import check as check_key
from semel.observe.formatting import claim_of, document, now_us, summary
from semel.runtime import audit
from semel.server.auth import permit
from semel.server.dashboard.auth import Viewer, form_of
from semel.server.dashboard.recent_events import strip
from semel.server.dashboard.rendering import DASH
from semel.server.dashboard.state import Dashboard
from semel.server.dashboard.store_reader import DEFAULT_WINDOW_US, records_of
from semel.server.problems import HttpProblem
from semel.types import Absent, Busy, Id, Lost, Record, State
from semel.windows import resolve

__all__ = ["address", "routes"]

PAGE_ROWS = 50
TAIL_ROWS = 40
FENCE = re.compile("[0-9]{1,16}")
STATES: tuple[State, ...] = ("claimed", "done", "failed", "unknown")
SCOPES_MAX = 1000
"""The most consumers that a search covers."""


def routes(desk: Dashboard) -> list[Route]:
    """The pages."""

    async def events(request: Request) -> Response:
        viewer = await desk.viewer(request)
        return await desk.page(request, viewer, "events.html", await _search(desk, viewer, request))

    async def tail(request: Request) -> Response:
        viewer = await desk.viewer(request)
        consumer, what = (request.query_params.get(name, "") for name in ("consumer", "what"))
        seen = desk.tail.last(TAIL_ROWS, viewer.tenant, consumer, what)
        values = {"seen": seen, "address": address, "instance": desk.instance}
        return await desk.page(request, viewer, "_tail.html", values)

    async def event(request: Request) -> Response:
        viewer = await desk.viewer(request)
        record = await _record(desk, viewer, request)
        return await desk.page(request, viewer, "event.html", await _event(desk, record))

    async def forget(request: Request) -> Response:
        viewer = await desk.viewer(request)
        form = await form_of(request)
        viewer.require("admin")
        record = await _record(desk, viewer, request)
        await _forget(desk, viewer, record, form.get("force") == "yes")
        return RedirectResponse(f"/ui/events?q={quote(record.key, safe='')}&done=forgotten", 303)

    async def replay(request: Request) -> Response:
        viewer = await desk.viewer(request)
        form = await form_of(request)
        viewer.require("admin")
        record = await _record(desk, viewer, request)
        await _replay(desk, viewer, record, form.get("fence", ""))
        return RedirectResponse(f"/ui/events?q={quote(record.key, safe='')}&done=replayed", 303)

    async def decide(request: Request) -> Response:
        viewer = await desk.viewer(request)
        form = await form_of(request)
        viewer.require("admin")
        record = await _record(desk, viewer, request)
        await _decide(desk, viewer, record, form)
        return RedirectResponse(f"/ui/events?q={quote(record.key, safe='')}&done=decided", 303)

    one = "/event/{consumer}/{key:path}"
    return [
        Route("/events", events),
        Route("/parts/tail", tail),
        Route(one, event),
        Route("/forget/{consumer}/{key:path}", forget, methods=["POST"]),
        Route("/replay/{consumer}/{key:path}", replay, methods=["POST"]),
        Route("/decide/{consumer}/{key:path}", decide, methods=["POST"]),
        *_flight_routes(desk),
    ]


def address(record_id: Id, verb: str = "event") -> str:
    """Return the path of the page of a record."""
    tenant, consumer, key = record_id
    of = f"?tenant={quote(tenant, safe='')}" if tenant else ""
    return f"/ui/{verb}/{quote(consumer, safe='')}/{quote(key, safe='')}{of}"


async def _search(desk: Dashboard, viewer: Viewer, request: Request) -> dict[str, Any]:
    """Search the records of a key, of a prefix, or of a state."""
    asked = request.query_params
    query, consumer = asked.get("q", "").strip(), asked.get("consumer", "")
    state = next((each for each in STATES if each == asked.get("state")), None)
    settings = await desk.figures.settings()
    scopes = sorted(name for name in settings.modes if viewer.tenant in (None, name[0]))
    values: dict[str, Any] = {
        "query": query,
        "consumer": consumer,
        "state": state,
        "states": STATES,
        "names": sorted({name for _, name in scopes}),
        "address": address,
        "seen": desk.tail.last(TAIL_ROWS, viewer.tenant),
        "instance": desk.instance,
        "done": asked.get("done", ""),
        "records": [],
        "cursor": None,
        "searched": bool(query or state or consumer),
        "listed": False,
        "trouble": "",
    }
    try:
        if query:
            check_key(query)
            wanted = [scope for scope in scopes if consumer in ("", scope[1])][:SCOPES_MAX]
            answers = await desk.looks.quick([Lookup((*scope, query)) for scope in wanted])
            values["records"] = [_row(each) for each in records_of(answers)]
    except KeyInvalid as error:
        values["trouble"] = str(error)
    if not values["records"] and values["searched"] and not values["trouble"] and viewer.is_admin:
        item = Scan(
            viewer.tenant, consumer or None, state, query, cursor=asked.get("cursor") or None, limit=PAGE_ROWS
        )
        permit(viewer.caller, item)
        page: Page = await desk.looks.slow(item)
        values["records"] = [_row(each) for each in page.records if not is_own(each.tenant, each.consumer)]
        values["cursor"], values["listed"] = page.cursor, True
    return values


def _row(record: Record) -> dict[str, Any]:
    return {"id": record.id, **summary(record, now_us()), "first_seen_us": record.first_seen_us}


async def _record(desk: Dashboard, viewer: Viewer, request: Request) -> Record:
    """Return the record of a path if the user may see it. Raises `HttpProblem`."""
    named = request.query_params.get("tenant", "")
    tenant = named if viewer.tenant is None else viewer.tenant
    key = request.path_params["key"]
    try:
        check_key(key)
    except KeyInvalid as error:
        raise HttpProblem(404, "absent", str(error)) from error
    item = Lookup((tenant, request.path_params["consumer"], key))
    permit(viewer.caller, item)
    (answer,) = await desk.looks.quick((item,))
    record = answer_or_raise(answer)
    if isinstance(record, Absent):
        raise HttpProblem(
            404, "absent", f"no record of {key!a}: it is new, its window is over, or it was forgotten"
        )
    assert isinstance(record, Record)
    return record


async def _event(desk: Dashboard, record: Record) -> dict[str, Any]:
    now = now_us()
    try:
        kept = await desk.taker.find_event(record)
    except StoreUnavailable:  # the table does not answer; show the record anyway
        kept = None
    shown = await asyncio.to_thread(document, record, now)
    return {
        "record": record,
        "shown": shown,
        "strip": strip(record, desk.tail.of(record.id), now, desk.instance),
        "address": address,
        "dash": DASH,
        "running": shown["claim"] == "running",
        "replayable": kept is not None,
    }


async def _forget(desk: Dashboard, viewer: Viewer, record: Record, force: bool) -> None:  # noqa: FBT001 - a tick in a form
    if force and audit.is_forced(record):
        audit.warn(record, viewer.label)
    found = await desk.service.one(viewer.caller, Forget(record.id, force, record.fence))
    if isinstance(found, Busy):
        raise HttpProblem(409, "running", "a claim runs: wait for it, or tick the box to force it")
    if isinstance(found, Lost | Absent):
        raise _problem_of_change()


async def _replay(desk: Dashboard, viewer: Viewer, record: Record, fence: str) -> None:
    if fence != str(record.fence):
        raise _problem_of_change()
    event = await desk.taker.find_event(record)
    if event is None:
        raise HttpProblem(
            409, "payload-unknown", "its payload is not kept here; forget it, and its next delivery runs"
        )
    details = {"consumer": record.consumer, "key": record.key, "fence": record.fence, "state": record.state}
    permit(viewer.caller, Forget(record.id))  # the first step of a replay
    await desk.service.note(viewer.caller, record.tenant, "replay", **details)
    if not await desk.taker.again(record, event):
        raise _problem_of_change()


async def _decide(desk: Dashboard, viewer: Viewer, record: Record, form: dict[str, str]) -> None:
    to = form.get("to", "")
    if to not in ("done", "absent") or not FENCE.fullmatch(form.get("fence", "")):
        raise HttpProblem(422, "invalid", "choose whether it happened: done or absent")
    settings = await desk.figures.settings()
    window = resolve(settings.windows, record.tenant, record.consumer, record.event_type, DEFAULT_WINDOW_US)
    value = encode(None) if to == "done" else None
    item = Resolve(record.id, int(form["fence"]), to, value, window)  # type: ignore[arg-type]  # looked at above
    if isinstance(await desk.service.one(viewer.caller, item), Lost):
        raise _problem_of_change()


def _problem_of_change() -> HttpProblem:
    return HttpProblem(409, "changed", "the event has changed since the page was loaded; reload it")


FLIGHT_ROWS_MAX = 200
FLIGHT_S = 1.5
SLOW_SHARE = 10.0
"""A listing is cached for this many times its duration."""


def _flight_routes(desk: Dashboard) -> list[Route]:
    """The page of claims in flight: the age of each, and its lease."""
    known: dict[str | None, tuple[float, list[Record]]] = {}

    async def claims(viewer: Viewer) -> dict[str, Any]:
        until, records = known.get(viewer.tenant, (0.0, []))
        if time.monotonic() >= until:
            began = time.monotonic()
            page: Page = await desk.looks.slow(Scan(viewer.tenant, None, "claimed", limit=FLIGHT_ROWS_MAX))
            records = [each for each in page.records if not is_own(each.tenant, each.consumer)]
            took_s = time.monotonic() - began
            if len(known) > FLIGHT_ROWS_MAX:
                known.clear()
            known[viewer.tenant] = (time.monotonic() + max(FLIGHT_S, SLOW_SHARE * took_s), records)
        now = now_us()
        rows = sorted((_flight_row(viewer, each, now) for each in records), key=lambda row: -row["age_s"])
        return {"claims": rows, "address": address, "rows_max": FLIGHT_ROWS_MAX}

    async def flight(request: Request) -> Response:
        viewer = await desk.viewer(request)
        return await desk.page(request, viewer, "flight.html", await claims(viewer))

    async def part(request: Request) -> Response:
        viewer = await desk.viewer(request)
        return await desk.page(request, viewer, "_flight.html", await claims(viewer))

    return [Route("/flight", flight), Route("/parts/flight", part)]


def _flight_row(viewer: Viewer, record: Record, now: int) -> dict[str, Any]:
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
