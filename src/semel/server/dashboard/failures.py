"""What needs a person: failing events by consumer and error, undecided ones, dead letters, stuck messages."""

import asyncio
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlencode

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from semel.core.commands import Forget, Item, Page, Scan
from semel.core.ids import is_own
from semel.server.auth import permit
from semel.server.dashboard.auth import Viewer, form_of
from semel.server.dashboard.flight import release
from semel.server.dashboard.records import resolve_item
from semel.server.dashboard.snapshots import Case, CaseStatus, case_of
from semel.server.dashboard.state import Dashboard
from semel.server.problems import HttpProblem, unavailable
from semel.types import Completed, Forgotten, State, Unavailable

__all__ = ["CaseGroup", "groups_of", "routes"]

GROUPS_SHOWN = 100
KEYS_SHOWN = 20
ACT_MAX = 500
"""The most events that one press changes: each has its entry in the audit. Pressing again goes on."""
ACT_ITEMS = 50
"""Events per round trip of an action."""
PAGE_ROWS = 500
NUMBER = re.compile("[0-9]{1,16}")
STATUSES: dict[CaseStatus, tuple[str, str]] = {
    "unknown": ("Undecided", "nobody knows whether the effect happened: look, then decide"),
    "failed": ("Given up", "failed for good: every duplicate gets the failure"),
    "journaled": ("Journal expired", "accepted and kept, but no receiver of its consumer runs it"),
    "silent": ("Worker silent", "the lease is over: the next delivery takes over"),
    "waiting": ("Failing", "it failed and is tried again"),
}
"""Their names and meanings, the most urgent first. Claims that run are not failing."""
VERBS: dict[CaseStatus, tuple[str, ...]] = {
    "unknown": ("resolve",),
    "failed": ("forget",),
    "journaled": ("forget",),
    "silent": ("release", "forget"),
    "waiting": ("forget",),
}
_STATE: dict[CaseStatus, State] = {"unknown": "unknown", "failed": "failed"}


class CaseGroup(Struct, frozen=True):
    """Failing events of one consumer with one kind of error."""

    status: CaseStatus
    tenant: str
    consumer: str
    kind: str
    count: int
    first_us: int
    last_us: int
    message: str
    """Of the last error."""
    messages: int
    """How many different ones there are."""
    workers: tuple[str, ...]
    """Those with the most of them."""
    attempts: int
    """The most attempts of one event."""
    next_us: int
    """The first time at which one of them may run again; 0: none waits."""
    journaled: int
    cases: tuple[Case, ...]
    """The latest."""

    @property
    def verbs(self) -> tuple[str, ...]:
        """The actions on all of them."""
        return VERBS[self.status]


def groups_of(cases: Iterable[Case]) -> list[CaseGroup]:
    """Group failing cases by status, consumer and kind of error: the most urgent first, then the latest."""
    found: dict[tuple[CaseStatus, str, str, str], list[Case]] = {}
    for case in cases:
        if case.is_failing:
            found.setdefault((case.status, *case.id[:2], case.kind), []).append(case)
    order = list(STATUSES)
    groups = [_group(*name, each) for name, each in found.items()]
    return sorted(groups, key=lambda group: (order.index(group.status), -group.last_us))


def _group(status: CaseStatus, tenant: str, consumer: str, kind: str, cases: list[Case]) -> CaseGroup:
    latest = sorted(cases, key=lambda case: -case.last_us)
    workers = Counter(case.worker for case in cases if case.worker)
    return CaseGroup(
        status=status,
        tenant=tenant,
        consumer=consumer,
        kind=kind,
        count=len(cases),
        first_us=min(case.first_us for case in cases),
        last_us=latest[0].last_us,
        message=latest[0].message,
        messages=len({case.message for case in cases}),
        workers=tuple(name for name, _ in workers.most_common(3)),
        attempts=max(case.attempt for case in cases),
        next_us=min((case.until_us for case in cases), default=0) if status == "waiting" else 0,
        journaled=sum(case.is_journaled for case in cases),
        cases=tuple(latest[:KEYS_SHOWN]),
    )


