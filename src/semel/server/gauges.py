"""Ask now and then what no event tells: how much the store and its outbox hold."""

import asyncio
import logging
import time

from semel.core.commands import Count
from semel.errors import SemelError
from semel.outbox.rows import Rows, rows_for
from semel.server.service import Service

__all__ = ["Gauges"]

_log = logging.getLogger("semel")

EVERY_S = 60.0
"""Of the outbox, which has an index for it."""
STATS_S = 300.0
"""Of the store, which looks at every record for it."""
SHARE = 20
"""Counting takes one part in so many of an instance's time at most."""


class Gauges:
    """Keeps the gauges of one instance true."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._task: asyncio.Task[None] | None = None
        self._stats_due = 0.0
        store = service.settings.store
        has_outbox = store.startswith(("sqlite:", "postgresql:", "postgres:")) and service.is_of_settings
        self._rows: Rows | None = rows_for(store) if has_outbox else None

    def start(self) -> None:
        """Begin; ended by `close`."""
        self._task = asyncio.create_task(self._ask_on(), name="semel-gauges")

    async def close(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _ask_on(self) -> None:
        while True:
            for ask in (self._ask_outbox, self._ask_store):
                try:
                    await ask()
                except SemelError as error:
                    _log.debug("a gauge could not be read: %s", error)
                except Exception:  # noqa: BLE001 - the other gauges go on
                    _log.exception("a gauge could not be read")
            await asyncio.sleep(EVERY_S)

    async def _ask_store(self) -> None:
        began = time.monotonic()
        if began < self._stats_due:
            return
        # The answer is told to the hooks by the store's own tap.
        await self._service.slow.ask("gauges", Count())
        took_s = time.monotonic() - began
        self._stats_due = began + max(STATS_S, SHARE * took_s)

    async def _ask_outbox(self) -> None:
        if self._rows is None:
            return
        try:
            await self._rows.open()
            counts = await self._rows.counts()
        finally:
            await self._rows.close()  # a session that is idle for long is ended by the server
        self._service.metrics.hook.note_outbox(counts.pending, counts.oldest_age_s)
