"""One storm in one mode: deliver, kill, redeliver, until every message is acknowledged; then count."""

import os
import selectors
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec import Struct, field

from semel.cli.demo.queue import (
    PHASES,
    Ack,
    Arrived,
    Deliver,
    DemoPlan,
    Go,
    Mode,
    Nack,
    Phase,
    Ready,
    WorkerFault,
    from_worker,
)
from semel.cli.demo.worker import LEASE_S, DemoFolder, Order
from semel.testing.redelivery import RedeliveryQueue
from semel.testing.worker_processes import Nursery, WorkerSocket

__all__ = ["DemoProgress", "Storm", "StormError"]

PREFETCH = 4
"""How many deliveries a worker holds: all of them are redelivered when it dies."""
PAUSE_S = LEASE_S * 1.75
TICK_S = 0.05
STALL_S = 30.0
"""After this long without an acknowledgement the demo fails instead of hanging."""
RETRY_MAX_S = 0.1


class StormError(Exception):
    """The demo itself failed; no guarantee was checked."""


class DemoProgress(Struct):
    """Counts so far, for the display and the result."""

    mode: Mode
    events: int
    messages: int
    acked: int = 0
    deliveries: int = 0
    duplicates: int = 0
    replays: int = 0
    pauses: int = 0
    takeovers: int = 0
    kills: Counter[Phase] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    """By event: kills, pauses and lost claims; each may repeat an effect outside the store."""
    answers: dict[str, set[str]] = field(default_factory=dict)
    workers: str = ""
    """One sign per worker: running, waiting to be killed, or stopped."""


class DemoWorker(Struct):
    """One worker as the queue sees it."""

    pid: int
    line: WorkerSocket[Ready | Arrived | Ack | Nack]
    ready: bool = False
    in_hand: set[int] = field(default_factory=set)
    resume_at: float = 0.0
    """When it continues; 0: it is not stopped."""