def routes(desk: Dashboard) -> list[Route]:
    """The pages."""

    async def failures(request: Request) -> Response:
        viewer = await desk.viewer(request)
        if request.query_params.get("done"):  # show what the action has left
            await desk.snapshots.of(viewer.tenant).fresh()
        return await desk.page(request, viewer, "failures.html", await _values(desk, viewer, request))

    async def part(request: Request) -> Response:
        viewer = await desk.viewer(request)
        return await desk.page(request, viewer, "_failures.html", await _values(desk, viewer, request))

    async def act(request: Request) -> Response:
        viewer = await desk.viewer(request)
        form = await form_of(request)
        viewer.require("admin")
        done, changed, left = await _act(desk, viewer, form)
        said = {"done": form["verb"], "count": done, "changed": changed, "left": int(left)}
        return RedirectResponse(f"/ui/failures?{urlencode(said)}", 303)

    async def act_on_letters(request: Request) -> Response:
        viewer = await desk.overseer(request)
        form = await form_of(request)
        viewer.require("admin")
        group = (form.get("consumer", ""), form.get("reason", ""), form.get("kind", ""))
        modes = dict((await desk.figures.settings()).modes)
        source, verb = form.get("source", ""), "drop" if form.get("verb") == "drop" else "replay"
        act = desk.dead_letters.drop if verb == "drop" else desk.dead_letters.replay
        done, refused = await act(viewer.caller, source, group, modes)
        await desk.letters.fresh()
        said = {"done": verb, "count": done, "changed": refused, "left": 0}
        return RedirectResponse(f"/ui/failures?{urlencode(said)}", 303)

    return [
        Route("/failures", failures),
        Route("/parts/failures", part),
        Route("/failures", act, methods=["POST"]),
        Route("/dead-letters", act_on_letters, methods=["POST"]),
    ]


async def _values(desk: Dashboard, viewer: Viewer, request: Request) -> dict[str, Any]:
    asked = request.query_params
    snapshot, letters, rows, sources = await asyncio.gather(
        desk.snapshots.of(viewer.tenant).first(),
        desk.letters.first() if viewer.sees_all else _nothing(),
        desk.stuck_rows.first() if viewer.sees_all else _nothing(),
        _sources(desk, viewer),
    )
    groups = groups_of(snapshot.cases) if snapshot else []
    chosen = {name: asked.get(name, "") for name in ("status", "consumer", "kind")}
    shown = [
        group
        for group in groups
        if chosen["status"] in ("", group.status)
        and chosen["consumer"] in ("", group.consumer)
        and chosen["kind"] in ("", group.kind)
    ]
    lettered: list[int] = []
    if letters:
        found = letters.events
        cases = snapshot.cases if snapshot else ()
        by_group = Counter((case.status, *case.id[:2], case.kind) for case in cases if case.id[1:] in found)
        lettered = [by_group[group.status, group.tenant, group.consumer, group.kind] for group in shown]
    counts = {status: sum(group.count for group in groups if group.status == status) for status in STATUSES}
    if snapshot:
        counts |= {status: snapshot.count(status) for status in _STATE}
    return {
        "groups": shown[:GROUPS_SHOWN],
        "lettered": lettered or [0] * len(shown),
        "more_groups": max(0, len(shown) - GROUPS_SHOWN),
        "counts": counts,
        "statuses": STATUSES,
        "chosen_filter": chosen,
        "filtered": any(chosen.values()),
        "letters": letters,
        "both": desk.lettered_failures(viewer, snapshot),
        "rows": rows,
        "failing": desk.failing(viewer, snapshot),
        "snapshot": snapshot,
        "counted_us": snapshot.taken_us if snapshot else 0,
        "sampled": snapshot is not None and bool(snapshot.sampled),
        "bounded": {status for status in STATUSES if snapshot and snapshot.is_bounded(status)},
        "now_us": desk.now_us,
        "act_max": ACT_MAX,
        "sources": sources,
        "said": _action_notice(asked),
    }


