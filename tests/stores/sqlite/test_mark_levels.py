"""Marks move through three tables and answer as if there were one: expiry, purge, other connections, old files."""

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from semel.core.commands import Count, Forget, Lookup, Mark, Marked, Purge, Purged
from semel.core.ids import digests_of
from semel.stores.memory.store import MemoryStore
from semel.stores.sqlite import SqliteStore, marks, schema
from semel.stores.sqlite.encoding import EPOCH_US
from semel.testing import ManualClock

SECOND = 10**6
HOUR = 3600 * SECOND
LEVELS = "SELECT " + ", ".join(f"(SELECT count(*) FROM {level})" for level in marks.LEVELS)


@pytest.fixture
def small_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "SMALL_MAX", 8)
    monkeypatch.setattr(marks, "MIDDLE_MAX", 40)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def stores(tmp_path: Path, clock: ManualClock) -> Iterator[list[SqliteStore]]:
    """Two stores on one file, as in two processes."""
    made = [SqliteStore(tmp_path / "marks.db", clock=clock, synchronous="NORMAL") for _ in range(2)]
    yield made
    for store in made:
        store.close()


def levels(store: SqliteStore) -> tuple[int, int, int]:
    with closing(sqlite3.connect(store.path)) as connection:
        found: tuple[int, int, int] = connection.execute(LEVELS).fetchone()
        return found


def mark(store: SqliteStore, *keys: str, window_us: int = HOUR) -> list[bool]:
    (answer,) = store.send([Mark("", "m", list(keys), window_us)])
    assert isinstance(answer, Marked)
    return answer.firsts


@pytest.mark.usefixtures("small_levels")
@pytest.mark.parametrize("seed", range(2))
def test_three_tables_answer_as_one(stores: list[SqliteStore], clock: ManualClock, seed: int) -> None:
    """Two connections take turns; the store in memory, which has one table, says what is right."""
    chance = random.Random(seed)
    memory = MemoryStore(clock=clock)
    rows: list[tuple[int, int, int]] = []
    for _ in range(160):
        clock.advance(us=chance.choice((11, 1_000_003, 40_000_007)))
        keys = [f"k{number}" for number in chance.sample(range(600), chance.choice((1, 5, 20)))]
        window_us = chance.choice((30 * SECOND, HOUR, 24 * HOUR))
        items: list[Any] = [
            Mark("", "m", keys, window_us), Mark("", "m", keys, window_us), Mark("", "m", keys, window_us),
            Lookup(("", "m", keys[0])), Forget(("", "m", keys[0])), Purge(limit=chance.choice((3, 50))),
        ]  # fmt: skip
        item = chance.choice(items)
        (mine,), (right,) = chance.choice(stores).send([item]), memory.send([item])
        assert type(mine) is type(right)
        if isinstance(mine, Marked):
            assert mine == right
        rows.append(levels(stores[0]))
    (counted,), (right,) = stores[0].send([Count()]), memory.send([Count()])
    assert counted.marks == right.marks
    assert all(max(column) > 0 for column in zip(*rows, strict=True)), "each table was used"
    assert max(small for small, _, _ in rows) <= 8 + 20


@pytest.mark.usefixtures("small_levels")
def test_all_tables_are_purged_in_bounded_steps(stores: list[SqliteStore], clock: ManualClock) -> None:
    store = stores[0]
    for start in range(0, 300, 5):
        mark(store, *(f"k{number}" for number in range(start, start + 5)))
    mark(store, "k300")
    held = levels(store)
    assert min(held) > 0
    assert sum(held) == 301
    clock.advance(us=HOUR + SECOND)
    mark(store, "later")
    assert store.send([Purge(dry_run=True)])[0].count == sum(levels(store)) - 1
    purged: list[Purged] = []
    while not purged or purged[-1].more:
        purged += store.send([Purge(limit=7)])
    assert max(each.count for each in purged) == 7
    assert sum(levels(store)) == 1
    assert mark(store, "later", "k1", "k299") == [False, True, True]


def test_a_batch_writes_few_pages_of_a_large_file(stores: list[SqliteStore]) -> None:
    """Random digests in one table would write a page each."""
    store = stores[0]
    mark(store, "first")
    with closing(sqlite3.connect(store.path)) as connection, connection:
        connection.execute(
            "WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 60000)"
            " INSERT INTO semel_marks_2 SELECT randomblob(16), 1, 90000000000000 FROM n"
        )
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    mark(store, *(f"k{number}" for number in range(500)))
    pages = Path(store.path + "-wal").stat().st_size / 4120
    assert 1 < pages < 60


def test_marks_of_an_older_file_are_known(tmp_path: Path, clock: ManualClock) -> None:
    path = tmp_path / "old.db"
    keys = [f"k{number}" for number in range(50)]
    with closing(sqlite3.connect(path)) as old:
        old.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
        for number, script in schema.migrations().items():
            if number < 3:
                old.executescript(script)
        old.execute("INSERT INTO semel_consumers (id, tenant, consumer) VALUES (1, '', 'm')")
        expires_at = clock.now_us() + HOUR - EPOCH_US
        old.executemany(
            "INSERT INTO semel_marks VALUES (?, 1, ?)",
            [(each, expires_at) for each in digests_of("", "m", keys)],
        )
        old.commit()
    store = SqliteStore(path, clock=clock)
    assert mark(store, *keys, "new") == [False] * 50 + [True]
    clock.advance(us=HOUR + SECOND)
    assert mark(store, *keys, window_us=2 * HOUR) == [True] * 50
    store.close()


def test_a_process_from_before_the_migration_fails_instead_of_missing_marks(
    stores: list[SqliteStore],
) -> None:
    mark(stores[0], "k")
    with closing(sqlite3.connect(stores[0].path)) as older, pytest.raises(sqlite3.OperationalError):
        older.execute("INSERT INTO semel_marks VALUES (x'00', 1, 1)")
