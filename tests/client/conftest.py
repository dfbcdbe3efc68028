"""One place per test, for every kind of client."""

import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from semel.runtime import keeper
from tests.client.clients import KINDS, Either, Kind, Place
from tests.waiting import until


def named(thread: threading.Thread) -> bool:
    return thread.name.startswith("semel-")


def semel_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if named(thread)]


@pytest.fixture(params=KINDS, ids=str)
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    kind: Kind = request.param
    before = set(threading.enumerate())
    place = Place(kind, tmp_path)
    yield place
    for client in place.opened:
        await client.close()
    place.spy.close()
    await until(lambda: not [thread for thread in set(threading.enumerate()) - before if named(thread)])


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease of half a minute is renewed every 30 ms: no stall of a busy computer is as long as the lease."""
    for part in ("RENEW_AT", "RETRY_AT"):
        monkeypatch.setattr(keeper, part, 1 / 1000)
    monkeypatch.setattr(keeper, "TOGETHER", 1 / 4000)


@pytest.fixture
def client(place: Place) -> Either:
    return place.open()
