"""Give up at once what no repetition cures."""

from typing import Any

from semel.brokers.routes import Call, Middleware
from semel.brokers.source import Arrival
from semel.errors import GiveUp

__all__ = ["GiveUp", "dead_letter"]


def dead_letter(*kinds: type[Exception]) -> Middleware:
    """Send the message to the dead letters when its handler raises one of these, instead of trying it again."""

    async def final(message: Arrival, call: Call) -> Any:
        try:
            return await call(message)
        except kinds as error:
            raise GiveUp(f"{type(error).__name__}: {error}") from error

    return final
