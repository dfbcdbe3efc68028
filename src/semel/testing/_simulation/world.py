"""Virtual time, one queue of future events, and one seeded random generator."""

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any, Protocol

START_US = 1_000_000_000_000
"""Any date will do; a fence is never zero."""
LEASE_US = 1_000_000
WINDOW_US = 150 * LEASE_US
"""Longer than one whole phase, so that within a phase no record expires."""
FAULTS_US = 8 * LEASE_US
"""How long faults occur in a phase; after that everything must finish."""
FINISH_US = 110 * LEASE_US
"""Long enough for a message that kills its worker at every attempt until it is given up."""
STEPS_MAX = 8_000
"""Five times the maximum of a correct run: a run that needs more loops for ever."""

CRASH_BEFORE, CRASH_AFTER, PAUSE, LOST_REQUEST, LOST_REPLY, LATE_REQUEST, LATE_REPLY, FAIR = range(8)
FATES = (
    "crash before sending",
    "crash after sending",
    "pause",
    "request lost",
    "reply lost",
    "request late",
    "reply late",
    "fair",
)


class Violation(AssertionError):
    """The protocol broke a promise; the text says which one."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Process(Protocol):
    """A process that may die or stall. Its events are dropped after its death and delayed while it stalls."""

    life: int
    paused_until_us: int


class FaultOdds:
    """The odds of each fault in one seed. Each seed draws its own, so that each fault is frequent in some seed."""

    __slots__ = (
        "error_after",
        "error_before",
        "fates",
        "flushes",
        "handler_crash",
        "handler_pause",
        "long_handler",
        "notifies",
        "outages",
        "poison",
        "sink_late",
        "sink_lost",
        "steps_back",
    )

    def __init__(self, rng: Random, *, may_flush: bool) -> None:
        random = rng.random
        levels = (0.0, 0.0, 0.01, 0.03, 0.09)

        def level() -> float:
            return levels[int(random() * len(levels))]

        total, fates = 0.0, []
        for _ in range(FAIR):
            total += level()
            fates.append(total)
        self.fates = fates
        self.handler_crash = level()
        self.handler_pause = level()
        self.error_before = level()
        self.error_after = level()
        self.sink_late = level()
        self.sink_lost = level()
        self.long_handler = 2 * level()
        self.poison = level()
        self.notifies = random() < 0.5  # noqa: PLR2004  # a fair coin
        self.outages = int(random() * 3)
        self.flushes = 1 if may_flush and random() < 0.25 else 0  # noqa: PLR2004  # every fourth seed
        # A store that lost its data AND whose clock stepped back may repeat a fence: no promise is made.
        self.steps_back = 0 if self.flushes else int(random() * 3)


class World:
    """The clock, the event queue and the random generator."""

    def __init__(self, seed: int, *, may_flush: bool = False, trace: list[str] | None = None) -> None:
        self.rng = Random(seed)
        self.random = self.rng.random
        self.weather = FaultOdds(self.rng, may_flush=may_flush)
        self.now = START_US
        self.faults_until = START_US + FAULTS_US
        self.steps = 0
        self.trace = trace
        self._queue: list[tuple[int, int, Process | None, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, delay_us: int, call: Callable[..., object], *args: Any) -> None:
        """Call this later, even if processes die meanwhile."""
        self._count = count = self._count + 1
        heappush(self._queue, (self.now + delay_us, count, None, 0, call, args))

    def after(self, process: Process, delay_us: int, call: Callable[..., object], *args: Any) -> None:
        """Call this later in a process. Dropped if the process dies before; delayed while it is paused."""
        self._count = count = self._count + 1
        heappush(self._queue, (self.now + delay_us, count, process, process.life, call, args))

    def run(self, until_us: int) -> None:
        """Run the due events in order until the queue is empty or `until_us` is reached."""
        queue = self._queue
        while queue and queue[0][0] <= until_us:
            time, _, process, life, call, args = heappop(queue)
            if process is not None:
                if process.life != life:
                    continue
                if process.paused_until_us > time:
                    self._count = count = self._count + 1
                    heappush(queue, (process.paused_until_us, count, process, life, call, args))
                    continue
            self.now = time
            self.steps += 1
            if self.steps > STEPS_MAX:
                raise Violation("endless", f"{STEPS_MAX} steps, and the run has not ended")
            call(*args)
        if not queue:
            return
        self.now = until_us

    def between(self, low_us: int, high_us: int) -> int:
        """Return a random time between the two."""
        return low_us + int(self.random() * (high_us - low_us))

    def chance(self, odds: float) -> bool:
        """Return whether a fault strikes; never after the fault time of the phase."""
        return odds > 0 and self.now < self.faults_until and self.random() < odds

    def fate(self) -> int:
        """Draw the fault of one request; `FAIR` if none."""
        if self.now >= self.faults_until:
            return FAIR
        roll = self.random()
        fates = self.weather.fates
        if roll >= fates[-1]:
            return FAIR
        for fate, limit in enumerate(fates):
            if roll < limit:
                return fate
        return FAIR

    def note(self, text: str) -> None:
        """Write a line into the trace, if there is one."""
        if self.trace is not None:
            self.trace.append(f"{(self.now - START_US) / LEASE_US:9.4f}  {text}")
