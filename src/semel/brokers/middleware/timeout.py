"""Stop a handler that takes too long; its message is tried again later."""

from typing import Any

from semel.brokers.routes import Call, Middleware
from semel.brokers.source import Arrival
from semel.lazily import asyncio

__all__ = ["timeout"]


def timeout(after_s: float) -> Middleware:
    """Cancel the handler after so long: the attempt counts, and ends with `TimeoutError`.

    A handler that blocks runs in a thread, which nobody can stop: it is waited for, and its result counts.
    """

    async def limited(message: Arrival, call: Call) -> Any:
        async with asyncio.timeout(after_s):
            return await call(message)

    return limited
