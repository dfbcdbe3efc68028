"""Protocols that are broken on purpose. The simulation is trusted because it catches each of them."""

from collections.abc import Callable, Generator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from semel.core import flows
from semel.core.commands import Claim, Flow, Granted, Invoke, Lookup, Mark, Raised, Resolve, Settle
from semel.core.machine import decide
from semel.core.settlement import Task, outcome_of, plain, settlement_for
from semel.testing._simulation.modes import FlowOf, acknowledges, run_leased
from semel.testing._simulation.referee import SimAttempt
from semel.testing._simulation.store import Commit, Flaws
from semel.testing._simulation.world import LEASE_US
from semel.types import Busy, Completed, Done, Outcome, Record, Unavailable

Decision = tuple[Any, Record | None]


class Mutant(Struct, frozen=True, kw_only=True):
    """A departure from the rules, and the mode whose promises it breaks."""

    mode: str
    flaws: Flaws = Flaws()
    flow: FlowOf | None = None
    acks: Callable[[Any], bool] | None = None


# --- stores ---


def complete_without_fence(record: Record | None, item: Any, now: int) -> Decision:
    """A completion is accepted from any owner, with any fence."""
    if type(item) is Settle and item.to == "done" and record is not None and record.state == "claimed":
        return decide(replace(record, owner=item.owner, fence=item.fence), item, now)
    return decide(record, item, now)


def release_without_owner(record: Record | None, item: Any, now: int) -> Decision:
    """A release frees the key even if another owner holds it by now."""
    if type(item) is Settle and item.to == "released" and record is not None and record.state == "claimed":
        return decide(record, replace(item, owner=record.owner or b"?", fence=record.fence), now)
    return decide(record, item, now)


def delete_on_error(record: Record | None, item: Any, now: int) -> Decision:
    """An error deletes the key without checking its owner. Here it gets an old expiry, so it is absent."""
    if type(item) is Settle and item.to == "released" and record is not None:
        return Completed(at_us=now), replace(
            record, state="done", owner=b"?", lease_until_us=0, expires_at_us=0
        )
    return decide(record, item, now)


def cleared_to_nobody(record: Record | None, item: Any, now: int) -> Decision:
    """After a probe finds no effect the key is free for any claim, although its other copies may be acknowledged."""
    if type(item) is Resolve and item.to == "claimed":
        return decide(record, replace(item, owner=b"", lease_us=0), now)
    return decide(record, item, now)


def expired_is_present(record: Record | None, item: Any, now: int) -> Decision:
    """A stored row counts even if its window is over."""
    if type(item) is Claim and record is not None and record.state == "done":
        return decide(replace(record, expires_at_us=now + 1), item, now)[0], None
    return decide(record, item, now)


def no_takeover(record: Record | None, item: Any, now: int) -> Decision:
    """A claim stays with its owner for ever."""
    if (
        type(item) is Claim
        and record is not None
        and record.state == "claimed"
        and record.owner not in (b"", item.owner)
    ):
        return Busy(1.0), None
    return decide(record, item, now)


def released_keeps_owner(record: Record | None, item: Any, now: int) -> Decision:
    """Release ends the lease and leaves the owner, so that a renewal in flight revives it."""
    answer, written = decide(record, item, now)
    if type(item) is Settle and item.to == "released" and written is not None:
        written = replace(written, owner=item.owner)
    return answer, written


def takeover_starts_afresh(record: Record | None, item: Any, now: int) -> Decision:
    """A takeover resets the attempts, so that poison is retried for ever."""
    answer, written = decide(record, item, now)
    if type(answer) is Granted and written is not None:
        return replace(answer, attempt=1), replace(written, attempt=1)
    return answer, written


def takeover_forgets_steps(record: Record | None, item: Any, now: int) -> Decision:
    """A takeover does not hand on which steps were done."""
    answer, written = decide(record, item, now)
    if type(item) is Claim and type(answer) is Granted and written is not None:
        return replace(answer, steps=()), replace(written, steps=())
    return answer, written


def spares_only_done(record: Record, _now: int) -> bool:
    """A purge that removes every unfinished claim."""
    return record.state != "claimed"


# --- flows ---


def _fresh_owners(attempt: SimAttempt, flow: Flow[Any]) -> Generator[Any, Any, Any]:
    """Use a new owner for each try, as a driver's own retry of a plain SET NX does."""
    owner, tries, answer = attempt.owner, 0, None
    while True:
        try:
            command = flow.send(answer)
        except StopIteration as end:
            return end.value
        if type(command) is Claim:
            owner = attempt.owner[:8] + tries.to_bytes(8, "big")
            tries += 1
            command = replace(command, owner=owner)
        elif type(command) is Settle:
            command = replace(command, owner=owner)
        answer = yield command


def fresh_owner_each_try(attempt: SimAttempt, task: Task, flaws: Flaws) -> Flow[Outcome[Any]]:
    """After a lost reply the claim is sent with another owner."""
    return _fresh_owners(attempt, run_leased(attempt, task, flaws))


