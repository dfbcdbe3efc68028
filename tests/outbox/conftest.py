"""Every kind of database that holds an outbox."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.outbox.tools import KINDS, Place


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    made = Place(request.param, tmp_path)
    yield made
    made.close()


@pytest.fixture
def postgres_place(tmp_path: Path) -> Iterator[Place]:
    made = Place("postgres", tmp_path)
    yield made
    made.close()


@pytest.fixture
def sqlite_place(tmp_path: Path) -> Iterator[Place]:
    made = Place("sqlite", tmp_path)
    yield made
    made.close()
