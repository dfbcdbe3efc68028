"""Every store keeps every promise, in both colours."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from semel.clock import Clock
from semel.core.commands import Answer, Flow, Item
from semel.core.protocols import Listener
from semel.stores.memory.store import MemoryStore
from semel.testing import ManualClock, store_contract
from semel.testing.contract.harness import Scenario, ScenarioContext, check
from semel.testing.store_contract import Colour, Harness
from tests.contract.dict_store import DictStore
from tests.contract.stores import KINDS, Kind

CASES = [
    pytest.param(kind, scenario, id=f"{kind.name}-{scenario.name}")
    for kind in KINDS
    if not kind.in_loop
    for scenario in store_contract.scenarios(kind.capabilities)
    if scenario.name not in kind.without
]


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize(("kind", "scenario"), CASES)
def test_store(kind: Kind, scenario: Scenario, colour: Colour, tmp_path: Path) -> None:
    store_contract.check(scenario, kind.harness(tmp_path, colour), colour)


class TestAsOthersUseIt(store_contract.StoreSuite):
    """The few lines that the author of a store writes."""

    capabilities = DictStore.capabilities

    def connect(self, folder: Path, clock: ManualClock) -> DictStore:
        return DictStore(clock)


class OnAServersClock(store_contract.ServerSuite):
    """What the author of a store on a server writes; not collected, as all of it waits for long."""

    capabilities = MemoryStore.capabilities

    def harness(self, folder: Path) -> Harness:
        store = MemoryStore()
        return Harness(lambda: store)


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_time_is_waited_for_where_it_cannot_be_moved(colour: Colour, tmp_path: Path) -> None:
    suite = OnAServersClock()
    suite.test_the_store_promises_what_the_suite_checks(tmp_path)
    chosen = {scenario.name: scenario for scenario in store_contract.scenarios(manual=suite.manual)}
    for name in (
        "a_lease_that_is_over_is_taken_over",
        "a_window_that_is_over_means_absent",
        "a_mark_expires",
    ):
        suite.test_contract(chosen[name], colour, tmp_path)


@pytest.mark.parametrize(
    ("suite", "unsaid"), [(store_contract.StoreSuite, "connect"), (store_contract.ServerSuite, "harness")]
)
def test_a_suite_that_does_not_say_where_the_records_are_is_refused(suite: type[Any], unsaid: str) -> None:
    with pytest.raises(TypeError, match=unsaid):
        suite()


def test_powers_pick_the_scenarios() -> None:
    every = {scenario.name for scenario in store_contract.scenarios()}
    memory = {scenario.name for scenario in store_contract.scenarios(MemoryStore.capabilities)}
    real = {scenario.name for scenario in store_contract.scenarios(manual=False)}
    assert every - memory == {
        "a_claim_with_a_window_without_end_is_as_any_other",
        "a_key_without_end_outlasts_decades",
        "a_purge_leaves_records_without_end_alone",
        "a_stored_window_without_end_moves_records_both_ways",
        "a_window_without_end_keeps_the_key",
        "a_window_without_end_survives_a_restart",
        "answers_survive_reopening",
        "marks_and_settings_survive_reopening",
        "time_and_fences_go_on_after_reopening",
    }
    assert "the_stores_time_never_goes_back" in every - real
    assert len(every) > 120


def test_a_broken_promise_says_which_and_what_went_before() -> None:
    def flow(b: ScenarioContext) -> Flow[None]:
        yield from b.hold("the key")
        check(False, "what was wrong")

    with pytest.raises(AssertionError, match="what was wrong") as raised:
        store_contract.run(Scenario("a_name", "A promise.", flow), Harness(DictStore, clock=ManualClock()))
    notes = raised.value.__notes__
    assert notes[0] == "scenario a_name: A promise."
    assert "Claim(" in notes[1]
    assert "Granted(" in notes[1]


def test_a_store_for_event_loops_only_is_refused_in_threads() -> None:
    class AsyncOnly:
        name = "async:"
        capabilities = DictStore.capabilities

        def __init__(self, clock: Clock) -> None:
            self.inner = DictStore(clock)

        async def aopen(self) -> None: ...
        async def aclose(self) -> None: ...
        async def asend(self, items: Sequence[Item], /) -> list[Answer]:
            await asyncio.sleep(0)
            return self.inner.send(items)

        def watch(self, listener: Listener, /) -> Callable[[], None]:
            return self.inner.watch(listener)

    clock = ManualClock()
    store = AsyncOnly(clock)
    for scenario in store_contract.scenarios(DictStore.capabilities):
        store_contract.check(scenario, Harness(lambda: store, clock=clock), "async")
    with pytest.raises(TypeError, match="event loops only"):
        store_contract.run(scenario, Harness(lambda: store, clock=clock))


def test_the_contract_needs_no_pytest() -> None:
    script = "import sys; import semel.testing.store_contract; print('pytest' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
