"""The contract by the server's own clock, in both colours: what no test can move is waited for."""

from pathlib import Path

import pytest

from semel.core.protocols import AnyStore
from semel.testing import store_contract
from semel.testing.contract.harness import Scenario
from semel.testing.store_contract import Colour, Harness
from tests.stores.postgres import places

SCENARIOS = store_contract.scenarios(places.CAPABILITIES, manual=False)


@pytest.mark.slow
@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_by_the_servers_clock(scenario: Scenario, colour: Colour, tmp_path: Path) -> None:
    def connect() -> AnyStore:
        store = places.make(tmp_path)
        return store.twin() if colour == "async" else store

    store_contract.check(scenario, Harness(connect), colour)
