"""Try again at once, under the same claim, what fails for a moment."""

from typing import Any

from semel.brokers.routes import Call, Middleware
from semel.brokers.source import Arrival

__all__ = ["retry"]


def retry(
    *kinds: type[Exception], tries: int = 3, wait_s: float = 0.1, wait_max_s: float = 2.0
) -> Middleware:
    """Repeat the handler when it raises one of these, with a growing pause; the last error is the attempt's.

    For effects that a repetition does not harm: it is the same attempt, under the same claim. Other errors, and what
    is left after the last try, are released and come back after the policy's delay.
    """
    import stamina

    async def patient(message: Arrival, call: Call) -> Any:
        async for attempt in stamina.retry_context(
            on=kinds or Exception, attempts=tries, timeout=None, wait_initial=wait_s, wait_max=wait_max_s
        ):
            with attempt:
                return await call(message)
        raise AssertionError("unreachable: the last try returns or raises")  # pragma: no cover

    return patient
