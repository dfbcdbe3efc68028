"""Stores on the run's shared server, each test with a schema of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.stores.postgres import PostgresStore
from tests.services import postgres
from tests.stores.postgres import places


@pytest.fixture
def place(tmp_path: Path) -> str:
    return postgres.place(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PostgresStore]:
    made = places.make(tmp_path)
    made.open()
    yield made
    made.close()
