"""Processes that run the real flows: they crash at any yield, stall past their lease, and renew their claims."""

from collections.abc import Callable, Generator
from typing import Any

from semel.core.commands import (
    Ask,
    Claim,
    Granted,
    Invoke,
    Lookup,
    Pause,
    Raised,
    Ran,
    Renew,
    Returned,
    Settle,
    Sleep,
    Unwatch,
    Watch,
)
from semel.errors import ClaimLost, NotApplied
from semel.testing._simulation.handler import Leave, part_of
from semel.testing._simulation.referee import SimAttempt
from semel.testing._simulation.store import LATENCY_US, SimSink, SimStore
from semel.testing._simulation.world import CRASH_AFTER, CRASH_BEFORE, FAIR, FATES, LEASE_US, PAUSE, World
from semel.types import Lost, Record, Renewed, Unavailable

MARGIN_US = LEASE_US // 10
"""How long before its deadline a handler treats its claim as lost."""
POLL_US = LEASE_US // 2
"""How often a waiting duplicate polls if no notification comes."""
BACKOFF_US = LEASE_US // 50
COIN = 0.5


class PermanentError(Exception):
    """A permanent error."""


class TransientError(Exception):
    """A transient error."""


class SimRun:
    """One flow in one process, and its current attempt."""

    __slots__ = ("attempt", "finished", "flow", "handling", "part", "seen_fence", "slept", "stage", "worker")

    def __init__(
        self,
        worker: "Worker",
        attempt: SimAttempt,
        flow: Generator[Any, Any, Any],
        finished: Callable[["SimRun", Any], None],
    ) -> None:
        self.worker = worker
        self.attempt = attempt
        self.flow = flow
        self.finished = finished
        self.handling = False
        self.part = ""
        """The step whose effect is next; empty: the handler has no steps."""
        self.stage = 0
        """Grows with each step of the handler; steps of a cancelled handler are dropped."""
        self.slept = 0
        self.seen_fence = 0
        """Fence of the record that was looked up; a probe in quarantine is called for it."""


