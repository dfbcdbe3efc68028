"""State that all pages of one instance share: figures, store reader, live list, sessions."""

import asyncio
import platform
from collections import Counter
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from semel.errors import StoreError
from semel.observe.counters import CounterHook
from semel.observe.rollups import Asking, Writer
from semel.observe.workers import BEAT_S, Heartbeat
from semel.runtime.generators import adrive
from semel.runtime.process import logging
from semel.runtime.tasks import end_tasks
from semel.server.dashboard.auth import Viewer, viewer_of
from semel.server.dashboard.figures import RANGES, Figures, Range, RollupReader
from semel.server.dashboard.recent_events import Tail
from semel.server.dashboard.rendering import page
from semel.server.dashboard.store_reader import StoreReader
from semel.server.events import Events
from semel.server.service import Service

__all__ = ["Dashboard"]

FLUSH_S = 60.0
DEFAULT_RANGE = "1h"
LIVE_MAX = 100
"""The most live pages at a time."""
LIVE_PER_TOKEN_MAX = 20
"""The most live pages of one token."""


class Dashboard:
    """The dashboard of one instance; writes rollups while it is open."""

    def __init__(self, service: Service, taker: Events, tally: CounterHook, tail: Tail) -> None:
        self.service: Service = service
        self.taker: Events = taker
        self.tail: Tail = tail
        self.instance: str = platform.node() or "this instance"
        self.looks: StoreReader = StoreReader(service)
        self._tally = tally
        self._writer = Writer(tally)
        self._heartbeat = Heartbeat(tally)
        self._book = RollupReader(self.looks, tally, self._writer)
        self.figures: Figures = Figures(self._book, tally, self.looks, self._writer.mark)
        self.listeners: Counter[str] = Counter()
        """Live pages by token."""
        self._flusher: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start to write rollups."""
        self._flusher = asyncio.get_running_loop().create_task(self._flush(), name="semel-rollups")

    async def close(self) -> None:
        """Write the rest."""
        flusher, self._flusher = self._flusher, None
        if flusher is not None:
            await end_tasks(flusher)
            await self._write(self._writer.close())
            if self._heartbeat.was_written:
                await self._beat(stopped=True)
        await self.looks.close()

    async def _flush(self) -> None:
        while True:
            left_s = FLUSH_S - self._tally.now_s % FLUSH_S + 0.1  # until just after the full minute
            await asyncio.sleep(min(left_s, BEAT_S))
            if left_s <= BEAT_S:
                await self._write(self._writer.flush())
            else:
                await self._beat()

    async def _beat(self, *, stopped: bool = False) -> None:
        """Write the heartbeat of this instance, in place of a flush, so at most one write each 10 s."""
        with suppress(StoreError):  # the next one comes soon
            await adrive(self._heartbeat.beat(stopped=stopped), self.service.runtime.channel.asend)

    async def _write(self, asking: Asking) -> None:
        async with self._book.turning:
            try:
                await adrive(asking, self.service.runtime.channel.asend)
                self._book.expire()
            except StoreError as error:
                logging.getLogger("semel").warning("rollups could not be written: %s", error)

    def is_full(self, viewer: Viewer) -> bool:
        """Whether no more live pages are allowed, in total or with this token."""
        if self.listeners.total() >= LIVE_MAX:
            return True
        return viewer.has_token and self.listeners[viewer.caller.name] >= LIVE_PER_TOKEN_MAX

    async def viewer(self, request: Request) -> Viewer:
        """Return the user. Raises `LoginNeeded`."""
        return await viewer_of(request, self.service)

    async def overseer(self, request: Request) -> Viewer:
        """Return a user of the whole store. Raises `LoginNeeded`, and `HttpProblem` for a user of one tenant."""
        viewer = await self.viewer(request)
        viewer.caller.require_all_tenants("this is about the whole store")
        return viewer

    async def page(
        self,
        request: Request,
        viewer: Viewer,
        name: str,
        values: dict[str, Any] | None = None,
        status: int = 200,
    ) -> Response:
        """Render a whole page, or only the part that a partial request asks for."""
        always = {"viewer": viewer, "chosen": range_of(request), "ranges": RANGES, "store": self.store_name}
        always["header"] = await self.figures.header(viewer.tenant)
        always["path"] = request.url.path
        return page(name, always | (values or {}), status)

    @property
    def store_name(self) -> str:
        """The kind of the store, without its address."""
        return self.service.runtime.store.name.partition(":")[0]


def range_of(request: Request) -> Range:
    """The range that was asked for, or an hour."""
    return RANGES.get(request.query_params.get("range", ""), RANGES[DEFAULT_RANGE])
