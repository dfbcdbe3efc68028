"""Servers that would lose what they have answered, replicas, and a disk that is really full."""

import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from semel.core.commands import Claim, Count, Granted, Known, Lookup, Mark, Marked, Settle
from semel.errors import StoreFull, StoreRefused
from semel.stores.postgres import PostgresStore
from semel.types import Absent, Busy, Completed, Record, Unavailable
from tests.services import postgres
from tests.services.postgres import Own
from tests.waiting import await_true

MINUTE_US = 60 * 1_000_000
DAY_US = 86_400 * 1_000_000
DISK = "12m"


@pytest.fixture
def own() -> Iterator[Own]:
    with postgres.own() as mine:
        yield mine


def claim(key: str = "k", **more: Any) -> Claim:
    return Claim(("", "c", key), os.urandom(16), MINUTE_US, DAY_US, **more)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["fsync", "full_page_writes", "synchronous_commit"])
def test_a_server_that_may_lose_answers_is_not_called_durable(own: Own, setting: str) -> None:
    own.stop()
    own.start(**{setting: "off"})
    store = PostgresStore(own.url)
    found = [store.capabilities.durable]
    store.open()
    found.append(store.capabilities.durable)
    assert [setting in weakness for weakness in store.weaknesses] == [True]
    store.close()
    own.restart()
    store.open()
    found.append(store.capabilities.durable)
    store.close()
    assert found == [True, False, True]
    assert store.weaknesses == ()


@pytest.mark.slow
def test_a_replica_is_refused_until_it_is_promoted(own: Own) -> None:
    primary = PostgresStore(own.url)
    primary.open()
    done, held = claim("done"), claim("held")
    first, _ = primary.send([done, held])
    primary.send([Settle(done.id, done.owner, first.fence, "done", b"j1", DAY_US)])
    standby = own.standby(own.folder.parent / "standby")
    try:
        replica = PostgresStore(standby.url)
        with pytest.raises(StoreRefused, match="is a replica; connect to the primary"):
            replica.open()
        with pytest.raises(StoreRefused, match="replica"):
            replica.send([claim("other")])
        later = claim("later")
        primary.send([later])
        ((at,),) = postgres.execute(own.url, "SELECT pg_current_wal_lsn()::text")
        assert await_true(lambda: has_replayed(standby.url, at), 30)
        primary.close()
        own.stop(signal.SIGINT)
        postgres.execute(standby.url, "SELECT pg_promote()")
        replica.open()
        known, busy, also_busy = replica.send([claim("done"), claim("held"), claim("later")])
        assert isinstance(known, Known)
        assert known.value == b"j1"
        assert isinstance(busy, Busy)
        assert isinstance(also_busy, Busy)
        (mine,) = replica.send([later])  # the owner who lost its connection has its claim still
        assert isinstance(mine, Granted)
        replica.close()
    finally:
        standby.stop(signal.SIGQUIT)


def has_replayed(url: str, at: str) -> bool:
    ((replayed,),) = postgres.execute(url, f"SELECT pg_last_wal_replay_lsn() >= '{at}'::pg_lsn")
    return bool(replayed)


@pytest.mark.slow
def test_a_store_whose_server_becomes_a_replica_is_told(own: Own) -> None:
    """After a switch-over the old address leads to a replica: writes are refused, in plain words."""
    store = PostgresStore(own.url)
    store.open()
    own.stop()
    signal_file = own.folder / "data" / "standby.signal"
    signal_file.touch()
    own.start()
    with pytest.raises(StoreRefused, match="primary"):
        store.send([claim()])
    store.close()


# --- a full disk --------------------------------------------------------------------------------


