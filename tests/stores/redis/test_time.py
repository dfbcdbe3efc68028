"""The server's own clock decides: what lasts and what ends, waited for in its time."""

from pathlib import Path

import pytest

from semel.testing import store_contract
from semel.testing.contract.harness import Scenario
from semel.testing.store_contract import Colour, Harness
from tests.services import redis
from tests.stores.redis.places import CAPABILITIES, clocked

CHOSEN = {
    "a_lease_that_is_over_is_taken_over",
    "a_mark_expires",
    "a_purge_changes_no_answer",
    "a_window_that_is_over_means_absent",
    "an_orphan_is_remembered_for_its_window",
    "orphans_with_a_journal_are_found",
    "steps_are_given_to_the_next_attempt",
    "what_must_be_decided_does_not_expire",
}
SCENARIOS = [
    one
    for one in store_contract.scenarios(CAPABILITIES, manual=False)
    if one.name in CHOSEN or one.flow.__module__.endswith(".marks")
]
"""All about marks: with the server's clock they are plain commands, with any other a script."""


def test_the_chosen_scenarios_exist() -> None:
    assert {one.name for one in SCENARIOS} > CHOSEN


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.name)
def test_contract(scenario: Scenario, colour: Colour, tmp_path: Path) -> None:
    at = redis.place(tmp_path)
    harness = Harness(lambda: clocked(at, None).twin() if colour == "async" else clocked(at, None))
    store_contract.check(scenario, harness, colour)
