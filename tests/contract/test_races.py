"""Claims that start at a barrier: one winner per key, between threads and between processes."""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from semel.clock import SystemClock
from semel.core.commands import Claim, Granted, Mark, Settle
from semel.core.protocols import Store
from semel.stores.sqlite import SqliteStore
from semel.types import Completed
from tests.contract.mutants import GetThenSet
from tests.contract.racer import KEYS, MINUTE_US
from tests.contract.stores import KINDS, Kind

ROOT = Path(__file__).resolve().parents[2]
CALLERS = 8
PROCESSES = 4


def race(store: Store, keys: list[str]) -> tuple[Counter[str], Counter[str]]:
    """How many callers won each key: by claims sent one by one, and by marks."""
    barrier = threading.Barrier(CALLERS, timeout=30)
    claimed: Counter[str] = Counter()
    marked: Counter[str] = Counter()

    def caller(_number: int) -> list[tuple[str, bool, bool]]:
        barrier.wait()
        won = []
        for key in keys:
            claim = Claim(("", "claims", key), os.urandom(16), MINUTE_US, MINUTE_US)
            (answer,) = store.send([claim])
            (mark,) = store.send([Mark("", "marks", [key], MINUTE_US)])
            won.append((key, isinstance(answer, Granted), mark.firsts[0]))
        return won

    with ThreadPoolExecutor(CALLERS) as threads:
        for won in threads.map(caller, range(CALLERS)):
            claimed.update(key for key, first, _ in won if first)
            marked.update(key for key, _, first in won if first)
    return claimed, marked


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_racing_threads_have_one_winner_per_key(kind: Kind, tmp_path: Path) -> None:
    store = kind.make(tmp_path, SystemClock())
    store.open()
    try:
        claimed, marked = race(store, KEYS)
    finally:
        store.close()
    assert claimed == Counter(KEYS)
    assert marked == Counter(KEYS)


def test_the_race_is_a_race_that_a_store_can_lose() -> None:
    claimed, marked = race(GetThenSet(SystemClock()), KEYS[:5])
    assert claimed == Counter(dict.fromkeys(KEYS[:5], CALLERS))
    assert marked == Counter(dict.fromkeys(KEYS[:5], CALLERS))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_racing_batches_in_opposite_order_all_come_back(kind: Kind, tmp_path: Path) -> None:
    store = kind.make(tmp_path, SystemClock())
    store.open()
    barrier = threading.Barrier(CALLERS, timeout=30)

    def caller(number: int) -> int:
        claims = [Claim(("", "claims", key), os.urandom(16), MINUTE_US, MINUTE_US) for key in KEYS]
        barrier.wait()
        sent = claims if number % 2 else claims[::-1]
        answers = store.send(sent)
        mine = [
            (claim, answer)
            for claim, answer in zip(sent, answers, strict=True)
            if isinstance(answer, Granted)
        ]
        done = store.send(
            [
                Settle(claim.id, claim.owner, answer.fence, "done", window_us=MINUTE_US)
                for claim, answer in mine
            ]
        )
        assert all(isinstance(answer, Completed) and not answer.recreated for answer in done)
        return len(mine)

    try:
        with ThreadPoolExecutor(CALLERS) as threads:
            assert sum(threads.map(caller, range(CALLERS))) == len(KEYS)
    finally:
        store.close()


def test_racing_processes_have_one_winner_per_key(tmp_path: Path) -> None:
    path = tmp_path / "semel.db"
    store = SqliteStore(path)
    store.open()
    store.close()
    racers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.contract.racer", str(path)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(PROCESSES)
    ]  # fmt: skip
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    results = [json.loads(racer.communicate(timeout=60)[0]) for racer in racers]
    assert Counter(key for result in results for key in result["claimed"]) == Counter(KEYS)
    assert [sum(column) for column in zip(*(result["marked"] for result in results), strict=True)] == [
        1
    ] * len(KEYS)
