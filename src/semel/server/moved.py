"""Refuse the claims and marks of consumers that are moving to another store, or from one."""

from semel.core.commands import Admit, Claim, Item, Mark
from semel.core.moves import check_moves, places_of_moves
from semel.errors import StoreMoved
from semel.runtime.engine import Runtime
from semel.server.problems import RETRY_AFTER_S, HttpProblem
from semel.stores.http.encoding import STORE_MOVED

__all__ = ["MoveCheck"]


class MoveCheck:
    """Knows the moves that the store's settings note. A service of both stores (`migrating:`) has no such notes."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._windows: object = None
        self._moving: frozenset[tuple[str, str]] = frozenset()
        """The consumers with a note in these windows, with their tenants: for a quick no."""

    async def refresh(self) -> None:
        """Read the settings again if they are due. A move of one consumer is no error of the other requests."""
        try:
            await self._runtime.arefresh()
        except StoreMoved:  # of the consumer of events; its own requests are told
            return

    def check(self, item: Item) -> None:
        """Raise `HttpProblem` if the item begins something for a consumer that must not use this store alone.

        What has begun may end here: renewals and results are written.
        """
        match item:
            case Claim():
                reason = self.reason(item.id[0], item.id[1])
            case Mark() | Admit():
                reason = self.reason(item.tenant, item.consumer)
            case _:
                return
        if reason:
            raise HttpProblem(409, STORE_MOVED, reason)

    def check_sender(self, tenant: str, consumer: str) -> None:
        """Raise `HttpProblem` that asks a sender of events to send again later: a service of both stores takes them."""
        reason = self.reason(tenant, consumer)
        if reason:
            raise HttpProblem(503, STORE_MOVED, reason, {"Retry-After": str(RETRY_AFTER_S)})

    def reason(self, tenant: str, consumer: str) -> str:
        """Return why this consumer must not use this store alone; empty: it may."""
        windows = self._runtime.windows
        if windows is not self._windows:  # read again since
            self._windows, self._moving = windows, places_of_moves(windows)
        if (tenant, consumer) not in self._moving:
            return ""
        try:
            check_moves(windows, ((tenant, consumer),))
        except StoreMoved as error:
            return str(error)
        return ""
