"""The outbox in the store's database: waiting and dead messages, retry and drop."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from semel.errors import StoreUnknown, UsageError
from semel.outbox.tables import Entry, Rows, rows_for
from semel.server.dashboard.auth import form_of
from semel.server.dashboard.state import Dashboard
from semel.server.problems import HttpProblem

__all__ = ["routes"]

T = TypeVar("T")
ROWS_MAX = 100


def routes(desk: Dashboard) -> list[Route]:
    """The pages."""
    box = OutboxReader(desk)

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
        return RedirectResponse(f"/ui/outbox?done={count}", 303)

    return [Route("/outbox", outbox), Route("/outbox", act, methods=["POST"])]


def _ids(text: str) -> list[str] | None:
    if not text:
        return None
    try:
        return [str(uuid.UUID(text))]
    except ValueError:
        raise HttpProblem(422, "invalid", "that is not the id of a message") from None


class OutboxReader:
    """Reads the outbox in the store's database; opened for each request."""

    def __init__(self, desk: Dashboard) -> None:
        self._url = desk.service.settings.store
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


async def _gather(rows: Rows) -> dict[str, Any]:
    dead: list[Entry] = await rows.entries("dead", 0, ROWS_MAX)
    pending = await rows.entries("pending", 0, ROWS_MAX)
    return {"counts": await rows.counts(), "dead": dead, "pending": pending, "rows_max": ROWS_MAX}
