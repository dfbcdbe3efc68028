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
from semel.observe.dedup_progress import SeenDedup, dedups
from semel.observe.rollups import Asking, Writer
from semel.observe.workers import BEAT_S, Heartbeat, SeenWorker, workers
from semel.runtime.generators import adrive
from semel.runtime.process import logging
from semel.runtime.tasks import end_tasks
from semel.server.dashboard.auth import Viewer, viewer_of
from semel.server.dashboard.dead_letters import DeadLetterReader, Letters
from semel.server.dashboard.figures import RANGES, Figures, Range, RollupReader
from semel.server.dashboard.guarantees import Explainer
from semel.server.dashboard.outbox import OutboxReader, StuckRows
from semel.server.dashboard.recent_events import Tail
from semel.server.dashboard.refreshed import Refreshed
from semel.server.dashboard.rendering import page
from semel.server.dashboard.snapshots import Snapshot, Snapshots
from semel.server.dashboard.store_reader import StoreReader
from semel.server.events import Events
from semel.server.service import Service

__all__ = ["Dashboard"]

FLUSH_S = 60.0
DEFAULT_RANGE = "1h"
OUTBOX_EVERY_S = 15.0
LETTERS_EVERY_S = 60.0
"""Looking at dead letters hides them from others for a moment at some brokers."""
WORKERS_EVERY_S = 5.0
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
        self.snapshots: Snapshots = Snapshots(self.looks, lambda: tally.now_s)
        self.outbox: OutboxReader = OutboxReader(service.settings.store if service.is_of_settings else "")
        self.stuck_rows: Refreshed[StuckRows] = Refreshed(self.outbox.stuck, OUTBOX_EVERY_S)
        self.workers: Refreshed[list[SeenWorker]] = Refreshed(self._seen_workers, WORKERS_EVERY_S)
        self.dedups: Refreshed[list[SeenDedup]] = Refreshed(self._seen_dedups, WORKERS_EVERY_S)
        self.dead_letters: DeadLetterReader = DeadLetterReader(service, self.workers.first)
        self.letters: Refreshed[Letters] = Refreshed(self.dead_letters.read, LETTERS_EVERY_S)
        self.explainer: Explainer = Explainer(service)
        self._flusher: asyncio.Task[None] | None = None

    async def _seen_workers(self) -> list[SeenWorker]:
        found: list[SeenWorker] = await self.looks.ask_own(workers())
        return found

    async def _seen_dedups(self) -> list[SeenDedup]:
        found: list[SeenDedup] = await self.looks.ask_own(dedups())
        return found

    @property
    def now_us(self) -> int:
        """The store's clock, estimated."""
        return round(1e6 * self._tally.now_s)

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
        for each in (
            self.snapshots,
            self.stuck_rows,
            self.letters,
            self.workers,
            self.dedups,
            self.explainer,
            self.looks,
        ):
            await each.close()

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
        if request.query_params.get("count") == "now":
            self.snapshots.of(viewer.tenant).expire()
        always["header"] = await self.header(viewer)
        always["path"] = request.url.path
        return page(name, always | (values or {}), status)

    async def header(self, viewer: Viewer) -> dict[str, Any]:
        """Return the counters of every page: the last hour, and what the last snapshot counted."""
        figures = await self.figures.header(viewer.tenant)
        snapshot = self.snapshots.of(viewer.tenant).last()
        return figures | {
            "in_flight": snapshot.running if snapshot else None,
            "failing": self.failing(viewer, snapshot),
            "bounded": snapshot is not None and snapshot.is_bounded("running"),
        }

    def failing(self, viewer: Viewer, snapshot: Snapshot | None) -> int:
        """Return how many events, dead letters and messages need a person, as far as the user may see them."""
        number = snapshot.failing if snapshot else 0
        if viewer.sees_all:
            letters, rows = self.letters.last(), self.stuck_rows.last()
            number += rows.number if rows else 0
            if letters:
                number += max(0, letters.number - self.lettered_failures(viewer, snapshot))
        return number

    def lettered_failures(self, viewer: Viewer, snapshot: Snapshot | None) -> int:
        """Return how many of the failing events have a dead letter: event and letter are one failure."""
        letters = self.letters.last() if viewer.sees_all else None
        events = letters.events if letters else frozenset()
        cases = snapshot.cases if snapshot and events else ()
        return sum(case.is_failing and case.id[1:] in events for case in cases)

    @property
    def store_name(self) -> str:
        """The kind of the store, without its address."""
        return self.service.runtime.store.name.partition(":")[0]


def range_of(request: Request) -> Range:
    """The range that was asked for, or an hour."""
    return RANGES.get(request.query_params.get("range", ""), RANGES[DEFAULT_RANGE])
