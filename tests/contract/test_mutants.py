"""Every broken store is found out by the scenarios named for it; a contract that all pass proves nothing."""

import pytest

from semel.testing import store_contract
from tests.contract.dict_store import DictStore
from tests.contract.mutants import Mutant, breaks
from tests.contract.mutants_admin import MUTANTS


def broken_promises(store_type: type[DictStore]) -> set[str]:
    chosen = store_contract.scenarios(store_type.capabilities)
    return {scenario.name for scenario in chosen if breaks(scenario, store_type)}


@pytest.mark.slow
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
