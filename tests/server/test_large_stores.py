"""Pages of a store that takes long to count: they open, and say when and how their numbers were counted."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from semel.core.commands import Admit, Answer, Claim, Count, Item, Scan, Settle
from semel.runtime.process import new_owner
from semel.server.dashboard.rendering import page
from semel.server.dashboard.snapshots import Snapshot
from semel.server.settings import ServeSettings
from semel.stores.sqlite import SqliteStore
from semel.types import Stats
from tests.server.test_failures import text_of
from tests.server.tools import Running, serving
from tests.waiting import await_true

MINUTE_US = 60 * 10**6


class SlowCounts(SqliteStore):
    """Counts when it is allowed to; remembers which states were listed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_count = threading.Event()
        self.listed: list[str | None] = []

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        for item in items:
            if isinstance(item, Count):
                assert self.may_count.wait(60)
            if isinstance(item, Scan) and item.consumer is None and not item.orphaned:
                self.listed.append(item.state)
        return super().send(items)


@pytest.fixture
def store(tmp_path: Path) -> SlowCounts:
    return SlowCounts(tmp_path / "semel.db")


@pytest.fixture
def running(store: SlowCounts) -> Iterator[Running]:
    with serving(ServeSettings(auth="none", port=0), store=store) as made:
        yield made
        store.may_count.set()


def settle(store: SlowCounts, key: str, to: str) -> None:
    place, owner = ("", "billing", key), new_owner()
    (granted,) = store.send((Claim(place, owner, MINUTE_US, MINUTE_US),))
    store.send((Settle(place, owner, granted.fence, to, b"jnull", MINUTE_US, MINUTE_US),))  # type: ignore[arg-type]


def test_pages_open_while_the_records_are_counted(running: Running, store: SlowCounts) -> None:
    store.send((Admit("", "billing", "lease"),))
    settle(store, "evt_1", "done")
    for path in ("", "failures", "flight", "stores", "consumer/billing"):
        told = text_of(running, path)
        assert "Counting …" in told
        assert "Nothing needs you" not in told, "nobody knows yet"
        assert "Nothing is in flight" not in told
    store.may_count.set()
    assert await_true(lambda: "Counted at" in text_of(running, "failures"), 30)
    assert "Nothing needs you" in text_of(running, "failures")


def test_states_that_nothing_has_are_not_listed(running: Running, store: SlowCounts) -> None:
    """Redis lists the records of one state as slowly as it counts all."""
    store.may_count.set()
    settle(store, "evt_1", "done")
    settle(store, "evt_2", "failed")
    assert await_true(lambda: "evt_2" in text_of(running, "failures"), 30)
    assert set(store.listed) == {"failed"}


def test_somebody_can_have_it_counted_now(running: Running, store: SlowCounts) -> None:
    """What takes long is counted seldom; a person who repaired something does not wait for that."""
    store.may_count.set()
    settle(store, "evt_1", "failed")
    assert await_true(lambda: "evt_1" in text_of(running, "failures"), 30)
    pages = next(each for each in running.app.routes if getattr(each, "path", "") == "/ui").app
    pages.state.desk.snapshots.of(None)._due = float("inf")
    settle(store, "evt_2", "failed")
    assert "evt_2" not in text_of(running, "failures")
    text_of(running, "failures?count=now")
    assert await_true(lambda: "evt_2" in text_of(running, "failures"), 30)


def test_numbers_say_how_long_they_took() -> None:
    viewer, stats = {"sees_all": False}, Stats(now_us=0)
    taken = [Snapshot(10**12, stats, took_s=took_s) for took_s in (0.0, 10.0, 80.0)]
    told = [bytes(page("_held.html", {"viewer": viewer, "snapshot": each}).body) for each in taken]
    assert b"it took" not in told[0]
    assert b"it took 10s, so it is done every 3m30s" in told[1]
    assert b"it took 1m20s, so it is done every 6m20s" in told[2]
    assert b'href="?count=now"' in told[1]
