"""One seed from beginning to end: two phases with faults, and the checks after each."""

from msgspec import Struct

from semel.testing._simulation.modes import Mode, judge
from semel.testing._simulation.referee import Referee, SimEvent
from semel.testing._simulation.source import SimQueue, Socket
from semel.testing._simulation.store import Flaws, SimSink, SimStore
from semel.testing._simulation.worker import Worker
from semel.testing._simulation.world import FAULTS_US, FINISH_US, LEASE_US, WINDOW_US, Violation, World

WORKERS = 3
KEYS = 6
KEYS_AGAIN = 3
"""How many keys are used again for new events after their window."""
REPEAT_ODDS = 0.3
"""The probability that a producer sends the same event in two messages."""
AGAIN_ODDS = 0.35


class SimResult(Struct, kw_only=True):
    """The result of one seed."""

    seed: int
    steps: int = 0
    events: int = 0
    deliveries: int = 0
    effects: int = 0
    repeated: int = 0
    """Effects beyond the first of each event; only events of kind `fine` count."""
    lost: int = 0
    given_up: int = 0
    violation: Violation | None = None


class Simulation:
    """The simulation of one seed of a mode, with the flaws of a mutant if any."""

    def __init__(
        self, mode: Mode, seed: int, *, flaws: Flaws, harm_only: bool = False, trace: list[str] | None = None
    ) -> None:
        self.mode = mode
        self.world = world = World(seed, may_flush=mode.may_flush, trace=trace)
        self.referee = Referee(world, harm_only=harm_only)
        self.store = SimStore(world, self.referee, flaws)
        self.sink = SimSink(world, mode.sink, flaws)
        workers = [Worker(world, self.store, self.sink, number) for number in range(WORKERS)]
        kind = Socket if mode.journal else SimQueue
        self.source = kind(world, self.referee, mode, flaws, workers)
        self.events: list[SimEvent] = []
        self.result = SimResult(seed=seed)

    def play(self) -> SimResult:
        """Run the seed and return its result. A broken promise is part of the result and is not raised."""
        world, result = self.world, self.result
        try:
            self._phase(KEYS, FAULTS_US)
            if world.random() < AGAIN_ODDS:
                self._let_windows_end()
                self._phase(KEYS_AGAIN, FAULTS_US // 2)
        except Violation as violation:
            result.violation = violation
            world.note(f"VIOLATION {violation}")
        fine = [event for event in self.events if event.kind == "fine"]
        result.steps = world.steps
        result.events = len(self.events)
        result.deliveries = self.source.deliveries
        result.effects = sum(event.effects for event in fine)
        result.repeated = sum(event.repeated for event in fine)
        result.given_up = sum(event.failed for event in fine)
        result.lost = sum(not event.happened and not event.failed and event.grants > 0 for event in fine)
        if not self.mode.journal:
            result.lost = sum(not event.happened and not event.failed for event in fine)
        return result

    def _phase(self, keys: int, faults_us: int) -> None:
        world = self.world
        world.faults_until = world.now + faults_us
        phase = [self._event(number) for number in range(keys)]
        for event in phase:
            for _ in range(2 if world.random() < REPEAT_ODDS else 1):
                self.source.publish(event, world.between(0, faults_us // 2))
        self._nemesis(faults_us)
        self._finish(faults_us)
        if self.mode.quarantine:
            again = [event for event in phase if self.store.resolve(event)]
            for event in again:
                self.source.publish(event, 0)
            self._finish(0)
        for event in phase:
            judge(self.mode, event)

    def _event(self, number: int) -> SimEvent:
        world = self.world
        kind = "fine"
        if (
            self.mode.suppresses
            and not self.mode.in_transaction
            and not self.mode.may_lose
            and world.chance(world.weather.poison)
        ):
            # An event that dies there is not run again.
            unasked = self.mode.quarantine and not self.mode.probe
            kinds = ("permanent", "poison") if unasked else ("permanent", "poison", "killer")
            kind = kinds[int(world.random() * len(kinds))]
        event = SimEvent(("", "sim", f"k{number}"), f"e{len(self.events)}", kind, self.mode.parts)
        self.events.append(event)
        self.referee.events[event.id] = event
        return event

    def _nemesis(self, faults_us: int) -> None:
        """Schedule outages, steps of the store's clock, purges and data losses."""
        world, store = self.world, self.store
        weather = world.weather
        for _ in range(weather.outages):
            world.at(world.between(0, faults_us), self._outage)
        for _ in range(weather.steps_back):
            world.at(world.between(0, faults_us), self._step_back)
        for _ in range(2):
            world.at(world.between(0, faults_us), store.purge)
        for _ in range(weather.flushes):
            world.at(world.between(0, faults_us), store.flush)

    def _outage(self) -> None:
        span = self.world.between(LEASE_US // 5, 2 * LEASE_US)
        self.store.down_until_us = self.world.now + span
        if self.world.trace is not None:
            self.world.note(f"the store is out of reach for {span / LEASE_US:.2f} leases")

    def _step_back(self) -> None:
        span = self.world.between(0, LEASE_US // 2)
        self.store.offset_us -= span
        if self.world.trace is not None:
            self.world.note(f"the store's clock steps back by {span / LEASE_US:.2f} leases")

    def _finish(self, faults_us: int) -> None:
        until = self.world.now + faults_us + FINISH_US
        if isinstance(self.source, Socket):
            self.source.listen(until)
        self.world.run(until)
        self.world.faults_until = 0
        self.store.down_until_us = 0
        if left := self.source.unfinished_events():
            raise Violation("unfinished", f"{', '.join(left)} long after the faults stopped")

    def _let_windows_end(self) -> None:
        self.world.now += 2 * WINDOW_US
        self.sink.forget()
        self.world.note("the windows are over; the same keys come as new events")