class Worker:
    """A process with a few deliveries at a time and a clock that is wrong by `skew_us`."""

    def __init__(self, world: World, store: SimStore, sink: SimSink, number: int) -> None:
        self.world = world
        self.store = store
        self.sink = sink
        self.number = number
        self.life = 0
        self.alive = True
        self.paused_until_us = 0
        self.skew_us = world.between(-3 * LEASE_US, 3 * LEASE_US)
        self.stops_at_once = world.random() < COIN
        """Async handlers are cancelled when their claim is lost; sync handlers check before the effect."""
        self.in_transaction = False
        self.runs: list[SimRun] = []
        self.restarted: Callable[[Worker], None] = lambda _worker: None

    # --- life and death ---

    def crash(self) -> None:
        """Crash: all work of this process stops; requests already sent still arrive."""
        for run in self.runs:
            run.attempt.touch()
        self.runs = []
        self.life += 1
        self.alive = False
        if self.world.trace is not None:
            self.world.note(f"w{self.number} dies")
        self.world.at(self.world.between(LEASE_US // 10, LEASE_US * 3 // 2), self._restart)

    def _restart(self) -> None:
        self.alive = True
        self.paused_until_us = 0
        self.restarted(self)

    def pause(self) -> None:
        """Stall, often past the lease."""
        for run in self.runs:
            run.attempt.touch()
        span = self.world.between(LEASE_US // 2, 3 * LEASE_US)
        self.paused_until_us = self.world.now + span
        if self.world.trace is not None:
            self.world.note(f"w{self.number} stalls for {span / LEASE_US:.2f} leases")

    # --- the driver ---

    def start(self, run: SimRun) -> None:
        """Start a flow."""
        self.runs.append(run)
        self._resume(run, None)

    def _resume(self, run: SimRun, answer: Any) -> None:
        """Send the flow its answer, and carry out its next command."""
        world = self.world
        while True:
            try:
                command = run.flow.send(answer)
            except StopIteration as end:
                self._end(run, end.value)
                return
            kind = type(command)
            if kind is Invoke:
                run.part = part_of(command)
                self._invoke(run)
                return
            if kind is Leave:
                answer = Returned(command.value)
                continue
            if kind is Ask:
                self._probe(run)
                return
            if kind is Watch:
                answer = world.now + round(command.wait_s * 1e6)
            elif kind is Unwatch:
                answer = None
            elif kind is Sleep:
                if world.now >= command.watch:
                    answer = False
                    continue
                self._sleep(run, command)
                return
            elif kind is Pause:
                until = (
                    run.attempt.deadline_us
                    if command.owner
                    else run.attempt.started_us + round(command.wait_s * 1e6)
                )
                backoff = min(BACKOFF_US << command.tries, LEASE_US // 4)
                if world.now + backoff >= until:
                    answer = False
                    continue
                world.after(self, backoff, self._resume, run, True)  # noqa: FBT003  # the answer to Pause
                return
            else:
                self._ask(run, command)
                return

    def _end(self, run: SimRun, outcome: Any) -> None:
        run.attempt.over = True
        self.runs.remove(run)
        if self.world.trace is not None:
            self.world.note(f"{run.attempt.name}: {outcome}")
        run.finished(run, outcome)

    def _ask(self, run: SimRun, item: Any) -> None:
        fate = self.world.fate()
        if fate < FAIR and self.world.trace is not None:
            self.world.note(f"{run.attempt.name}: {type(item).__name__.lower()}, {FATES[fate]}")
        if fate == CRASH_BEFORE:
            self.crash()
            return
        if fate == PAUSE:
            self.pause()
            self.world.after(self, 0, self._transmit, run, item, FAIR)
            return
        self._transmit(run, item, fate)
        if fate == CRASH_AFTER:
            self.crash()

    def _transmit(self, run: SimRun, item: Any, fate: int) -> None:
        attempt = run.attempt
        if type(item) is Claim:
            attempt.claim = item
            attempt.sent_us = self.world.now
        self.store.send(self, item, attempt, fate, self.skew_us, self._on_answer, run, item)

    def _on_answer(self, run: SimRun, item: Any, answer: Any) -> None:
        attempt = run.attempt
        if type(answer) is Granted:
            attempt.granted = answer
            attempt.deadline_us = attempt.sent_us + item.lease_us
            self.world.after(self, LEASE_US // 3, self._keep, run, attempt)
        elif type(item) is Settle and type(answer) is not Unavailable:
            attempt.over = True
        elif type(item) is Lookup and type(answer) is Record:
            run.seen_fence = answer.fence
        self._resume(run, answer)

    def _sleep(self, run: SimRun, command: Sleep) -> None:
        run.slept = slept = run.slept + 1
        world = self.world
        due = min(round(command.retry_after_s * 1e6) + 1, POLL_US, max(command.watch - world.now, 1))
        world.after(self, due, self._wake, run, slept)
        if world.weather.notifies and run.attempt.claim is not None:
            life = self.life

            def notify() -> None:
                if self.life == life:
                    world.after(self, world.between(*LATENCY_US), self._wake, run, slept)

            self.store.watchers.setdefault(run.attempt.claim.id, []).append(notify)

    def _wake(self, run: SimRun, slept: int) -> None:
        if run.slept == slept:
            run.slept += 1
            self._resume(run, True)  # noqa: FBT003  # the answer to Sleep

    # --- the keeper ---

    def _keep(self, run: SimRun, attempt: SimAttempt) -> None:
        claim, granted = attempt.claim, attempt.granted
        if attempt.over or attempt.lost or claim is None or granted is None:
            return
        item = Renew(claim.id, claim.owner, granted.fence, claim.lease_us)
        fate = self.world.fate()
        if fate in (CRASH_BEFORE, PAUSE):
            fate = FAIR  # flows and handlers draw these themselves; here they would strike twice as often
        self.store.send(
            self, item, attempt, fate, self.skew_us, self._on_renewed, run, attempt, self.world.now
        )
        if fate == CRASH_AFTER:
            self.crash()

    def _on_renewed(self, run: SimRun, attempt: SimAttempt, sent_us: int, answer: Any) -> None:
        if attempt.over:
            return
        if type(answer) is Renewed:
            attempt.deadline_us = max(attempt.deadline_us, sent_us + LEASE_US)
            self.world.after(self, LEASE_US // 3, self._keep, run, attempt)
        elif type(answer) is Lost or self.world.now >= attempt.deadline_us - MARGIN_US:
            self._on_lost(run, attempt)
        else:
            self.world.after(self, BACKOFF_US, self._keep, run, attempt)

    def _on_lost(self, run: SimRun, attempt: SimAttempt) -> None:
        """Mark the claim as lost: the handler must not have an effect any more."""
        attempt.lost = True
        if run.handling and self.stops_at_once and run.attempt is attempt:
            self._on_end(run, Raised(ClaimLost("reported by the keeper"), lost=True))

    # --- the probe ---

    def _probe(self, run: SimRun) -> None:
        """Call the probe of the sink. Any fault may strike; only in quarantine may the answer be lost."""
        world, claim = self.world, run.attempt.claim
        assert claim is not None
        if world.chance(world.weather.handler_crash):
            self.crash()
            return
        if world.chance(world.weather.handler_pause):
            self.pause()
        silent = claim.quarantine and world.chance(world.weather.sink_lost)
        world.after(self, world.between(*LATENCY_US), self._on_probe, run, silent)

    def _on_probe(self, run: SimRun, silent: bool) -> None:  # noqa: FBT001  # whether the answer is lost
        attempt, world = run.attempt, self.world
        assert attempt.claim is not None
        mine = None if attempt.granted is None else attempt.granted.fence
        if attempt.claim.quarantine:  # about its own attempt, or about the record that it found
            last = run.seen_fence if mine is None else mine
        else:
            assert mine is not None
            last = mine - 1
        answer = self.sink.probe(attempt.event, last)
        if world.trace is not None:
            world.note(f"{attempt.name}: the probe answers {answer}{', answer lost' if silent else ''}")
        if world.chance(world.weather.handler_crash):
            self.crash()
            return
        ran: Ran = Raised(TransientError("no answer")) if silent else Returned(answer)
        world.after(self, world.between(*LATENCY_US), self._resume, run, ran)

    # --- the handler ---

    def _invoke(self, run: SimRun) -> None:
        world = self.world
        run.stage = stage = run.stage + 1
        run.handling = True
        if run.attempt.event.kind == "killer":
            self.crash()
            return
        long = world.chance(world.weather.long_handler)
        delay = world.between(LEASE_US, 3 * LEASE_US) if long else world.between(1_000, LEASE_US // 4)
        world.after(self, delay, self._look, run, stage)

    def _look(self, run: SimRun, stage: int) -> None:
        """Check the claim a last time before the effect; faults between this check and the effect remain possible."""
        if run.stage != stage:
            return
        world, attempt = self.world, run.attempt
        weather = world.weather
        if attempt.granted is not None and (attempt.lost or world.now >= attempt.deadline_us - MARGIN_US):
            attempt.touch()
            self._on_end(run, Raised(ClaimLost("noticed by the handler"), lost=True))
        elif attempt.event.kind == "permanent":
            self._on_end(run, Raised(PermanentError("never")))
        elif attempt.event.kind == "poison":
            self._on_end(run, Raised(NotApplied("never")))
        elif world.chance(weather.error_before):
            attempt.touch()
            self._on_end(
                run, Raised(NotApplied("not now") if world.random() < COIN else TransientError("not now"))
            )
        elif world.chance(weather.handler_crash):
            self.crash()
        else:
            run.stage = stage + 1
            if world.chance(weather.handler_pause):
                self.pause()
            world.after(self, 0, self._act, run, stage + 1)

    def _act(self, run: SimRun, stage: int) -> None:
        if run.stage != stage:
            return
        world, attempt = self.world, run.attempt
        if self.in_transaction:
            world.after(self, 1_000, self._on_effect, run, stage, True)  # noqa: FBT003  # applied, once committed
            return
        there = world.between(*LATENCY_US)
        if world.chance(world.weather.sink_late):
            attempt.touch()
            world.at(world.between(LEASE_US // 5, 3 * LEASE_US), self.sink.apply, attempt, run.part)
            world.after(self, LEASE_US // 5, self._on_effect, run, stage, None)
        elif world.chance(world.weather.sink_lost):
            attempt.touch()
            world.at(there, self.sink.apply, attempt, run.part)
            world.after(self, LEASE_US // 5, self._on_effect, run, stage, None)
        else:
            world.at(there, self._reach_sink, run, stage, self.life)

    def _reach_sink(self, run: SimRun, stage: int, life: int) -> None:
        applied = self.sink.apply(run.attempt, run.part)
        if self.life == life:
            self.world.after(self, self.world.between(*LATENCY_US), self._on_effect, run, stage, applied)

    def _on_effect(self, run: SimRun, stage: int, applied: bool | None) -> None:  # noqa: FBT001  # the sink's answer
        if run.stage != stage:
            return
        world, weather, attempt = self.world, self.world.weather, run.attempt
        if applied is None:
            self._on_end(run, Raised(TransientError("the sink did not answer")))
        elif not applied:
            self._on_end(run, Raised(TransientError("the sink knows a newer fence")))
        elif world.chance(weather.error_after):
            attempt.touch()
            self._on_end(run, Raised(TransientError("too late")))
        elif world.chance(weather.handler_crash):
            self.crash()
        else:
            if world.chance(weather.handler_pause):
                self.pause()
            run.stage = stage + 1
            world.after(self, world.between(100, 20_000), self._return, run, stage + 1)

    def _return(self, run: SimRun, stage: int) -> None:
        if run.stage == stage:
            self._on_end(run, Returned(run.attempt.value))

    def _on_end(self, run: SimRun, ran: Ran) -> None:
        run.stage += 1
        run.handling = False
        self._resume(run, ran)
