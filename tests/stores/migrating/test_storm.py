"""Several processes during a move, some on one store alone, killed between the writes to the two stores."""

import signal
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.clock import SystemClock
from semel.stores.migrating import migrating
from semel.stores.migrating.moving import close, finish, moves
from semel.stores.sqlite import SqliteStore
from tests.services import postgres, redis
from tests.stores.migrating.mover import KEYS, stores_of

HOUR_US = 3600 * 10**6


class LaterClock(SystemClock):
    """Hours ahead: the leases of killed workers are over."""

    def __init__(self, hours: int) -> None:
        self._ahead_us = hours * HOUR_US

    def now_us(self) -> int:
        return super().now_us() + self._ahead_us


def stores(folder: Path, hours: int = 0) -> dict[str, Any]:
    """Return the old and the new store, and both as one."""
    old, new = (SqliteStore(folder / f"{name}.db", clock=LaterClock(hours)) for name in ("old", "new"))
    return {"old": old, "new": new, "both": migrating(old=old, new=new)}


def work(folder: Path, *workers: tuple[str, str]) -> list[int]:
    """Run workers at the same time. Returns how each ended."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.stores.migrating.mover", folder, side, str(seed), point],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for seed, (side, point) in enumerate(workers)
    ]
    with ExitStack() as ends:
        for each in started:
            ends.enter_context(each)
            assert each.stdout is not None
            assert each.stdout.readline() == b"ready\n"
        for each in started:
            assert each.stdin is not None
            each.stdin.close()
        return [each.wait() for each in started]


def deliver_again(folder: Path, side: str) -> set[type]:
    """Deliver every event once more, after all leases are over. Returns the kinds of outcomes."""
    store = stores(folder, 9)[side]
    with (
        closing(store),
        semel.open(store, consumer="mover", policy=semel.Policy(lease_s=600, wait_s=0)) as once,
        (folder / "ledger").open("a") as ledger,
    ):

        def effect(key: str) -> str:
            ledger.write(f"{key}\n")
            return f"receipt of {key}"

        return {type(once.run(key, effect, key)) for key in KEYS}


def forget_the_dead(folder: Path, side: str) -> None:
    """Forget what killed workers hold, on servers whose clocks no test moves; the others have finished theirs."""
    policy = semel.Policy(lease_s=600, wait_s=0)
    old, new = stores_of(folder)
    store = {"old": old, "new": new}.get(side) or migrating(old=old, new=new)
    with (
        closing(store),
        semel.open(store, consumer="mover", policy=policy) as once,
        (folder / "ledger").open("a") as ledger,
    ):
        for key in KEYS:
            outcome = once.run(key, ledger.write, f"{key}\n")
            if isinstance(outcome, semel.Busy):
                once.records.forget(key, force=True)
                outcome = once.run(key, ledger.write, f"{key}\n")
            assert isinstance(outcome, semel.Done), (key, outcome)


def effects(folder: Path) -> Counter[str]:
    return Counter((folder / "ledger").read_text().split())


@pytest.mark.parametrize("last", ["both", "old"])
def test_beside_processes_on_the_old_store_every_effect_happens_once(tmp_path: Path, last: str) -> None:
    deaths = work(
        tmp_path,
        ("old", "none"), ("both", "claim"), ("both", "settle"), ("both", "effect"), ("old", "effect"), ("both", "none"),
    )  # fmt: skip
    assert sorted(deaths) == [-signal.SIGKILL] * 4 + [0] * 2
    assert deliver_again(tmp_path, last) == {semel.Done}
    assert effects(tmp_path) == dict.fromkeys(KEYS, 1)


@pytest.mark.parametrize("last", ["both", "new"])
def test_beside_processes_on_the_new_store_every_effect_happens_once(tmp_path: Path, last: str) -> None:
    store = stores(tmp_path)["both"]
    with closing(store), semel.open(store, consumer="mover") as once:
        once.run("before", str)
    pair = stores(tmp_path, 0)["both"]
    pair.open()
    close(pair.old, pair.new, moves(pair.old, pair.new)[0])
    pair.close()
    pair = stores(tmp_path, 2)["both"]
    pair.open()
    assert finish(pair.old, pair.new, moves(pair.old, pair.new)[0], HOUR_US) == ""
    pair.close()
    deaths = work(
        tmp_path,
        ("new", "none"), ("both", "claim"), ("both", "effect"), ("new", "effect"), ("both", "none"),
    )  # fmt: skip
    assert sorted(deaths) == [-signal.SIGKILL] * 3 + [0] * 2
    assert deliver_again(tmp_path, last) == {semel.Done}
    assert effects(tmp_path) == dict.fromkeys(KEYS, 1)


@pytest.mark.service
@pytest.mark.parametrize("last", ["both", "old"])
def test_from_redis_to_postgresql_every_effect_happens_once(tmp_path: Path, last: str) -> None:
    (tmp_path / "urls").write_text(f"{redis.place(tmp_path)} {postgres.place(tmp_path)}")
    deaths = work(
        tmp_path,
        ("old", "none"), ("both", "claim"), ("both", "settle"), ("both", "effect"), ("old", "effect"), ("both", "none"),
    )  # fmt: skip
    assert sorted(deaths) == [-signal.SIGKILL] * 4 + [0] * 2
    forget_the_dead(tmp_path, last)
    assert effects(tmp_path) == dict.fromkeys(KEYS, 1)
