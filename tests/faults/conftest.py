"""The stores of crash points: each embedded store, with a clock that the test moves."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.core.protocols import Store
from semel.testing import ManualClock
from tests.faults.scenes import STORES


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    store = STORES[request.param](tmp_path, clock)
    store.open()
    yield store
    store.close()
