"""Marks in memory: without a lock for single ones, in a set for batches, and never first for two."""

import gc
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

import semel
from semel.clock import SystemClock
from semel.errors import KeyInvalid, StoreFull
from semel.stores.memory.marks import BATCH_MIN, HAS_GIL, Marker, MemoryMarks, SteadyClock
from semel.stores.memory.store import MemoryStore

SECOND_US = 1_000_000
LONG_US = 3600 * SECOND_US
SECOND_NS = 10**9


class Hand(SteadyClock):
    """A clock that counts as real, so that the way without a lock is taken, and is turned by hand."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.ns = 10**15
        self.now = lambda: self.ns


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(params=[True, False], ids=["lock-free", "locked"])
def new_marks(request: pytest.FixtureRequest) -> Callable[[], MemoryMarks]:
    """Makes marks as a build with the global interpreter lock does, and as a free-threaded one does."""
    lock_free: bool = request.param
    return lambda: MemoryMarks(SteadyClock(SystemClock()), lock_free=lock_free)


def marker(marks: MemoryMarks, window_us: int = LONG_US, room: int = 10**6) -> Marker:
    return marks.marker(lambda: window_us, lambda: room, lambda: StoreFull("full"))


def together(*works: Callable[[], object]) -> None:
    barrier = threading.Barrier(len(works))

    def start(work: Callable[[], object]) -> None:
        barrier.wait()
        work()

    threads = [threading.Thread(target=start, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_of_threads_that_mark_a_key_one_is_the_first(new_marks: Callable[[], MemoryMarks]) -> None:
    mark = marker(new_marks())
    keys = [f"key {number}" for number in range(2000)]
    firsts: list[list[bool]] = [[], [], []]
    together(*[lambda mine=mine: mine.extend(map(mark, keys)) for mine in firsts])
    assert [sum(column) for column in zip(*firsts, strict=True)] == [1] * len(keys)


def test_of_a_batch_and_single_marks_one_is_the_first(new_marks: Callable[[], MemoryMarks]) -> None:
    """The batch looks at single marks made without a lock, and they look at it: one of them must see the other."""
    batch_of = 2 * BATCH_MIN
    for turn in range(60):
        marks = new_marks()
        mark = marker(marks)
        mark("warm")  # from now on without a lock
        keys = [f"{turn} {number}" for number in range(batch_of)]
        singles: list[bool] = []
        batch: list[bool] = []
        together(
            lambda: singles.extend(map(mark, keys)),  # noqa: B023
            lambda: batch.extend(marks.add(keys, LONG_US)),  # noqa: B023 - they have ended before the next turn
        )
        assert [one + other for one, other in zip(singles, batch, strict=True)] == [1] * batch_of
        assert len(marks) == batch_of + 1


def test_purging_takes_no_mark_that_runs(new_marks: Callable[[], MemoryMarks]) -> None:
    marks = new_marks()
    mark, numbers = marker(marks), count()
    done = threading.Event()
    purged: set[int] = set()

    def purge() -> None:
        while not done.is_set():
            purged.add(marks.purge())
            marks.make_room()

    def make() -> None:
        assert all(mark(f"key {next(numbers)}") for _ in range(5000))
        done.set()

    together(make, purge)
    assert purged <= {0}  # what is marked meanwhile does not enter the count
    assert not any(mark(f"key {number}") for number in range(5000))


class CountingLock:
    """A lock that counts how often it is taken."""

    def __init__(self) -> None:
        self.taken = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        self.taken += 1

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize(("lock_free", "taken"), [(True, 0), (False, 3)])
def test_without_the_interpreter_lock_every_mark_takes_the_lock(lock_free: bool, taken: int) -> None:
    steady = SteadyClock(SystemClock())
    moment = steady.now()
    steady.now = lambda: moment  # after some seconds a marker would read the window again, with the lock
    marks = MemoryMarks(steady, lock_free=lock_free)
    mark = marker(marks)
    mark("warm")
    lock: Any = CountingLock()
    marks._lock = lock
    assert [mark("a"), mark("b"), mark("a")] == [True, True, False]
    assert lock.taken == taken


def test_a_free_threaded_build_is_known() -> None:
    assert bool(sysconfig.get_config_var("Py_GIL_DISABLED")) is not HAS_GIL


def test_a_look_at_all_marks_starts_again_when_one_is_made_meanwhile() -> None:
    """While memory is tidied up, other threads may run, also in the midst of what looks like one step."""
    marks = MemoryMarks(SteadyClock(SystemClock()))
    mark, numbers = marker(marks), count()
    for _ in range(3000):
        mark(f"key {next(numbers)}")

    others: list[threading.Thread] = []

    def intrude(phase: str, _info: object) -> None:
        if phase == "start" and next(intrusions) < 5:
            others.append(threading.Thread(target=mark, args=(f"key {next(numbers)}",)))
            others[-1].start()
            others[-1].join(0.1)  # now and then a mark waits until the look at all has ended

    intrusions, threshold = count(), gc.get_threshold()
    gc.callbacks.append(intrude)
    gc.set_threshold(100)
    try:
        assert (marks.count_expired(), marks.purge()) == (0, 0)
    finally:
        gc.callbacks.remove(intrude)
        gc.set_threshold(*threshold)
    for other in others:
        other.join()
    assert next(intrusions) > 0
    assert not any(mark(f"key {number}") for number in range(3000))


def test_single_marks_and_batches_know_each_other() -> None:
    marks = MemoryMarks(Hand())
    mark = marker(marks)
    assert mark("single") is True
    keys = ["single", *(f"key {number}" for number in range(BATCH_MIN)), "key 3"]
    assert marks.add(keys, LONG_US) == [False, *[True] * BATCH_MIN, False]
    assert [mark("key 3"), mark("new"), mark("new")] == [False, True, False]
    assert marks.add(["new"], LONG_US) == [False]
    assert len(marks) == BATCH_MIN + 2


def test_each_mark_ends_with_its_own_window() -> None:
    clock = Hand()
    marks = MemoryMarks(clock)
    short, long = marker(marks, SECOND_US), marker(marks, 4 * SECOND_US)
    batch = [f"key {number}" for number in range(BATCH_MIN)]
    assert [short("s"), long("l"), short("t")] == [True] * 3
    assert marks.add(batch, 2 * SECOND_US) == [True] * BATCH_MIN
    clock.ns += SECOND_NS - 1
    assert [short("s"), long("l"), *marks.add(batch, 1)] == [False] * (2 + BATCH_MIN)
    clock.ns += 1
    assert [short("s"), long("l"), *marks.add(batch, 1)] == [True, False, *[False] * BATCH_MIN]
    assert marks.count_expired() == 1  # t, which nobody asked for again
    clock.ns += SECOND_NS
    assert marks.add(batch, LONG_US) == [True] * BATCH_MIN
    assert (marks.purge(), marks.count_expired(), len(marks)) == (2, 0, 1 + BATCH_MIN)


def test_after_its_batches_are_over_single_marks_need_no_lock() -> None:
    clock = Hand()
    marks = MemoryMarks(clock)
    mark = marker(marks)
    marks.add([f"key {number}" for number in range(BATCH_MIN)], SECOND_US)
    assert marks._batching is True
    clock.ns += SECOND_NS
    assert mark("key 1") is True
    assert marks._batching is False


def test_a_key_that_is_none_leaves_no_mark() -> None:
    marks = MemoryMarks(Hand())
    mark = marker(marks)
    mark("warm")
    for key in ("", "a\nb", "x" * 513, "\ud800", "\x7f"):
        with pytest.raises(KeyInvalid):
            mark(key)
    with pytest.raises(KeyInvalid):
        mark(7)
    assert [mark("x" * 512), mark("x" * 512), mark("ключ"), mark("ключ")] == [True, False, True, False]
    assert len(marks) == 3


@pytest.mark.parametrize("compact", [False, True])
def test_a_full_store_refuses_new_marks_by_the_real_clock_too(compact: bool) -> None:
    store = MemoryStore(records_max=3, compact=compact)
    mark = store.marker("", "marks", lambda: LONG_US)
    assert [mark(key) for key in "abc"] == [True] * 3
    with pytest.raises(StoreFull):
        mark("d")
    assert mark("b") is False


@pytest.mark.parametrize("url", ["memory:", "memory:?compact=true"])
def test_a_client_takes_marks_of_both_kinds(url: str) -> None:
    with semel.open(url, consumer="m", mode="mark") as once:
        assert [once.mark("a"), once.mark("a"), once.mark("b"), once.mark("b")] == [True, False, True, False]
        keys = [*"abcdefghijklmnopqrstuvwxyz", "z"]
        assert once.mark_many(keys) == [False, False, *[True] * 24, False]
        assert [once.mark("c"), once.mark("C")] == [False, True]
        assert once.records.stats().marks == 27


def test_an_unknown_way_to_be_compact_is_refused() -> None:
    with pytest.raises(semel.errors.PolicyInvalid, match="compact"):
        semel.open("memory:?compact=perhaps", consumer="m", mode="mark")
