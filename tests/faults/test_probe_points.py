"""Every yield of the flows that ask a probe, every fault: what the probe can tell is done once."""

import pytest

from semel.core.protocols import Store
from semel.testing import ManualClock
from semel.testing.faults import FAULTS, Died, Driver, Strike
from tests.faults.scenes import Scene, strike
from tests.faults.table import GUARANTEES, ONCE, TWICE, Cell

TAKEOVERS: dict[tuple[str, str], list[str]] = {
    ("lease, probe", "effect"): ["Claim", "Ask", "Settle"],
    ("lease, probe", "no effect"): ["Claim", "Ask", "Invoke", "Settle"],
    ("quarantine, probe", "effect"): ["Claim", "Lookup", "Ask", "Resolve"],
    ("quarantine, probe", "no effect"): ["Claim", "Lookup", "Ask", "Resolve", "Claim", "Invoke", "Settle"],
}
"""What the next delivery does, by the mode and by what the dead attempt left."""
RAISED: dict[str, list[str]] = {
    "effect": ["Claim", "Invoke", "Lookup", "Ask", "Settle"],
    "no effect": ["Claim", "Invoke", "Lookup", "Ask", "Settle"],
}
"""Quarantine: a handler that raises is asked about at once."""

POINTS = [
    pytest.param(mode, left, at, fault, id=f"{mode}-{left}-{at}-{command}-{fault}")
    for (mode, left), commands in TAKEOVERS.items()
    for at, command in enumerate(commands)
    for fault in FAULTS
]
RAISED_POINTS = [
    pytest.param(left, at, fault, id=f"{left}-{at}-{command}-{fault}")
    for left, commands in RAISED.items()
    for at, command in enumerate(commands)
    for fault in FAULTS
    if command != "Invoke"  # `test_crash_points` strikes there
]


def dies(scene: Scene, left: str) -> None:
    """An attempt that is killed after its effect, or before it; its lease is over."""
    driver = Driver(scene.store, scene.clock, Strike(1, "after_reply" if left == "effect" else "not_sent"))
    with pytest.raises(Died):
        driver.run(scene.flow(driver))
    scene.pass_lease()


@pytest.mark.parametrize(("mode", "left"), TAKEOVERS)
def test_no_yield_is_left_out(mode: str, left: str, store: Store, clock: ManualClock) -> None:
    scene = Scene(mode, store, clock)
    dies(scene, left)
    driver = Driver(store, clock)
    driver.run(scene.flow(driver))
    assert driver.commands == TAKEOVERS[mode, left]
    assert scene.measured() == ONCE
    scene.redeliver()
    assert (scene.measured(), scene.asked) == (ONCE, 1)


@pytest.mark.parametrize(("mode", "left", "at", "fault"), POINTS)
def test_a_fault_while_asking_costs_nothing_that_the_probe_can_tell(
    mode: str, left: str, at: int, fault: str, store: Store, clock: ManualClock
) -> None:
    scene = Scene(mode, store, clock)
    dies(scene, left)
    struck = Strike(at, fault)  # type: ignore[arg-type]
    commands = strike(scene, struck, flow=scene.flow, again=scene.redeliver, lands_first=False)
    assert commands[: at + 1] == TAKEOVERS[mode, left][: at + 1]
    scene.redeliver()  # where it was left unknown, the next delivery asks again
    assert scene.measured() == expected(mode, left, commands[at], fault)


def expected(mode: str, left: str, command: str, fault: str) -> Cell:
    """A probe whose answer is lost cannot tell: then lease runs again, as it does without a probe."""
    unanswered = command == "Ask" and fault in ("reply_lost", "late")
    return TWICE if unanswered and mode == "lease, probe" and left == "effect" else ONCE


@pytest.mark.parametrize(("left", "at", "fault"), RAISED_POINTS)
def test_a_fault_while_asking_about_a_handler_that_raised(
    left: str, at: int, fault: str, store: Store, clock: ManualClock
) -> None:
    scene = Scene("quarantine, probe", store, clock)
    effect, raised = scene.body, list[bytes]()

    def body(driver: Driver, owner: bytes) -> str:
        if raised:
            return str(effect(driver, owner))
        raised.append(owner)
        if left == "effect":
            effect(driver, owner)
        raise TimeoutError("no answer in time")

    scene.body = body
    struck = Strike(at, fault)  # type: ignore[arg-type]
    commands = strike(scene, struck, flow=scene.flow, again=scene.redeliver, lands_first=False)
    assert commands[: at + 1] == RAISED[left][: at + 1]
    scene.redeliver()
    assert scene.measured() == ONCE


@pytest.mark.parametrize("mode", ["lease, probe", "quarantine, probe"])
@pytest.mark.parametrize("fault", ["late", "stalled"])
def test_a_no_that_is_not_final_costs_a_second_effect(
    mode: str, fault: str, store: Store, clock: ManualClock
) -> None:
    """What the page says: a probe that only looks cannot see a call that is still under way."""
    scene = Scene(mode, store, clock)
    scene.final = False
    struck = Strike(1, fault)  # type: ignore[arg-type]
    strike(scene, struck, flow=scene.flow, again=scene.redeliver, lands_first=False)
    assert scene.measured() == TWICE


@pytest.mark.parametrize("mode", ["lease, probe", "quarantine, probe"])
def test_the_table_says_so(mode: str) -> None:
    twice = [window for window, cell in GUARANTEES[mode].items() if cell != ONCE]
    assert twice == ["store_lost"]
