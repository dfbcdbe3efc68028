"""Change any one thing in the machine, and a scenario fails: the contract says all that the machine says."""

import pytest

from semel.testing import store_contract
from tests.contract.dict_store import DictStore
from tests.contract.machine_mutants import MUTATED, Change, changes
from tests.contract.mutants import breaks

EQUIVALENT = {
    (
        "standing: replace(record, state='unknown', settled_at_us=record.lease_until_us, expires_at_us=FOREVER, "
        "errors=_with_lease_end(record)) -> "
        "replace(record, state='unknown', settled_at_us=record.lease_until_us, errors=_with_lease_end(record))"
    ): "a quarantined claim has no expiry from the start",
    "_claim: None if record is stored else record -> None": "an orphan counts as unknown, written down or not",
    "_claim: None if record is stored else record -> record": "an unknown record is written as it stands",
    "_claim: record is stored -> record is not stored": "both of these at once",
    (
        "_settle: record.expires_at_us if record.expires_at_us != FOREVER "
        "else record.first_seen_us + item.window_us -> "
        "record.first_seen_us + item.window_us"
    ): "a sliding window that was changed while its claim ran may count by either",
}
"""Changes that no answer shows, or that the protocol leaves open; each with its reason."""
ALLOWED = set(EQUIVALENT)


def is_found_out(change: Change) -> bool:
    changed = type("Changed", (DictStore,), {"rules": change.module()})
    return any(breaks(scenario, changed) for scenario in store_contract.scenarios(DictStore.capabilities))


@pytest.mark.slow
@pytest.mark.parametrize("function", sorted(MUTATED))
def test_every_change_of_the_machine_is_found_out(function: str) -> None:
    mine = [change for change in changes() if change.name.startswith(f"{function}: ")]
    unnoticed = {change.name for change in mine if not is_found_out(change)}
    assert unnoticed == {name for name in ALLOWED if name.startswith(f"{function}: ")}


def test_the_machine_is_changed_in_many_places() -> None:
    names = [change.name for change in changes()]
    assert len(names) > 150
    assert set(names) >= ALLOWED
