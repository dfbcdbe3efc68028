"""The client that blocks, and the two doors: `open` and `aopen`.

What it says to the store is in `plans`, the protocol in `core.flows`; here is only how it waits.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from semel.client.base import as_deliveries, check_concurrency, check_own_arguments, raise_if_interrupted
from semel.client.client_async import AsyncSemel
from semel.client.guard import Guard, GuardOptions, KeySource, MetaSource
from semel.client.items import ItemBuilder
from semel.client.records import Records, Windows
from semel.client.verbs import Verbs
from semel.core.protocols import AsyncStore, HasAsyncTwin, Store
from semel.errors import PolicyInvalid, StoreUnknown
from semel.keys.sliding import Sliding
from semel.policy import Policy
from semel.runtime.engine import Runtime
from semel.runtime.executor import Executor
from semel.runtime.generators import drive
from semel.runtime.handlers import blocking
from semel.runtime.keeper import Keeper
from semel.runtime.scheduler import copies, drive_many
from semel.stores.memory.store import MemoryStore
from semel.stores.registry import store_for
from semel.types import Delivery, Done, Mode, Outcome
from semel.windows import Duration

if TYPE_CHECKING:
    from semel.connections.kinds import AsyncpgConnection, AwaitedConnection, BlockingConnection
    from semel.inbox import AsyncInbox, Inbox
    from semel.observe.events import Hook  # loaded when somebody listens
    from semel.outbox.publish import AsyncOutbox, Outbox

__all__ = ["Semel", "aopen", "open"]

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


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
    """A client of a store, named by its URL or given. No I/O yet: the first use connects, or `with`.

    `ids` declares that every key is an id with a time inside (`"uuid7"`, `"ulid"`, `"ksuid"`, `"snowflake"`), by
    which a store may lay out its records and remove the old ones at once. `hooks`: callables that are told what
    happens, one event at a time (`semel.observe`).
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
    """The same for an event loop. No I/O yet: the first use connects, or `async with`."""
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
        runtime = Runtime(runtime.store.twin(), owned=True, hooks=runtime.hooks)  # made here, so closed here
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
    from semel.observe.events import Hooks  # not loaded unless somebody listens

    return Runtime(found, owned=owned, hooks=Hooks(hooks))


