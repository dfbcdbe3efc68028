"""Histories of real servers under faults: the machine explains every answer, and a racy store is found out."""

import os
import random
from pathlib import Path

import pytest

from semel.testing.histories import check_history
from tests.histories.storm import PLACES, Storm

SOAK = bool(os.environ.get("SEMEL_SOAK"))
CALLS, ROUNDS = (1_500, 25) if SOAK else (240, 0)
"""Calls of each worker, and faults at least; each kind of fault comes once in any case."""
STEPS_MAX = 400_000 if SOAK else 15_000
"""Of the search for one key: seconds at most."""


@pytest.mark.service
@pytest.mark.timeout(0 if SOAK else 300)
@pytest.mark.parametrize("name", PLACES)
def test_the_machine_explains_what_a_store_answered_under_faults(name: str, tmp_path: Path) -> None:
    seed = os.environ.get("SEMEL_TEST_SEED") or (os.urandom(4).hex() if SOAK else "once")
    with PLACES[name](tmp_path) as place, Storm(tmp_path, place, CALLS) as storm:
        storm.run(ROUNDS, random.Random(seed))
        result = check_history(storm.history(), steps_max=STEPS_MAX)
    print(f"{name}, seed {seed}: {result}")  # noqa: T201  # shown with -s and on failure
    assert not result.unexplained, str(result)
    assert len(result.undecided) <= result.keys // 4, str(result)  # too many lost replies for one key
    assert result.overlapping > 5
    assert (
        any(proxy.cuts for proxy in place.proxies) or not place.proxies
    )  # some clients repeat a cut call until it is answered
