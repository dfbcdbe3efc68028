"""The client that blocks: its executor and keeper, and the verbs that differ from those of `AsyncSemel`.

All other verbs are in `verbs`. `open` and `aopen` create the clients.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from semel.client.client_async import AsyncSemel
from semel.client.items import ItemBuilder
from semel.client.near_misses import explains_near_misses
from semel.client.records import Records, Windows
from semel.client.verbs import Verbs
from semel.core.protocols import AsyncStore, HasAsyncTwin, Store
from semel.errors import PolicyInvalid, StoreUnknown
from semel.policy import Policy
from semel.runtime.engine import Runtime
from semel.runtime.executor import Executor
from semel.runtime.keeper import Keeper
from semel.stores.memory.store import MemoryStore
from semel.stores.registry import store_for
from semel.types import Mode
from semel.windows import Duration

if TYPE_CHECKING:
    from semel.connections.base import AsyncpgConnection, AwaitedConnection, BlockingConnection
    from semel.inbox import AsyncInbox, Inbox
    from semel.observe.events import Hook  # loaded only if there are hooks
    from semel.outbox.publish import AsyncOutbox, Outbox

__all__ = ["Semel", "aopen", "open"]


@explains_near_misses
def open(
    store: str | Store,
    *,
    consumer: str,
    tenant: str = "",
    window: Duration = "24h",
    lease: Duration = "30s",
    mode: Mode = "lease",
    policy: Policy | None = None,
    ids: str | None = None,
    hooks: "Iterable[Hook]" = (),
) -> "Semel":
    """Return a client of a store, given as a URL or an object. No I/O yet: the first use or `with` connects.

    `consumer` names the program that handles the events: each consumer has its own records, as each `tenant` has.
    `window`: how long a finished key is remembered. `lease`: how long a claim is held without a sign of life.
    `mode`: what happens after a crash: `lease`, `inbox`, `quarantine`, `mark` or `observe`. `policy`: all other
    options. `hooks`: callables that get one event for each thing that happens (`semel.observe`).

    `ids` declares that every key is an id that contains its time (`"uuid7"`, `"ulid"`, `"ksuid"`, `"snowflake"`). A
    store may then lay out its records by that time and remove old ones at once. `"opaque"` does the same for marks
    whose keys contain no time.
    """
    plan = ItemBuilder(
        consumer=consumer,
        tenant=tenant,
        window=window,
        lease=lease,
        mode=mode,
        policy=policy or Policy(),
        ids=ids,
    )
    return Semel(plan, _runtime(store, mode, hooks))


@explains_near_misses
def aopen(
    store: str | Store | AsyncStore,
    *,
    consumer: str,
    tenant: str = "",
    window: Duration = "24h",
    lease: Duration = "30s",
    mode: Mode = "lease",
    policy: Policy | None = None,
    ids: str | None = None,
    hooks: "Iterable[Hook]" = (),
) -> AsyncSemel:
    """Return a client for an event loop, as `open` does for threads. The first use or `async with` connects."""
    plan = ItemBuilder(
        consumer=consumer,
        tenant=tenant,
        window=window,
        lease=lease,
        mode=mode,
        policy=policy or Policy(),
        ids=ids,
    )
    runtime = _runtime(store, mode, hooks)
    if isinstance(runtime.store, HasAsyncTwin):
        runtime = Runtime(
            runtime.store.twin(), owned=True, hooks=runtime.hooks
        )  # created here, so closed here
    return AsyncSemel(plan, runtime)


def _runtime(store: str | Store | AsyncStore, mode: Mode, hooks: "Iterable[Hook]") -> Runtime:
    owned = isinstance(store, str)
    found = store_for(store) if isinstance(store, str) else store
    if not isinstance(found, Store | AsyncStore):
        raise StoreUnknown(f"{found!r} is neither a store URL nor a store")
    if mode == "inbox":
        if not found.capabilities.transactional:
            raise PolicyInvalid(f"{found.name} cannot hold an inbox: your transaction does not reach it")
        if owned and hasattr(found, "adopt"):
            found.adopt()  # the tables belong beside the application's own
    hooks = tuple(hooks)
    if not hooks:
        return Runtime(found, owned=owned)
    from semel.observe.events import Hooks  # loaded only if there are hooks

    return Runtime(found, owned=owned, hooks=Hooks(hooks))


class Semel(Verbs):
    """A client that blocks. Use it from any thread; after a fork the child uses its own connections."""

    def __init__(self, plan: ItemBuilder, runtime: Runtime) -> None:
        super().__init__(plan, runtime)
        self._own_executor = Executor(runtime, runtime.keeper, plan.policy, self._window_known)
        self.records: Records = Records(plan, self._ask, audits=runtime.store.capabilities.audits)
        self.windows: Windows = Windows(plan, runtime.store, self._ask, runtime.expire_settings)

    def using(self, policy: Policy) -> "Semel":
        """Return the same client with another policy; both share one connection."""
        return Semel(self._plan.using(policy), self._runtime)

    @property
    def twin(self) -> AsyncSemel:
        """The async client of the same store; `guard` uses it for an `async def`.

        Closing this client closes it too: at once, or soon if an event loop is using it. To wait for that, await
        `twin.close()` in the loop.
        """
        return AsyncSemel(self._plan, self._runtime.twin())

    def _executor(self) -> Executor:
        return self._own_executor

    def _keeper(self) -> Keeper:
        return self._runtime.keeper

    # --- plain verbs ---

    def mark(self, key: str, *, event_type: str = "", meta: Mapping[str, str] | None = None) -> bool:
        """Mark the key as processed; returns `True` the first time. At most once: a crash after it loses the event.

        `event_type` selects the window. A mark stores only its key: `meta` is for hooks.
        """
        first = self.mark_many((key,), event_type=event_type, meta=meta)[0]
        store, plan = self._runtime.store, self._plan
        if (
            isinstance(store, MemoryStore)
            and not self._runtime.reporter.listens
            and not plan.policy.refresh_on_sight
            and not plan.ids
        ):
            # No round trip to wait for: from now on this object's `mark` is the store's own, without us in between.
            window = partial(self._window_us, plan.policy.event_type)
            vars(self)["mark"] = store.marker(plan.tenant, plan.consumer, window, self._mark_of_type)
        return first

    def _mark_of_type(self, key: str, event_type: str) -> bool:
        return self.mark_many((key,), event_type=event_type)[0]

    @overload
    def inbox(self, handle: "BlockingConnection") -> "Inbox": ...
    @overload
    def inbox(self, handle: "AwaitedConnection | AsyncpgConnection") -> "AsyncInbox": ...
    def inbox(self, handle: Any) -> Any:
        """Mark events in your own transaction on `handle`: effect and mark commit together, or neither does.

        Returns an `Inbox`, or an `AsyncInbox`, whose verbs are awaited, if the handle's calls are awaited.
        """
        from semel.connections import AsyncCallerConnection, handle_for
        from semel.inbox import inbox_for

        self._plan.require("inbox")
        found = handle_for(handle)
        if isinstance(found, AsyncCallerConnection):
            return self.twin.inbox(handle)
        self._runtime.warn_in_loop()
        return inbox_for(
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

        self._connect()
        return outbox_for(handle, self._runtime.store, self._plan)

    def _window_us(self, event_type: str) -> int:
        return self._plan.window_us(self._connect(), event_type)

    # --- claims that the caller settles ---