class Semel(Verbs):
    """A client that blocks. Use it from any thread; after a fork the child goes on with its own connections."""

    def __init__(self, plan: ItemBuilder, runtime: Runtime) -> None:
        super().__init__(plan, runtime)
        self._hands = Executor(runtime, runtime.keeper, plan.policy, self._window_known)
        self._perform = self._hands.__call__  # a bound method is called faster than an object
        self.records: Records = Records(plan, self._ask, audits=runtime.store.capabilities.audits)
        self.windows: Windows = Windows(plan, self._ask, runtime.expire_settings)

    def using(self, policy: Policy) -> "Semel":
        """The same client by another policy; both share one connection."""
        return Semel(self._plan.using(policy), self._runtime)

    @property
    def twin(self) -> AsyncSemel:
        """The async client of the same store; what `guard` uses for an `async def`.

        Closing this client closes it too: at once, or soon where an event loop is using it. Whoever wants to
        wait for that awaits `twin.close()` in the loop.
        """
        return AsyncSemel(self._plan, self._runtime.twin())

    def _executor(self) -> Executor:
        return self._hands

    def _keeper(self) -> Keeper:
        return self._runtime.keeper

    # --- run ---

    @overload
    def run(
        self,
        key: str,
        fn: Callable[..., R],
        /,
        *args: Any,
        event_type: str,
        meta: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> Outcome[R]: ...

    @overload
    def run(
        self, key: str, fn: Callable[..., R], /, *args: Any, meta: Mapping[str, str], **kwargs: Any
    ) -> Outcome[R]: ...

    @overload
    def run(self, key: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Outcome[R]: ...

    def run(  # type: ignore[misc]  # whatever is not its own is for `fn`
        self,
        key: str,
        fn: Callable[..., R],
        /,
        *args: Any,
        event_type: str = "",
        meta: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> Outcome[R]:
        """Run `fn` once for this key; a duplicate gets the first one's outcome. Two round trips, one for a duplicate.

        An exception of `fn` is an outcome: `Failed` if the policy calls it permanent, else `Errored`, with the
        claim released. Raises for wrong use, and passes interrupts on once the claim is released. `event_type`
        selects the window, `meta` is kept with the record; all other arguments are for `fn`.
        """
        blocking(fn)
        if event_type or meta is not None:
            check_own_arguments(fn, event_type, meta)
        call = partial(fn, *args, **kwargs) if args or kwargs else fn
        return self._run(key, call, fn, self._fingerprint(args, kwargs), event_type, meta)

    def _run(
        self,
        key: str,
        call: Any,
        fn: Any,
        fingerprint: bytes | None,
        event_type: str = "",
        meta: Mapping[str, str] | None = None,
        sliding: Sliding | None = None,
        event_time_us: int | None = None,
    ) -> Outcome[Any]:
        stored, reached = self._reach()
        claim = self._plan.claim_for_call(stored, key, fingerprint, event_type, meta, sliding, event_time_us)
        flow = self._plan.flow(claim, call, fn, reached=reached)
        if self._runtime.hooks is not None:
            flow = self._instrumented(flow, claim, fn)
        try:
            outcome = drive(flow, self._perform)
        except BaseException:
            self._hands.forsake((claim.owner,))
            raise
        self._hands.drop(claim.owner)
        if type(outcome) is not Done:
            return raise_if_interrupted(outcome)
        if outcome.reason:
            self._warn_not_kept(fn, outcome)
        return outcome

    def run_many(
        self,
        deliveries: Iterable[Delivery[T] | tuple[str, T]],
        handler: Callable[[T], R],
        *,
        concurrency: int = 1,
    ) -> list[Outcome[R]]:
        """Run `handler(delivery.body)` once for each key. One claim for all; outcomes in input order.

        A pair `(key, body)` is a delivery, too. One delivery's failure never touches another's. Completions leave as
        handlers finish; a crash repeats at most those under way. `concurrency`: how many handlers run at once, in
        threads.
        """
        blocking(handler)
        check_concurrency(concurrency)
        deliveries = self._with_fingerprints(as_deliveries(deliveries))
        stored, reached = self._reach()
        made, first_at, place_of = self._many(stored, deliveries, handler, reached=reached)
        try:
            outcomes = drive_many([flow for flow, _ in made], self._hands, concurrency)
        finally:
            self._hands.forsake(owner for _, owner in made)
        spread = copies(outcomes, place_of, first_at, [delivery.fingerprint for delivery in deliveries])
        self._tell_copies(deliveries, handler, first_at, place_of, spread)
        self._warn_each_not_kept(handler, outcomes)
        return spread

    def guard(
        self,
        *,
        key: KeySource,
        name: str | None = None,
        event_type: str = "",
        meta: MetaSource | None = None,
        policy: Policy | None = None,
    ) -> Guard:
        """Decorate a function so that it runs once per key and every call returns the first one's value.

        `key`: an attribute path that starts with a parameter's name (`"order.id"`), or a callable that is given
        the arguments. An `async def` is served by the async twin.

        Each function has its own records, under `NAME::KEY`: another function with the same keys shares none. The
        name is its module and qualified name, so renaming or moving it makes its keys new; `name` keeps them.
        `event_type` selects the window, `meta` (or what a callable makes of the arguments) is kept with the record.
        """
        options = GuardOptions(key=key, name=name, event_type=event_type, meta=meta)
        return Guard(self if policy is None else self.using(policy), options)

    # --- plain verbs ---

    def mark(self, key: str, *, event_type: str = "", meta: Mapping[str, str] | None = None) -> bool:
        """Note the key, at most once, by its honest name: `True` the first time. A crash after it loses the event.

        `event_type` selects the window. A mark keeps nothing but its key: `meta` is for hooks.
        """
        first = self.mark_many((key,), event_type=event_type, meta=meta)[0]
        store, plan = self._runtime.store, self._plan
        if isinstance(store, MemoryStore) and self._runtime.hooks is None:
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

        An `Inbox`; an `AsyncInbox`, whose verbs are awaited, where those of the handle are.
        """
        from semel.connections import AsyncCallerConnection, handle_for
        from semel.inbox import inbox_for

        self._plan.require("inbox")
        found = handle_for(handle)
        if isinstance(found, AsyncCallerConnection):
            return self.twin.inbox(handle)
        return inbox_for(found, self._runtime.store, self._plan, self._connect, self._tell_marked)

    @overload
    def outbox(self, handle: "BlockingConnection") -> "Outbox": ...
    @overload
    def outbox(self, handle: "AwaitedConnection | AsyncpgConnection") -> "AsyncOutbox": ...
    def outbox(self, handle: Any) -> Any:
        """Write messages in your own transaction on `handle`: effect and message commit together, or neither does.

        A relay publishes them afterwards. What `publish` of the outbox returns is awaited if the handle's calls are.
        """
        from semel.outbox.publish import outbox_for

        self._connect()
        return outbox_for(handle, self._runtime.store, self._plan)

    def _window_us(self, event_type: str) -> int:
        return self._plan.window_us(self._connect(), event_type)

    # --- claims in the caller's hands ---
