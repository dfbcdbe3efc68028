"""Fixtures of this folder: stores of both colours, and a server of one's own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.core.protocols import Store
from semel.stores.redis import AsyncRedisStore, RedisStore
from tests.services import redis
from tests.stores.redis.tools import Make
from tests.stores.shells import InLoop


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes open stores of either colour, closed at the end."""
    made: list[Store] = []

    def make(url: str, **options: Any) -> Store:
        store: Store = (
            RedisStore(url, **options) if request.param == "sync" else InLoop(AsyncRedisStore(url, **options))
        )
        made.append(store)
        store.open()
        return store

    yield make
    for store in made:
        store.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[redis.Own]:
    with redis.own(tmp_path) as mine:
        yield mine
