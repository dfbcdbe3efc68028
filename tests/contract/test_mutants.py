"""Every broken store is found out by the scenarios named for it; a contract that all pass proves nothing."""

from pathlib import Path

import pytest

from semel.testing import ManualClock, store_contract
from semel.testing.store_contract import Harness
from tests.contract import mutants_admin  # fills the table
from tests.contract.dict_store import DictStore
from tests.contract.mutants import MUTANTS, Mutant

assert mutants_admin


def broken_promises(store_type: type[DictStore]) -> set[str]:
    broken = set()
    for scenario in store_contract.scenarios(store_type.capabilities):
        clock = ManualClock()
        store = store_type(clock)
        try:
            store_contract.run(scenario, Harness(lambda store=store: store, clock=clock, hear_s=0.05))  # type: ignore[misc]
        except Exception:  # noqa: BLE001 - however a broken store breaks, it is found out
            broken.add(scenario.name)
    return broken


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_store_is_found_out(name: str) -> None:
    mutant: Mutant = MUTANTS[name]
    broken = broken_promises(mutant.store)
    assert set(mutant.caught_by) <= broken


def test_a_sound_store_is_not_accused() -> None:
    assert broken_promises(DictStore) == set()


def test_there_are_many_mutants_and_each_names_real_scenarios() -> None:
    known = {scenario.name for scenario in store_contract.scenarios()}
    assert len(MUTANTS) >= 50
    assert {name for mutant in MUTANTS.values() for name in mutant.caught_by} <= known
