"""A full disk: a clear answer, nothing half-written, and what is stored still answers."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.core.commands import Granted, Lookup, Mark, Scan
from semel.errors import StoreFull
from semel.stores.sqlite import SqliteStore
from semel.types import Completed, Unavailable
from tests.stores.sqlite.tools import HOUR, claim, finish, hold, lookup, named, settle


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "a.db", synchronous="NORMAL")
    store.open()
    yield store
    store.close()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = os.geteuid() == 0 and (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=False, capture_output=True
        ).returncode
        == 0
    )
    if not mounted:
        pytest.skip("needs the right to mount a small disk")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(store: SqliteStore, size: int = 100) -> tuple[list[str], list[Any]]:
    """Claim until there is no room; the keys that were granted, and the last answers."""
    granted: list[str] = []
    for batch in range(1000):
        keys = [f"k{batch}-{number}" for number in range(size)]
        answers = store.send([claim(key, event_type="x" * 100) for key in keys])
        if not all(isinstance(answer, Granted) for answer in answers):
            return granted, answers
        granted += keys
    raise AssertionError("it never filled up")


def stored(store: SqliteStore) -> list[str]:
    keys: list[str] = []
    cursor: str | None = None
    while True:
        page = store.send([Scan(limit=1000, cursor=cursor)])[0]
        keys += [record.key for record in page.records]
        cursor = page.cursor
        if cursor is None:
            return keys


def check_full(store: SqliteStore) -> None:
    held, granted_first = hold(store, "held")
    granted, answers = fill(store)
    assert granted
    assert all(isinstance(each, Unavailable) and isinstance(each.error, StoreFull) for each in answers)
    assert set(stored(store)) == {"held", *granted}
    known, refused, mark = store.send(
        [
            Lookup(named("held")),
            claim("new", event_type="x" * 4000),
            Mark("", "m", [str(n) for n in range(9999)], HOUR),
        ]
    )
    assert known.state == "claimed"
    assert isinstance(refused, Unavailable)
    assert isinstance(mark, Unavailable)
    assert "free some disk space" in str(mark.error)
    assert set(stored(store)) == {"held", *granted}
    assert (held.id, granted_first.attempt) == (named("held"), 1)


def test_the_largest_size(store: SqliteStore) -> None:
    assert store._writer is not None
    store._writer.execute("PRAGMA max_page_count = 60")
    check_full(store)
    store._writer.execute("PRAGMA max_page_count = 100000")
    finish(store, "new")
    assert lookup(store, "new").state == "done"


def test_what_is_settled_still_fits(store: SqliteStore) -> None:
    assert store._writer is not None
    held, granted = hold(store, "held")
    store._writer.execute("PRAGMA max_page_count = 60")
    fill(store)
    answers = store.send(
        [settle(held, granted, None), *(claim(f"more{n}", event_type="x" * 100) for n in range(100))]
    )
    assert isinstance(answers[0], Completed)
    assert all(isinstance(answer, Unavailable) for answer in answers[1:])
    assert lookup(store, "held").state == "done"


def test_a_disk_that_is_really_full(tiny_disk: Path) -> None:
    store = SqliteStore(tiny_disk / "a.db")
    store.open()
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(b"x" * 100_000)
    check_full(store)
    ballast.unlink()
    assert isinstance(store.send([claim("new")])[0], Granted)
    store.close()
    again = SqliteStore(tiny_disk / "a.db")
    assert lookup(again, "held").state == "claimed"
    assert lookup(again, "new").state == "claimed"
    again.close()
