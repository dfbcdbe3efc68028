"""Sources of deliveries: a queue that sends until it is acknowledged, and a socket that sends only once."""

from collections.abc import Callable
from typing import Any

from semel.core import flows
from semel.core.commands import Scan
from semel.core.settlement import Task
from semel.testing._simulation.modes import Mode, task_for
from semel.testing._simulation.referee import Referee, SimAttempt, SimEvent
from semel.testing._simulation.store import Flaws
from semel.testing._simulation.worker import SimRun, Worker
from semel.testing._simulation.world import LEASE_US, World
from semel.types import Busy, Id, Record

SLOTS = 2
"""Deliveries that one process handles at a time."""
DUPLICATE_ODDS = 0.2
ACK_LOST_ODDS = 0.05
QUIET_US = 5 * LEASE_US
"""After this time every worker that stalled while it handled an event runs again."""
WAITS_S = (0.0, 0.4, 2.5)


class SimMessage:
    """One copy of an event in the queue."""

    __slots__ = ("acked", "event", "visible_us")

    def __init__(self, event: SimEvent, visible_us: int) -> None:
        self.event = event
        self.visible_us = visible_us
        """After this time without an ack the copy is sent again, even if a worker handles it."""
        self.acked = False


class SimSource:
    """The base of both sources: chooses a worker for each delivery and the owner of its claim."""

    def __init__(
        self, world: World, referee: Referee, mode: Mode, flaws: Flaws, workers: list[Worker]
    ) -> None:
        self.world = world
        self.referee = referee
        self.mode = mode
        self.flaws = flaws
        self.workers = workers
        self.deliveries = 0
        for worker in workers:
            worker.in_transaction = mode.in_transaction

    def attempt(self, worker: Worker, event: SimEvent) -> SimAttempt:
        """Return a new attempt for a delivery."""
        self.deliveries += 1
        number = worker.number * 1000 + worker.life if self.flaws.owner_per_process else self.deliveries
        owner = (number << 64).to_bytes(16, "big")
        return SimAttempt(
            event, owner, f"w{worker.number} {event.payload} #{self.deliveries}", self.world.now
        )

    def run(self, worker: Worker, event: SimEvent, on_end: Callable[[SimRun, Any], None]) -> None:
        """Start the flow of a delivery in a worker."""
        attempt = self.attempt(worker, event)
        wait_s = WAITS_S[int(self.world.random() * len(WAITS_S))]
        task = task_for(self.mode, event, attempt.owner, wait_s, self.flaws)
        worker.start(SimRun(worker, attempt, self.mode.flow(attempt, task, self.flaws), on_end))


class SimQueue(SimSource):
    """At least once: each copy is sent again until it is acknowledged, and sometimes without a reason."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.messages: list[SimMessage] = []

    def publish(self, event: SimEvent, delay_us: int) -> None:
        """Add an event to the queue."""
        message = SimMessage(event, self.world.between(LEASE_US // 2, 4 * LEASE_US))
        self.messages.append(message)
        self.world.at(delay_us, self._deliver, message)

    def _deliver(self, message: SimMessage) -> None:
        """Deliver the message to a worker, and check it again after its visibility time."""
        world = self.world
        free = [worker for worker in self.workers if worker.alive and len(worker.runs) < SLOTS]
        if not free:
            world.at(world.between(LEASE_US // 20, LEASE_US // 5), self._again, message)
            return
        worker = free[int(world.random() * len(free))]
        if world.chance(DUPLICATE_ODDS):
            world.at(world.between(0, 4 * LEASE_US), self._deliver, message)
        world.at(message.visible_us, self._again, message)
        world.after(worker, 0, self._begin, worker, message)

    def _again(self, message: SimMessage) -> None:
        if not message.acked:
            self._deliver(message)

    def _begin(self, worker: Worker, message: SimMessage) -> None:
        def on_end(run: SimRun, outcome: Any) -> None:
            self._on_end(run, outcome, message)

        message.acked = message.acked or self.flaws.ack_on_receipt
        self.run(worker, message.event, on_end)

    def _on_end(self, run: SimRun, outcome: Any, message: SimMessage) -> None:
        world = self.world
        if self.mode.acks(outcome):
            if world.chance(world.weather.handler_crash):
                run.worker.crash()  # done, and not yet acknowledged
                return
            self._check(run, outcome, message)
            if not world.chance(ACK_LOST_ODDS):
                message.acked = True
        else:
            after = round(outcome.retry_after_s * 1e6) if isinstance(outcome, Busy) else 0
            world.at(after + world.between(1_000, LEASE_US // 5), self._again, message)

    def _check(self, run: SimRun, outcome: Any, message: SimMessage) -> None:
        if self.mode.suppresses:
            self.referee.on_ack(run.attempt, outcome)
            self.referee.on_outcome(message.event, outcome)
        else:
            self.referee.on_observed_run(run.attempt, outcome)

    def unfinished_events(self) -> list[str]:
        """Return the events that were never acknowledged."""
        return [message.event.payload for message in self.messages if not message.acked]


class Socket(SimSource):
    """At most once: only workers that listen at that moment get the event; a sweep runs orphans."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.events: list[SimEvent] = []
        self.sweep_until_us = 0
        for worker in self.workers:
            worker.restarted = self._listen

    def publish(self, event: SimEvent, delay_us: int) -> None:
        """Send an event to all workers that listen now. It is never sent again."""
        self.events.append(event)
        self.world.at(delay_us, self._broadcast, event)

    def _broadcast(self, event: SimEvent) -> None:
        for worker in self.workers:
            if worker.alive:
                self.world.after(
                    worker, self.world.between(0, LEASE_US // 10), self.run, worker, event, _ignore_outcome
                )

    def listen(self, until_us: int) -> None:
        """Let every worker sweep for orphans until that time."""
        self.sweep_until_us = until_us
        for worker in self.workers:
            if worker.alive:
                self._listen(worker)

    def _listen(self, worker: Worker) -> None:
        self.world.after(worker, self.world.between(LEASE_US // 2, LEASE_US), self._sweep, worker)

    def _sweep(self, worker: Worker) -> None:
        fair = self.world.now >= self.world.faults_until + QUIET_US
        if self.world.now >= self.sweep_until_us or (fair and not self.unfinished_events()):
            return
        self._listen(worker)
        run = SimRun(worker, self.attempt(worker, self.events[0]), iter(()), _ignore_outcome)  # type: ignore[arg-type]

        def task(record: Record) -> Task:
            run.attempt.over = True
            run.attempt = self.attempt(worker, self.event(record.id))
            return task_for(self.mode, run.attempt.event, run.attempt.owner, 0.0, self.flaws)

        run.flow = flows.sweep(Scan(orphaned=True, limit=4), task)
        worker.start(run)

    def event(self, record_id: Id) -> SimEvent:
        """Return the event of a journaled record."""
        return self.referee.events[record_id]

    def unfinished_events(self) -> list[str]:
        """Return the events that were accepted and are not done."""
        return [event.payload for event in self.events if event.grants and not event.completed]


def _ignore_outcome(run: SimRun, outcome: Any) -> None:
    """Do nothing: a socket takes no ack, and the journal holds events that are not done."""
