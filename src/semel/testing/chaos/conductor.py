"""Run a handler in worker processes, and make faults happen to them, round by round."""

import os
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec import Struct, field

from semel.testing.chaos.feeds import Feed
from semel.testing.chaos.ledger import ChaosLedger, FaultNote, HandlerCall, Stage, WorkerLedger
from semel.testing.chaos.messages import (
    ChaosOrder,
    DeliveriesReceived,
    DeliveryAnswer,
    FromConductor,
    FromWorker,
    Halted,
    Handed,
    HandlerSource,
    Lagged,
    Proceed,
    RunBegan,
    RunEnded,
    RunReached,
    Watched,
    from_worker,
)
from semel.testing.chaos.plan import PlannedFault, draw_round
from semel.testing.chaos.settings import ChaosFailed, ChaosSettings, Sample
from semel.testing.chaos.stores import StoreFaults
from semel.testing.worker_processes import Nursery, WorkerSocket

__all__ = ["ChaosProgress", "Conductor"]

PAUSE_LEASES = 1.75
"""How long a worker is stopped: well past its lease."""
TICK_S = 0.02
STALL_S, STALL_LEASES = 60.0, 15.0
"""After this long without an acknowledgement the run fails instead of hanging."""
STARTS_FAILED_MAX = 3
DEATHS_MAX, DEATHS_WITHOUT_RETURN_MAX = 20, 5
"""A handler that has not returned once gets less patience."""
ERRORS_MAX = 50
"""A handler that raised in so many runs, and has not returned once, does not take these events at all."""
LOG_CHARS = 2000
SETTLE_S = 30.0
"""How long to wait at the end for handlers that still run."""
RECENT_S = 1.0
LAST_WORDS_S = 2.0


class ChaosProgress(Struct):
    """Counts so far, for a display."""

    rounds: int = 0
    share: float = 0.0
    events: int = 0
    acked: int = 0
    messages: int = 0
    deliveries: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    workers: str = ""
    """One word per worker: working, paused, starting."""


class WorkerProcess(Struct):
    """One worker as the conductor sees it."""

    pid: int
    link: WorkerSocket[FromWorker]
    state: WorkerLedger
    ready: bool = False
    resume_at: float = 0.0
    """When it goes on; 0: it is not stopped."""
    pause: FaultNote | None = None
    recent: deque[tuple[float, str]] = field(default_factory=deque)
    """Keys answered a short while ago."""


