"""Every yield of every flow, every fault, every embedded store: the effects are those of the table."""

import pytest

from semel.core.commands import Claim
from semel.core.protocols import Store
from semel.testing import ManualClock
from semel.testing.faults import FAULTS, Died, Driver, Strike
from semel.types import Absent, Done, Record
from tests.faults.scenes import ID, LEASE_US, SINK_OF, WINDOW_US, Scene, acknowledges, lose, strike, with_step
from tests.faults.table import GUARANTEES, LOST, STEPS, WINDOW_OF, WINDOWS, Cell

PLACE = {"Claim": "claim", "Mark": "claim", "Invoke": "effect", "Settle": "complete"}
YIELDS = {"mark": ["Mark", "Invoke"]}
LEASED = ["Claim", "Invoke", "Settle"]
WAITING = ["Claim", "Watch", "Claim", "Sleep", "Claim", "Unwatch", "Invoke", "Settle"]
SWEPT = ["Scan", "Claim", "Invoke", "Settle"]
STEPPED = ["Claim", "Invoke", "Invoke", "Renew", "Settle"]

POINTS = [
    pytest.param(mode, at, fault, id=f"{mode}-{at}-{command}-{fault}")
    for mode in SINK_OF
    for at, command in enumerate(YIELDS.get(mode, LEASED))
    for fault in FAULTS
]


def lands_first(place: str) -> bool:
    """A late claim arrives before anybody else comes; a late effect or completion after another took over."""
    return place == "claim"


@pytest.mark.parametrize("mode", SINK_OF)
def test_no_yield_of_a_flow_is_left_out(mode: str, store: Store, clock: ManualClock) -> None:
    scene = Scene(mode, store, clock)
    driver = Driver(store, clock)
    assert acknowledges(driver.run(scene.flow(driver)))
    assert driver.commands == YIELDS.get(mode, LEASED)
    assert scene.measured() == Cell(1)


@pytest.mark.parametrize(("mode", "at", "fault"), POINTS)
def test_a_fault_at_any_yield_costs_what_the_table_says(
    mode: str, at: int, fault: str, store: Store, clock: ManualClock
) -> None:
    scene = Scene(mode, store, clock)
    place = PLACE[YIELDS.get(mode, LEASED)[at]]
    struck = Strike(at, fault)  # type: ignore[arg-type]
    strike(scene, struck, flow=scene.flow, again=scene.redeliver, lands_first=lands_first(place))
    assert scene.measured() == expected(mode, place, fault)
    if mode != "observe":
        scene.redeliver()
        assert scene.measured() == expected(mode, place, fault), "one more duplicate changed something"


def expected(mode: str, place: str, fault: str) -> Cell | None:
    return GUARANTEES[mode][WINDOW_OF[place, fault]]


@pytest.mark.parametrize("mode", SINK_OF)
def test_a_store_that_loses_the_record_costs_what_the_table_says(
    mode: str, store: Store, clock: ManualClock
) -> None:
    scene = Scene(mode, store, clock)
    scene.redeliver()
    lose(store)
    scene.redeliver()
    assert scene.measured() == GUARANTEES[mode]["store_lost"]


def test_the_mark_has_no_window_after_its_effect(store: Store, clock: ManualClock) -> None:
    scene = Scene("mark", store, clock)
    driver = Driver(store, clock)
    driver.run(scene.flow(driver))
    scene.redeliver()
    for window in ("after_effect", "before_ack", "stalled_after_effect"):
        assert scene.measured() == GUARANTEES["mark"][window]


def test_a_marked_event_whose_handler_raises_is_lost(store: Store, clock: ManualClock) -> None:
    scene = Scene("mark", store, clock)
    effect, scene.body = scene.body, refuses
    driver = Driver(store, clock)
    assert not acknowledges(driver.run(scene.flow(driver)))
    scene.body = effect
    scene.redeliver()
    assert scene.measured() == LOST


def refuses(_driver: Driver, _owner: bytes) -> None:
    raise ConnectionError("not now")


def test_every_window_of_the_table_is_measured() -> None:
    measured = {
        (mode, WINDOW_OF[PLACE[command], fault])
        for mode in SINK_OF
        for command in YIELDS.get(mode, LEASED)
        for fault in FAULTS
    } | {(mode, "store_lost") for mode in SINK_OF}
    promised = {
        (mode, window)
        for mode, cells in GUARANTEES.items()
        for window, cell in cells.items()
        if cell is not None and mode in SINK_OF
    } - {("mark", "before_ack"), ("mark", "stalled_after_effect")}
    assert promised <= measured
    assert all(list(cells) == list(WINDOWS) for cells in GUARANTEES.values())


# --- waiting ---

WAITS = [
    pytest.param(mode, at, fault, id=f"{mode}-{at}-{command}-{fault}")
    for mode in ("lease, keyed sink", "lease, fenced sink", "lease, plain sink")
    for at, command in enumerate(WAITING)
    for fault in FAULTS
    if command in PLACE or fault != "late"
]


def held_by_the_dead(scene: Scene) -> None:
    """Somebody claims the event and dies."""
    driver = Driver(scene.store, scene.clock, Strike(0, "after_reply"))
    with pytest.raises(Died):
        driver.run(scene.flow(driver))


def window_of_waiting(at: int, fault: str) -> str:
    """Before the claim is had, a waiting process holds nothing; after it, it is as any other."""
    if at < WAITING.index("Unwatch") - 1:
        return "before_ack" if fault == "stalled" else "before_claim"
    if WAITING[at] == "Unwatch":
        held = {"not_sent": "after_claim", "after_reply": "after_claim", "stalled": "stalled_before_effect"}
        return held.get(fault, "before_claim")
    return WINDOW_OF[PLACE[WAITING[at]], fault]


