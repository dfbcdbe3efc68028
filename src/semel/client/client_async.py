"""The client that awaits: its executor and keeper, and the verbs that differ from those of `client.Semel`.

All other verbs are in `verbs_async`.
"""

from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any, overload

from semel.client.items import ItemBuilder, marks_of
from semel.client.records_async import AsyncRecords, AsyncWindows
from semel.client.verbs_async import AsyncVerbs
from semel.keys.limits import check
from semel.policy import Policy
from semel.runtime.channel import LoopCoalescer
from semel.runtime.engine import Runtime
from semel.runtime.executor import AsyncExecutor
from semel.runtime.keeper import LoopKeeper

if TYPE_CHECKING:
    from semel.connections.base import AsyncpgConnection, AwaitedConnection, BlockingConnection
    from semel.inbox import AsyncInbox
    from semel.outbox.publish import AsyncOutbox, Outbox

__all__ = ["AsyncSemel"]


class AsyncSemel(AsyncVerbs):
    """A client that awaits. Use it from any event loop; on a networked store no thread is involved."""

    awaits = True

    def __init__(self, plan: ItemBuilder, runtime: Runtime) -> None:
        super().__init__(plan, runtime)
        self._last_executor: AsyncExecutor | None = None
        self.records: AsyncRecords = AsyncRecords(plan, self._ask, audits=runtime.store.capabilities.audits)
        self.windows: AsyncWindows = AsyncWindows(plan, runtime.store, self._ask, runtime.expire_settings)

    def using(self, policy: Policy) -> "AsyncSemel":
        """Return the same client with another policy; both share one connection."""
        return AsyncSemel(self._plan.using(policy), self._runtime)

    def _executor(self) -> AsyncExecutor:
        """Return the executor of the running loop: created once per loop, as its keeper is."""
        runtime = self._runtime
        keeper = runtime.loop_keeper()
        executor = self._last_executor
        if executor is None or executor.keeper is not keeper:
            executor = AsyncExecutor(runtime, keeper, self._plan.policy, self._window_known)
            self._last_executor = executor
        return executor

    def _keeper(self) -> LoopKeeper:
        return self._runtime.loop_keeper()

    # --- plain verbs ---

    async def mark(self, key: str, *, event_type: str = "", meta: Mapping[str, str] | None = None) -> bool:
        """Mark the key as processed; returns `True` the first time. At most once: a crash after it loses the event.

        `event_type` selects the window. A mark stores only its key: `meta` is for hooks.
        """
        runtime, plan = self._runtime, self._plan
        channel = runtime.channel
        if (
            type(channel) is not LoopCoalescer
            or plan.mode != "mark"
            or plan.policy.refresh_on_sight
            or not self._admitted
            or monotonic() >= runtime.fresh_until
        ):
            return (await self.mark_many((key,), event_type=event_type, meta=meta))[0]
        plan.check_times((key,))
        window_us = plan.window_us(runtime.windows, event_type or plan.policy.event_type)
        first = await channel.mark(plan.tenant, plan.consumer, window_us, check(key))
        return first if type(first) is bool else marks_of(first)[0]

    def inbox(self, handle: "AwaitedConnection | AsyncpgConnection") -> "AsyncInbox":
        """Mark events in your own transaction on `handle`: effect and mark commit together, or neither does.

        Returns an `AsyncInbox`; the handle's own calls must be awaited too.
        """
        from semel.connections import CallerConnection, handle_for
        from semel.inbox import ainbox_for

        self._plan.require("inbox")
        found = handle_for(handle)
        if isinstance(found, CallerConnection):
            raise TypeError(
                f"a {type(handle).__name__} that blocks would block the event loop; open the client with semel.open()"
            )
        return ainbox_for(
            found, self._runtime.store, self._plan, self._connect, self._report_marked, self._connect_behind
        )

    @overload
    def outbox(self, handle: "BlockingConnection") -> "Outbox": ...
    @overload
    def outbox(self, handle: "AwaitedConnection | AsyncpgConnection") -> "AsyncOutbox": ...
    def outbox(self, handle: Any) -> Any:
        """Write messages in your own transaction on `handle`: effect and message commit together, or neither does.

        A relay publishes them afterwards. `publish` of the outbox is awaited if the handle's calls are awaited.
        """
        from semel.outbox.publish import outbox_for

        return outbox_for(handle, self._runtime.store, self._plan, self._connect)
