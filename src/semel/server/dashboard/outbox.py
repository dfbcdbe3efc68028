"""The outbox in the store's database: its page, what is stuck in it, retry and drop."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from semel.errors import StoreUnknown, UsageError
from semel.observe.formatting import now_us
from semel.outbox.tables import Entry, OutboxCounts, Rows, rows_for
from semel.server.dashboard.auth import form_of
from semel.server.problems import HttpProblem

if TYPE_CHECKING:
    from semel.server.dashboard.state import Dashboard

__all__ = ["OutboxReader", "StuckRows", "routes"]

T = TypeVar("T")
OUTBOX_ROWS_MAX = 100
STUCK_S = 60.0
"""A row that waits for longer than this is stuck: a relay publishes within seconds."""


def routes(desk: "Dashboard") -> list[Route]:
    """The page."""
    box = desk.outbox

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
        desk.stuck_rows.expire()
        return RedirectResponse(f"/ui/outbox?done={count}", 303)

    return [Route("/outbox", outbox), Route("/outbox", act, methods=["POST"])]


def _ids(text: str) -> list[str] | None:
    if not text:
        return None
    try:
        return [str(uuid.UUID(text))]
    except ValueError:
        raise HttpProblem(422, "invalid", "that is not the id of a message") from None


class StuckRows(Struct, frozen=True):
    """What is stuck in an outbox: dead rows, and rows that wait for long."""

    taken_us: int
    counts: OutboxCounts = OutboxCounts(0, 0, 0.0)
    groups: tuple[dict[str, Any], ...] = ()

    @property
    def number(self) -> int:
        """How many rows need a person."""
        waiting: int = sum(group["count"] for group in self.groups if group["state"] == "pending")
        return self.counts.dead + waiting


class OutboxReader:
    """Reads the outbox in the store's database; opened for each request."""

    def __init__(self, url: str) -> None:
        self._url = url
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

    async def stuck(self) -> StuckRows:
        """Return what is stuck; nothing where there is no outbox."""
        now = now_us()
        if not self.is_there:
            return StuckRows(now)
        found = await self.use(_gather)
        late = [
            each
            for each in found["pending"]
            if now - max(each.row.created_at, each.not_before or 0) > 1e6 * STUCK_S
        ]
        return StuckRows(now, found["counts"], (*_groups("dead", found["dead"]), *_groups("pending", late)))


def _groups(state: str, entries: list[Entry]) -> list[dict[str, Any]]:
    """Group rows by destination and error, those that wait longest first."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for each in entries:
        found.setdefault((each.row.destination, each.error or ""), []).append(each)
    return [
        {
            "state": state,
            "destination": destination,
            "error": error,
            "count": len(rows),
            "types": sorted({each.row.event_type for each in rows})[:3],
            "attempts": max(each.row.attempts for each in rows),
            "first_us": min(each.row.created_at for each in rows),
            "last_us": max(each.settled_at or each.row.created_at for each in rows),
        }
        for (destination, error), rows in found.items()
    ]


async def _gather(rows: Rows) -> dict[str, Any]:
    dead: list[Entry] = await rows.entries("dead", 0, OUTBOX_ROWS_MAX)
    pending = await rows.entries("pending", 0, OUTBOX_ROWS_MAX)
    return {"counts": await rows.counts(), "dead": dead, "pending": pending, "rows_max": OUTBOX_ROWS_MAX}
