"""The window that is in force for a consumer, as its store and its records show it."""

from pathlib import Path
from typing import Any

import pytest

import semel
from semel.core.commands import ReadSettings, Scan
from semel.observe.window_in_force import SAMPLE, WindowInForce, window_in_force
from semel.stores.registry import store_for
from tests.services import postgres, redis

DAY_US = 86400 * 10**6


@pytest.fixture(params=["sqlite", "redis", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/events.db"
    return redis.place(tmp_path) if request.param == "redis" else postgres.place(tmp_path)


def shown(url: str) -> WindowInForce:
    store: Any = store_for(url)
    store.open()
    try:
        settings, page = store.send((ReadSettings(), Scan("", "billing", "done", limit=SAMPLE)))
        return window_in_force(settings.windows, "", "billing", page.records, DAY_US)
    finally:
        store.close()


def test_it_is_the_stored_one_else_what_records_show_else_assumed(url: str) -> None:
    with semel.open(url, consumer="billing", window="45m") as once:
        once.claim("running")
        assert shown(url) == WindowInForce(DAY_US, "assumed")
        once.run("a", int)
        assert shown(url) == WindowInForce(45 * 60 * 10**6, "seen")
        once.windows.set("2h", event_type="order.paid")
        once.run("b", int, event_type="order.paid")
        assert shown(url) == WindowInForce(45 * 60 * 10**6, "seen"), (
            "a type with a window of its own says nothing"
        )
        once.windows.set("3h")
        assert shown(url) == WindowInForce(3 * 3600 * 10**6, "stored")
