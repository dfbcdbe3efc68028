"""The code that both clients share; `verbs` and `verbs_async` differ in how they wait."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeAlias, TypeVar

from msgspec.structs import replace

from semel.client.claims import ClaimActions, Claimed
from semel.client.items import ClientTask, ItemBuilder, ObserveCounts, marks_of, time_us
from semel.core import flows
from semel.core.commands import Claim, Flow, Granted, Item, Mark, Renew, Settle
from semel.core.folding import copy_of_claim, leaders, leaders_in_time
from semel.core.protocols import AsyncStore, Store
from semel.core.settlement import RESOLVED_MEANWHILE, replay
from semel.errors import ClaimLost, NotRecorded, RecordCorrupt, UsageError
from semel.keys.limits import check_all
from semel.keys.sliding import Sliding
from semel.policy import Policy
from semel.runtime.engine import Runtime
from semel.runtime.handlers import label_of, return_type
from semel.runtime.keeper import LiveClaim
from semel.stores.memory.store import MemoryStore
from semel.types import (
    Busy,
    Delivery,
    Done,
    Errored,
    Failed,
    Late,
    Lost,
    Mismatch,
    Mode,
    Outcome,
    Record,
    Unavailable,
    Unknown,
)

__all__ = ["ClaimOutcome", "Client", "raise_if_interrupted"]

T = TypeVar("T")

ClaimOutcome: TypeAlias = Claimed | Done[Any] | Failed | Busy | Mismatch | Late | Unknown
"""The result of `claim`."""


class Client:
    """The base of both clients."""

    awaits: bool = False
    """Whether its verbs are awaited."""

    _actions: ClaimActions
    """The actions that its claims call."""

    def __init__(self, plan: ItemBuilder, runtime: Runtime) -> None:
        self._plan = plan
        self._runtime = runtime
        self._admitted = False
        plan.check_store(runtime.store)
        self._tells_copies = isinstance(runtime.store, MemoryStore)
        """Whether the store itself distinguishes the first of equal keys in one mark from its copies."""

    def __repr__(self) -> str:
        plan = self._plan
        return f"{type(self).__name__}({self._runtime.store.name!r}, consumer={plan.consumer!r}, mode={plan.mode!r})"

    @property
    def consumer(self) -> str:
        """The name of the consumer."""
        return self._plan.consumer

    @property
    def tenant(self) -> str:
        """The tenant of its records; empty without tenants."""
        return self._plan.tenant

    @property
    def mode(self) -> Mode:
        """The mode of the consumer."""
        return self._plan.mode

    @property
    def policy(self) -> Policy:
        """The policy of its deliveries."""
        return self._plan.policy

    @property
    def store(self) -> Store | AsyncStore:
        """The store of its records."""
        return self._runtime.store

    @property
    def observed(self) -> ObserveCounts:
        """The counts of observe mode in this process."""
        return self._plan.observed

    def _claim_item(
        self,
        stored: Any,
        key: str,
        event_type: str | None,
        fingerprint: bytes | None,
        event_time: datetime | None,
        journal: Any,
        sliding: Sliding | None,
        meta: Mapping[str, str] | None,
    ) -> Claim:
        self._plan.require("lease", "quarantine", "transaction", "observe")
        self._check_journal(journal)
        return self._plan.claim(
            stored,
            key,
            fingerprint,
            sliding_us=None if sliding is None else sliding.window_us,
            event_type=event_type or "",
            event_time_us=time_us(event_time),
            journal=journal,
            meta=meta,
            lateness_us=None if sliding is None else sliding.lateness_us,
        )

    def _check_journal(self, journal: Any) -> None:
        if journal is not None and self._plan.ids:
            raise UsageError(
                f"consumer {self._plan.consumer!r} declared ids={self._plan.ids!r}: its records are removed by the time"
                " in the id, and a journaled claim must stay until it is finished; use a consumer without ids"
            )
        if journal is not None and not self._runtime.store.capabilities.durable:
            name = self._runtime.store.name
            fix = "CONFIG SET appendonly yes" if name.startswith(("redis", "valkey")) else "use sqlite:"
            raise UsageError(f"{name} forgets on exit, and a journal must not; {fix}")

    def _claim_items(self, stored: Any, deliveries: Sequence[str | Delivery[Any]]) -> list[Claim]:
        self._plan.require("lease", "quarantine", "transaction", "observe")
        claim, claims = self._plan.claim, list[Claim]()
        if isinstance(deliveries, str | Delivery):
            raise UsageError("claim_many takes a list of keys or deliveries; for one of them use claim")
        for each in deliveries:
            if isinstance(each, str):
                claims.append(claim(stored, each))
            elif not isinstance(each, Delivery):
                raise UsageError(f"claim_many takes keys and deliveries, not {each!r}")
            else:
                self._check_journal(each.journal)
                claims.append(self._plan.claim_for_delivery(stored, each))
        return claims

    def _outcome(self, claim: Claim, answer: Any, sent_at: float) -> Any:
        if isinstance(answer, Granted):
            kept = LiveClaim.since(claim, answer, sent_at, self._plan.policy.run_max_s)
            return Claimed(self._actions, claim, answer, kept)
        return replay(answer, None)

    def _outcomes(self, claims: list[Claim], answers: list[Any], sent_at: float, fold: Any) -> list[Any]:
        """Return the outcomes of `claim_many`; a later copy of a key gets its outcome from the first one's answer."""
        first_at, place_of = fold
        outcome = self._outcome
        outcomes: list[Any] = []
        for claim, place in zip(claims, place_of, strict=True):
            answer, leader = answers[place], claims[first_at[place]]
            try:
                answer = answer if claim is leader else copy_of_claim(leader, claim, answer)
                outcomes.append(outcome(claim, answer, sent_at))
            except RecordCorrupt as error:  # one unreadable record must not cost the others their claims
                outcomes.append(Unavailable(error))
        return outcomes

    def _tasks(
        self,
        deliveries: Sequence[Delivery[Any]],
        handler: Callable[[Any], Any],
        before_fail: Callable[[Delivery[Any], BaseException, Granted], Any] | None = None,
    ) -> tuple[list[ClientTask], Sequence[int], Sequence[int]]:
        """Return the tasks of `run_many`, one for each distinct key, and how the copies map to them."""
        plan, windows = self._plan, self._runtime.windows
        for delivery in deliveries:
            if delivery.journal is not None:
                self._check_journal(delivery.journal)
        first_at: Sequence[int]
        place_of: Sequence[int]
        if plan.mode == "observe":
            first_at = place_of = range(len(deliveries))
        elif any(delivery.lateness_us is not None for delivery in deliveries):
            first_at, place_of = leaders_in_time(
                [plan.claim_for_delivery(windows, each) for each in deliveries]
            )
        else:
            first_at, place_of = leaders([each.key for each in deliveries])
        build, returns, tasks = plan.delivery_task, return_type(handler), []
        for at in first_at:
            delivery = deliveries[at]
            before = None if before_fail is None else partial(before_fail, delivery)
            tasks.append(build(windows, delivery, handler, returns, before))
        return tasks, first_at, place_of

    # --- reports ---

    def _flows(self, tasks: Sequence[ClientTask], *, reached: bool) -> list[Flow[Outcome[Any]]]:
        """Return the flows of tasks, reported to hooks if there are any. `reached`: the store could be opened."""
        made = [task.flow(task) if reached else flows.without_store(task) for task in tasks]
        if not self._runtime.reporter.listens:
            return made
        return [self._watch(flow, task) for flow, task in zip(made, tasks, strict=True)]

    def _orphan_flow(self, task: ClientTask) -> Flow[Outcome[Any]]:
        """Return the flow of an orphan, reported to hooks if there are any."""
        return self._flows((task,), reached=True)[0]

    def _watch(self, flow: Flow[Outcome[Any]], task: ClientTask) -> Flow[Outcome[Any]]:
        observes = self._plan.mode == "observe"
        return self._runtime.reporter.watch(
            flow,
            task,
            task.handler,
            task.delivery,
            awaits=self.awaits,
            observes=observes,
            source=self._plan.source,
        )

    def _report_copies(
        self,
        deliveries: Sequence[Delivery[Any]],
        handler: Any,
        first_at: Sequence[int],
        place_of: Sequence[int],
        outcomes: Sequence[Outcome[Any]],
        *,
        parks: bool = False,
    ) -> None:
        """Report later copies of a key in one batch: they have no flow of their own."""
        reporter = self._runtime.reporter
        if not reporter.listens or len(first_at) == len(deliveries):
            return
        for at, place in enumerate(place_of):
            if first_at[place] != at:
                delivery = self._plan.with_event_type(deliveries[at])
                record_id = self._plan.id(delivery.key)
                reporter.report_copy(record_id, handler, delivery, outcomes[at], parks=parks)

    def _report_left(self, claim: Claimed, to: Any, answer: Any, error: BaseException | None) -> None:
        """Report that a `with` block has settled its claim."""
        item = claim.claim
        settle = Settle(item.id, item.owner, claim.granted.fence, to)
        self._runtime.reporter.report_settled((settle,), (answer,), (item,), error)

    def _report_settled(
        self, claims: Sequence[Claimed], items: Sequence[Item], answers: Sequence[Any]
    ) -> None:
        """Report that claims were settled by hand, or by a runner, which observes each of them."""
        reporter = self._runtime.reporter
        if not reporter.listens:
            return
        for claim, item, answer in zip(claims, items, answers, strict=True):
            if claim.observer is not None:
                claim.observer.note_settled(item, answer)
            else:
                reporter.report_settled((item,), (answer,), (claim.claim,))

    def _report_marked(
        self,
        keys: Sequence[str],
        firsts: Sequence[bool | Outcome[Any]],
        event_type: str = "",
        meta: Mapping[str, str] | None = None,
    ) -> None:
        """Report keys that this client or its inbox has marked."""
        plan = self._plan
        event_type = event_type or plan.policy.event_type
        self._runtime.reporter.report_marked((plan.tenant, plan.consumer), keys, firsts, event_type, meta)

    def _warn_not_kept(self, fn: Any, outcome: Done[Any]) -> None:
        """Warn about the first value of a handler that cannot be kept: its duplicates get no value."""
        label = label_of(fn)
        if outcome.replayed or label in self._plan.warned or not self._plan.warns_not_kept:
            return
        if outcome.reason == RESOLVED_MEANWHILE:  # the handler is not to blame
            return
        self._plan.warned.add(label)
        warnings.warn(
            f"the return value of {label} is not kept, so a duplicate gets no value: {outcome.reason}"
            " (or set Policy(keep_value=False))",
            RuntimeWarning,
            stacklevel=4,
        )

    def _warn_each_not_kept(self, fn: Any, outcomes: Sequence[Outcome[Any]]) -> None:
        for outcome in outcomes:
            if type(outcome) is Done and outcome.reason:
                self._warn_not_kept(fn, outcome)
                return

    def _recovery(
        self, stored: Any, handler: Callable[[Any], Any]
    ) -> tuple[Callable[[Record], ClientTask], list[bytes]]:
        """Return the function that builds an orphan's task, and the owners of the claims that it makes."""
        task, owners = self._plan.recovery(stored, handler), list[bytes]()

        def build_task(record: Record) -> ClientTask:
            built = task(record)
            owners.append(built.claim.owner)
            return built

        return build_task, owners

    def _drop_settled(self, claims: Sequence[Claimed], verdicts: Sequence[Any], keeper: Any) -> None:
        """Stop renewing the claims whose settle was answered."""
        if not keeper.kept:
            return
        for claim, verdict in zip(claims, verdicts, strict=True):
            if type(verdict) is not Unavailable:
                keeper.drop(claim.claim.owner)

    def _check_exit(self, claim: Claimed, error: BaseException | None, answer: Any) -> None:
        """Raise an error if a `with` block succeeded but was not recorded. Never hides an error of the block itself."""
        if error is None and isinstance(answer, Lost):
            raise ClaimLost(f"another attempt at {claim.key!r} took over; its result counts")
        if error is None and isinstance(answer, Unavailable):
            raise NotRecorded(
                f"{claim.key!r} ran, but the store could not record it: a repeat may run again"
            ) from answer.error

    def _window_known(self, event_type: str) -> int:
        """Return the window in force for an event type, as last read from the store."""
        return self._plan.window_us(self._runtime.windows, event_type)

    def _as_of_now(self, claim: Claimed) -> Claim:
        """Return the claim with the window in force now: a change applies to later completions."""
        item, windows = claim.claim, self._runtime.windows
        window_us = self._plan.window_us(windows, item.event_type)
        return item if item.sliding or item.window_us == window_us else replace(item, window_us=window_us)

    def _completions(self, claims: Sequence[Claimed], values: Sequence[Any] | None) -> list[Settle]:
        values = [None] * len(claims) if values is None else values
        as_of_now, completion = self._as_of_now, self._plan.completion
        return [
            completion(as_of_now(claim), claim.granted, value)
            for claim, value in zip(claims, values, strict=True)
        ]

    def _failures(self, claims: Sequence[Claimed], errors: Sequence[BaseException | str]) -> list[Settle]:
        return [
            self._plan.failure(self._as_of_now(claim), claim.granted, error)
            for claim, error in zip(claims, errors, strict=True)
        ]

    def _releases(
        self,
        claims: Sequence[Claimed],
        delay_s: float,
        errors: Sequence[BaseException | str | None] | None,
        *,
        count_attempt: bool,
    ) -> list[Settle]:
        return [
            self._plan.release(claim.claim, claim.granted, delay_s, count_attempt=count_attempt, error=error)
            for claim, error in zip(claims, errors or [None] * len(claims), strict=True)
        ]

    def _renewals(self, claims: Sequence[Claimed]) -> list[Renew]:
        return [self._plan.renewal(claim.claim, claim.granted) for claim in claims]

    def _marks(
        self, stored: Any, keys: Sequence[str], event_type: str
    ) -> tuple[Mark, Callable[[Any], list[bool]]]:
        """Return the mark of the distinct keys, and a function that maps its answer to all given keys."""
        self._plan.require("mark")
        if isinstance(keys, str):
            raise UsageError("mark_many takes a list of keys; for one key use mark")
        check_all(keys)
        if self._tells_copies or len(set(keys)) == len(keys):
            return self._plan.mark(stored, keys, event_type), marks_of
        first_at, place_of = leaders(keys)

        def unfold(answer: Any) -> list[bool]:
            firsts = marks_of(answer)
            return [firsts[place] and first_at[place] == at for at, place in enumerate(place_of)]

        return self._plan.mark(stored, [keys[at] for at in first_at], event_type), unfold


