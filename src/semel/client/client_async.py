"""The client that awaits.

The same verbs as `client.Semel`, held to it by a test; what it says to the store is in `plans`.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from msgspec.structs import replace

from semel.client.base import as_deliveries, check_concurrency, check_own_arguments, raise_if_interrupted
from semel.client.guard import AsyncGuard, GuardOptions, KeySource, MetaSource
from semel.client.items import ItemBuilder, marks_of
from semel.client.records_async import AsyncRecords, AsyncWindows
from semel.client.verbs_async import AsyncVerbs
from semel.core import flows
from semel.core.commands import Claim, Granted
from semel.core.settlement import Task
from semel.keys.limits import check
from semel.keys.sliding import Sliding
from semel.policy import ATTEMPTS_LIMIT, Policy
from semel.runtime.channel import LoopCoalescer
from semel.runtime.engine import Runtime
from semel.runtime.executor import AsyncExecutor
from semel.runtime.generators import adrive
from semel.runtime.handlers import awaitable
from semel.runtime.keeper import LoopKeeper
from semel.runtime.scheduler import adrive_many, copies
from semel.types import Delivery, Done, Failed, Outcome
from semel.windows import OFF

if TYPE_CHECKING:
    from semel.connections.kinds import AsyncpgConnection, AwaitedConnection, BlockingConnection
    from semel.inbox import AsyncInbox
    from semel.outbox.publish import AsyncOutbox, Outbox

__all__ = ["AsyncSemel"]

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class AsyncSemel(AsyncVerbs):
    """A client that awaits. Use it from any event loop; on a networked store no thread is involved."""

    awaits = True

    def __init__(self, plan: ItemBuilder, runtime: Runtime) -> None:
        super().__init__(plan, runtime)
        self._last_hands: AsyncExecutor | None = None
        self.records: AsyncRecords = AsyncRecords(plan, self._ask, audits=runtime.store.capabilities.audits)
        self.windows: AsyncWindows = AsyncWindows(plan, self._ask, runtime.expire_settings)

    def using(self, policy: Policy) -> "AsyncSemel":
        """The same client by another policy; both share one connection."""
        return AsyncSemel(self._plan.using(policy), self._runtime)

    def _executor(self) -> AsyncExecutor:
        """The executor of the running loop: made once for each, as its keeper is."""
        runtime = self._runtime
        keeper = runtime.loop_keeper()
        hands = self._last_hands
        if hands is None or hands.keeper is not keeper:
            hands = AsyncExecutor(runtime, keeper, self._plan.policy, self._window_known)
            self._last_hands = hands
        return hands

    def _keeper(self) -> LoopKeeper:
        return self._runtime.loop_keeper()

    # --- run ---

    @overload
    async def run(
        self,
        key: str,
        fn: Callable[..., Awaitable[R]],
        /,
        *args: Any,
        event_type: str,
        meta: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> Outcome[R]: ...

    @overload
    async def run(
        self, key: str, fn: Callable[..., Awaitable[R]], /, *args: Any, meta: Mapping[str, str], **kwargs: Any
    ) -> Outcome[R]: ...

    @overload
    async def run(
        self, key: str, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Outcome[R]: ...

    async def run(  # type: ignore[misc]  # whatever is not its own is for `fn`
        self,
        key: str,
        fn: Callable[..., Awaitable[R]],
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
        call = partial(awaitable(fn), *args, **kwargs)
        if event_type or meta is not None:
            check_own_arguments(fn, event_type, meta)
        return await self._run(key, call, fn, self._fingerprint(args, kwargs), event_type, meta)

    async def _run(
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
        stored, reached = await self._reach()
        claim = self._plan.claim_for_call(stored, key, fingerprint, event_type, meta, sliding, event_time_us)
        return await self._under(claim, call, fn, reached=reached)

    async def _deliver_one(
        self, delivery: Delivery[T], handler: Callable[[T], Awaitable[R]], owner: bytes | None = None
    ) -> Outcome[R]:
        """`run_many` of one, without what a batch needs: what comes one by one comes often.

        `owner`: of an earlier call for the same delivery, whose claim may have been granted without an answer.
        """
        (delivery,) = self._with_fingerprints((delivery,))
        self._check_journal(delivery.journal)
        stored, reached = await self._reach()
        claim = self._plan.claim_for_delivery(stored, delivery)
        if owner is not None:
            claim = replace(claim, owner=owner)
        call = partial(handler, delivery.body)
        return await self._under(claim, call, handler, delivery, reached=reached)

    async def _under(
        self,
        claim: Claim,
        call: Any,
        fn: Any,
        delivery: Delivery[Any] | None = None,
        *,
        reached: bool = True,
    ) -> Outcome[Any]:
        """Run the call under this claim, or learn why not."""
        hands = self._executor()
        flow = self._plan.flow(claim, call, fn, reached=reached)
        if self._runtime.hooks is not None:
            flow = self._instrumented(flow, claim, fn, delivery)
        try:
            outcome = await adrive(flow, hands)
        except BaseException:
            hands.forsake((claim.owner,))
            raise
        hands.drop(claim.owner)
        if type(outcome) is Done and outcome.reason:
            self._warn_not_kept(fn, outcome)
        return raise_if_interrupted(outcome)

    async def run_many(
        self,
        deliveries: Iterable[Delivery[T] | tuple[str, T]],
        handler: Callable[[T], Awaitable[R]],
        *,
        concurrency: int = 1,
    ) -> list[Outcome[R]]:
        """Run `handler(delivery.body)` once for each key. One claim for all; outcomes in input order.

        A pair `(key, body)` is a delivery, too. One delivery's failure never touches another's. Completions leave as
        handlers finish; a crash repeats at most those under way. `concurrency`: how many handlers run at once, in
        tasks.
        """
        awaitable(handler)
        check_concurrency(concurrency)
        return await self._deliver(as_deliveries(deliveries), handler, concurrency)

    async def _deliver(
        self,
        deliveries: Sequence[Delivery[T]],
        handler: Callable[[T], Awaitable[R]],
        concurrency: int,
        last_words: Callable[[Delivery[T], BaseException, Granted], Awaitable[None]] | None = None,
        told: Callable[[int, Outcome[R]], object] | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> list[Outcome[R]]:
        """Do what `run_many` does, for a runner that wants to hear more of it.

        `last_words` come before a delivery is failed for good; `told` hears of each outcome as soon as it is
        known, by the position of the first delivery of its key. `is_stopping`: once it is true no further handler
        starts, except in mode mark, where what is marked has to run.
        """
        deliveries = self._with_fingerprints(deliveries)
        stored, reached = await self._reach()
        made, first_at, place_of = self._many(stored, deliveries, handler, last_words, reached=reached)
        hands = self._executor()
        try:
            tell = None if told is None else lambda place, outcome: told(first_at[place], outcome)
            stops = is_stopping if self.mode != "mark" else lambda: False
            outcomes = await adrive_many([flow for flow, _ in made], hands, concurrency, tell, stops)
        finally:
            hands.forsake(owner for _, owner in made)
        spread = copies(outcomes, place_of, first_at, [delivery.fingerprint for delivery in deliveries])
        self._tell_copies(deliveries, handler, first_at, place_of, spread, parks=last_words is not None)
        self._warn_each_not_kept(handler, outcomes)
        return spread

    async def _give_up(
        self,
        delivery: Delivery[T],
        error: Exception,
        last_words: Callable[[Delivery[T], BaseException, Granted], Awaitable[None]],
    ) -> Outcome[Any]:
        """Close a delivery as failed that runs in transactions, for a runner: claimed, said, failed."""
        claim = self._plan.claim_for_delivery(await self._connect(), delivery)
        words = partial(last_words, delivery)
        if claim.window_us == OFF:
            await words(error, Granted(fence=0, attempt=1, lease_until_us=0, first_seen_us=0))
            return Failed(error)

        async def fails() -> None:
            raise error

        policy = replace(self._plan.policy, permanent=(Exception,), max_attempts=ATTEMPTS_LIMIT)
        hands = self._executor()
        try:
            return await adrive(flows.once(Task(claim, fails, policy, last_words=words)), hands)
        finally:
            hands.forsake((claim.owner,))

    def guard(
        self,
        *,
        key: KeySource,
        name: str | None = None,
        event_type: str = "",
        meta: MetaSource | None = None,
        policy: Policy | None = None,
    ) -> AsyncGuard:
        """Decorate a function so that it runs once per key and every call returns the first one's value.

        `key`: an attribute path that starts with a parameter's name (`"order.id"`), or a callable that is given
        the arguments. Only for `async def`: a function that blocks would stop the loop.

        Each function has its own records, under `NAME::KEY`: another function with the same keys shares none. The
        name is its module and qualified name, so renaming or moving it makes its keys new; `name` keeps them.
        `event_type` selects the window, `meta` (or what a callable makes of the arguments) is kept with the record.
        """
        options = GuardOptions(key=key, name=name, event_type=event_type, meta=meta)
        return AsyncGuard(self if policy is None else self.using(policy), options)

    # --- plain verbs ---

    async def mark(self, key: str, *, event_type: str = "", meta: Mapping[str, str] | None = None) -> bool:
        """Note the key, at most once, by its honest name: `True` the first time. A crash after it loses the event.

        `event_type` selects the window. A mark keeps nothing but its key: `meta` is for hooks.
        """
        runtime, plan = self._runtime, self._plan
        channel = runtime.channel
        if (
            type(channel) is not LoopCoalescer
            or plan.mode != "mark"
            or not self._admitted
            or monotonic() >= runtime.fresh_until
        ):
            return (await self.mark_many((key,), event_type=event_type, meta=meta))[0]
        window_us = plan.window_us(runtime.windows, event_type or plan.policy.event_type)
        first = await channel.mark(plan.tenant, plan.consumer, window_us, check(key))
        return first if type(first) is bool else marks_of(first)[0]

    def inbox(self, handle: "AwaitedConnection | AsyncpgConnection") -> "AsyncInbox":
        """Mark events in your own transaction on `handle`: effect and mark commit together, or neither does.

        An `AsyncInbox`; the handle's own verbs have to be awaited too.
        """
        from semel.connections import CallerConnection, handle_for
        from semel.inbox import ainbox_for

        self._plan.require("inbox")
        found = handle_for(handle)
        if isinstance(found, CallerConnection):
            raise TypeError(
                f"a {type(handle).__name__} that blocks would block the event loop; open the client with semel.open()"
            )
        return ainbox_for(found, self._runtime.store, self._plan, self._connect, self._tell_marked)

    @overload
    def outbox(self, handle: "BlockingConnection") -> "Outbox": ...
    @overload
    def outbox(self, handle: "AwaitedConnection | AsyncpgConnection") -> "AsyncOutbox": ...
    def outbox(self, handle: Any) -> Any:
        """Write messages in your own transaction on `handle`: effect and message commit together, or neither does.

        A relay publishes them afterwards. What `publish` of the outbox returns is awaited if the handle's calls are.
        """
        from semel.outbox.publish import outbox_for

        return outbox_for(handle, self._runtime.store, self._plan, self._connect)

    # --- claims in the caller's hands ---
