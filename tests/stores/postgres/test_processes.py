"""Processes that attack the same keys, die between their steps, and fork."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from semel.core.commands import Claim, Count, Granted, Known, Settle
from semel.stores.postgres import PostgresStore
from semel.types import Busy, Completed
from tests.stores.postgres.attacker import KEYS, MINUTE_US
from tests.waiting import await_true

ROOT = Path(__file__).resolve().parents[3]


def launch(place: str, role: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.stores.postgres.attacker", place, role],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def claim(key: str, owner: bytes | None = None) -> Claim:
    return Claim(("", "claims", key), owner or os.urandom(16), MINUTE_US, MINUTE_US)


def test_eight_processes_have_one_winner_per_key(place: str, store: PostgresStore) -> None:
    attackers = [launch(place, "race") for _ in range(8)]
    for attacker in attackers:
        assert attacker.stdin is not None
        attacker.stdin.write("go\n")
        attacker.stdin.flush()
    results = [json.loads(attacker.communicate(timeout=60)[0]) for attacker in attackers]
    for part in ("won", "done", "marked"):
        assert Counter(key for result in results for key in result[part]) == Counter(KEYS), part


def test_processes_that_call_singly_and_in_batches_have_one_winner_per_key(
    place: str, store: PostgresStore
) -> None:
    store.send([claim("warm")])  # everybody finds the consumer, or enters it: both ways race
    attackers = [launch(place, role) for role in ("race", "race-singly") * 3]
    for attacker in attackers:
        assert attacker.stdin is not None
        attacker.stdin.write("go\n")
        attacker.stdin.flush()
    results = [json.loads(attacker.communicate(timeout=60)[0]) for attacker in attackers]
    for part in ("won", "done", "marked"):
        assert Counter(key for result in results for key in result[part]) == Counter(KEYS), part


@pytest.mark.parametrize("moment", ["claimed", "settled", "claimed-singly", "settled-singly"])
def test_a_client_killed_between_its_steps_leaves_what_it_said(
    place: str, store: PostgresStore, moment: str
) -> None:
    victim = launch(place, moment)
    victim.communicate("go\n", timeout=60)
    assert victim.returncode == -9
    answers: list[Any] = []
    mine = [
        claim(key) for key in KEYS
    ]  # the same each time: what was granted stays ours until the last lease is over

    def all_answered() -> bool:
        answers[:] = store.send(mine)
        return not any(isinstance(answer, Busy) for answer in answers)

    assert await_true(all_answered, 10)
    if moment.startswith("settled"):
        assert all(isinstance(answer, Known) and answer.value == b"jdone" for answer in answers)
    else:
        assert all(isinstance(answer, Granted) and answer.attempt == 2 for answer in answers)


def test_a_forked_child_makes_its_own_connections(store: PostgresStore) -> None:
    mine = claim("parent")
    (granted,) = store.send([mine])
    stop = store.watch(lambda _: None)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            (answer,) = store.send([claim("child")])
            (known,) = store.send([claim("parent")])
            os.write(write, f"{type(answer).__name__} {type(known).__name__}".encode())
            store.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(read, 100) == b"Granted Busy"
    os.close(read)
    os.close(write)
    (done,) = store.send([Settle(mine.id, mine.owner, granted.fence, "done", window_us=MINUTE_US)])
    assert isinstance(done, Completed)
    assert isinstance(store.send([claim("child")])[0], Busy)
    assert store.send([Count()])[0].states == {"done": 1, "claimed": 1}
    stop()
