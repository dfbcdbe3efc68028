"""The protocol, written once: generators that yield commands and receive their answers.

No I/O, no clock, no thread and no event loop in here; `semel.runtime.executor` runs a flow either way. A process may
die at any `yield`: `docs/explain/guarantees.md` has the guarantees, and tests kill a flow at each of them.

    claim ──► Granted ──► Invoke ──► Settle(done | failed | released | unknown) ──► Outcome
      │          └──────► Ask, where an earlier attempt may have had its effect: the probe may save the Invoke
      └─────► Known, Mismatch, Late: an answer, not an error
      └─────► Unknown: an answer too, unless a probe can resolve it
      └─────► Busy: watch, claim again, sleep, claim again, ... until it is ours, known, or time is up
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard, TypeVar

from semel.core.commands import (
    Ask,
    Claim,
    ClaimAnswer,
    Flow,
    Granted,
    Invoke,
    Known,
    Lookup,
    Mark,
    Page,
    Pause,
    Raised,
    Ran,
    Renew,
    RenewAnswer,
    Resolve,
    Returned,
    Scan,
    Settle,
    Sleep,
    Unwatch,
    Watch,
)
from semel.core.machine import is_apart
from semel.core.settlement import (
    Settlement,
    Task,
    answer_of,
    attempts_exhausted,
    fail_if_last_attempt,
    inquiry,
    is_interrupted,
    kept_error,
    outcome_of,
    outcome_without_claim,
    plain,
    replay,
    retry_dead_letter,
    retry_later,
    settlement_for,
)
from semel.errors import StoreUnavailable
from semel.types import (
    Busy,
    CannotTell,
    Completed,
    Done,
    Errored,
    ErrorInfo,
    Happened,
    Outcome,
    Record,
    SettleAnswer,
    Unavailable,
    Unknown,
)

AnyTask = TypeVar("AnyTask", bound=Task)


def once(task: Task) -> Flow[Outcome[Any]]:
    """Claim, run, settle. The effect happens under the claim, and the record says so afterwards."""
    # Every event passes here: plain yields, without the generator that `yield from` makes of a command.
    answer: ClaimAnswer = yield task.claim
    if type(answer) is Known:
        return replay(answer, task.returns)
    if type(answer) is not Granted:
        if isinstance(answer, (Busy, Unavailable)):
            answer = yield from claim_with_wait(task.claim, task.policy.wait_s, answer)
        if isinstance(answer, Unknown) and task.policy.probe is not None:
            answer = yield from resolve_quarantined(task, answer)
        if not isinstance(answer, Granted):
            if runs_unguarded(task, answer):
                return outcome_without_claim((yield Invoke(task.call, task.claim)))
            return replay(answer, task.returns)
    ran: Ran | None = None
    if answer.attempt > 1 and task.policy.probe is not None:
        ran = yield from ask_probe(task, answer)
    if ran is None and answer.attempt > task.policy.max_attempts:
        ran = Raised(attempts_exhausted(None, answer.attempt, task.policy.max_attempts))
    if ran is None:
        ran = yield Invoke(task.call, task.claim, answer)
    verdict, error = settlement_for(ran, task, answer.attempt), None
    if type(ran) is not Returned:
        ran, verdict = yield from before_settling_error(task, answer, ran, verdict)
        error = kept_error(ran, task, verdict)
    settled = yield from settle(task.claim, answer, verdict, error)
    return outcome_of(ran, verdict, settled, answer.attempt)


def before_settling_error(
    task: Task, granted: Granted, ran: Ran, verdict: Settlement
) -> Flow[tuple[Ran, Settlement]]:
    """Do what comes before an attempt that raised is settled: ask the probe, count attempts, write a dead letter."""
    if verdict.to == "unknown" and task.policy.probe is not None:
        ran, verdict = yield from ask_probe_after_error(task, granted, ran, verdict)
    ran, verdict = fail_if_last_attempt(ran, verdict, task, granted.attempt)
    if verdict.to == "failed" and task.before_fail is not None and isinstance(ran, Raised):
        # Before the record is closed: a crash in between writes the dead letter twice; the other order could lose it.
        said = yield from Invoke(partial(task.before_fail, ran.error, granted))
        if isinstance(said, Raised):
            verdict = retry_dead_letter(task.policy, granted.attempt)
    return ran, verdict


def ask_probe(task: Task, granted: Granted) -> Flow[Ran | None]:
    """Ask the probe about an earlier attempt. Returns its outcome, or `None` if the handler must run.

    In quarantine a claim is granted again only if nothing had happened. After the last attempt the probe is asked
    once more, but not for ever: the probe itself may kill its worker.
    """
    policy = task.policy
    if policy.probe is None or task.claim.quarantine or granted.attempt > policy.max_attempts + 1:
        return None
    asked = yield from Ask(policy.probe, inquiry(task, granted.attempt, granted.first_seen_us, granted.steps))
    if isinstance(asked, Raised) and not isinstance(asked.error, Exception):
        return asked
    answer = answer_of(asked)
    return Returned(answer.value) if isinstance(answer, Happened) else None


def ask_probe_after_error(
    task: Task, granted: Granted, ran: Ran, verdict: Settlement
) -> Flow[tuple[Ran, Settlement]]:
    """Ask the probe, under the claim, after a handler raised in quarantine, before an operator has to decide."""
    probe = task.policy.probe
    if probe is None or not isinstance(ran, Raised) or ran.lost or not isinstance(ran.error, Exception):
        return ran, verdict  # stopped from outside: the next delivery asks
    record = yield from Lookup(task.claim.id)  # this attempt may have noted steps
    steps = record.steps if isinstance(record, Record) else granted.steps
    asked = yield from Ask(probe, inquiry(task, granted.attempt, granted.first_seen_us, steps))
    if isinstance(asked, Raised) and not isinstance(asked.error, Exception):
        return asked, verdict
    answer = answer_of(asked)
    if isinstance(answer, Happened):
        ran = Returned(answer.value)
        return ran, settlement_for(ran, task, granted.attempt)
    return ran, verdict if isinstance(answer, CannotTell) else retry_later(task.policy, granted.attempt)


def resolve_quarantined(task: Task, unknown: Unknown) -> Flow[Any]:
    """Ask the probe about a quarantined event: its outcome, the claim to run it, or the answer as it was.

    No owner holds the claim meanwhile. The probe's answer is written only over the same fence, so that of
    several concurrent callers one decides; the others claim again and get the result.
    """
    policy = task.policy
    record = yield from Lookup(task.claim.id)
    if _no_answer(record):
        return record
    if isinstance(record, Unavailable) or policy.probe is None:
        return unknown
    if not isinstance(record, Record) or record.state != "unknown":
        return (yield from claim_again(task))
    if is_apart(record, task.claim):
        return unknown  # it is about another event of the same content
    asked = yield from Ask(policy.probe, inquiry(task, record.attempt, record.first_seen_us, record.steps))
    if isinstance(asked, Raised) and not isinstance(asked.error, Exception):
        return Errored(asked.error, record.attempt)
    answer = answer_of(asked)
    if isinstance(answer, CannotTell):
        return unknown
    if isinstance(answer, Happened):
        ran = Returned(answer.value)
        verdict = settlement_for(ran, task, record.attempt)
        settled = yield from Resolve(task.claim.id, record.fence, "done", verdict.value, task.claim.window_us)
        if isinstance(settled, Completed) or _no_answer(settled):
            return outcome_of(ran, verdict, settled, record.attempt)
    else:
        # Claimed in the same step: otherwise a crash before the claim would leave it without an owner.
        mine, lease_us = task.claim.owner, task.claim.lease_us
        settled = yield from Resolve(task.claim.id, record.fence, "claimed", owner=mine, lease_us=lease_us)
        if _no_answer(settled):
            return settled
    if isinstance(settled, Unavailable):
        return unknown  # the store refuses: this caller may not decide
    return (yield from claim_again(task))


def claim_again(task: Task) -> Flow[ClaimAnswer]:
    """Claim once more, and wait for another owner."""
    answer = yield from task.claim
    if isinstance(answer, Busy | Unavailable):
        answer = yield from claim_with_wait(task.claim, task.policy.wait_s, answer)
    return answer


def runs_unguarded(task: Task, answer: Any) -> bool:
    """Whether the policy lets the handler run without an answer of the store. A corrupt record is an answer."""
    return task.policy.on_unavailable == "run" and _no_answer(answer)


def _no_answer(answer: Any) -> TypeGuard[Unavailable]:
    return isinstance(answer, Unavailable) and isinstance(answer.error, StoreUnavailable)


def claim_with_wait(claim: Claim, wait_s: float, answer: ClaimAnswer) -> Flow[ClaimAnswer]:
    """Claim; if another attempt holds the claim, wait for its end or take over."""
    answer = yield from retry_while_unavailable(claim, wait_s, answer)
    if not isinstance(answer, Busy) or not wait_s:
        return answer
    watch = yield from Watch(claim.id, wait_s)
    while isinstance(answer, Busy):
        # Claim again after watching: the owner may have finished between our claim and our watch.
        answer = yield from retry_while_unavailable(claim, wait_s, (yield from claim))
        if isinstance(answer, Busy) and not (yield from Sleep(watch, answer.retry_after_s)):
            break
    yield from Unwatch(watch)
    return answer


def retry_while_unavailable(claim: Claim, wait_s: float, answer: ClaimAnswer) -> Flow[ClaimAnswer]:
    """Retry the claim with the same owner while the store is unavailable and time is left."""
    tries = 0
    while isinstance(answer, Unavailable) and (yield from Pause(tries, wait_s=wait_s)):
        answer = yield from claim
        tries += 1
    return answer


def settle(
    claim: Claim, granted: Granted, verdict: Settlement, error: ErrorInfo | None = None
) -> Flow[SettleAnswer]:
    """Settle the claim; retries until its deadline, because an effect must not go unrecorded."""
    item = Settle(
        claim.id,
        claim.owner,
        granted.fence,
        verdict.to,
        verdict.value,
        claim.window_us,
        claim.lease_us,
        claim.sliding,
        round(verdict.delay_s * 1e6) if verdict.delay_s else 0,
        verdict.count_attempt,
        claim.event_time_us if claim.apart_us else None,
        error,
    )
    answer: SettleAnswer = yield item
    if type(answer) is Completed:
        return answer
    tries = 0
    while (
        isinstance(answer, Unavailable)
        and verdict.to != "released"
        and (yield from Pause(tries, claim.owner))
    ):
        answer = yield from item
        tries += 1
    return answer


def step(
    renew: Callable[[bytes | None], Renew], call: Callable[[], Any], encoded: Callable[[Any], bytes | None]
) -> Flow[tuple[Ran, RenewAnswer | None]]:
    """One named effect inside a handler: run it, then note its value in the parent's record."""
    ran = yield from Invoke(call)
    if isinstance(ran, Raised):
        return ran, None
    item, tries = renew(encoded(ran.value)), 0
    answer = yield from item
    while isinstance(answer, Unavailable) and (yield from Pause(tries, item.owner)):
        answer = yield from item
        tries += 1
    return ran, answer


