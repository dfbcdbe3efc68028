"""Search, the live list, the timeline of one event, and the actions of operators on it."""

import re
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from semel.codec import encode
from semel.core.commands import Forget, Lookup, Page, Resolve, Scan, StoreSettings, answer_or_raise
from semel.core.ids import is_own
from semel.errors import KeyInvalid, StoreUnavailable
from semel.keys.limits import check as check_key
from semel.observe.formatting import claim_of, document, now_us, summary
from semel.runtime import audit
from semel.server.auth import permit
from semel.server.dashboard.auth import Viewer, form_of
from semel.server.dashboard.flight import release
from semel.server.dashboard.recent_events import KINDS, strip
from semel.server.dashboard.rendering import DASH
from semel.server.dashboard.state import Dashboard
from semel.server.dashboard.store_reader import DEFAULT_WINDOW_US, records_of
from semel.server.problems import HttpProblem
from semel.types import Absent, Busy, Id, Lost, Record, State
from semel.windows import resolve

__all__ = ["resolve_item", "routes"]

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
        return await desk.page(request, viewer, "_tail.html", _tail(desk, viewer, request))

    async def event(request: Request) -> Response:
        viewer = await desk.viewer(request)
        record = await _record(desk, viewer, request)
        return await desk.page(request, viewer, "event.html", await _event(desk, viewer, record))

    async def forget(request: Request) -> Response:
        viewer = await desk.viewer(request)
        form = await form_of(request)
        viewer.require("admin")
        record = await _record(desk, viewer, request)
        await _forget(desk, viewer, record, form.get("force") == "yes")
        desk.snapshots.expire()
        return RedirectResponse(f"/ui/events?q={quote(record.key, safe='')}&done=forgotten", 303)

    async def replay(request: Request) -> Response:
        viewer = await desk.viewer(request)
        form = await form_of(request)
        viewer.require("admin")
        record = await _record(desk, viewer, request)
        await _replay(desk, viewer, record, form.get("fence", ""))
        desk.snapshots.expire()
        return RedirectResponse(f"/ui/events?q={quote(record.key, safe='')}&done=replayed", 303)

    async def decide(request: Request) -> Response:
        viewer = await desk.viewer(request)
        form = await form_of(request)
        viewer.require("admin")
        record = await _record(desk, viewer, request)
        await _decide(desk, viewer, record, form)
        desk.snapshots.expire()
        return RedirectResponse(f"/ui/events?q={quote(record.key, safe='')}&done=decided", 303)

    async def let_go(request: Request) -> Response:
        viewer = await desk.viewer(request)
        form = await form_of(request)
        viewer.require("admin")
        record = await _record(desk, viewer, request)
        if form.get("fence", "") != str(record.fence) or not record.owner:
            raise _problem_of_change()
        if claim_of(record, desk.now_us) == "running" and form.get("force") != "yes":
            raise HttpProblem(409, "running", "the claim runs: wait for it, or tick the box to take it away")
        if not await release(desk, viewer, record.id, record.owner, record.fence):
            raise _problem_of_change()
        desk.snapshots.expire()
        return RedirectResponse(f"/ui/events?q={quote(record.key, safe='')}&done=released", 303)

    one = "/event/{consumer}/{key:path}"
    return [
        Route("/events", events),
        Route("/parts/tail", tail),
        Route(one, event),
        Route("/forget/{consumer}/{key:path}", forget, methods=["POST"]),
        Route("/replay/{consumer}/{key:path}", replay, methods=["POST"]),
        Route("/decide/{consumer}/{key:path}", decide, methods=["POST"]),
        Route("/release/{consumer}/{key:path}", let_go, methods=["POST"]),
    ]


def _tail(desk: Dashboard, viewer: Viewer, request: Request) -> dict[str, Any]:
    """Return the latest events: of a consumer, an outcome, and, for those who may see keys, a beginning of the key."""
    asked = request.query_params
    chosen = {name: asked.get(f"tail_{name}", "").strip() for name in ("consumer", "what", "prefix")}
    if not viewer.is_admin:  # whether it matches would tell the key
        chosen["prefix"] = ""
    seen = desk.tail.last(TAIL_ROWS, viewer.tenant, **chosen)
    return {
        "seen": seen,
        "tail": chosen,
        "kinds": KINDS,
        "instance": desk.instance,
    }


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
        **_tail(desk, viewer, request),
        "done": asked.get("done", ""),
        "records": [],
        "prefixed": asked.get("begins") == "yes",
        "cursor": None,
        "searched": bool(query or state or consumer),
        "listed": False,
        "trouble": "",
    }
    try:
        if query:
            check_key(query)
        if query and not values["prefixed"]:
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


async def _redelivery(desk: Dashboard, record: Record) -> dict[str, Any]:
    """Return where a new delivery of this event must come from, as far as that is known."""
    sources = {
        source
        for worker in await desk.workers.first() or ()
        for tenant, consumer, source in worker.sources
        if (tenant, consumer) == record.id[:2]
    }
    letters = desk.letters.last()
    dead = [source.name for source in (letters.sources if letters else ()) if record.id[1:] in source.events]
    return {"sources": sorted(sources), "dead_at": dead}


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


async def _event(desk: Dashboard, viewer: Viewer, record: Record) -> dict[str, Any]:
    now = desk.now_us
    try:
        kept = await desk.taker.find_event(record)
    except StoreUnavailable:  # the table does not answer; show the record anyway
        kept = None
    shown = await desk.service.beside_loop(partial(document, record, now))
    return {
        "record": record,
        "shown": shown,
        "strip": strip(record, desk.tail.of(record.id), now, desk.instance),
        "comes_from": await _redelivery(desk, record) if viewer.sees_all else {"sources": [], "dead_at": []},
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
    if not FENCE.fullmatch(form.get("fence", "")):
        raise HttpProblem(422, "invalid", "choose whether it happened: done or absent")
    settings = await desk.figures.settings()
    item = resolve_item(record.id, int(form["fence"]), record.event_type, form, settings)
    if isinstance(await desk.service.one(viewer.caller, item), Lost):
        raise _problem_of_change()


def _problem_of_change() -> HttpProblem:
    return HttpProblem(409, "changed", "the event has changed since the page was loaded; reload it")


def resolve_item(
    record_id: Id, fence: int, event_type: str, form: dict[str, str], settings: StoreSettings
) -> Resolve:
    """Return the command. Raises `HttpProblem` if the form has no decision, or a value that is not JSON."""
    window = resolve(settings.windows, *record_id[:2], event_type, DEFAULT_WINDOW_US)
    to = form.get("to", "")
    if to == "absent":
        return Resolve(record_id, fence, "absent", None, window)
    if to == "done":
        return Resolve(record_id, fence, "done", encode(_value(form.get("value", ""))), window)
    raise HttpProblem(422, "invalid", "choose whether it happened: done or absent")


def _value(text: str) -> object:
    """Return the value that duplicates are answered with; an empty field is null."""
    if not text.strip():
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise HttpProblem(
            422, "invalid", f"the value is not JSON ({error}); write a text in quotation marks"
        ) from None
