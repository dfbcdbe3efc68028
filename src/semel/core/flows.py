"""The protocol, written once: generators that yield commands and are sent their answers.

No I/O, no clock, no thread and no event loop in here; `semel.drive` runs a flow either way. A process may
die at any `yield`: what then holds is the table in `docs/explain/guarantees.md`, proved by killing it there.

    claim ──► Granted ──► Invoke ──► Settle(done | failed | released | unknown) ──► Outcome
      └─────► Known, Mismatch, Late, Unknown: an answer, not an error
      └─────► Busy: watch, claim again, sleep, claim again, ... until it is ours, known, or time is up
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from semel.core.commands import (
    Claim,
    ClaimAnswer,
    Flow,
    Granted,
    Invoke,
    Mark,
    Page,
    Pause,
    Raised,
    Ran,
    Renew,
    RenewAnswer,
    Scan,
    Settle,
    SettleAnswer,
    Sleep,
    Unwatch,
    Watch,
)
from semel.core.verdicts import Task, Verdict, conclude, interrupted, judge, plain, postponed, replay
from semel.errors import AttemptsExhausted
from semel.types import Busy, Completed, Done, Outcome, Record, Unavailable


def once(task: Task) -> Flow[Outcome[Any]]:
    """Claim, run, settle. The effect happens under the claim, and the record says so afterwards."""
    # Every event passes here: plain yields, without the generator that `yield from` makes of a command.
    answer: ClaimAnswer = yield task.claim
    if type(answer) is not Granted:
        if isinstance(answer, (Busy, Unavailable)):
            answer = yield from patiently(task.claim, task.policy.wait_s, answer)
        if not isinstance(answer, Granted):
            return replay(answer, task.returns)
    if answer.attempt > task.policy.max_attempts:
        ran: Ran = Raised(
            AttemptsExhausted(f"attempt {answer.attempt} of {task.policy.max_attempts} allowed")
        )
    else:
        ran = yield Invoke(task.call, task.claim, answer)
    verdict = judge(ran, task, answer.attempt)
    if verdict.to == "failed" and task.last_words is not None and isinstance(ran, Raised):
        # Before the record is closed: a crash in between says it twice, the other order would never say it.
        said = yield from Invoke(partial(task.last_words, ran.error, answer))
        if isinstance(said, Raised):
            verdict = postponed(task.policy, answer.attempt)
    settled = yield from settle(task.claim, answer, verdict)
    return conclude(ran, verdict, settled, answer.attempt)


def patiently(claim: Claim, wait_s: float, answer: ClaimAnswer) -> Flow[ClaimAnswer]:
    """Where another attempt holds the claim: wait for that one's end, or take over from it."""
    answer = yield from reached(claim, wait_s, answer)
    if not isinstance(answer, Busy) or not wait_s:
        return answer
    watch = yield from Watch(claim.id, wait_s)
    while isinstance(answer, Busy):
        # Again, now that we listen: the owner may have finished between our claim and our watch.
        answer = yield from reached(claim, wait_s, (yield from claim))
        if isinstance(answer, Busy) and not (yield from Sleep(watch, answer.retry_after_s)):
            break
    yield from Unwatch(watch)
    return answer


def reached(claim: Claim, wait_s: float, answer: ClaimAnswer) -> Flow[ClaimAnswer]:
    """The same claim again, with the same owner, while the store is out of reach and time is left."""
    tries = 0
    while isinstance(answer, Unavailable) and (yield from Pause(tries, wait_s=wait_s)):
        answer = yield from claim
        tries += 1
    return answer


def settle(claim: Claim, granted: Granted, verdict: Verdict) -> Flow[SettleAnswer]:
    """Say how it ended, again and again until the claim's deadline: an effect must not go unrecorded."""
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
    orphans: Scan, task: Callable[[Record], Task], run: Callable[[Task], Flow[Outcome[Any]]] = once
) -> Flow[list[Outcome[Any]]]:
    """Take over journaled claims whose owner died: their source will never send them again. `run`: each of them."""
    page = yield from orphans
    outcomes: list[Outcome[Any]] = []
    if isinstance(page, Page):
        for record in page.records:
            outcomes.append((yield from run(task(record))))
            if interrupted(outcomes[-1]):
                break
    return outcomes


def marked(mark: Mark, task: Task) -> Flow[Outcome[Any]]:
    """Mark, then run: at most once, by its honest name. A crash in between loses the event."""
    answer = yield from mark
    if isinstance(answer, Unavailable):
        return answer
    if not answer.firsts[0]:
        return Done(None, replayed=True, kept=False)
    return plain((yield from Invoke(task.call, task.claim)))


def observed(task: Task, duplicate: Callable[[ClaimAnswer], None]) -> Flow[Outcome[Any]]:
    """Run whatever the store says, and report what would have been suppressed."""
    answer = yield from task.claim
    if not isinstance(answer, Granted):
        duplicate(answer)
        return plain((yield from Invoke(task.call, task.claim)))
    ran = yield from Invoke(task.call, task.claim, answer)
    yield from settle(task.claim, answer, judge(ran, task, answer.attempt))
    return plain(ran)


def unguarded(task: Task) -> Flow[Outcome[Any]]:
    """The event type's window is off: run, and remember nothing."""
    return plain((yield from Invoke(task.call, task.claim)))
