"""Many processes on the same keys of a real server, some of them killed."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from semel.core.commands import Claim, Granted, Settle
from semel.stores.redis import RedisStore
from semel.types import Completed, Lost
from tests.services import redis
from tests.stores.redis.racer import KEYS, MINUTE_US
from tests.stores.redis.tools import opened
from tests.waiting import await_true

ROOT = Path(__file__).resolve().parents[3]
PROCESSES = 8
KILLS = 5


def start(url: str, what: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.stores.redis.racer", url, what],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def hear(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "hows"),
    [("server", ["race"]), ("server", ["alone"]), ("server", ["alone", "race"]), ("cluster", ["race"])],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_racing_processes_have_one_winner_per_key(tmp_path: Path, where: str, hows: list[str]) -> None:
    url = redis.place(tmp_path) if where == "server" else redis.cluster(tmp_path)
    racers = [start(url, hows[number % len(hows)]) for number in range(PROCESSES)]
    for racer in racers:
        assert hear(racer) == "ready"
    for racer in racers:
        tell(racer, "go")
    results = [json.loads(racer.communicate(timeout=60)[0]) for racer in racers]
    for kind in ("claimed", "marked"):
        assert Counter(key for result in results for key in result[kind]) == Counter(KEYS), kind


def take(store: RedisStore, key: str, owner: bytes) -> Granted:
    """Claim until it is ours: the lease of whoever was killed must end first."""
    found: list[Granted] = []

    def try_once() -> bool:
        (answer,) = store.send([Claim(("", "claims", key), owner, MINUTE_US, MINUTE_US)])
        if isinstance(answer, Granted):
            found.append(answer)
        return bool(found)

    assert await_true(try_once, 10)
    return found[0]


@pytest.mark.slow
def test_the_claims_of_a_killed_process_are_taken_over(tmp_path: Path) -> None:
    url = redis.place(tmp_path)
    with opened(url) as store:
        last_fence = 0
        for kill in range(KILLS):
            victim = start(url, "hold")
            assert hear(victim) == "ready"
            tell(victim, f"warm {kill}")  # the next one takes the short way
            hear(victim)
            tell(victim, f"key {kill}")
            told = json.loads(hear(victim))
            victim.kill()
            victim.communicate()
            owner = os.urandom(16)
            granted = take(store, f"key {kill}", owner)
            assert granted.attempt == told["attempt"] + 1 == 2
            assert granted.fence > told["fence"] > last_fence
            last_fence = granted.fence
            name = ("", "claims", f"key {kill}")
            zombie = Settle(name, os.urandom(16), told["fence"], "done", b"z", MINUTE_US, MINUTE_US)
            mine = Settle(name, owner, granted.fence, "done", b"r", MINUTE_US, MINUTE_US)
            assert store.send([zombie, mine]) == [Lost(), Completed(at_us=store.send([mine])[0].at_us)]