@pytest.mark.parametrize(("mode", "at", "fault"), WAITS)
def test_a_fault_while_waiting_costs_no_more_than_the_table_says(
    mode: str, at: int, fault: str, store: Store, clock: ManualClock
) -> None:
    scene = Scene(mode, store, clock)
    held_by_the_dead(scene)
    commands = strike(
        scene,
        Strike(at, fault),  # type: ignore[arg-type]
        flow=lambda driver: scene.flow(driver, wait_s=600.0),
        again=scene.redeliver,
        lands_first=lands_first(PLACE.get(WAITING[at], "")),
    )
    assert commands[: at + 1] == WAITING[: at + 1]
    assert scene.measured() == GUARANTEES[mode][window_of_waiting(at, fault)]


def test_a_quarantined_event_is_not_taken_over_by_waiting(store: Store, clock: ManualClock) -> None:
    scene = Scene("quarantine", store, clock)
    held_by_the_dead(scene)
    driver = Driver(store, clock)
    driver.run(scene.flow(driver, wait_s=600.0))
    assert scene.measured() == GUARANTEES["quarantine"]["after_claim"]


def test_a_waiting_duplicate_does_not_take_over_before_the_lease_ends(
    store: Store, clock: ManualClock
) -> None:
    scene = Scene("lease, plain sink", store, clock)
    held_by_the_dead(scene)
    driver = Driver(store, clock)
    assert not acknowledges(driver.run(scene.flow(driver, wait_s=10.0)))
    assert scene.sink.effects == 0


# --- sweeping ---

SWEEPS = [
    pytest.param(mode, at, fault, id=f"{mode}-{at}-{command}-{fault}")
    for mode in ("lease, keyed sink", "lease, plain sink")
    for at, command in enumerate(SWEPT)
    for fault in FAULTS
]


@pytest.mark.parametrize(("mode", "at", "fault"), SWEEPS)
def test_a_fault_while_sweeping_costs_what_the_table_says(
    mode: str, at: int, fault: str, store: Store, clock: ManualClock
) -> None:
    scene = Scene(mode, store, clock, journal=b"payload")
    held_by_the_dead(scene)
    scene.pass_lease()
    place = PLACE.get(SWEPT[at], "scan")
    commands = strike(
        scene,
        Strike(at, fault),  # type: ignore[arg-type]
        flow=scene.sweep,
        again=scene.resweep,
        lands_first=lands_first(place),
    )
    assert commands[: at + 1] == SWEPT[: at + 1]
    window = "before_claim" if place == "scan" else WINDOW_OF[place, fault]
    assert scene.measured() == GUARANTEES[mode][window]
    record = scene.record()
    assert isinstance(record, Record)
    assert record.state == "done"


# --- steps ---

STEP_WINDOWS = {
    ("step", "not_sent"): "killed before the step",
    ("step", "after_reply"): "killed in the step, after its effect",
    ("note", "not_sent"): "killed in the step, after its effect",
    ("note", "after_reply"): "killed after the step's note",
    ("note", "reply_lost"): "the note's reply is lost",
    ("complete", "not_sent"): "killed after the step's note",
    ("complete", "after_reply"): "killed after the step's note",
    ("handler", "not_sent"): "killed before the step",
    ("handler", "after_reply"): "killed after the step's note",
}
STEP_PLACES = ["claim", "handler", "step", "note", "complete"]


@pytest.mark.parametrize(("place", "fault"), STEP_WINDOWS)
def test_a_step_that_is_noted_is_not_repeated(
    place: str, fault: str, store: Store, clock: ManualClock
) -> None:
    scene = Scene("lease, plain sink", store, clock)
    with_step(scene)
    at = STEP_PLACES.index(place)
    commands = strike(
        scene,
        Strike(at, fault),  # type: ignore[arg-type]
        flow=scene.flow,
        again=scene.redeliver,
        lands_first=False,
    )
    assert commands[: at + 1] == STEPPED[: at + 1]
    assert scene.measured() == STEPS[STEP_WINDOWS[place, fault]]


def test_every_step_window_is_measured() -> None:
    assert set(STEP_WINDOWS.values()) == set(STEPS)


# --- late requests ---


def test_a_claim_that_arrives_after_the_event_is_done_changes_nothing(
    store: Store, clock: ManualClock
) -> None:
    for mode in ("lease, plain sink", "quarantine"):
        scene = Scene(mode, store, clock)
        late = Claim(ID, b"o" * 16, LEASE_US, WINDOW_US, quarantine=mode == "quarantine")
        scene.redeliver()
        before = scene.record()
        store.send([late])
        assert scene.record() == before
        lose(store)


def test_a_completion_that_arrives_before_the_takeover_counts(store: Store, clock: ManualClock) -> None:
    scene = Scene("lease, plain sink", store, clock)
    strike(scene, Strike(2, "late"), flow=scene.flow, again=scene.redeliver, lands_first=True)
    assert scene.sink.effects == 1
    driver = Driver(store, clock)
    assert driver.run(scene.flow(driver)) == Done("done", replayed=True)


def test_before_any_claim_there_is_no_record(store: Store, clock: ManualClock) -> None:
    scene = Scene("lease, plain sink", store, clock)
    driver = Driver(store, clock, Strike(0, "not_sent"))
    with pytest.raises(Died):
        driver.run(scene.flow(driver))
    assert scene.record() == Absent()
