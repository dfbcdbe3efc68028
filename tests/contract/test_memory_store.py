"""What only the store in memory promises: its bounds, and marks at the speed of a dict."""

import os

from semel.core.commands import Claim, Count, Granted, Item, Known, Lookup, Mark, Marked, Renew, Settle
from semel.errors import StoreFull
from semel.stores.memory.store import MemoryStore
from semel.testing import ManualClock
from semel.types import Completed, Record, Unavailable

S = 1_000_000


def claim(key: str, window_us: int = 10 * S) -> Claim:
    return Claim(("", "claims", key), os.urandom(16), S, window_us)


def ask(store: MemoryStore, item: Item) -> object:
    return store.send([item])[0]


def test_a_full_store_says_so_and_goes_on_with_what_it_knows() -> None:
    store = MemoryStore(records_max=3, clock=ManualClock())
    claims = [claim(str(number)) for number in range(3)]
    granted = [ask(store, each) for each in claims]
    refused = ask(store, claim("one too many"))
    assert isinstance(refused, Unavailable)
    assert isinstance(refused.error, StoreFull)
    for each, answer in zip(claims, granted, strict=True):
        assert isinstance(answer, Granted)
        assert isinstance(
            ask(store, Settle(each.id, each.owner, answer.fence, "done", window_us=S)), Completed
        )
    assert isinstance(ask(store, claim("1")), Known)


def test_a_full_store_has_room_again_when_windows_end() -> None:
    clock = ManualClock()
    store = MemoryStore(records_max=3, clock=clock)
    for number in range(3):
        ask(store, claim(str(number)))
    clock.advance(13)
    assert isinstance(ask(store, claim("new")), Granted)


def test_a_full_store_still_knows_its_marks() -> None:
    clock = ManualClock()
    store = MemoryStore(records_max=3, clock=clock)
    assert ask(store, Mark("", "marks", ["a", "b", "c"], 10 * S)) == Marked([True, True, True])
    assert isinstance(ask(store, Mark("", "marks", ["d"], 10 * S)), Unavailable)
    assert ask(store, Mark("", "marks", ["c", "a"], 10 * S)) == Marked([False, False])
    clock.advance(11)
    assert ask(store, Mark("", "marks", ["d"], 10 * S)) == Marked([True])


def test_two_markers_with_different_windows_do_not_both_win() -> None:
    store = MemoryStore(clock=ManualClock())
    one = store.marker("", "marks", lambda: 10 * S)
    other = store.marker("", "marks", lambda: 20 * S)
    for number in range(20):
        first, second = (one, other) if number % 2 else (other, one)
        assert (first(f"key {number}"), second(f"key {number}")) == (True, False)
    for number in range(20):
        assert (one(f"key {number}"), other(f"key {number}")) == (False, False)
    assert ask(store, Mark("", "marks", ["key 3", "new"], 30 * S)) == Marked([False, True])
    assert (one("new"), other("new")) == (False, False)
    assert store.send([Count()])[0].marks == 21


def test_a_clock_set_back_shortens_no_mark() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    mark = store.marker("", "marks", lambda: 10 * S)
    assert mark("early") is True
    before = clock.now_us()
    clock.step_back(60)
    assert mark("late") is True
    late = store.send([Lookup(("", "marks", "late"))])[0]
    assert isinstance(late, Record)
    assert late.expires_at_us >= before + 10 * S


def test_a_changed_window_loses_no_mark() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    window_us = 10 * S
    mark = store.marker("", "marks", lambda: window_us)
    old = store.marker("", "marks", lambda: 10 * S)
    assert mark("early") is True
    window_us = 60 * S
    clock.advance(6)
    assert mark("late") is True
    assert [mark("early"), old("late"), old("early")] == [False, False, False]
    clock.advance(5)
    assert [mark("early"), mark("late"), old("early")] == [True, False, False]


def test_watchers_are_told_of_ends_and_not_of_renewals() -> None:
    store = MemoryStore(clock=ManualClock())
    told: list[object] = []
    stop = store.watch(told.append)
    item = claim("a")
    granted = ask(store, item)
    assert isinstance(granted, Granted)
    ask(store, Renew(item.id, item.owner, granted.fence, S, ("step", b"jnull")))
    assert told == []
    ask(store, Settle(item.id, item.owner, granted.fence, "done", window_us=S))
    assert told == [item.id]
    stop()
