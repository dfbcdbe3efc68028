"""A hook that logs takeovers: an attempt that follows one which ended elsewhere."""

import logging
from collections import OrderedDict
from threading import Lock

from semel.observe import events
from semel.observe.limited_log import RateLimit
from semel.observe.log_format import about

__all__ = ["TakeoverLog"]

_log = logging.getLogger("semel")

RELEASED_MAX = 10_000
"""How many keys are remembered whose attempt failed in this process: their next attempt is no takeover."""


class TakeoverLog:
    """Logs each claim that is not the first of its key, unless this process itself released the key."""

    def __init__(self) -> None:
        self._limit = RateLimit()
        self._lock = Lock()
        self._released: OrderedDict[tuple[str, str, str], None] = OrderedDict()

    def __call__(self, happening: events.HookEvent) -> None:
        """Log a takeover."""
        if isinstance(happening, events.Released):
            with self._lock:
                self._released[_id(happening)] = None
                if len(self._released) > RELEASED_MAX:
                    self._released.popitem(last=False)
        elif isinstance(happening, events.ClaimedEvent) and happening.attempt > 1:
            with self._lock:
                own = self._released.pop(_id(happening), happening) is None
                left_out = None if own else self._limit.take()
            if left_out is not None:
                self._tell(happening, left_out)

    @staticmethod
    def _tell(claimed: events.ClaimedEvent, left_out: int) -> None:
        more = f" ({left_out:,} more like it were not logged)" if left_out else ""
        _log.warning(
            "%s: attempt %d at key %r is taken over here: an earlier one ended with its worker, or failed there;"
            " it runs now%s", claimed.consumer, claimed.attempt, claimed.key, more,
            extra=about("takeover", consumer=claimed.consumer, key=claimed.key, attempt=claimed.attempt,
                        next="it runs here now"),
        )  # fmt: skip


def _id(event: events.DeliveryEvent) -> tuple[str, str, str]:
    return event.tenant, event.consumer, event.key