class Storm:
    """Runs one storm. `step` is called about twenty times a second."""

    def __init__(
        self,
        mode: Mode,
        plan: DemoPlan,
        nursery: Nursery,
        folder: Path,
        *,
        step: Callable[[DemoProgress], None],
    ) -> None:
        self._plan = plan
        self._nursery = nursery
        self._folder = folder
        self._step = step
        self._queue = RedeliveryQueue(plan.sent)
        self._selector = selectors.DefaultSelector()
        self._crew: dict[int, DemoWorker] = {}
        self._cut_off: set[str] = set()
        self._attempts: set[tuple[str, int]] = set()
        self._complaint = ""
        self.place: DemoFolder = DemoFolder(folder, mode)
        self.progress: DemoProgress = DemoProgress(mode, len(plan.events), len(plan.sent))

    def run(self, workers: int) -> DemoProgress:
        """Run the whole storm. Raises `StormError` when it stalls. Ends every worker on exit."""
        self.place.prepare()
        try:
            for _ in range(workers):
                self._start()
            self._loop()
        finally:
            for man in list(self._crew.values()):
                self._end(man)
            self._selector.close()
        return self.progress

    def _loop(self) -> None:
        acked, stalled_at = 0, time.monotonic() + STALL_S
        while self._queue.left or any(man.resume_at for man in self._crew.values()):
            now = time.monotonic()
            if self.progress.acked > acked:
                acked, stalled_at = self.progress.acked, now + STALL_S
            if now > stalled_at:
                raise StormError(f"no delivery was acknowledged for {STALL_S:g} s. {self._complaint}")
            due = self._queue.tick(now)
            self._resume(now)
            self._dispatch(now)
            for key, _ in self._selector.select(min(TICK_S, max(0.0, (due or now + 1) - now))):
                self._hear(self._crew[key.data])
            self._show()

    # --- workers ---

    def _start(self) -> None:
        pid, end = self._nursery.start(Order(str(self._folder), self.progress.mode))
        self._crew[pid] = DemoWorker(pid, WorkerSocket(end, from_worker))
        self._selector.register(end, selectors.EVENT_READ, pid)

    def _end(self, man: DemoWorker) -> None:
        """Kill it with -9, which no handler can catch and which also ends stopped processes."""
        with suppress(ProcessLookupError):
            os.kill(man.pid, signal.SIGKILL)
        self._selector.unregister(man.line.end)
        man.line.end.shutdown(socket.SHUT_RDWR)
        man.line.end.close()
        del self._crew[man.pid]

    def _replace(self, man: DemoWorker) -> None:
        self._end(man)
        self._queue.abandon(man.pid)
        self._start()

    def _resume(self, now: float) -> None:
        for man in self._crew.values():
            if man.resume_at and man.resume_at <= now:
                man.resume_at = 0.0
                os.kill(man.pid, signal.SIGCONT)
                _say(man, Go())

    def _dispatch(self, now: float) -> None:
        for man in self._crew.values():
            while man.ready and not man.resume_at and len(man.in_hand) < PREFETCH:
                number = self._queue.take(man.pid, now)
                if number is None:
                    return
                event = self._queue.events[number]
                man.in_hand.add(number)
                _say(man, Deliver(number, event, bool(self._plan.hits.get(event))))
        self.progress.deliveries = self._queue.deliveries

    # --- messages of workers ---

    def _hear(self, man: DemoWorker) -> None:
        try:
            for message in man.line.hear():
                match message:
                    case Ready():
                        man.ready = True
                    case Arrived():
                        self._on_arrival(man, message)
                    case Ack():
                        self._on_ack(man, message)
                    case Nack():
                        self._on_nack(man, message)
                if man.pid not in self._crew:
                    return
        except EOFError:
            self._complaint = "A worker ended by itself."
            self._replace(man)

    def _on_arrival(self, man: DemoWorker, arrived: Arrived) -> None:
        event = self._queue.events[arrived.number]
        self._note_attempt(event, arrived.attempt)
        if arrived.phase == "claimed":
            self._note_second_try(event)
        hit = self._due(event, arrived.phase)
        if hit is None:
            _say(man, Go())
            return
        self._plan.hits[event].remove(hit)
        self.progress.hits[event] += 1
        if hit.kind == "pause":
            os.kill(man.pid, signal.SIGSTOP)
            man.resume_at = time.monotonic() + PAUSE_S
            self.progress.pauses += 1
            return
        if arrived.phase in PHASES[:2]:
            self._cut_off.add(event)
        self.progress.kills[arrived.phase] += 1
        self._replace(man)

    def _due(self, event: str, phase: Phase) -> WorkerFault | None:
        """Return the first remaining hit of this event if it is for this phase."""
        left = self._plan.hits.get(event)
        return left[0] if left and left[0].phase == phase else None

    def _on_ack(self, man: DemoWorker, ack: Ack) -> None:
        event = self._queue.events[ack.number]
        man.in_hand.discard(ack.number)
        self._note_attempt(event, ack.attempt)
        if ack.duplicate:
            self.progress.duplicates += 1
            self.progress.replays += bool(ack.answer)
        else:
            self._note_second_try(event)
        self.progress.answers.setdefault(event, set()).add(ack.answer)
        if self._plan.loses_ack():
            self._queue.nack(ack.number, time.monotonic())
        else:
            self._queue.ack(ack.number)
        self.progress.acked = self.progress.messages - self._queue.left

    def _on_nack(self, man: DemoWorker, nack: Nack) -> None:
        man.in_hand.discard(nack.number)
        if nack.lost:
            self.progress.hits[self._queue.events[nack.number]] += 1
        self._complaint = nack.why or self._complaint
        self._queue.nack(nack.number, time.monotonic() + min(nack.retry_after_s, RETRY_MAX_S))

    def _note_attempt(self, event: str, attempt: int) -> None:
        """Note an attempt; one that is not the first is a takeover."""
        if attempt > 1 and (event, attempt) not in self._attempts:
            self._attempts.add((event, attempt))
            self.progress.takeovers += 1

    def _note_second_try(self, event: str) -> None:
        """Note a second attempt. Without leases the store counts none: the queue knows which workers it killed."""
        if event in self._cut_off and self.progress.mode == "inbox":
            self.progress.takeovers += 1
        self._cut_off.discard(event)

    def _show(self) -> None:
        signs = {True: "paused", False: "working"}
        self.progress.workers = " ".join(
            signs[bool(man.resume_at)] if man.ready else "starting" for man in self._crew.values()
        )
        self._step(self.progress)


def _say(man: DemoWorker, message: Deliver | Go) -> None:
    """Send a message. The next read notices a worker that has ended."""
    with suppress(ConnectionError):
        man.line.say(message)