@pytest.fixture
def small_disk(own: Own) -> Iterator[str]:
    """A store's URL whose tables lie on a disk of a few megabytes."""
    disk = own.folder.parent / "disk"
    disk.mkdir()
    mounted = os.geteuid() == 0 and (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)],
            check=False,
            capture_output=True,
        ).returncode
        == 0
    )
    if not mounted:
        pytest.skip("needs the right to mount a small disk")
    try:
        place = disk / "space"
        place.mkdir()
        postgres.give(disk)
        postgres.give(place)
        postgres.execute(own.url, f"CREATE TABLESPACE small LOCATION '{place}'")
        yield f"{own.url}?options=-c%20default_tablespace%3Dsmall"
        own.stop(signal.SIGQUIT)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_a_full_disk_refuses_whole_items_and_what_is_stored_still_answers(small_disk: str, own: Own) -> None:
    store = PostgresStore(small_disk)
    store.open()
    held = claim("held")
    (granted,) = store.send([held])
    (first,) = store.send([Mark("", "m", ["mark"], DAY_US)])
    assert first == Marked([True])
    stored, refused = fill(store)
    assert len(stored) > 1000
    assert all(isinstance(answer.error, StoreFull) for answer in refused.values())
    assert "free some disk space" in str(next(iter(refused.values())).error)
    # What was refused is not there at all, and what was granted is there as it was granted.
    found = store.send([Lookup(("", "c", key)) for key in refused])
    assert all(isinstance(record, Absent) for record in found)
    (counted,) = store.send([Count()])
    assert counted.states == {"claimed": len(stored) + 1}
    some = list(stored)[:: len(stored) // 50]
    for key, record in zip(some, store.send([Lookup(("", "c", key)) for key in some]), strict=True):
        assert isinstance(record, Record)
        assert (record.owner, record.fence) == stored[key]
    # Duplicates are answered; of settles, those that find room on their pages.
    assert all(isinstance(answer, Busy) for answer in store.send([claim(key) for key in some]))
    assert store.send([Mark("", "m", ["mark"], DAY_US)]) == [Marked([False])]
    (ended,) = store.send([Settle(held.id, held.owner, granted.fence, "done", b"j1", DAY_US, MINUTE_US)])
    assert isinstance(ended, Completed)
    store.close()


def fill(store: PostgresStore) -> tuple[dict[str, tuple[bytes, int]], dict[str, Any]]:
    """Claim until there is no room: what was granted with owner and fence, and what was refused."""
    stored: dict[str, tuple[bytes, int]] = {}
    for number in range(2000):
        sent = [claim(f"{number}-{n}", event_type="t" * 200) for n in range(200)]
        answers = dict(zip([each.id[2] for each in sent], store.send(sent), strict=True))
        stored |= {
            each.id[2]: (each.owner, answers[each.id[2]].fence)
            for each in sent
            if isinstance(answers[each.id[2]], Granted)
        }
        refused = {key: answer for key, answer in answers.items() if isinstance(answer, Unavailable)}
        if refused:
            return stored, refused
    raise AssertionError("it never filled up")


def fill_beside(url: str) -> None:
    """Take all the room there is with something else."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE ballast (bytes bytea) TABLESPACE small")
        connection.execute("ALTER TABLE ballast ALTER bytes SET STORAGE EXTERNAL")
        while True:
            connection.execute("INSERT INTO ballast VALUES (convert_to(repeat('x', 100000), 'UTF8'))")


@pytest.mark.slow
def test_room_that_comes_back_is_used(small_disk: str, own: Own) -> None:
    store = PostgresStore(small_disk)
    store.open()
    store.send([claim("first")])  # so that the consumer is known, and only records need room
    with pytest.raises(psycopg.errors.DiskFull):
        fill_beside(own.url)
    stored, refused = fill(store)
    postgres.execute(own.url, "DROP TABLE ballast")
    again = store.send([claim(key) for key in refused])
    assert all(isinstance(answer, Granted) and answer.attempt == 1 for answer in again)
    assert all(isinstance(answer, Busy) for answer in store.send([claim(key) for key in stored]))
    store.close()
