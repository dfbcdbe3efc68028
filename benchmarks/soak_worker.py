"""One worker of the soak: holds a rate of events on one store, delivers each again, and writes what it saw as JSON.

`python -m benchmarks.soak_worker URL --rate 10 --seconds 60 --effects FILE` is started by `benchmarks.soak`.
"""

import math
import os
import random
import sys
import time
from argparse import ArgumentParser
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

import semel

STEPS_PER_OCTAVE = 16
"""Buckets of the histogram: each is 4 per cent wide."""
WINDOW = "2m"
"""Short, so that records expire and are removed while the soak runs: then memory must stop growing."""
AGAIN_S = (5.0, 60.0)
"""When an event comes a third time, seconds after the first: well within the window."""
AGAIN_MAX = 100
"""The most events that wait for it."""
WAIT_S = 30.0


class Latencies:
    """A histogram of latencies of a fixed size, however long it counts."""

    def __init__(self) -> None:
        self.buckets = [0] * (40 * STEPS_PER_OCTAVE)
        self.max_us = 0.0

    def add(self, us: float) -> None:
        """Count one."""
        at = int(math.log2(max(us, 1.0)) * STEPS_PER_OCTAVE)
        self.buckets[min(at, len(self.buckets) - 1)] += 1
        self.max_us = max(self.max_us, us)

    def percentile_us(self, share: float) -> float:
        """Return the upper end of the bucket that this share of all calls is in; 0 without any."""
        wanted, counted = share * sum(self.buckets), 0
        for at, count in enumerate(self.buckets):
            counted += count
            if count and counted >= wanted:
                return min(float(2 ** ((at + 1) / STEPS_PER_OCTAVE)), self.max_us)
        return 0.0


class Interval(msgspec.Struct, kw_only=True):
    """What one worker did in one interval, or in all of them; latencies count from when a call was due."""

    calls: int = 0
    events: int = 0
    """New ones: first deliveries."""
    wrong: int = 0
    """Answers that were not what the delivery should get."""
    p50_us: float = 0.0
    p99_us: float = 0.0
    p999_us: float = 0.0
    max_us: float = 0.0
    example: str = ""
    """One wrong answer."""


class Soaker:
    """Delivers events at a rate, each at least twice, and checks every answer."""

    def __init__(self, once: semel.Semel, effects: int, run: str) -> None:
        self.once = once
        self.effects = effects
        self.run_name = run
        self.chance = random.Random(run)
        self.events = 0
        self.again: deque[tuple[float, int]] = deque()
        self.total, self.now = Interval(), Interval()
        self.total_times, self.times = Latencies(), Latencies()

    def step(self, due_s: float) -> None:
        """Deliver one new event, the same again, and now and then an older one."""
        number = self.events
        self.events += 1
        self._deliver(number, due_s, replayed=False)
        self._deliver(number, due_s, replayed=True)
        now_s, (soonest_s, latest_s) = time.monotonic(), AGAIN_S
        if self.again and now_s - self.again[0][0] > soonest_s:
            began_s, older = self.again.popleft()
            if now_s - began_s < latest_s:
                self._deliver(older, due_s, replayed=True)
        if len(self.again) < AGAIN_MAX and self.chance.random() < 0.1:
            self.again.append((now_s, number))
        self.now.events += 1

    def _deliver(self, number: int, due_s: float, *, replayed: bool) -> None:
        if replayed:  # due when the one before it is answered
            due_s = time.monotonic()
        ran = False

        def effect() -> int:
            nonlocal ran
            ran = True
            os.write(self.effects, b"%d\n" % number)
            return number

        outcome = self.once.run(f"{self.run_name}-{number}", effect)
        self.times.add((time.monotonic() - due_s) * 1e6)
        self.now.calls += 1
        right = isinstance(outcome, semel.Done) and outcome.value == number
        right = right and outcome.replayed == replayed != ran  # type: ignore[union-attr]
        if not right:
            self.now.wrong += 1
            self.now.example = f"{number}: {outcome!r:.200}"

    def end_interval(self) -> Interval:
        """Return the figures since the last one, and begin the next."""
        done = _with_times(self.now, self.times)
        for name in ("calls", "events", "wrong"):
            setattr(self.total, name, getattr(self.total, name) + getattr(done, name))
        self.total.example = self.total.example or done.example
        for at, count in enumerate(self.times.buckets):
            self.total_times.buckets[at] += count
        self.total_times.max_us = max(self.total_times.max_us, self.times.max_us)
        self.now, self.times = Interval(), Latencies()
        return done

    def sum(self) -> Interval:
        """Return the figures of all intervals."""
        return _with_times(self.total, self.total_times)


def _with_times(figures: Interval, times: Latencies) -> Interval:
    figures.p50_us, figures.p99_us = times.percentile_us(0.5), times.percentile_us(0.99)
    figures.p999_us, figures.max_us = times.percentile_us(0.999), times.max_us
    return figures


def hold_rate(step: Callable[[float], None], tick: Callable[[], None], rate: float, seconds: float) -> None:
    """Call `step` at a rate, with the time at which it was due; `tick` after each."""
    begun = time.monotonic()
    number = 0
    while (due := begun + number / rate) < begun + seconds:
        time.sleep(max(due - time.monotonic(), 0))
        step(due)
        tick()
        number += 1


def main() -> int:
    """Run, and write one line of JSON for each interval and one for all of them."""
    parser = ArgumentParser(
        prog="python -m benchmarks.soak_worker", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("url")
    parser.add_argument("--rate", type=float, required=True, help="new events a second")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--every", type=float, default=10.0, help="seconds of an interval")
    parser.add_argument("--effects", type=Path, required=True, help="a line is appended for each effect")
    options = parser.parse_args()
    write = msgspec.json.Encoder().encode
    effects = os.open(options.effects, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    policy = semel.Policy(wait_s=WAIT_S)
    try:
        with (
            semel.open(options.url, consumer="soak", window=WINDOW, lease="30s", policy=policy) as once,
            semel.Cleaner(once, every="15s"),
        ):
            soaker, ends = Soaker(once, effects, os.urandom(4).hex()), [time.monotonic() + options.every]

            def tick() -> None:
                if time.monotonic() >= ends[0]:
                    ends[0] += options.every
                    sys.stdout.write(write(soaker.end_interval()).decode() + "\n")
                    sys.stdout.flush()

            hold_rate(soaker.step, tick, options.rate, options.seconds)
            soaker.end_interval()
            sys.stdout.write(write(soaker.sum()).decode() + "\n")
    finally:
        os.close(effects)
    return 0


if __name__ == "__main__":
    sys.exit(main())
