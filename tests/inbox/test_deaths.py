"""Processes that die or stand still in the middle of a transaction, and answers that never come."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

import semel
from semel.inbox import Inbox
from semel.testing.proxy import Proxy
from semel.types import Absent
from tests.inbox.bench import CONSUMER, Bench
from tests.inbox.kinds import KINDS, Psycopg, Sqlite
from tests.inbox.victim import STEPS
from tests.stores.sqlite.tools import line, process

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_between_any_two_steps_mark_and_effect_are_both_there_or_neither(
    kind: str, tmp_path: Path
) -> None:
    bench = Bench(KINDS[kind], tmp_path)
    died = subprocess.run(
        [sys.executable, "-m", "tests.inbox.victim", kind, bench.url, bench.store_url, bench.wallet],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."])}, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert died.returncode == 0, died.stderr
    assert died.stdout.split() == list(STEPS)
    assert bench.balance() == len(STEPS)
    for step in STEPS:
        record = bench.record(f"killed when {step}")
        assert (record.state, record.attempt) == ("done", 1)
        assert record.value == f'j"value of killed when {step}"'.encode()


HOLDING = """
import sys
import semel
store_url, url, key = sys.argv[1:]
once = semel.open(store_url, consumer="wallet", mode="inbox", window="1h")
if url.startswith("sqlite"):
    import sqlite3
    connection = sqlite3.connect(url.removeprefix("sqlite:///"))
else:
    import psycopg
    connection = psycopg.connect(url)
assert once.inbox(connection).first(key)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(bench: Bench, key: str) -> Iterator["subprocess.Popen[str]"]:
    """Another process that has marked the key and does not go on."""
    with process(HOLDING, bench.store_url, bench.url, key) as child:
        assert line(child).strip() == "held"
        yield child


@pytest.mark.parametrize("kind", [Psycopg, Sqlite], ids=lambda kind: kind.dialect)
def test_a_holder_that_stands_still_is_waited_for_so_long_and_one_that_died_is_not(
    kind: Any, tmp_path: Path
) -> None:
    bench = Bench(kind, tmp_path)
    policy = semel.Policy(lock_wait_s=0.3)
    with (
        semel.open(bench.store_url, consumer=CONSUMER, mode="inbox", policy=policy) as once,
        bench.other() as mine,
        holder(bench, "evt_1") as child,
    ):
        os.kill(child.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(semel.errors.StillRunning):
            once.inbox(mine).first("evt_1")
        assert 0.3 <= time.monotonic() - began < 5
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        patient = once.using(semel.Policy(lock_wait_s=30))
        assert patient.inbox(mine).first("evt_1")  # in the same transaction
        mine.commit()
    assert bench.record("evt_1").state == "done"


# --- PostgreSQL behind a network that breaks ----------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(Psycopg, tmp_path)


@contextmanager
def about_to_commit(bench: Bench) -> Iterator[tuple[Proxy, psycopg.Connection[Any], Inbox]]:
    """A mark and an effect behind a proxy, not yet committed."""
    with (
        Proxy(urlsplit(bench.url).port or 5432) as proxy,
        semel.open(bench.store_url, consumer=CONSUMER, mode="inbox") as once,
    ):
        connection = psycopg.connect(bench.url.replace(f":{urlsplit(bench.url).port}/", f":{proxy.port}/"))
        inbox = once.inbox(connection)
        assert inbox.first("evt_1")
        connection.execute(f"UPDATE {bench.wallet} SET balance = balance + 1")
        yield proxy, connection, inbox
        connection.close()


def test_a_commit_whose_answer_was_lost_is_resolved(bench: Bench) -> None:
    with about_to_commit(bench) as (proxy, connection, inbox):
        proxy.mode, proxy.cuts_left = "cut_reply", 1
        with pytest.raises(psycopg.OperationalError):
            connection.commit()
        assert inbox.committed("evt_1")
        assert bench.balance() == 1


def test_a_commit_that_never_arrived_is_resolved(bench: Bench) -> None:
    with about_to_commit(bench) as (proxy, connection, inbox):
        proxy.cut()
        with pytest.raises(psycopg.OperationalError):
            connection.commit()
        assert not inbox.committed("evt_1")
        assert bench.balance() == 0
        assert bench.record("evt_1") == Absent()


def test_one_call_is_one_round_trip(bench: Bench) -> None:
    with about_to_commit(bench) as (proxy, connection, inbox):
        before = proxy.turns
        assert all(inbox.first_many([f"new_{number}" for number in range(200)]))
        assert proxy.turns - before == 1
        assert not inbox.first("new_7")
        assert proxy.turns - before == 2
        connection.rollback()
