"""The modes: which flow a delivery runs through, which sink it has, and what may be expected in the end."""

from collections.abc import Callable, Generator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from semel.core import flows
from semel.core.commands import Claim, ClaimAnswer, Flow, Invoke, Mark, Raised
from semel.core.settlement import Task
from semel.policy import Policy
from semel.testing._simulation.referee import MAX_ATTEMPTS, SimAttempt, SimEvent
from semel.testing._simulation.store import Commit, Flaws, SimSeen, SinkKind
from semel.testing._simulation.worker import Declined
from semel.testing._simulation.world import LEASE_US, Violation
from semel.types import (
    CannotTell,
    Done,
    Errored,
    Failed,
    Inquiry,
    Late,
    Mismatch,
    Outcome,
    Unavailable,
    Unknown,
)

FlowOf = Callable[[SimAttempt, Task, Flaws], Generator[Any, Any, Any]]


class Mode(Struct, frozen=True, kw_only=True):
    """How a consumer works, and what it promises."""

    name: str
    flow: FlowOf
    sink: SinkKind = "keyed"
    quarantine: bool = False
    probe: bool = False
    """A truthful one, whose answers are final. In quarantine it cannot tell now and then."""
    journal: bool = False
    in_transaction: bool = False
    may_flush: bool = False
    once: bool = True
    """Never two effects, whatever happens to the workers."""
    may_lose: bool = False
    suppresses: bool = True
    acks: Callable[[Any], bool] = lambda outcome: acknowledges(outcome)  # noqa: PLW0108  # defined below


def acknowledges(outcome: Any) -> bool:
    """Whether a runner acknowledges: only what is recorded, or copied to the dead letter first."""
    if isinstance(outcome, Done):
        return outcome.recorded
    return isinstance(outcome, (Failed, Unknown, Mismatch, Late))


def task_for(mode: Mode, event: SimEvent, owner: bytes, wait_s: float, flaws: Flaws) -> Task:
    """One delivery of an event, ready to be run by a flow."""
    claim = Claim(
        event.id,
        owner,
        LEASE_US,
        flaws.window_us,
        journal=event.payload.encode() if mode.journal else None,
        quarantine=mode.quarantine,
    )
    policy = POLICIES[wait_s]
    return Task(claim, _do_nothing, replace(policy, probe=_unused_probe) if mode.probe else policy)


POLICIES = {
    wait_s: Policy(lease_s=LEASE_US / 1e6, wait_s=wait_s, max_attempts=MAX_ATTEMPTS, permanent=(Declined,))
    for wait_s in (0.0, 0.4, 2.5)
}
"""Duplicates that do not wait, that wait less than a lease, and that wait long enough to take over."""


def _do_nothing() -> None:
    """Stand in for the handler, which the simulated worker plays itself."""


def _unused_probe(_inquiry: Inquiry) -> CannotTell:
    """Stand in for the probe, which the simulated worker plays itself."""
    return CannotTell()


def lease_flow(_attempt: SimAttempt, task: Task, _flaws: Flaws) -> Flow[Outcome[Any]]:
    """Return the flow of `run` itself."""
    return flows.once(task)


def mark_flow(_attempt: SimAttempt, task: Task, _flaws: Flaws) -> Flow[Outcome[Any]]:
    """Mark, then run."""
    tenant, consumer, key = task.claim.id
    return flows.mark_then_run(Mark(tenant, consumer, [key], task.claim.window_us), task)


def observe_flow(attempt: SimAttempt, task: Task, _flaws: Flaws) -> Flow[Outcome[Any]]:
    """Run whatever the store says."""

    def duplicate(_answer: ClaimAnswer) -> None:
        attempt.event.duplicates += 1

    return flows.run_observed(task, duplicate)


def inbox_flow(attempt: SimAttempt, task: Task, _flaws: Flaws) -> Flow[Outcome[Any]]:
    """Mark and effect in one transaction: begin, look, work, commit."""
    seen = yield from SimSeen(task.claim.id)
    if isinstance(seen, Unavailable):
        return seen
    if seen:
        return Done(None, replayed=True, kept=False)
    ran = yield from Invoke(_do_nothing)
    if isinstance(ran, Raised):
        return Errored(ran.error, 1)
    committed = yield from Commit(task.claim.id, attempt)
    if isinstance(committed, Unavailable):
        return committed
    return Done(None, replayed=not committed, kept=False)


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(name="inbox", flow=inbox_flow, in_transaction=True),
        Mode(name="lease-keyed", flow=lease_flow, may_flush=True),
        Mode(name="lease-fenced", flow=lease_flow, sink="fenced", once=False, may_flush=True),
        Mode(name="lease-plain", flow=lease_flow, sink="plain", once=False, may_flush=True),
        Mode(name="quarantine", flow=lease_flow, sink="plain", quarantine=True),
        Mode(name="lease-probe", flow=lease_flow, sink="plain", probe=True),
        Mode(name="quarantine-probe", flow=lease_flow, sink="plain", quarantine=True, probe=True),
        Mode(name="mark", flow=mark_flow, sink="plain", may_lose=True),
        Mode(name="observe", flow=observe_flow, sink="plain", suppresses=False),
        Mode(name="journal", flow=lease_flow, journal=True),
    )
}


def judge(mode: Mode, event: SimEvent) -> None:
    """What must be true of an event when all is over."""
    if event.kind != "fine":
        if event.effects and event.kind == "permanent":
            raise Violation("twice", f"{event.payload}: failed for good, and yet there is an effect")
        return
    if event.effects == 0:
        _without_effect(mode, event)
    elif event.effects > 1 and mode.suppresses:
        if mode.once:
            raise Violation("twice", f"{event.payload}: {event.effects} effects")
        if event.effects - 1 > event.touched + event.losses:
            raise Violation(
                "twice",
                f"{event.payload}: {event.effects} effects, but faults touched only {event.touched} attempts"
                f" and the store lost it {event.losses} times",
            )
    if any(later <= earlier for earlier, later in zip(event.fences, event.fences[1:], strict=False)):
        raise Violation("zombie", f"{event.payload}: effects with the fences {event.fences}")


def _without_effect(mode: Mode, event: SimEvent) -> None:
    if event.failed:
        if event.grants <= MAX_ATTEMPTS:
            raise Violation("gave up", f"{event.payload}: failed after {event.grants} attempts")
    elif mode.journal and not event.grants:
        return  # every listener died before any claim was made: nobody ever accepted it
    elif not (mode.may_lose and event.touched):
        raise Violation("lost", f"{event.payload}: accepted, and there is no effect")
