"""Counts and scans: separate from other requests, one at a time, in turn by tenant."""

import asyncio
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from semel.core.commands import Answer, Count, Item, Page, Scan
from semel.core.protocols import AsyncStore, Store
from semel.errors import StoreError, StoreUnavailable
from semel.observe.events import Hooks
from semel.observe.timed_stores import instrument_store
from semel.server.problems import HttpProblem
from semel.stores.memory.store import MemoryStore
from semel.stores.registry import store_for
from semel.types import Record, Stats, Unavailable

__all__ = ["SlowLane", "answer_bytes", "send_to"]

WAITING_MAX = 16
"""The most counts and scans of one tenant that run or wait."""
FIRST_ROWS, MORE_ROWS = 64, 256
"""Records per read of a scan: few at first, because they may be large."""
CACHED_TIMES = 10
CACHED_MIN_S, CACHED_MAX_S = 0.05, 60.0
"""A count that took longer than this is cached for ten times its duration."""
CACHED_MAX = 1000


class SlowLane:
    """Executes items that read every record. A store given by its URL gets a separate connection here."""

    def __init__(self, store: Store | AsyncStore, url: str, hooks: Hooks, answer_bytes_max: int) -> None:
        self._shared = store
        self._url = url
        self._hooks = hooks
        self._answer_bytes_max = answer_bytes_max
        self._own: Store | AsyncStore | None = None
        self._lane = asyncio.Lock()
        self._turns: dict[str, tuple[asyncio.Lock, list[None]]] = {}
        self._counts: dict[str | None, tuple[float, Stats]] = {}

    async def close(self) -> None:
        """Close the connection."""
        own, self._own = self._own, None
        if own is None or own is self._shared:
            return
        if isinstance(own, Store):
            await asyncio.to_thread(own.close)
        else:
            await own.aclose()

    async def ask(self, who: str, item: Count | Scan) -> tuple[Answer, float]:
        """Return the answer and the store's time in seconds. Raises `HttpProblem` if too many wait.

        Each tenant has a queue of its own, so that one tenant's many requests do not delay another's.
        """
        known = self._recent_count(item)
        if known is not None:
            return known, 0.0
        turn, waiting = self._turns.setdefault(who, (asyncio.Lock(), []))
        if len(waiting) >= WAITING_MAX:
            raise HttpProblem(
                429,
                "too-many",
                f"{WAITING_MAX} counts and scans wait already; wait for them",
                {"Retry-After": "1"},
            )
        waiting.append(None)
        try:
            async with turn, self._lane:
                known = self._recent_count(item)
                if known is not None:
                    return known, 0.0
                began = time.monotonic()
                answer = await (self._scan(item) if isinstance(item, Scan) else self._send(item))
                took_s = time.monotonic() - began
        finally:
            waiting.pop()
            if not waiting:
                self._turns.pop(who, None)
        if isinstance(item, Count) and isinstance(answer, Stats) and took_s > CACHED_MIN_S:
            if len(self._counts) >= CACHED_MAX:
                self._counts.clear()
            self._counts[item.tenant] = (
                time.monotonic() + min(CACHED_MAX_S, CACHED_TIMES * took_s),
                answer,
            )
        return answer, took_s

    def _recent_count(self, item: Item) -> Stats | None:
        if not isinstance(item, Count):
            return None
        until, stats = self._counts.get(item.tenant, (0.0, None))
        return stats if time.monotonic() < until else None

    async def _scan(self, item: Scan) -> Answer:
        """Read a page of as many records as the answer may hold."""
        records: list[Record] = []
        used, rows, cursor = 0, FIRST_ROWS, item.cursor
        while True:
            wanted = min(rows, item.limit - len(records))
            page = await self._send(replace(item, cursor=cursor, limit=wanted))
            if not isinstance(page, Page):
                return page
            records += page.records
            used += answer_bytes(page)
            cursor, rows = page.cursor, MORE_ROWS
            if cursor is None or len(records) >= item.limit or used >= self._answer_bytes_max:
                return Page(records, cursor)

    async def _send(self, item: Item) -> Answer:
        if self._own is None:
            self._own = await self._open_store()
        try:
            (answer,) = await send_to(self._own, (item,))
        except StoreUnavailable as error:
            return Unavailable(error)
        except StoreError:
            raise
        except Exception as error:
            if isinstance(item, Scan) and item.cursor:  # each store has its own kind of cursor
                raise HttpProblem(422, "out-of-bounds", "the cursor is not one of this server") from error
            raise
        return answer

    async def _open_store(self) -> Store | AsyncStore:
        if not self._url:
            return self._shared
        store = store_for(self._url)
        if isinstance(store, MemoryStore):  # the next page would be empty
            return self._shared
        own = instrument_store(store, self._hooks)
        if isinstance(own, Store):
            await asyncio.to_thread(own.open)
        else:
            await own.aopen()
        return own


def _ignore(_took_s: float) -> None:
    """Charge nobody."""


async def send_to(
    store: Store | AsyncStore, items: Sequence[Item], on_store_time: Callable[[float], None] = _ignore
) -> list[Answer]:
    """Execute items without blocking the event loop; `on_store_time` gets the seconds. Raises `StoreError`."""
    began = time.perf_counter()

    def send() -> list[Answer]:
        nonlocal began
        began = time.perf_counter()  # the wait for a thread does not count
        return store.send(items)  # type: ignore[union-attr]

    try:
        if not isinstance(store, Store):
            return await store.asend(items)
        return send() if store.capabilities.instant else await asyncio.to_thread(send)
    finally:
        on_store_time(time.perf_counter() - began)


def answer_bytes(answer: Answer) -> int:
    """Return the size of the stored values in an answer."""
    if isinstance(answer, Page):
        return sum(map(answer_bytes, answer.records))
    size = sum(len(each.message) + len(each.traceback) for each in getattr(answer, "errors", ()))
    for field in ("value", "journal", "meta"):
        size += len(getattr(answer, field, None) or b"")
    return size + sum(len(value or b"") for _, value in getattr(answer, "steps", ()) or ())
