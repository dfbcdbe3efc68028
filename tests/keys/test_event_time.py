"""Duplicates by event time: checked against the rule applied to a complete history."""

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from semel.errors import PolicyInvalid
from semel.keys import EventTimeWindow
from semel.keys.event_time import sight

W = 10


class Oracle:
    """The rule in its plainest words, over everything that was ever accepted."""

    def __init__(self, window: int, lateness: int) -> None:
        self.window, self.lateness = window, lateness
        self.accepted: dict[str, list[int]] = defaultdict(list)

    def see(self, fingerprint: str, time: int) -> str:
        accepted = self.accepted[fingerprint]
        newest = max(accepted, default=time)
        if any(abs(time - other) < self.window for other in accepted if other >= newest - self.lateness):
            return "duplicate"
        if time < newest - self.lateness + self.window:
            return "late"
        accepted.append(time)
        return "new"


fingerprints = st.sampled_from("abc")
events = st.lists(st.tuples(fingerprints, st.integers(-60, 60)), max_size=60)
drifting = st.lists(st.tuples(fingerprints, st.integers(-25, 25)), max_size=120).map(
    lambda jitters: [(fingerprint, 3 * place + jitter) for place, (fingerprint, jitter) in enumerate(jitters)]
)


@given(events | drifting, st.integers(W, 5 * W))
@example([("a", 0), ("a", 9), ("a", 10), ("a", 19), ("a", -9), ("a", -10)], 30)
@example([("a", 0), ("a", 30), ("a", 20), ("a", 9), ("a", 10)], 20)
def test_bounded_history_answers_as_a_complete_one_would(seen: list[tuple[str, int]], lateness: int) -> None:
    window, oracle = EventTimeWindow(W, lateness), Oracle(W, lateness)
    for fingerprint, time in seen:
        assert window.see(fingerprint, time) == oracle.see(fingerprint, time)


@given(events | drifting, st.integers(W, 3 * W), st.integers(1, 2))
@example(
    [("a", 0), ("b", -1), ("b", 9), ("b", -1)], 20, 1
)  # dropped and known again: its old history is still gone
def test_room_that_runs_out_never_lets_a_near_duplicate_through(
    seen: list[tuple[str, int]], lateness: int, fingerprints_max: int
) -> None:
    window = EventTimeWindow(W, lateness, fingerprints_max=fingerprints_max)
    accepted: dict[str, list[int]] = defaultdict(list)
    for fingerprint, time in seen:
        verdict = window.see(fingerprint, time)
        near = any(abs(time - other) < W for other in accepted[fingerprint])
        if verdict == "new":
            assert not near
            accepted[fingerprint].append(time)
        elif verdict == "duplicate":
            assert near, "a false duplicate loses an event"
        assert len(window) <= fingerprints_max


@given(drifting)
def test_memory_of_one_fingerprint_is_bounded(seen: list[tuple[str, int]]) -> None:
    window = EventTimeWindow(W, 3 * W)
    for _, time in seen:
        window.see("a", time)
        assert len(window._histories["a"].accepted) <= 3 + 1


@given(st.lists(st.tuples(fingerprints, st.integers(-40, 40), st.booleans()), max_size=60))
def test_withdrawn_event_may_come_again_and_no_other_slips_through(seen: list[tuple[str, int, bool]]) -> None:
    window = EventTimeWindow(W, 3 * W)
    kept: dict[str, list[int]] = defaultdict(list)
    for fingerprint, time, succeeded in seen:
        if window.see(fingerprint, time) != "new":
            continue
        assert all(abs(time - other) >= W for other in kept[fingerprint])
        if succeeded:
            kept[fingerprint].append(time)
        else:
            assert window.forget(fingerprint, time)
            assert window.see(fingerprint, time) == "new"
            assert window.forget(fingerprint, time)


def test_steady_stream_yields_one_event_per_window() -> None:
    window = EventTimeWindow(W)
    accepted = [time for time in range(100) if window.see("a", time) == "new"]
    assert accepted == list(range(0, 100, W))


def test_event_older_than_the_history_is_late_not_new() -> None:
    window = EventTimeWindow(W, 2 * W)
    assert window.see("a", 1_000) == "new"
    assert window.see("a", 989) == "late"
    assert window.see("a", 990) == "new"
    assert window.see("b", 0) == "new", "another fingerprint's clock is its own"


def test_one_event_from_the_future_does_not_make_the_others_late() -> None:
    window = EventTimeWindow(W)
    window.see("a", 10**15)
    assert window.see("b", 0) == "new"


def test_dropped_fingerprint_is_late_until_it_cannot_matter() -> None:
    window = EventTimeWindow(W, fingerprints_max=2)
    assert [window.see(name, time) for name, time in [("a", 0), ("b", 100), ("c", 200)]] == ["new"] * 3
    assert len(window) == 2
    assert window.see("a", 9) == "late"
    assert window.see("a", 10) == "new"


def test_busy_fingerprint_is_not_dropped_for_its_first_event() -> None:
    window = EventTimeWindow(W, fingerprints_max=2)
    for name, time in [("a", 0), ("b", 50), ("a", 100), ("c", 200)]:
        assert window.see(name, time) == "new"
    assert window.see("a", 105) == "duplicate"
    assert window.see("b", 55) == "late"


def test_forgetting_what_was_never_accepted_says_so() -> None:
    window = EventTimeWindow(W)
    assert not window.forget("a", 0)
    window.see("a", 0)
    assert not window.forget("a", 1)


def test_rule_is_open_at_the_window() -> None:
    def at(time: int) -> Any:
        return sight([100], 100, time, window_us=W, lateness_us=3 * W)

    assert [at(time) for time in (79, 80, 90, 91, 100, 109, 110)] == [
        "late",
        "new",
        "new",
        "duplicate",
        "duplicate",
        "duplicate",
        "new",
    ]


@pytest.mark.parametrize(
    ("window", "lateness", "room"), [(0, None, 1), (-1, None, 1), (10, 9, 1), (10, 100_001, 1), (10, None, 0)]
)
def test_settings_that_cannot_hold_are_refused(window: int, lateness: int | None, room: int) -> None:
    with pytest.raises(PolicyInvalid):
        EventTimeWindow(window, lateness, fingerprints_max=room)
