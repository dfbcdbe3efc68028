"""What one tenant may make the store keep for ever: consumers, stored windows, and the steps of a record."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from semel.core.commands import (
    Admit,
    Answer,
    Item,
    Lookup,
    ReadSettings,
    Renew,
    StoreSettings,
    SetWindow,
    SwitchMode,
)
from semel.server.problems import HttpProblem
from semel.server.settings import Limits
from semel.types import Id, Record

__all__ = ["Growth"]

SETTINGS_LIVE_S = 5.0
"""How long what other instances have added is not noticed."""
RECORDS_MAX = 10_000
"""Records whose steps are remembered; of others the store is asked."""
STEP_VALUES = 4
"""The steps of a record may take as much as so many values."""


class Growth:
    """Knows what there is, and refuses what would be too much."""

    def __init__(self, limits: Limits, send: Callable[[Sequence[Item]], Awaitable[list[Answer]]]) -> None:
        self._limits = limits
        self._send = send
        self._modes: set[tuple[str, str]] = set()
        self._windows: set[tuple[str, str, str]] = set()
        self._fresh_until = 0.0
        self._steps: dict[tuple[Id, bytes], tuple[int, int]] = {}

    async def check(self, item: Item) -> None:
        """Raises `HttpProblem` for an item that makes something grow past its limit."""
        match item:
            case Admit() | SwitchMode():
                await self._check_name((item.tenant, item.consumer), "consumers")
            case SetWindow() if item.window_us is not None:
                await self._check_name((item.tenant, item.consumer, item.event_type), "windows")
            case Renew() if item.step is not None:
                await self._check_step(item)
            case _:
                pass

    async def _check_name(self, name: tuple[str, ...], what: str) -> None:
        if name in self._known(what):
            return
        if time.monotonic() >= self._fresh_until:
            (found,) = await self._send((ReadSettings(),))
            if isinstance(found, StoreSettings):
                self._modes, self._windows = set(found.modes), set(found.windows)
                self._fresh_until = time.monotonic() + SETTINGS_LIVE_S
        known, most = self._known(what), self._limits.consumers_max
        if name not in known and sum(each[0] == name[0] for each in known) >= most:
            raise HttpProblem(
                409,
                f"too-many-{what}",
                f"there are {most} {what} already; use one of them, or raise consumers_max",
            )
        known.add(name)

    def _known(self, what: str) -> set[Any]:
        return self._modes if what == "consumers" else self._windows

    async def _check_step(self, item: Renew) -> None:
        assert item.step is not None
        place, size = (item.id, item.owner), len(item.step[1] or b"")
        count, used = self._steps.get(place) or await self._stored(item.id)
        if self._exceeds(count, used + size):
            count, used = await self._stored(item.id)  # a step that is written again replaces the one before
            if self._exceeds(count, used + size):
                raise HttpProblem(
                    413,
                    "too-many-steps",
                    f"a record takes {self._limits.steps_max} steps with {self._bytes_max} bytes together; complete it,"
                    " or keep less in a step",
                )
        self._steps.pop(place, None)
        self._steps[place] = (count + 1, used + size)
        if len(self._steps) > RECORDS_MAX:
            del self._steps[next(iter(self._steps))]

    @property
    def _bytes_max(self) -> int:
        return STEP_VALUES * self._limits.value_bytes_max

    def _exceeds(self, count: int, size_bytes: int) -> bool:
        return count >= self._limits.steps_max or size_bytes > self._bytes_max

    async def _stored(self, record_id: Id) -> tuple[int, int]:
        (found,) = await self._send((Lookup(record_id),))
        if not isinstance(found, Record):
            return 0, 0
        return len(found.steps), sum(len(value or b"") for _, value in found.steps)