def sweep(
    orphans: Scan, task: Callable[[Record], AnyTask], run: Callable[[AnyTask], Flow[Outcome[Any]]] = once
) -> Flow[list[Outcome[Any]]]:
    """Take over journaled claims whose owner died: their source will never send them again. `run`: each of them."""
    page = yield from orphans
    outcomes: list[Outcome[Any]] = []
    if isinstance(page, Page):
        for record in page.records:
            outcomes.append((yield from run(task(record))))
            if is_interrupted(outcomes[-1]):
                break
    return outcomes


def mark_then_run(mark: Mark, task: Task) -> Flow[Outcome[Any]]:
    """Mark, then run: at most once. A crash in between loses the event."""
    answer = yield from mark
    if isinstance(answer, Unavailable):
        if runs_unguarded(task, answer):
            return outcome_without_claim((yield from Invoke(task.call, task.claim)))
        return answer
    if not answer.firsts[0]:
        return Done(None, replayed=True, kept=False)
    return plain((yield from Invoke(task.call, task.claim)))


def run_observed(task: Task, duplicate: Callable[[ClaimAnswer], None]) -> Flow[Outcome[Any]]:
    """Run in any case, and report duplicates that another mode would have stopped."""
    answer = yield from task.claim
    if not isinstance(answer, Granted):
        duplicate(answer)
        return plain((yield from Invoke(task.call, task.claim)))
    ran = yield from Invoke(task.call, task.claim, answer)
    verdict = settlement_for(ran, task, answer.attempt)
    yield from settle(task.claim, answer, verdict, kept_error(ran, task, verdict))
    return plain(ran)


def run_unrecorded(task: Task) -> Flow[Outcome[Any]]:
    """Run without a record: the event type's window is off."""
    return plain((yield from Invoke(task.call, task.claim)))


def without_store(task: Task) -> Flow[Outcome[Any]]:
    """Run without a store: it could not be opened, and the policy allows it."""
    return outcome_without_claim((yield from Invoke(task.call, task.claim)))