def mark_first(_attempt: SimAttempt, task: Task, _flaws: Flaws) -> Flow[Outcome[Any]]:
    """Mark, then run, and promise that nothing is lost."""
    tenant, consumer, key = task.claim.id
    answer = yield from Mark(tenant, consumer, [key], task.claim.window_us)
    if isinstance(answer, Unavailable):
        return answer
    if not answer.firsts[0]:
        return Done(None, replayed=True, kept=False)
    return plain((yield from Invoke(task.call)))


def check_then_act(_attempt: SimAttempt, task: Task, _flaws: Flaws) -> Flow[Outcome[Any]]:
    """Look, run, then store: two workers that look at the same time both run."""
    found = yield from Lookup(task.claim.id)
    if isinstance(found, Unavailable):
        return found
    if isinstance(found, Record) and found.state == "done":
        return Done(None, replayed=True, kept=False)
    ran = yield from Invoke(task.call)
    if isinstance(ran, Raised):
        return plain(ran)
    claimed = yield from task.claim
    if not isinstance(claimed, Granted):
        return plain(ran)
    verdict = settlement_for(ran, task, claimed.attempt)
    return outcome_of(ran, verdict, (yield from flows.settle(task.claim, claimed, verdict)), claimed.attempt)


def mark_commits_alone(attempt: SimAttempt, task: Task, _flaws: Flaws) -> Flow[Outcome[Any]]:
    """The mark is written on a connection of its own, not in the caller's transaction."""
    tenant, consumer, key = task.claim.id
    answer = yield from Mark(tenant, consumer, [key], task.claim.window_us)
    if isinstance(answer, Unavailable):
        return answer
    if not answer.firsts[0]:
        return Done(None, replayed=True, kept=False)
    ran = yield from Invoke(task.call)
    if isinstance(ran, Raised):
        return plain(ran)
    committed = yield from Commit(task.claim.id, attempt)
    return committed if isinstance(committed, Unavailable) else Done(None, kept=False)


def rerun_unasked(_attempt: SimAttempt, task: Task, _flaws: Flaws) -> Flow[Outcome[Any]]:
    """The probe exists, but the flow does not call it."""
    return flows.once(replace(task, policy=replace(task.policy, probe=None)))


# --- runners ---


def drops_while_busy(outcome: Any) -> bool:
    """A duplicate of a running event is dropped."""
    return isinstance(outcome, Busy) or acknowledges(outcome)


def acks_unrecorded(outcome: Any) -> bool:
    """The message is acknowledged when the handler returns, whatever the store answers."""
    return isinstance(outcome, Done) or acknowledges(outcome)


MUTANTS: dict[str, Mutant] = {
    "complete without fence": Mutant(mode="lease-keyed", flaws=Flaws(decide=complete_without_fence)),
    "release without owner check": Mutant(mode="lease-plain", flaws=Flaws(decide=release_without_owner)),
    "unconditional delete on error": Mutant(mode="lease-plain", flaws=Flaws(decide=delete_on_error)),
    "release keeps the owner": Mutant(mode="lease-plain", flaws=Flaws(decide=released_keeps_owner)),
    "takeover forgets the attempts": Mutant(mode="lease-keyed", flaws=Flaws(decide=takeover_starts_afresh)),
    "takeover forgets the steps": Mutant(mode="steps", flaws=Flaws(decide=takeover_forgets_steps)),
    "expired row counted as present": Mutant(mode="lease-keyed", flaws=Flaws(decide=expired_is_present)),
    "no takeover": Mutant(mode="lease-keyed", flaws=Flaws(decide=no_takeover)),
    "purge of running claims": Mutant(mode="lease-plain", flaws=Flaws(spared_by_purge=spares_only_done)),
    "one owner per process": Mutant(mode="lease-plain", flaws=Flaws(owner_per_process=True)),
    "client clock decides the lease": Mutant(mode="lease-plain", flaws=Flaws(client_clock=True)),
    "one number for lease and window": Mutant(mode="lease-plain", flaws=Flaws(window_us=LEASE_US)),
    "fence ignored at a fenced sink": Mutant(mode="lease-fenced", flaws=Flaws(fence_ignored=True)),
    "idempotency key per attempt": Mutant(mode="lease-keyed", flaws=Flaws(key_per_attempt=True)),
    "fresh owner on each try": Mutant(mode="lease-keyed", flow=fresh_owner_each_try),
    "fresh owner, and busy means duplicate": Mutant(
        mode="lease-keyed", flow=fresh_owner_each_try, acks=drops_while_busy
    ),
    "mark before effect, sold as once": Mutant(mode="lease-keyed", flow=mark_first),
    "check then act": Mutant(mode="lease-plain", flow=check_then_act),
    "drop while busy": Mutant(mode="lease-keyed", acks=drops_while_busy),
    "ack on receipt": Mutant(mode="lease-keyed", flaws=Flaws(ack_on_receipt=True)),
    "ack before complete": Mutant(mode="lease-keyed", acks=acks_unrecorded),
    "rerun without asking the probe": Mutant(mode="lease-probe", flow=rerun_unasked),
    "cleared to nobody": Mutant(mode="quarantine-probe", flaws=Flaws(decide=cleared_to_nobody)),
    "mark outside the transaction": Mutant(
        mode="inbox", flaws=Flaws(mark_commits_alone=True), flow=mark_commits_alone
    ),
}
"""By name. The simulation must catch each; how often it does shows how many seeds are enough."""
