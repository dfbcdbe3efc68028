"""A broker or a store that gives no answer is left alone for a while, and for longer each time."""

import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TypeVar

from semel.brokers.source import Source
from semel.errors import SourceUnavailable
from semel.lazily import asyncio

__all__ = ["OUTAGE_MAX_S", "RECEIVE_WAIT_S", "backoff_s", "reached"]

_log = logging.getLogger("semel.runner")

T = TypeVar("T")

RECEIVE_WAIT_S = 0.5
"""The longest time before a loop looks up from the broker: a stop is noticed within it."""
OUTAGE_FIRST_S = 0.5
OUTAGE_MAX_S = 15.0
_DOUBLINGS = 16
"""More than there are up to the longest wait; a float has not room for all that an outage of hours would make."""


def backoff_s(tries: int, first_s: float = OUTAGE_FIRST_S, max_s: float = OUTAGE_MAX_S) -> float:
    """How long to leave it alone after so many questions without an answer."""
    return min(max_s, first_s * 2.0 ** min(tries, _DOUBLINGS))


async def reached(
    source: Source, ask: Callable[[], Awaitable[T]], is_stopping: Callable[[], bool]
) -> T | None:
    """What the broker answers; backs off and connects again while it does not. `None` when stopped first."""
    tries = 0
    while not is_stopping():
        try:
            return await ask()
        except SourceUnavailable as error:
            delay_s = backoff_s(tries)
            _log.warning("%s cannot be reached (%s); again in %.1f s", source.name, error, delay_s)
            tries += 1
            until = monotonic() + delay_s
            while not is_stopping() and (left := until - monotonic()) > 0:
                await asyncio.sleep(min(left, RECEIVE_WAIT_S))
            try:
                await source.open()
            except SourceUnavailable:
                continue
    return None