class Conductor:
    """Runs the rounds of one chaos run. `step` is called many times a second."""

    def __init__(
        self,
        settings: ChaosSettings,
        feed: Feed,
        faults: StoreFaults,
        nursery: Nursery,
        log: Path,
        *,
        source: str,
        run_id: str,
        step: Callable[[ChaosProgress], None],
    ) -> None:
        self._settings = settings
        self._feed = feed
        self._faults = faults
        self._nursery = nursery
        self._log = log
        self._run_id = run_id
        self._step = step
        self._sample = Sample(settings.sample)
        self._order = ChaosOrder(
            handler=settings.handler,
            store=faults.url,
            mode=settings.mode,
            consumer=settings.consumer,
            lease_s=settings.lease_s,
            source=source,
            visibility_s=settings.visibility_s,
            concurrency=settings.concurrency,
            effects_table=settings.mode == "inbox" and not settings.effects,
            path=[entry or str(Path.cwd()) for entry in ["", *sys.path]],
        )
        self._selector = selectors.DefaultSelector()
        self._crew: dict[int, WorkerProcess] = {}
        self._planned: dict[str, list[PlannedFault]] = {}
        self._outage: FaultNote | None = None
        self._last_outage: FaultNote | None = None
        self._began = time.monotonic()
        self._starts_failed = 0
        self._deaths = 0
        self._returned = 0
        self._errors = 0
        self._last_error = ""
        self.ledger: ChaosLedger = ChaosLedger()
        self.progress: ChaosProgress = ChaosProgress()

    def run(self) -> list[str]:
        """Run all rounds. Returns the keys of the events. Raises `ChaosFailed`. Ends every worker on exit."""
        keys: list[str] = []
        try:
            for _ in range(self._settings.workers):
                self._start()
            while not self._is_over():
                keys += self._run_round(self.progress.rounds)
                self.progress.rounds += 1
            self._settle()
        finally:
            for process in list(self._crew.values()):
                self._end(process)
            self._selector.close()
        return keys

    @property
    def now_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    def _is_over(self) -> bool:
        done, wanted = self.progress.rounds, self._settings.rounds
        return done >= wanted if wanted else done > 0 and self.now_s >= self._settings.minutes * 60

    # --- a round ---

    def _run_round(self, number: int) -> list[str]:
        plan = draw_round(
            self._settings.seed,
            number,
            self._settings.events,
            pause_leases=PAUSE_LEASES,
            cuts=self._faults.cuts,
            replies=self._faults.replies,
            kinds=self._settings.faults,
        )
        keys = {event: f"chaos-{self._run_id}-{event:06d}" for event in plan.events}
        self._planned = {keys[event]: list(faults) for event, faults in plan.faults.items()}
        for process in self._crew.values():
            self._say(process, Watched(list(self._planned)))
        self._feed.send([(keys[event], self._sample(keys[event], event)) for event in plan.sent])
        self.progress.events += len(keys)
        self.progress.messages += len(plan.sent)
        self._loop_until(lambda: not self._feed.left and not self._is_paused, "message is not acknowledged")
        self._faults.restore()
        self._watch_outage()
        return list(keys.values())

    @property
    def _is_paused(self) -> bool:
        return any(process.resume_at for process in self._crew.values())

    def _settle(self) -> None:
        """Wait for handlers that still run: those of paused workers whose events others have done meanwhile."""
        until = time.monotonic() + SETTLE_S
        self._loop_until(
            lambda: not self.ledger.running() or time.monotonic() >= until, "handler does not end"
        )

    def _loop_until(self, done: Callable[[], bool], what: str) -> None:
        patience_s = max(STALL_S, STALL_LEASES * self._settings.lease_s)
        left, stalled_at = self._feed.left, time.monotonic() + patience_s
        while not done():
            now = time.monotonic()
            if self._feed.left != left:
                left, stalled_at = self._feed.left, now + patience_s
            if now > stalled_at:
                raise ChaosFailed(f"a {what} for {patience_s:g} s.\n{self._reasons()}")
            self._refuse_only_errors()
            self._feed.tick(now)
            self._resume(now)
            self._dispatch(now)
            self._watch_outage()
            for key, _ in self._selector.select(TICK_S):
                if key.data in self._crew:
                    self._hear(self._crew[key.data])
            self._show()

    def _dispatch(self, now: float) -> None:
        prefetch = self._settings.concurrency
        for process in self._crew.values():
            free = prefetch - len(process.state.in_hand)
            if process.ready and not process.resume_at and free > 0:
                handed = self._feed.deliveries_for(process.pid, free, now)
                if handed:
                    # It holds them from now on, even if it dies before it reports them.
                    process.state.in_hand.update((each.position, each.key) for each in handed)
                    self._say(process, Handed(handed))

    def _show(self) -> None:
        progress, settings = self.progress, self._settings
        progress.acked = progress.messages - self._feed.left
        in_round = 1 - self._feed.left / max(1, progress.messages)
        progress.share = (
            min(1.0, (progress.rounds + in_round) / settings.rounds)
            if settings.rounds
            else min(1.0, self.now_s / max(1e-9, settings.minutes * 60))
        )
        progress.deliveries = sum(self.ledger.deliveries.values())
        progress.workers = " ".join(
            "starting" if not each.ready else "paused" if each.resume_at else "working"
            for each in self._crew.values()
        )
        self._step(progress)

    # --- workers ---

    def _start(self) -> None:
        pid, end = self._nursery.start(self._order)
        state = WorkerLedger(len(self.ledger.workers), self.now_s)
        self.ledger.workers.append(state)
        self._crew[pid] = WorkerProcess(pid, WorkerSocket(end, from_worker), state)
        self._selector.register(end, selectors.EVENT_READ, pid)
        self._say(self._crew[pid], Watched(list(self._planned)))

    def _say(self, process: WorkerProcess, message: FromConductor) -> None:
        """Send a message. The next read notices a worker that has ended."""
        with suppress(OSError):
            process.link.say(message)

    def _end(self, process: WorkerProcess) -> None:
        """Kill it with -9, which also ends stopped processes; read what it said before."""
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        self._selector.unregister(process.link.end)
        process.link.end.settimeout(LAST_WORDS_S)  # a child of the handler may hold the other end
        with suppress(EOFError, OSError):
            while True:
                for message in process.link.hear():
                    self._on_message(process, message)
        process.link.end.close()
        process.state.ended_s = self.now_s
        for call in process.state.calls.values():
            if call.ended_s is None:
                call.cut_s = self.now_s
        del self._crew[process.pid]

    def _replace(self, process: WorkerProcess) -> None:
        self._feed.abandon(process.pid)
        self._start()

    def _resume(self, now: float) -> None:
        for process in self._crew.values():
            if process.resume_at and process.resume_at <= now:
                process.resume_at = 0.0
                if process.pause is not None:
                    process.pause.lasted_s = self.now_s - process.pause.at_s
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
                process.state.halted = None
                self._say(process, Proceed())

    def _on_own_death(self, process: WorkerProcess) -> None:
        """Handle a worker that ended by itself: it could not start, or its handler ended the process."""
        took_part = bool(process.state.calls)
        note = FaultNote("died by itself", self.now_s, process.state.number, hit=process.state.stages())
        self._end(process)
        self._starts_failed += not took_part
        self._deaths += 1
        deaths_max = DEATHS_MAX if self._returned else DEATHS_WITHOUT_RETURN_MAX
        if self._starts_failed >= STARTS_FAILED_MAX or self._deaths >= deaths_max:
            raise ChaosFailed(f"the workers end by themselves.\n{self._log_tail()}", usable=took_part)
        if took_part:
            self._note(note)
        self._replace(process)

    def _refuse_only_errors(self) -> None:
        """Raise `ChaosFailed` for a handler that raises in every run."""
        if not self._returned and self._errors >= ERRORS_MAX:
            raise ChaosFailed(
                f"the handler raised in each of {self._errors} runs, at last {self._last_error}.\n"
                "It gets what a handler of semel consume gets: annotate the parameter, such as order: dict, to get the"
                " body decoded."
            )

    def _reasons(self) -> str:
        """Return what may explain that nothing moves on."""
        slow_s = max((note.lasted_s for note in self.ledger.faults if note.kind == "store slow"), default=0.0)
        reasons = [self._log_tail()]
        if slow_s:
            reasons.insert(0, f"The store took {slow_s:.1f} s for one answer; a longer lease helps.")
        if self._last_error:
            reasons.insert(0, f"The handler's last error: {self._last_error}")
        return "\n".join(reasons).strip()

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-LOG_CHARS:].strip()

    # --- messages of workers ---

    def _hear(self, process: WorkerProcess) -> None:
        try:
            messages = list(process.link.hear())
        except EOFError:
            self._on_own_death(process)
            return
        # One thread of a worker halts at a time. What the others said meanwhile counts before a kill.
        halts = [message for message in messages if isinstance(message, Halted)]
        for message in messages:
            self._on_message(process, message)
        for halted in halts:
            if process.pid in self._crew:
                self._on_halt(process, halted)

    def _on_message(self, process: WorkerProcess, message: FromWorker) -> None:
        state = process.state
        match message:
            case HandlerSource(file, first, last):
                process.ready = True
                self.ledger.file, self.ledger.line_first, self.ledger.line_last = file, first, last
            case DeliveriesReceived(deliveries):
                for position, key in deliveries:
                    state.in_hand[position] = key
                    self.ledger.deliveries[key] = self.ledger.deliveries.get(key, 0) + 1
            case RunBegan(run, key, attempt):
                self._starts_failed = 0
                call = HandlerCall(key, state.number, attempt, self.now_s)
                state.calls[run] = call
                self.ledger.calls.setdefault(key, []).append(call)
            case RunReached(run, line):
                state.calls[run].lines.append(line)
            case RunEnded(run, error):
                state.calls[run].ended_s = self.now_s
                state.calls[run].error = error
                self._returned += not error
                self._errors += bool(error)
                self._last_error = error or self._last_error
            case DeliveryAnswer():
                self._on_answer(process, message)
            case Lagged(seconds, store):
                self._on_lag(process, seconds, store=store)
            case Halted():
                pass  # see `_hear`; or it was killed while it waited

    def _on_answer(self, process: WorkerProcess, answered: DeliveryAnswer) -> None:
        state = process.state
        if answered.how == "dead":
            for position in answered.positions:
                self.ledger.dead[state.in_hand.get(position, "")] = answered.reason
            return
        self._feed.answer(process.pid, answered, time.monotonic())
        if answered.how in ("extend", "acking"):
            return
        for position in answered.positions:
            key = state.in_hand.pop(position, None)
            if key is not None:
                process.recent.append((self.now_s, key))
                ended = [
                    run for run, call in state.calls.items() if call.key == key and call.ended_s is not None
                ]
                for run in ended:
                    del state.calls[run]
        while process.recent and process.recent[0][0] < self.now_s - RECENT_S - self._settings.lease_s:
            process.recent.popleft()

    def _on_lag(self, process: WorkerProcess, seconds: float, *, store: bool) -> None:
        """Note a stall that nobody planned: a busy computer, a slow store, a handler that blocks the event loop."""
        if process.pause is not None and process.pause.end_s >= self.now_s - RECENT_S:
            return  # that was the planned pause
        begin = self.now_s - seconds
        planned = self._last_outage
        if store and planned and (planned is self._outage or planned.end_s >= begin - RECENT_S):
            for key, stage in process.state.stages().items():
                planned.hit.setdefault(key, stage)
            return
        hit: dict[str, Stage] = {key: "returned" for at, key in process.recent if at >= begin}
        hit |= process.state.stages()
        kind = "store slow" if store else "stall"
        self._note(FaultNote(kind, max(0.0, begin), process.state.number, lasted_s=seconds, hit=hit))

    # --- faults ---

    def _on_halt(self, process: WorkerProcess, halted: Halted) -> None:
        process.state.halted = (halted.key, halted.phase)
        fault = self._due(halted)
        if fault is None:
            process.state.halted = None
            self._say(process, Proceed())
            return
        self._planned[halted.key].remove(fault)
        note = FaultNote(fault.kind, self.now_s, process.state.number, halted.key, halted.phase, halted.line)
        seconds = fault.leases * self._settings.lease_s
        match fault.kind:
            case "kill":
                self._kill(process, note, halted)
                return
            case "pause":
                os.kill(process.pid, signal.SIGSTOP)
                process.resume_at = time.monotonic() + seconds
                process.pause = note
                note.hit = process.state.stages()
                self._note(note)
                return
            case "store cut off":
                self._faults.cut_off(seconds)
                self._open_outage(note)
            case "reply lost":
                self._faults.lose_reply()
                self._open_outage(note)
            case "ack lost":
                self._feed.lose_ack(halted.key)
                note.hit = {halted.key: "recorded"}
                self._note(note)
        process.state.halted = None
        self._say(process, Proceed())

    def _due(self, halted: Halted) -> PlannedFault | None:
        """Return the fault that is planned for this point. One between lines also hits at the handler's end."""
        for fault in self._planned.get(halted.key, ()):
            if fault.kind == "ack lost" and not self._feed.loses_acks:
                continue
            if fault.phase == halted.phase and halted.share >= fault.share:
                return fault
            if fault.phase == "line" and halted.phase == "returned":
                return fault
        return None

    def _kill(self, process: WorkerProcess, note: FaultNote, halted: Halted) -> None:
        self._end(process)
        note.hit = process.state.stages()
        if halted.run in process.state.calls:
            process.state.calls[halted.run].halted_line = halted.line
        self._note(note)
        self._replace(process)

    def _open_outage(self, note: FaultNote) -> None:
        """Note a fault of the store; every event that is in hand while it lasts is hit."""
        if self._outage is not None:
            self._close_outage()
        self._outage = note
        self._last_outage = note
        self._note(note)
        self._watch_outage()

    def _watch_outage(self) -> None:
        if self._outage is None:
            return
        for process in self._crew.values():
            for key, stage in process.state.stages().items():
                self._outage.hit.setdefault(key, stage)
        if not self._faults.active:
            self._close_outage()

    def _close_outage(self) -> None:
        assert self._outage is not None
        self._outage.lasted_s = self.now_s - self._outage.at_s
        self._outage = None

    def _note(self, note: FaultNote) -> None:
        self.ledger.faults.append(note)
        self.progress.faults[note.kind] = self.progress.faults.get(note.kind, 0) + 1
