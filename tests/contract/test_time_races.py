"""Skewed writers at once: of equal events less than a window apart, one is accepted, whatever the order."""

import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from semel.clock import SystemClock
from semel.core.commands import Claim, Granted, Purge, Settle
from semel.core.protocols import Store
from semel.types import Completed
from tests.contract.mutants import LateEventsAreNew
from tests.contract.stores import KINDS, Kind

S = 1_000_000
WRITERS = 6
EVENTS = 40
CONTENTS = ("a", "b", "c")
APART = 10 * S
LATENESS = 600 * S
STORMS = 30
"""Threads that happen to take turns politely show nothing."""


class Accepted(NamedTuple):
    content: str
    time_us: int


def storm(store: Store) -> tuple[list[Accepted], Counter[str]]:
    """What was accepted of random events, each writer with a clock of its own; and how the others were answered."""
    barrier = threading.Barrier(WRITERS, timeout=30)
    start = time.time_ns() // 1000 - 400 * S

    def writer(number: int) -> tuple[list[Accepted], Counter[str]]:
        rng = random.Random(number)
        taken: list[Accepted] = []
        answered: Counter[str] = Counter()
        barrier.wait()
        for step in range(EVENTS):
            content = rng.choice(CONTENTS)
            happened = start + step * 5 * S + number * 7 * S + rng.randrange(20 * S)
            claim = Claim(
                ("", "storm", content), os.urandom(16), 30 * S, APART + LATENESS, event_time_us=happened,
                sliding=True, apart_us=APART,
            )  # fmt: skip
            (answer,) = store.send([claim])
            answered[type(answer).__name__] += 1
            if isinstance(answer, Granted):
                taken.append(Accepted(content, happened))
                settle = Settle(
                    claim.id, claim.owner, answer.fence, "done", None, claim.window_us, claim.lease_us,
                    sliding=True, event_time_us=happened,
                )  # fmt: skip
                (settled,) = store.send([settle])
                assert isinstance(settled, Completed)
                assert not settled.recreated
            if step % 10 == number:
                store.send([Purge()])
        return taken, answered

    with ThreadPoolExecutor(WRITERS) as threads:
        results = list(threads.map(writer, range(WRITERS)))
    accepted = [each for taken, _ in results for each in taken]
    return accepted, sum((answered for _, answered in results), Counter())


def nearest_us(accepted: list[Accepted]) -> int:
    """The smallest distance of two accepted events of one content."""
    distances = [
        later - earlier
        for content in CONTENTS
        for earlier, later in pairwise(sorted(time_us for name, time_us in accepted if name == content))
    ]
    return min(distances)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_two_accepted_events_are_near(kind: Kind, tmp_path: Path) -> None:
    store = kind.make(tmp_path, SystemClock())
    store.open()
    try:
        accepted, answered = storm(store)
    finally:
        store.close()
    assert nearest_us(accepted) >= APART
    assert answered["Granted"] == len(accepted) > len(CONTENTS), "repeats were accepted too"
    assert answered["Known"] > 0
    assert answered["Late"] > 0
    assert set(answered) <= {"Granted", "Known", "Late", "Busy"}


def test_the_storm_finds_a_store_that_takes_late_events_for_new() -> None:
    storms = (storm(LateEventsAreNew(SystemClock())) for _ in range(STORMS))
    assert any(nearest_us(accepted) < APART for accepted, _ in storms)
