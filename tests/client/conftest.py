"""One place per test, for every kind of client."""

import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.client.clients import KINDS, Any_, Kind, Place, until


def semel_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("semel-")]


@pytest.fixture(params=KINDS, ids=str)
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    kind: Kind = request.param
    before = semel_threads()
    place = Place(kind, tmp_path)
    yield place
    for client in place.opened:
        await client.close()
    place.spy.close()
    await until(lambda: semel_threads() == before)


@pytest.fixture
def client(place: Place) -> Any_:
    return place.open()