async def _nothing() -> None:
    """What a user of one tenant sees of dead letters and the outbox."""


def _action_notice(asked: Any) -> dict[str, Any] | None:
    """Return what an action has done, for the notice; only numbers and known words come from the address."""
    numbers = {name: asked.get(name, "") for name in ("count", "changed", "left")}
    if asked.get("done") not in ("forget", "release", "resolve", "replay", "drop"):
        return None
    if not all(NUMBER.fullmatch(each) for each in numbers.values()):
        return None
    return {"verb": asked["done"], **{name: int(each) for name, each in numbers.items()}}


async def _sources(desk: Dashboard, viewer: Viewer) -> dict[tuple[str, str], list[str]]:
    """Return the sources from which each consumer's workers have had deliveries."""
    found: dict[tuple[str, str], list[str]] = {}
    for worker in await desk.workers.first() or ():
        for tenant, consumer, source in worker.sources:
            if viewer.tenant in (None, tenant) and source not in found.setdefault((tenant, consumer), []):
                found[tenant, consumer].append(source)
    return found


async def _act(desk: Dashboard, viewer: Viewer, form: dict[str, str]) -> tuple[int, int, bool]:
    """Act on the events of a group as they are now, if they have not changed since the page was made.

    Returns how many were changed, how many had changed before, and whether there are more.
    """
    verb, status = form.get("verb", ""), form.get("status", "")
    if status not in STATUSES or verb not in VERBS[status] or not NUMBER.fullmatch(form.get("as_of", "")):
        raise HttpProblem(422, "invalid", "choose a group of failures, and what to do with it")
    cases, left = await _cases_of(desk, viewer, form)
    settings = await desk.figures.settings()
    done = changed = 0
    for at in range(0, len(cases), ACT_ITEMS):
        batch = cases[at : at + ACT_ITEMS]
        if verb == "release":
            answers = [await release(desk, viewer, case.id, case.owner, case.fence) for case in batch]
            done += sum(answers)
            changed += len(batch) - sum(answers)
            continue
        items: list[Item] = [
            resolve_item(case.id, case.fence, case.event_type, form, settings)
            if verb == "resolve"
            else Forget(case.id, fence=case.fence)
            for case in batch
        ]
        found = await desk.service.carry_out(viewer.caller, items)
        if all(isinstance(answer, Unavailable) for answer in found):
            raise unavailable(f"the store did not answer; {done} were changed before")
        number = sum(isinstance(answer, Completed | Forgotten) for answer in found)
        done += number
        changed += len(batch) - number
    return done, changed, left


async def _cases_of(desk: Dashboard, viewer: Viewer, form: dict[str, str]) -> tuple[list[Case], bool]:
    """Return the events of a group that were last changed before the page was made, and whether there are more."""
    tenant = form.get("tenant", "") if viewer.tenant is None else viewer.tenant
    status: Any = form["status"]
    cases: list[Case] = []
    cursor = None
    while True:
        item = Scan(
            tenant, form.get("consumer", ""), _STATE.get(status, "claimed"), cursor=cursor, limit=PAGE_ROWS
        )
        permit(viewer.caller, item)
        page: Page = await desk.looks.slow(item)
        for record in page.records:
            case = case_of(record, desk.now_us)
            if is_own(record.tenant, record.consumer) or case.last_us > int(form["as_of"]):
                continue
            if (case.status, case.kind) == (status, form.get("kind", "")):
                cases.append(case)
        cursor = page.cursor
        if cursor is None or len(cases) > ACT_MAX:
            return cases[:ACT_MAX], cursor is not None or len(cases) > ACT_MAX
