"""Cleaning up the plain table: one at a time, beside claims, never in their way, never changing an answer."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import semel
from semel.core.commands import Claim, Count, Granted, Purge, Settle
from semel.stores import Purged
from semel.stores.postgres import PostgresStore
from semel.testing import ManualClock
from semel.types import Completed
from tests.services import postgres
from tests.stores.postgres import places

S = 1_000_000
MINUTE_US = 60 * S
ROOT = Path(__file__).resolve().parents[3]


def finished(store: PostgresStore, count: int, window_us: int = S) -> None:
    """Records that expire soon."""
    for at in range(0, count, 500):
        claims = [
            Claim(("", "c", f"key {at + n}"), os.urandom(16), MINUTE_US, window_us)
            for n in range(min(500, count - at))
        ]
        store.send(
            [
                Settle(item.id, item.owner, answer.fence, "done", None, window_us)
                for item, answer in zip(claims, store.send(claims), strict=True)
            ]
        )


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def manual(tmp_path: Path, clock: ManualClock) -> Iterator[PostgresStore]:
    store = places.make(tmp_path, clock)
    store.open()
    yield store
    store.close()


@pytest.fixture
def other(place: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(place.partition("?")[0], application_name="the other one") as connection:
        yield connection


def test_while_another_one_cleans_nothing_is_done_and_it_is_named(
    manual: PostgresStore, clock: ManualClock, other: psycopg.Connection[Any]
) -> None:
    finished(manual, 10)
    clock.advance(us=10 * MINUTE_US)
    other.execute(manual.statements["elect"])
    (purged,) = manual.send([Purge()])
    assert (purged.count, purged.more) == (0, False)
    assert "the other one" in purged.cleaner
    assert f"pid {other.info.backend_pid}" in purged.cleaner
    other.rollback()  # as when it is killed
    (purged,) = manual.send([Purge()])
    assert (purged.count, purged.cleaner) == (10, "")
    assert 500 < purged.lag_s < 700


def test_cleaners_of_several_services_share_the_work(manual: PostgresStore, clock: ManualClock) -> None:
    finished(manual, 3000)
    clock.advance(us=10 * MINUTE_US)
    counts: list[int] = []
    barrier = threading.Barrier(3, timeout=30)

    class Service:
        records: Any

        def __init__(self) -> None:
            self.records = self

        def purge(self, *, limit: int = 0, dry_run: bool = False) -> Purged:
            (purged,) = manual.send([Purge(limit, dry_run)])
            assert isinstance(purged, Purged)
            return purged

    def service() -> None:
        barrier.wait()
        counts.append(semel.Cleaner(Service(), batch=100).clean().count)

    threads = [threading.Thread(target=service) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    counts.append(semel.Cleaner(Service(), batch=100).clean().count)  # should one have left in between
    assert sum(counts) == 3000
    assert manual.send([Count()])[0].expired == 0


def test_locked_rows_are_skipped_and_left_for_later(
    manual: PostgresStore, clock: ManualClock, other: psycopg.Connection[Any]
) -> None:
    finished(manual, 50)
    clock.advance(us=10 * MINUTE_US)
    schema = manual.place.schema
    other.execute(f"SELECT 1 FROM {schema}.records WHERE key < 'key 2' FOR UPDATE").fetchall()
    held = other.execute(f"SELECT count(*) FROM {schema}.records WHERE key < 'key 2'").fetchone()
    assert held is not None
    assert manual.send([Purge()])[0].count == 50 - held[0]
    other.rollback()
    assert manual.send([Purge()])[0].count == held[0]


def test_purging_and_taking_over_the_same_keys(store: PostgresStore) -> None:
    """Windows of a microsecond, so that every record is purged or taken over; a fence never comes twice."""
    keys = [f"k{number}" for number in range(20)]
    stop = threading.Event()
    fences: dict[str, list[int]] = {key: [] for key in keys}
    trouble: list[Any] = []

    def claimer() -> None:
        for _ in range(60):
            claims = [Claim(("", "c", key), os.urandom(16), MINUTE_US, 1) for key in keys]
            won = [
                (item, answer)
                for item, answer in zip(claims, store.send(claims), strict=True)
                if isinstance(answer, Granted)
            ]
            for item, answer in won:
                fences[item.id[2]].append(answer.fence)
            ended = store.send(
                [
                    Settle(item.id, item.owner, answer.fence, "done", None, 1, MINUTE_US)
                    for item, answer in won
                ]
            )
            trouble.extend(end for end in ended if end != Completed(at_us=end.at_us))

    def purger() -> None:
        while not stop.is_set():
            with store._open_pool().connection() as line:  # at once, not when its minute has come
                line.execute(
                    f"UPDATE {store.place.schema}.records SET purge_at = 0 WHERE ctid = ANY (ARRAY("
                    f"SELECT ctid FROM {store.place.schema}.records WHERE state = 1 FOR UPDATE SKIP LOCKED))"
                )
            store.send([Purge(7)])

    claimers = [threading.Thread(target=claimer) for _ in range(4)]
    purgers = [threading.Thread(target=purger) for _ in range(2)]
    for thread in (*claimers, *purgers):
        thread.start()
    for thread in claimers:
        thread.join(60)
    stop.set()
    for thread in purgers:
        thread.join(60)
    assert trouble == []
    assert all(len(set(found)) == len(found) for found in fences.values())
    assert sum(map(len, fences.values())) > len(keys)


@pytest.mark.slow
def test_a_cleaner_killed_in_the_middle_leaves_nothing_to_repair(
    manual: PostgresStore, clock: ManualClock, place: str
) -> None:
    finished(manual, 5000)
    clock.advance(us=10 * MINUTE_US)
    script = (
        "import os, signal, sys\n"
        "from semel.core.commands import Purge\n"
        "from semel.stores.postgres import from_url\n"
        "from semel.testing import ManualClock\n"
        "store = from_url(sys.argv[1]); store.clock = ManualClock(int(sys.argv[2])); store.open()\n"
        "for _ in range(3): store.send([Purge(100)])\n"
        "said = store._converse\n"
        "def dying(line, talk):\n"
        "    line.execute('BEGIN'); line.execute(store.statements['elect'])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "store._converse = dying\n"
        "store.send([Purge(100)])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, place, str(clock.now_us())], cwd=ROOT, timeout=60, check=False
    )
    assert ended.returncode == -9
    removed = 0
    for _ in range(1000):
        (purged,) = manual.send([Purge(1000)])
        removed += purged.count
        if not purged.more and not purged.cleaner:
            break
    assert removed == 4700


def test_ids_race_between_processes(place: str) -> None:
    """Four processes and one winner per id, in partitions."""
    with semel.open(place, consumer="claims", ids="uuid7", policy=semel.Policy(late="hold")):
        pass
    keys = ",".join(semel.keys.uuid7("n") for _ in range(100))
    racers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.stores.postgres.attacker", place, "race"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "ATTACKED_KEYS": keys},
        )
        for _ in range(4)
    ]  # fmt: skip
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"

    results = [json.loads(racer.communicate("go\n", timeout=60)[0]) for racer in racers]
    for part in ("won", "done"):
        assert sorted(key for result in results for key in result[part]) == sorted(keys.split(","))
    schema = place.partition("schema=")[2].partition("&")[0]
    assert postgres.execute(place, f"SELECT count(*)::int FROM {schema}.timed_records") == [(100,)]
