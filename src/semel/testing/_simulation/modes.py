"""The modes: the flow and the sink of a delivery, and the result that must hold at the end."""

from collections.abc import Callable, Generator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from semel.core import flows
from semel.core.commands import Claim, ClaimAnswer, Flow, Invoke, Mark, Raised
from semel.core.settlement import Task
from semel.policy import Policy
from semel.testing._simulation.handler import handler_of, play
from semel.testing._simulation.referee import MAX_ATTEMPTS, WHOLE, SimAttempt, SimEvent
from semel.testing._simulation.store import Commit, Flaws, SimSeen, SinkKind
from semel.testing._simulation.worker import PermanentError
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
    """The flow, the sink and the promises of a consumer."""

    name: str
    flow: FlowOf
    sink: SinkKind = "keyed"
    quarantine: bool = False
    probe: bool = False
    """Whether the handler has a probe. Its answers are true and final; in quarantine it sometimes cannot tell."""
    journal: bool = False
    in_transaction: bool = False
    parts: tuple[str, ...] = WHOLE
    """The steps of the handler, each with an effect of its own."""
    may_flush: bool = False
    once: bool = True
    """Whether an event never has two effects, even if workers die."""
    may_lose: bool = False
    suppresses: bool = True
    acks: Callable[[Any], bool] = lambda outcome: acknowledges(outcome)  # noqa: PLW0108  # defined below


def acknowledges(outcome: Any) -> bool:
    """Return whether a runner acknowledges: only if the outcome is recorded or has a dead letter."""
    if isinstance(outcome, Done):
        return outcome.recorded
    return isinstance(outcome, (Failed, Unknown, Mismatch, Late))


def task_for(mode: Mode, event: SimEvent, owner: bytes, wait_s: float, flaws: Flaws) -> Task:
    """Return the task of one delivery of an event."""
    claim = Claim(
        event.id,
        owner,
        LEASE_US,
        flaws.window_us,
        journal=event.payload.encode() if mode.journal else None,
        quarantine=mode.quarantine,
    )
    policy = POLICIES[wait_s]
    return Task(claim, _no_handler, replace(policy, probe=_no_probe) if mode.probe else policy)


POLICIES = {
    wait_s: Policy(
        lease_s=LEASE_US / 1e6, wait_s=wait_s, max_attempts=MAX_ATTEMPTS, permanent=(PermanentError,)
    )
    for wait_s in (0.0, 0.4, 2.5)
}
"""Duplicates that do not wait, that wait less than a lease, and that wait long enough to take over."""


def _no_handler() -> None:
    """Stand in for the handler, which the simulated worker plays itself."""


def _no_probe(_inquiry: Inquiry) -> CannotTell:
    """Stand in for the probe, which the simulated worker plays itself."""
    return CannotTell()


def run_leased(_attempt: SimAttempt, task: Task, _flaws: Flaws) -> Flow[Outcome[Any]]:
    """Run the real flow of mode lease."""
    return flows.once(task)


def run_in_steps(attempt: SimAttempt, task: Task, _flaws: Flaws) -> Flow[Outcome[Any]]:
    """Run the real flow of mode lease, with a handler that has its effects in real steps."""
    return play(flows.once(task), handler_of(attempt.event))


def run_marked(_attempt: SimAttempt, task: Task, _flaws: Flaws) -> Flow[Outcome[Any]]:
    """Run the real flow of mode mark: mark, then run."""
    tenant, consumer, key = task.claim.id
    return flows.mark_then_run(Mark(tenant, consumer, [key], task.claim.window_us), task)


def run_observed(attempt: SimAttempt, task: Task, _flaws: Flaws) -> Flow[Outcome[Any]]:
    """Run the real flow of mode observe: run whatever the store answers."""

    def duplicate(_answer: ClaimAnswer) -> None:
        attempt.event.duplicates += 1

    return flows.run_observed(task, duplicate)


def run_in_inbox(attempt: SimAttempt, task: Task, _flaws: Flaws) -> Flow[Outcome[Any]]:
    """Commit mark and effect in one transaction: begin, look, work, commit."""
    seen = yield from SimSeen(task.claim.id)
    if isinstance(seen, Unavailable):
        return seen
    if seen:
        return Done(None, replayed=True, kept=False)
    ran = yield from Invoke(_no_handler)
    if isinstance(ran, Raised):
        return Errored(ran.error, 1)
    committed = yield from Commit(task.claim.id, attempt)
    if isinstance(committed, Unavailable):
        return committed
    return Done(None, replayed=not committed, kept=False)


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(name="inbox", flow=run_in_inbox, in_transaction=True),
        Mode(name="lease-keyed", flow=run_leased, may_flush=True),
        Mode(name="lease-fenced", flow=run_leased, sink="fenced", once=False, may_flush=True),
        Mode(name="lease-plain", flow=run_leased, sink="plain", once=False, may_flush=True),
        Mode(
            name="steps",
            flow=run_in_steps,
            sink="plain",
            parts=("charge", "mail"),
            once=False,
            may_flush=True,
        ),
        Mode(name="quarantine", flow=run_leased, sink="plain", quarantine=True),
        Mode(name="lease-probe", flow=run_leased, sink="plain", probe=True),
        Mode(name="quarantine-probe", flow=run_leased, sink="plain", quarantine=True, probe=True),
        Mode(name="mark", flow=run_marked, sink="plain", may_lose=True),
        Mode(name="observe", flow=run_observed, sink="plain", suppresses=False),
        Mode(name="journal", flow=run_leased, journal=True),
    )
}
"""The modes that the simulation plays, by name."""


def judge(mode: Mode, event: SimEvent) -> None:
    """Raise `Violation` if an event's final state breaks a promise of the mode."""
    if event.kind != "fine":
        if event.effects and event.kind == "permanent":
            raise Violation("twice", f"{event.payload}: failed for good, but there is an effect")
        return
    if not event.happened:
        _without_effect(mode, event)
    if event.repeated and mode.suppresses:
        if mode.once and not event.forgets:
            raise Violation("twice", f"{event.payload}: {event.effects} effects")
        allowed = event.touched + (event.losses + event.forgets) * len(event.parts)
        if event.repeated > allowed:
            raise Violation(
                "twice",
                f"{event.payload}: {event.effects} effects, but faults touched only {event.touched} attempts"
                f" and the store lost it {event.losses} times",
            )
    if any(later <= earlier for earlier, later in zip(event.fences, event.fences[1:], strict=False)):
        raise Violation("zombie", f"{event.payload}: effects with the fences {event.fences}")


def _without_effect(mode: Mode, event: SimEvent) -> None:
    if event.failed:
        if event.grants < MAX_ATTEMPTS:
            raise Violation("gave up", f"{event.payload}: failed after {event.grants} attempts")
    elif mode.journal and not event.grants:
        return  # every listener died before it made a claim: the event was never accepted
    elif not (mode.may_lose and event.touched):
        raise Violation("lost", f"{event.payload}: accepted, but there is no effect")
