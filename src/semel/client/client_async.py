"""The client that awaits.

The same verbs as `client.Semel`, held to it by a test; what it says to the store is in `plans`.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, overload

from msgspec.structs import replace

from semel.client.base import (
    ClaimOutcome,
    Client,
    as_deliveries,
    check_concurrency,
    check_own_arguments,
    raised,
)
from semel.client.claims import Claimed
from semel.client.guard import AsyncGuard, GuardOptions, KeySource, MetaSource
from semel.client.items import ItemBuilder, marks_of
from semel.client.records_async import AsyncRecords, AsyncWindows
from semel.core import flows
from semel.core.commands import Claim, Granted, Item, answer_or_raise, raise_unavailable
from semel.core.folding import leaders
from semel.core.settlement import Task
from semel.errors import StoreUnavailable
from semel.keys.limits import check
from semel.keys.sliding import Sliding
from semel.policy import ATTEMPTS_LIMIT, Policy
from semel.runtime.channel import LoopCoalescer
from semel.runtime.engine import Runtime
from semel.runtime.executor import AsyncHands
from semel.runtime.generators import adrive
from semel.runtime.handlers import awaitable
from semel.runtime.scheduler import adrive_many, copies
from semel.types import Completed, Delivery, Done, Failed, Lost, Outcome, Renewed, Unavailable, Verdict
from semel.windows import OFF

if TYPE_CHECKING:
    from semel.inbox import AsyncInbox

__all__ = ["AsyncSemel"]

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class AsyncSemel(Client):
    """A client that awaits. Use it from any event loop; on a networked store no thread is involved."""

    awaits = True

    def __init__(self, plan: ItemBuilder, runtime: Runtime) -> None:
        super().__init__(plan, runtime)
        self._last_hands: AsyncHands | None = None
        self.records: AsyncRecords = AsyncRecords(plan, self._ask, audits=runtime.store.capabilities.audits)
        self.windows: AsyncWindows = AsyncWindows(plan, self._ask, runtime.expire_settings)

    def using(self, policy: Policy) -> "AsyncSemel":
        """The same client by another policy; both share one connection."""
        return AsyncSemel(self._plan.using(policy), self._runtime)

    async def __aenter__(self) -> Self:
        await self._connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Send what is queued and let go. Idempotent; works while other tasks wait."""
        await self._runtime.aclose()

    async def _connect(self) -> Any:
        """Connect at first use, and keep the stored windows fresh; returns them."""
        runtime = self._runtime
        if not self._admitted or monotonic() >= runtime.fresh_until:
            plan = self._plan
            await runtime.aconnect(plan.tenant, plan.consumer, plan.mode, plan.ids)
            if plan.mode == "inbox":
                await runtime.arefresh_behind()
            else:
                await runtime.arefresh()
            plan.check_live(runtime.windows, runtime.live_us)
            self._admitted = True
        return runtime.windows

    async def _reach(self) -> tuple[Any, bool]:
        """The stored windows, or those last known where the policy runs without the store; whether it was reached."""
        try:
            return await self._connect(), True
        except StoreUnavailable as error:
            return self._last_known(error), False

    async def _ask(self, item: Item) -> Any:
        await self._connect()
        return (await self._runtime.channel.asend((item,)))[0]

    def _hands(self) -> AsyncHands:
        """The hands of the running loop: made once for each, as its keeper is."""
        runtime = self._runtime
        keeper = runtime.loop_keeper()
        hands = self._last_hands
        if hands is None or hands.keeper is not keeper:
            hands = AsyncHands(runtime, keeper, self._plan.policy, self._window_known)
            self._last_hands = hands
        return hands

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
        claim = self._plan.called(stored, key, fingerprint, event_type, meta, sliding, event_time_us)
        return await self._under(claim, call, fn, reached=reached)

    async def _deliver_one(
        self, delivery: Delivery[T], handler: Callable[[T], Awaitable[R]], owner: bytes | None = None
    ) -> Outcome[R]:
        """`run_many` of one, without what a batch needs: what comes one by one comes often.

        `owner`: of an earlier call for the same delivery, whose claim may have been granted without an answer.
        """
        (delivery,) = self._printed((delivery,))
        self._check_journal(delivery.journal)
        stored, reached = await self._reach()
        claim = self._plan.delivered(stored, delivery)
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
        hands = self._hands()
        flow = self._plan.flow(claim, call, fn, reached=reached)
        if self._runtime.hooks is not None:
            flow = self._watched(flow, claim, fn, delivery)
        try:
            outcome = await adrive(flow, hands)
        except BaseException:
            hands.forsake((claim.owner,))
            raise
        hands.drop(claim.owner)
        if type(outcome) is Done and outcome.reason:
            self._warn_not_kept(fn, outcome)
        return raised(outcome)

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
        deliveries = self._printed(deliveries)
        stored, reached = await self._reach()
        made, first_at, place_of = self._many(stored, deliveries, handler, last_words, reached=reached)
        hands = self._hands()
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
        claim = self._plan.delivered(await self._connect(), delivery)
        words = partial(last_words, delivery)
        if claim.window_us == OFF:
            await words(error, Granted(fence=0, attempt=1, lease_until=0, first_seen=0))
            return Failed(error)

        async def fails() -> None:
            raise error

        policy = replace(self._plan.policy, permanent=(Exception,), max_attempts=ATTEMPTS_LIMIT)
        hands = self._hands()
        try:
            return await adrive(flows.once(Task(claim, fails, policy, last_words=words)), hands)
        finally:
            hands.forsake((claim.owner,))

    async def sweep(self, handler: Callable[[Any], Awaitable[R]], *, limit: int = 100) -> list[Outcome[R]]:
        """Take over journaled claims whose owner died, and run `handler(payload)` for each."""
        task, owners = self._recovery(await self._connect(), awaitable(handler))
        hands = self._hands()
        try:
            outcomes = await adrive(flows.sweep(self._plan.orphans(limit), task, self._once(handler)), hands)
        finally:
            hands.forsake(owners)
        return [raised(outcome) for outcome in outcomes]

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

    async def claim(
        self,
        key: str,
        *,
        event_type: str | None = None,
        fingerprint: bytes | None = None,
        event_time: datetime | None = None,
        journal: Any = None,
        sliding: Sliding | None = None,
        meta: Mapping[str, str] | None = None,
    ) -> ClaimOutcome:
        """The right to run, or what a duplicate needs to know. One round trip, no waiting.

        `sliding`: what made the key, where its window slides; by event time it needs `event_time` too. `meta` is kept
        with the record.
        """
        stored = await self._connect()
        item = self._claim_item(stored, key, event_type, fingerprint, event_time, journal, sliding, meta)
        sent_at = monotonic()
        answer = (await self._runtime.channel.asend((item,)))[0]
        self._tell_claimed((item,), (answer,))
        return self._outcome(item, answer_or_raise(answer), sent_at)  # type: ignore[no-any-return]

    async def claim_many(self, deliveries: Sequence[str | Delivery[Any]]) -> list[ClaimOutcome | Unavailable]:
        """Claims for all, in one round trip per 500; a later copy of a key gets `Busy`."""
        claims = self._claim_items(await self._connect(), deliveries)
        first_at, place_of = leaders([claim.id[2] for claim in claims])
        sent_at = monotonic()
        asked = [claims[at] for at in first_at]
        answers = await self._runtime.channel.asend(asked)
        self._tell_claimed(asked, answers)
        return self._outcomes(claims, answers, sent_at, (first_at, place_of))

    async def complete(self, claim: Claimed, value: Any = None) -> Completed | Lost[Any]:
        """The effect has happened: remember it. `Lost` if another attempt took over; nothing is overwritten."""
        verdict = (await self.complete_many([claim], [value]))[0]
        return raise_unavailable(verdict) if isinstance(verdict, Unavailable) else verdict

    async def fail(self, claim: Claimed, error: BaseException | str) -> Completed | Lost[Any]:
        """It failed for good: every duplicate gets this failure."""
        verdict = (await self.fail_many([claim], [error]))[0]
        return raise_unavailable(verdict) if isinstance(verdict, Unavailable) else verdict

    async def release(
        self, claim: Claimed, *, delay_s: float = 0.0, count_attempt: bool = True
    ) -> Completed | Lost[Any]:
        """Give the claim up; anybody may claim again after `delay_s`."""
        verdict = (await self.release_many([claim], delay_s=delay_s, count_attempt=count_attempt))[0]
        return raise_unavailable(verdict) if isinstance(verdict, Unavailable) else verdict

    async def renew(self, claim: Claimed) -> Renewed | Lost[Any]:
        """The lease once more, from now."""
        verdict = (await self.renew_many([claim]))[0]
        return raise_unavailable(verdict) if isinstance(verdict, Unavailable) else verdict

    async def complete_many(
        self, claims: Sequence[Claimed], values: Sequence[Any] | None = None
    ) -> list[Verdict]:
        """Complete all of them in one round trip per 500."""
        await self._hands().refresh()
        return await self._end(claims, self._completions(claims, values))

    async def fail_many(
        self, claims: Sequence[Claimed], errors: Sequence[BaseException | str]
    ) -> list[Verdict]:
        """Fail all of them in one round trip per 500."""
        await self._hands().refresh()
        return await self._end(claims, self._failures(claims, errors))

    async def release_many(
        self, claims: Sequence[Claimed], *, delay_s: float = 0.0, count_attempt: bool = True
    ) -> list[Verdict]:
        """Release all of them in one round trip per 500."""
        return await self._end(claims, self._releases(claims, delay_s, count_attempt=count_attempt))

    async def renew_many(self, claims: Sequence[Claimed]) -> list[Renewed | Lost[Any] | Unavailable]:
        """Renew all of them in one round trip per 500."""
        return await self._runtime.channel.asend(self._renewals(claims))

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

    async def mark_many(
        self, keys: Sequence[str], *, event_type: str = "", meta: Mapping[str, str] | None = None
    ) -> list[bool]:
        """Note many keys in one round trip; a later copy of a key is `False`."""
        item, unfold = self._marks(await self._connect(), keys, event_type)
        firsts = unfold((await self._runtime.channel.asend((item,)))[0])
        self._tell_marked(keys, firsts, event_type, meta)
        return firsts

    def inbox(self, handle: Any) -> "AsyncInbox":
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

    def outbox(self, handle: Any) -> Any:
        """Write messages in your own transaction on `handle`: effect and message commit together, or neither does.

        A relay publishes them afterwards. What `publish` of the outbox returns is awaited if the handle's calls are.
        """
        from semel.outbox.publish import outbox_for

        return outbox_for(handle, self._runtime.store, self._plan, self._connect)

    # --- claims in the caller's hands ---

    async def _end(self, claims: Sequence[Claimed], items: Sequence[Item]) -> list[Verdict]:
        for claim in claims:
            claim.settled = True
        verdicts = await self._runtime.channel.asend(items)
        self._drop_settled(claims, verdicts, self._runtime.loop_keeper())
        self._tell_settled(items, verdicts)
        return verdicts

    def _hold(self, claim: Claimed) -> None:
        self._runtime.loop_keeper().keep(claim._kept)  # noqa: SLF001 - the claim and its client are one mechanism

    def _drop(self, claim: Claimed) -> None:
        self._runtime.loop_keeper().drop(claim.claim.owner)

    async def _settle(self, claim: Claimed, error: BaseException | None) -> None:
        claim.settled = True
        verdict = self._plan.leaving(claim.claim, claim.granted, error)
        answer = await adrive(flows.settle(claim.claim, claim.granted, verdict), self._hands())
        self._tell_left(claim, verdict.to, answer)
        self._left(claim, error, answer)