def as_deliveries(given: Iterable[Delivery[T] | tuple[str, T]]) -> list[Delivery[T]]:
    """Return the deliveries; pairs `(key, body)` become deliveries. Raises `UsageError` for anything else."""
    if isinstance(given, str | bytes | Mapping | Delivery):
        raise UsageError(f"deliveries come in a list, not in a {type(given).__name__}")
    return [each if isinstance(each, Delivery) else _delivery_of(each) for each in given]


def _delivery_of(pair: Any) -> Delivery[Any]:
    if type(pair) is tuple and len(pair) == 2 and type(pair[0]) is str:  # noqa: PLR2004 - as nearly always
        return Delivery(key=pair[0], body=pair[1])
    match pair:
        case (str(key), body):
            return Delivery(key=key, body=body)
        case _:
            raise UsageError(
                f"{pair!r} is not a delivery; write Delivery(key=..., body=...), or a pair (key, body)"
            )


def check_concurrency(concurrency: int) -> None:
    """Raise `UsageError` for fewer than one handler at a time."""
    if concurrency < 1:
        raise UsageError(
            f"concurrency is {concurrency!r}; give the number of handlers that may run at once, from 1"
        )


def raise_if_interrupted(outcome: Outcome[T]) -> Outcome[T]:
    """Return the outcome. Raises the interrupt if it was one; the claim is released by then."""
    if type(outcome) is Errored and not isinstance(outcome.error, Exception):
        raise outcome.error
    return outcome
