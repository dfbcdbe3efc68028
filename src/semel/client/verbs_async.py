"""The verbs of a client: run, guard, claim, settle, mark, sweep.

`items` builds the items that they send to the store, `base` reads the answers, `core.flows` is the protocol.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from time import monotonic
from types import FunctionType, TracebackType
from typing import Any, ParamSpec, Self, TypeVar, overload

from semel.client.base import ClaimOutcome, Client, as_deliveries, check_concurrency, raise_if_interrupted
from semel.client.claims import ClaimActions, Claimed
from semel.client.guard import AsyncGuard, GuardedRuns, GuardOptions, KeySource, MetaSource
from semel.client.items import ClientTask, ItemBuilder
from semel.client.near_misses import check_arguments_for, check_own_arguments, explains_near_misses
from semel.core import flows
from semel.core.commands import Item, answer_or_raise, raise_unavailable
from semel.core.folding import leaders
from semel.errors import StoreUnavailable
from semel.keys.sliding import Sliding
from semel.policy import Policy
from semel.runtime.engine import Runtime
from semel.runtime.executor import AsyncExecutor
from semel.runtime.generators import adrive
from semel.runtime.handlers import AWAITABLE, CO_LATER, awaitable
from semel.runtime.scheduler import adrive_many, copies
from semel.types import Completed, Delivery, Done, Lost, Outcome, Renewed, SettleAnswer, Unavailable

__all__ = ["AsyncVerbs"]

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class AsyncVerbs(Client, ABC):
    """The verbs of a client."""

    def __init__(self, plan: ItemBuilder, runtime: Runtime) -> None:
        super().__init__(plan, runtime)
        self._actions = ClaimActions(self.awaits, self._keeper, self._settle)

    @abstractmethod
    def using(self, policy: Policy) -> Self:
        """Return the same client with another policy; both share one connection."""

    @abstractmethod
    def _executor(self) -> AsyncExecutor:
        """Return the executor for this caller."""

    # sync: _own_executor: Executor

    @abstractmethod
    def _keeper(self) -> Any:
        """Return the keeper that renews this caller's claims."""

    async def __aenter__(self) -> Self:
        await self._connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Send queued items and close the connections. Idempotent; works while others wait."""
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
            plan.check_store(runtime.store)  # again: some stores know what they can promise only now
            plan.check_live(runtime.windows, runtime.live_us)
            # sync: # One whose probe cannot be awaited is never admitted: each `run` must refuse it.
            self._admitted = True  # sync: self._admitted = not plan.probe_awaits
        return runtime.windows

    def _connect_behind(self) -> bool:
        """Start to connect in the background, unless it is done. Returns whether this client is connected."""
        plan = self._plan
        return self._admitted or self._runtime.aconnect_behind(
            plan.tenant, plan.consumer, plan.mode, plan.ids
        )

    async def _reach(self) -> bool:
        """Connect at first use; returns whether the store was reached. `False` only if the policy runs without it."""
        # sync: self._plan.check_probe()
        try:
            await self._connect()
        except StoreUnavailable:
            if self._plan.policy.on_unavailable != "run":
                raise
            return False
        return True

    async def _ask(self, item: Item) -> Any:
        await self._connect()
        return (await self._runtime.channel.asend((item,)))[0]

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
        """Run `fn` once for this key; a duplicate gets the first call's outcome. Two round trips, one for a duplicate.

        An exception of `fn` is an outcome: `Failed` if the policy calls it permanent, else `Errored`, with the
        claim released. Raises for wrong use, and passes interrupts on once the claim is released. `event_type`
        selects the window, `meta` is kept with the record; all other arguments are for `fn`.
        """
        if type(fn) is not FunctionType or fn.__code__.co_flags & CO_LATER != AWAITABLE:
            awaitable(fn)
        if event_type or meta is not None:
            check_own_arguments(fn, event_type, meta)
        if kwargs:
            check_arguments_for(fn, kwargs)
        plan, runtime = self._plan, self._runtime
        take = plan.policy.fingerprint
        fingerprint = None if take is None else take(*args, **kwargs)
        reached = (self._admitted and monotonic() < runtime.fresh_until) or await self._reach()
        call = partial(fn, *args, **kwargs) if args or kwargs else fn
        task = plan.task(runtime.windows, key, call, fn, fingerprint, event_type, meta)
        return await self._execute(task, reached=reached)

    async def _run_guarded(
        self,
        key: str,
        call: Any,
        fn: Any,
        fingerprint: bytes | None,
        event_type: str,
        meta: Mapping[str, str] | None,
        sliding: Sliding | None,
        event_time_us: int | None,
    ) -> Outcome[Any]:
        """Do the same as `run` for a guarded function, whose arguments are already read."""
        runtime = self._runtime
        reached = (self._admitted and monotonic() < runtime.fresh_until) or await self._reach()
        task = self._plan.task(
            runtime.windows, key, call, fn, fingerprint, event_type, meta, sliding, event_time_us
        )
        return await self._execute(task, reached=reached)

    async def _execute(self, task: ClientTask, *, reached: bool) -> Outcome[Any]:
        """Run one task to its outcome, for `run`, a guarded function or a single delivery.

        `reached`: the store could be opened.
        """
        executor = self._executor()  # sync: executor = self._own_executor
        flow = task.flow(task) if reached else flows.without_store(task)
        if self._runtime.reporter.listens:
            flow = self._watch(flow, task)
        try:
            outcome = await adrive(flow, executor.__call__)  # a bound method is called faster than an object
        except BaseException:
            executor.abandon((task.claim.owner,))
            raise
        executor.drop(task.claim.owner, None)
        if type(outcome) is not Done:
            return raise_if_interrupted(outcome)
        if outcome.reason:
            self._warn_not_kept(task.handler, outcome)
        return outcome

    async def run_many(
        self,
        deliveries: Iterable[Delivery[T] | tuple[str, T]],
        handler: Callable[[T], Awaitable[R]],
        *,
        concurrency: int = 1,
    ) -> list[Outcome[R]]:
        """Run `handler(delivery.body)` once for each key. One claim for all; outcomes in input order.

        A pair `(key, body)` is a delivery, too. A failure of one delivery never affects another. Completions are sent
        as handlers finish; a crash repeats at most the unfinished ones. `concurrency`: how many handlers run at once,
        in tasks of the loop, or in threads if the client blocks.
        """
        awaitable(handler)
        check_concurrency(concurrency)
        given = self._plan.with_fingerprints(as_deliveries(deliveries))
        reached = await self._reach()
        tasks, first_at, place_of = self._tasks(given, handler)
        executor = self._executor()
        try:
            outcomes = await adrive_many(self._flows(tasks, reached=reached), executor, concurrency)
        finally:
            executor.abandon(task.claim.owner for task in tasks)
        spread = copies(outcomes, place_of, first_at, [delivery.fingerprint for delivery in given])
        self._report_copies(given, handler, first_at, place_of, spread)
        self._warn_each_not_kept(handler, outcomes)
        return spread

    @explains_near_misses
    def guard(
        self,
        *,
        key: KeySource,
        name: str | None = None,
        event_type: str = "",
        meta: MetaSource | None = None,
        policy: Policy | None = None,
    ) -> AsyncGuard:
        """Decorate a function so that it runs once per key and every call returns the first call's value.

        `key`: an attribute path that starts with a parameter's name (`"order.id"`), or a callable that gets
        the arguments. An async client guards only `async def`: a function that blocks would stop the loop. A
        blocking client guards an `async def` with its async twin.

        Each function has its own records, under `NAME::KEY`: another function with the same keys shares none. The
        name is its module and qualified name, so renaming or moving it makes its keys new; `name` keeps them.
        `event_type` selects the window; `meta`, or its result for the arguments if it is callable, is stored with
        the record.
        """
        if policy is not None:
            return self.using(policy).guard(key=key, name=name, event_type=event_type, meta=meta)
        options = GuardOptions(key=key, name=name, event_type=event_type, meta=meta)
        runs = GuardedRuns(self._run_guarded, self._plan.policy, self._plan.guards)
        return AsyncGuard(runs, options)  # sync: return Guard(runs, options, self)

    async def sweep(self, handler: Callable[[Any], Awaitable[R]], *, limit: int = 100) -> list[Outcome[R]]:
        """Take over journaled claims whose owner died, and run `handler(payload)` for each."""
        # sync: self._plan.check_probe()
        task, owners = self._recovery(await self._connect(), awaitable(handler))
        executor = self._executor()
        try:
            outcomes = await adrive(flows.sweep(self._plan.orphans(limit), task, self._orphan_flow), executor)
        finally:
            executor.abandon(owners)
        return [raise_if_interrupted(outcome) for outcome in outcomes]

    # --- claims that the caller settles ---

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
        """Claim a key. Returns the claim, or the outcome for a duplicate. One round trip, no waiting.

        `sliding`: the sliding window that made the key, if any; by event time it needs `event_time` too. `meta` is
        stored with the record.
        """
        stored = await self._connect()
        item = self._claim_item(stored, key, event_type, fingerprint, event_time, journal, sliding, meta)
        sent_at = monotonic()
        answer = (await self._runtime.channel.asend((item,)))[0]
        self._runtime.reporter.report_claimed((item,), (answer,))
        return self._outcome(item, answer_or_raise(answer), sent_at)  # type: ignore[no-any-return]

    async def claim_many(self, deliveries: Sequence[str | Delivery[Any]]) -> list[ClaimOutcome | Unavailable]:
        """Claim many keys, in one round trip per 500; a later copy of a key gets `Busy`."""
        claims = self._claim_items(await self._connect(), deliveries)
        first_at, place_of = leaders([claim.id[2] for claim in claims])
        sent_at = monotonic()
        asked = [claims[at] for at in first_at]
        answers = await self._runtime.channel.asend(asked)
        self._runtime.reporter.report_claimed(asked, answers)
        return self._outcomes(claims, answers, sent_at, (first_at, place_of))

    async def complete(self, claim: Claimed, value: Any = None) -> Completed | Lost[Any]:
        """Record that the effect has happened. Returns `Lost` if another attempt took over; nothing is overwritten."""
        verdict = (await self.complete_many([claim], [value]))[0]
        return raise_unavailable(verdict) if isinstance(verdict, Unavailable) else verdict

    async def fail(self, claim: Claimed, error: BaseException | str) -> Completed | Lost[Any]:
        """Record a permanent failure: every duplicate gets it."""
        verdict = (await self.fail_many([claim], [error]))[0]
        return raise_unavailable(verdict) if isinstance(verdict, Unavailable) else verdict

    async def release(
        self,
        claim: Claimed,
        *,
        delay_s: float = 0.0,
        count_attempt: bool = True,
        error: BaseException | str | None = None,
    ) -> Completed | Lost[Any]:
        """Release the claim; the key can be claimed again after `delay_s`. `error`: why, kept for operators."""
        released = await self.release_many(
            [claim], delay_s=delay_s, count_attempt=count_attempt, errors=[error]
        )
        verdict = released[0]
        return raise_unavailable(verdict) if isinstance(verdict, Unavailable) else verdict

    async def renew(self, claim: Claimed) -> Renewed | Lost[Any]:
        """Renew the lease, from now."""
        verdict = (await self.renew_many([claim]))[0]
        return raise_unavailable(verdict) if isinstance(verdict, Unavailable) else verdict

    async def complete_many(
        self, claims: Sequence[Claimed], values: Sequence[Any] | None = None
    ) -> list[SettleAnswer]:
        """Complete all of them in one round trip per 500."""
        await self._executor().refresh()
        return await self._end(claims, self._completions(claims, values))

    async def fail_many(
        self, claims: Sequence[Claimed], errors: Sequence[BaseException | str]
    ) -> list[SettleAnswer]:
        """Fail all of them in one round trip per 500."""
        await self._executor().refresh()
        return await self._end(claims, self._failures(claims, errors))

    async def release_many(
        self,
        claims: Sequence[Claimed],
        *,
        delay_s: float = 0.0,
        count_attempt: bool = True,
        errors: Sequence[BaseException | str | None] | None = None,
    ) -> list[SettleAnswer]:
        """Release all of them in one round trip per 500."""
        return await self._end(claims, self._releases(claims, delay_s, errors, count_attempt=count_attempt))

    async def renew_many(self, claims: Sequence[Claimed]) -> list[Renewed | Lost[Any] | Unavailable]:
        """Renew all of them in one round trip per 500."""
        return await self._runtime.channel.asend(self._renewals(claims))

    async def mark_many(
        self, keys: Sequence[str], *, event_type: str = "", meta: Mapping[str, str] | None = None
    ) -> list[bool]:
        """Mark many keys in one round trip; a later copy of a key is `False`."""
        item, unfold = self._marks(await self._connect(), keys, event_type)
        firsts = unfold((await self._runtime.channel.asend((item,)))[0])
        self._report_marked(keys, firsts, event_type, meta)
        return firsts

    async def _end(self, claims: Sequence[Claimed], items: Sequence[Item]) -> list[SettleAnswer]:
        for claim in claims:
            claim.settled = True
        verdicts = await self._runtime.channel.asend(items)
        self._drop_settled(claims, verdicts, self._keeper())
        self._report_settled(claims, items, verdicts)
        return verdicts

    async def _settle(self, claim: Claimed, error: BaseException | None) -> None:
        claim.settled = True
        verdict = self._plan.leaving(claim.claim, claim.granted, error)
        kept = self._plan.describe(error)
        answer = await adrive(flows.settle(claim.claim, claim.granted, verdict, kept), self._executor())
        self._report_left(claim, verdict.to, answer, error)
        self._check_exit(claim, error, answer)
