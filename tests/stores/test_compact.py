"""Packed marks: the same answers as a dict, in a few bytes each."""

import gc
import random
import tracemalloc

from semel.clock import SystemClock
from semel.core.commands import Forget, Lookup
from semel.stores.memory.compact_marks import CompactMarks
from semel.stores.memory.marks import SteadyClock
from semel.types import Absent, Forgotten, Record

SECOND_US = 1_000_000
SECOND_NS = 10**9


class Hand(SteadyClock):
    """A clock turned by hand."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.ns = 10**15
        self.now = lambda: self.ns


def table(clock: SteadyClock) -> CompactMarks:
    return CompactMarks(clock, "", "marks")


def test_it_answers_as_a_dict_does() -> None:
    clock, dice = Hand(), random.Random(7)
    marks, model = table(clock), dict[str, int]()
    for _ in range(400):
        clock.ns += dice.randrange(SECOND_NS)
        window_us = dice.choice((5, 50, 500)) * SECOND_US
        keys = [f"key {dice.randrange(5000)}" for _ in range(dice.randrange(60))]
        wanted = []
        for key in keys:
            wanted.append(model.get(key, 0) <= clock.ns)
            if wanted[-1]:
                model[key] = clock.ns + window_us * 1000
        assert marks.add(keys, window_us) == wanted
        if dice.random() < 0.1 and keys:
            forgotten = marks.apply(Forget(("", "marks", keys[0])), 1)
            assert isinstance(forgotten, Forgotten if model.pop(keys[0], 0) > clock.ns else Absent)
    live, held, over = sum(expiry > clock.ns for expiry in model.values()), len(marks), marks.count_expired()
    assert held - over == live
    assert (marks.purge(), len(marks), marks.count_expired()) == (over, live, 0)
    assert all(marks.knows(key) is (expiry > clock.ns) for key, expiry in model.items())


def test_a_mark_takes_at_most_32_bytes() -> None:
    count = 40_000
    keys = [f"0198c0de-0000-7000-8000-{number:012x}" for number in range(count)]
    marks = table(SteadyClock(SystemClock()))
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for at in range(0, count, 500):
        marks.add(keys[at : at + 500], 3600 * SECOND_US)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(marks) == count
    assert (after - before) / count <= 32


def test_what_is_over_makes_room_while_marks_are_made() -> None:
    """A steady stream with a short window: the table stays as large as what runs, and half as much again."""
    clock = Hand()
    marks = table(clock)
    for second in range(40):
        marks.add([f"{second} {number}" for number in range(1000)], 5 * SECOND_US)
        clock.ns += SECOND_NS
    assert len(marks) < 1.6 * 5000


def test_a_mark_is_looked_up_with_its_expiry() -> None:
    clock = Hand()
    marks = table(clock)
    marks.add(["a"], 10 * SECOND_US)
    found = marks.apply(Lookup(("", "marks", "a")), 1)
    assert isinstance(found, Record)
    assert found.expires_at_us == clock.date_us(clock.ns + 10 * SECOND_NS)
    clock.ns += 10 * SECOND_NS
    assert isinstance(marks.apply(Lookup(("", "marks", "a")), 1), Absent)
