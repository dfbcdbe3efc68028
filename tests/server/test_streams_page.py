"""The page of deduplications: what instances wrote into the store, added up."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.observe.dedup_progress import InstanceFigures, ProgressWriter, SeenDedup, dedups
from semel.observe.numbered import ALIVE_US
from semel.runtime.generators import drive
from semel.server.settings import ServeSettings
from semel.stores.registry import store_for
from semel.stores.sqlite import SqliteStore
from tests.server.scenes import some_dedups
from tests.server.tools import Running, serving
from tests.services.server import NOBODY
from tests.waiting import await_true


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    made = SqliteStore(tmp_path / "semel.db", synchronous="NORMAL")
    made.open()
    yield made
    made.close()


def serving_of(store: SqliteStore) -> ServeSettings:
    return ServeSettings(auth="none", store=f"sqlite:///{store.path}", port=0)


def seen(store: SqliteStore) -> list[SeenDedup]:
    found: list[SeenDedup] = drive(dedups(), store.send)
    return found


def test_the_page_adds_up_the_instances_and_shows_what_is_restored(store: SqliteStore) -> None:
    some_dedups(store)
    with serving(serving_of(store)) as running:
        page = text_of(running, "/ui/streams")
        part = text_of(running, "/ui/parts/streams")
    for said in (page, part):
        assert "kafka://kafka:9092/orders?group=dedup" in said
        assert re.search(r"9\.5\s%\sof 1,000 records; 900 passed", said)
        assert ">47</p>" in said, "the lag of both"
        assert "250,000 are to be read for 1 partition" in said
        assert re.search(r"75\s% of the marks restored", said)
        assert said.count("<tr>") == 5, "two heads, three instances"


def text_of(running: Running, path: str) -> str:
    answer = running.client.get(path)
    assert answer.status_code == 200
    return answer.text


def test_without_any_it_says_how(store: SqliteStore) -> None:
    with serving(serving_of(store)) as running:
        assert "semel dedup --from" in text_of(running, "/ui/streams")


def test_an_instance_writes_while_it_runs_and_takes_itself_away_at_its_end(store: SqliteStore) -> None:
    writer = ProgressWriter(SqliteStore(store.path), "kafka://k/orders?group=g", "24h")
    writer.set(InstanceFigures(received=3, passed=2, duplicates=1, lag=9))
    writer.start()
    assert await_true(lambda: len(seen(store)) == 1, 30)
    [instance] = seen(store)
    assert (instance.figures.duplicates, instance.figures.lag, instance.window) == (1, 9, "24h")
    assert instance.is_alive(instance.seen_us + ALIVE_US)
    assert not instance.is_alive(instance.seen_us + ALIVE_US + 1)
    writer.close()
    assert seen(store) == []


def test_a_store_that_is_away_holds_nothing_up() -> None:
    store = store_for(f"redis://127.0.0.1:{NOBODY}/0")
    writer = ProgressWriter(store, "kafka://k/orders?group=g", "24h")  # type: ignore[arg-type]
    writer.start()
    writer.set(InstanceFigures(received=1))
    writer.close()
