"""The interface of a client for runners, middleware and the command line: more than its public verbs.

Brokers, ingest, HTTP and the command line use a client through these functions. No other module reads a client's
private members, and none of this is part of the public API.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, TypeAlias, TypeVar

from msgspec.structs import replace

from semel.client.base import ClaimOutcome, Client
from semel.client.claims import Claimed
from semel.client.client_async import AsyncSemel
from semel.client.items import ItemBuilder
from semel.core import flows
from semel.core.commands import Granted, Invoke, Item, Ran
from semel.core.settlement import Task
from semel.policy import ATTEMPTS_LIMIT
from semel.runtime.generators import adrive
from semel.runtime.handlers import return_type
from semel.runtime.process import worker_name
from semel.runtime.reporter import NOT_OBSERVED, DeliveryObserver, Reporter
from semel.runtime.scheduler import adrive_many, copies
from semel.types import Delivery, Failed, Outcome, Unavailable
from semel.windows import OFF

__all__ = [
    "BeforeFail",
    "check_journal",
    "claim_many",
    "deliver",
    "deliver_one",
    "drop",
    "fail_delivery",
    "invoke",
    "items_of",
    "keep",
    "known_window_us",
    "observe",
    "observer_of",
    "refresh_windows",
    "report_copies",
    "reporter_of",
    "send",
    "windows",
]

T = TypeVar("T")
R = TypeVar("R")

BeforeFail: TypeAlias = Callable[[Delivery[T], BaseException, Granted], Awaitable[None]]
"""Awaited before a delivery is recorded as failed; if it raises, the delivery is retried instead."""


# --- deliveries ---------------------------------------------------------------------------------


async def deliver(
    once: AsyncSemel,
    deliveries: Sequence[Delivery[T]],
    handler: Callable[[T], Awaitable[R]],
    concurrency: int,
    before_fail: BeforeFail[T],
    on_outcome: Callable[[int, Outcome[R]], object],
    is_stopping: Callable[[], bool],
    on_retry: Callable[[], object],
) -> list[Outcome[R]]:
    """`run_many` for a runner: one claim for all; outcomes by position.

    `on_outcome` is called with each outcome as soon as it is known, and with the position of the first delivery of
    its key. `is_stopping`: once it is true no further handler starts, except in mode mark, where a marked delivery
    has to run. `on_retry` is called before each retry of a completion that the store has not answered.
    """
    deliveries = once._plan.with_fingerprints(deliveries)
    reached = await once._reach()
    tasks, first_at, place_of = once._tasks(deliveries, handler, before_fail)
    executor = once._executor()
    stops = is_stopping if once.mode != "mark" else lambda: False
    try:
        outcomes = await adrive_many(
            once._flows(tasks, reached=reached),
            executor,
            concurrency,
            lambda place, outcome: on_outcome(first_at[place], outcome),
            stops,
            on_retry,
        )
    finally:
        executor.abandon(task.claim.owner for task in tasks)
    spread = copies(outcomes, place_of, first_at, [delivery.fingerprint for delivery in deliveries])
    once._report_copies(deliveries, handler, first_at, place_of, spread, parks=True)
    once._warn_each_not_kept(handler, outcomes)
    return spread


async def deliver_one(
    once: AsyncSemel,
    delivery: Delivery[T],
    handler: Callable[[T], Awaitable[R]],
    owner: bytes | None = None,
    *,
    quarantine: bool = False,
) -> Outcome[R]:
    """`run_many` for one delivery, without the overhead of a batch.

    `owner`: of an earlier call for the same delivery, whose claim may have been granted without an answer.
    `quarantine`: if the handler raises, the record becomes `unknown`, whatever the mode.
    """
    (delivery,) = once._plan.with_fingerprints((delivery,))
    once._check_journal(delivery.journal)
    reached = await once._reach()
    task = once._plan.delivery_task(
        once._runtime.windows, delivery, handler, return_type(handler), owner=owner
    )
    if quarantine:
        task = replace(task, claim=replace(task.claim, quarantine=True))
    return await once._execute(task, reached=reached)


async def fail_delivery(
    once: AsyncSemel,
    delivery: Delivery[T],
    error: Exception,
    before_fail: BeforeFail[T],
    owner: bytes | None = None,
) -> Outcome[Any]:
    """Record a delivery as failed whose handler ran in a transaction: claim it, await `before_fail`, fail it.

    `owner`: of the claim that recorded the attempt before it ran; taken over by another owner it would count as dead.
    """
    claim = once._plan.claim_for_delivery(await once._connect(), delivery)
    if owner is not None:
        claim = replace(claim, owner=owner)
    before = partial(before_fail, delivery)
    if claim.window_us == OFF:
        await before(error, Granted(fence=0, attempt=1, lease_until_us=0, first_seen_us=0))
        return Failed(error)

    async def fail() -> None:
        raise error

    policy = replace(once.policy, permanent=(Exception,), max_attempts=ATTEMPTS_LIMIT)
    executor = once._executor()
    try:
        task = Task(claim, fail, policy, before_fail=before, worker=worker_name)
        return await adrive(flows.once(task), executor)
    finally:
        executor.abandon((claim.owner,))


def observe(once: AsyncSemel, delivery: Delivery[Any], handler: Any) -> DeliveryObserver:
    """Report a delivery that runs in a transaction as received. Returns what reports the rest."""
    reporter = once._runtime.reporter
    if not reporter.listens:
        return NOT_OBSERVED
    claim = once._plan.claim_for_delivery(once._runtime.windows, delivery)
    return reporter.observe(claim, handler, delivery)


async def claim_many(
    once: AsyncSemel, deliveries: Sequence[Delivery[Any]], handler: Any
) -> list[ClaimOutcome | Unavailable]:
    """`claim_many` for a runner, of distinct keys: hooks get handler and source, now and at the settle."""
    reporter = once._runtime.reporter
    if not reporter.listens:
        return await once.claim_many(deliveries)
    claims = once._claim_items(await once._connect(), deliveries)
    sent_at = monotonic()
    answers = await once._runtime.channel.asend(claims)
    outcomes = once._outcomes(claims, answers, sent_at, (range(len(claims)), range(len(claims))))
    for at, (claim, delivery, answer) in enumerate(zip(claims, deliveries, answers, strict=True)):
        observer = reporter.observe(claim, handler, delivery)
        observer.note_claim_answer(answer)
        if isinstance(outcomes[at], Claimed):
            outcomes[at] = outcomes[at].with_observer(observer)
        else:
            observer.note_outcome(outcomes[at])
    return outcomes


def report_copies(
    once: AsyncSemel,
    deliveries: Sequence[Delivery[Any]],
    handler: Any,
    fold: tuple[Sequence[int], Sequence[int]],
    outcomes: Sequence[Outcome[Any]],
) -> None:
    """Report later copies of a key in a batch of a runner. `fold`: from `leaders`."""
    once._report_copies(deliveries, handler, *fold, outcomes, parks=True)


def observer_of(claim: Claimed) -> DeliveryObserver:
    """Return what reports the end of a claim of `claim_many`."""
    return claim.observer or NOT_OBSERVED


async def invoke(once: AsyncSemel, call: Invoke) -> Ran:
    """Call a handler as `run` does: with its context, and cancelled when its claim is lost."""
    return await once._executor().invoke(call)


# --- claims -------------------------------------------------------------------------------------


def keep(claim: Claimed) -> None:
    """Renew the claim until `drop`, as inside `with claim:`."""
    claim._actions.keeper().keep(claim._kept)


def drop(claim: Claimed) -> None:
    """Stop renewing the claim."""
    claim._actions.keeper().drop(claim.claim.owner)


# --- the store and the settings -----------------------------------------------------------------


async def send(once: AsyncSemel, items: Sequence[Item]) -> list[Any]:
    """Have the store execute items, with those of other callers; answers by position."""
    return await once._runtime.channel.asend(items)


async def windows(once: AsyncSemel) -> Any:
    """Connect at first use, and return the stored windows; they are at most seconds old."""
    return await once._connect()


async def refresh_windows(once: AsyncSemel) -> None:
    """Read the stored windows if it is time, without admitting the consumer."""
    await once._runtime.arefresh()


def known_window_us(client: Client, event_type: str = "") -> int:
    """Return the window in force for an event type, as last read from the store."""
    return client._window_known(event_type)


def check_journal(client: Client, journal: Any) -> None:
    """Raise `UsageError` if this client cannot store a journal; `None` means no journal."""
    client._check_journal(journal)


def items_of(client: Client) -> ItemBuilder:
    """Return the builder of the items that this client sends."""
    return client._plan


def reporter_of(client: Client) -> Reporter:
    """Return what reports to the client's hooks."""
    return client._runtime.reporter
