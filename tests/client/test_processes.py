"""Other processes: forked in the middle of everything, spawned, killed."""

import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any

import pytest

import semel
from semel import Claimed, Done
from semel.runtime.process import new_owner
from semel.stores.memory.store import MemoryStore
from semel.stores.sqlite import SqliteStore
from tests.client.clients import GUARD_S, Gate, Spy
from tests.client.conftest import semel_threads

CHILD_S = 20


def forked(work: Callable[[], Any]) -> str:
    """What `work` comes to in a child, as text."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(CHILD_S)  # whatever hangs, ends
        told = "?"
        try:
            told = repr(work())
        except BaseException:  # noqa: BLE001 - the parent is told
            told = traceback.format_exc()
        finally:
            os.write(write, told.encode()[:60_000])
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


def once_on(path: Path, **options: Any) -> semel.Semel:
    return semel.open(f"sqlite:///{path}?synchronous=normal", consumer="c", **options)


def test_owners_differ_after_a_fork() -> None:
    new_owner()  # the pool is drawn, and a child would inherit the rest of it
    theirs = forked(lambda: [new_owner().hex() for _ in range(300)])
    mine = {repr(new_owner().hex()) for _ in range(300)}
    assert not mine.intersection(theirs.strip("[]").split(", "))


def test_two_forks_claiming_one_key_give_one_winner(tmp_path: Path) -> None:
    once = once_on(tmp_path / "semel.db")
    once.run("warm", lambda: None)
    told: list[str] = []
    barrier = Barrier(4)

    def race() -> None:
        barrier.wait()
        told.append(forked(lambda: [isinstance(once.claim(f"k{at}"), Claimed) for at in range(20)]))

    threads = [Thread(target=race) for _ in range(3)]
    for thread in threads:
        thread.start()
    barrier.wait()
    for thread in threads:
        thread.join()
    won = [[each == "True" for each in text.strip("[]").split(", ")] for text in told]
    assert [sum(column) for column in zip(*won, strict=True)] == [1] * 20, told
    once.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "memory", "gathered"])
def test_a_fork_in_the_middle_of_everything_harms_neither_side(kind: str, tmp_path: Path) -> None:
    """A handler runs and is kept, a flusher is at work, somebody waits: then the process forks."""
    stores: dict[str, Callable[[], Any]] = {
        "sqlite": lambda: SqliteStore(tmp_path / "semel.db", synchronous="NORMAL"),
        "memory": MemoryStore,
        "gathered": lambda: Spy(MemoryStore(), instant=False),
    }
    store = stores[kind]()
    once = semel.open(store, consumer="c", lease="10s")
    gate, stop = Gate(), Event()
    outcomes: list[Any] = []

    def noise() -> None:
        number = 0
        while not stop.is_set():
            once.run_many(
                [semel.Delivery(key=f"{number}-{at}", body=at) for at in range(5)], lambda body: body
            )
            number += 1

    threads = [Thread(target=noise) for _ in range(2)]
    threads.append(Thread(target=lambda: outcomes.append(once.run("held", gate.pass_))))
    threads.append(Thread(target=lambda: outcomes.append(once.run("held", gate.pass_))))
    for thread in threads:
        thread.start()
    assert gate.entered.wait(GUARD_S)

    def child(turn: int) -> Any:
        before = (semel_threads(), dict(once._runtime.keeper.kept), dict(once._runtime.watches._rooms))
        mine = once.run(f"child {turn}", os.getpid)
        waited = once.using(semel.Policy(wait_s=0)).run("held", lambda: 1)
        deliveries = [semel.Delivery(key=f"c{turn}-{at}", body=at) for at in range(600)]
        many = once.run_many(deliveries, lambda body: body)
        assert isinstance(mine, Done)
        return before, mine.value == os.getpid(), type(waited).__name__, len(many), mine.recorded

    for turn in range(4):
        told = forked(partial(child, turn))
        assert told == "(([], {}, {}), True, 'Busy', 600, True)", told
    stop.set()
    gate.opened.set()
    for thread in threads:
        thread.join(GUARD_S)
    assert sorted(outcome.replayed for outcome in outcomes) == [False, True]
    assert gate.ran == 1
    once.close()
    store.close()


def _spawned(path: str, told: Any) -> None:
    once = once_on(Path(path))
    told.put([isinstance(once.claim(f"k{at}"), Claimed) for at in range(20)])
    once.close()


@pytest.mark.slow
def test_spawned_processes_have_one_winner_each(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    path = tmp_path / "semel.db"
    with once_on(path) as once:
        once.records.stats()
    workers = [context.Process(target=_spawned, args=(str(path), told)) for _ in range(2)]
    for worker in workers:
        worker.start()
    won = [told.get(timeout=CHILD_S) for _ in workers]
    for worker in workers:
        worker.join()
    assert [sum(column) for column in zip(*won, strict=True)] == [1] * 20
    told.close()
    told.join_thread()


KILLED = """
import os, sys, semel
once = semel.open(f"sqlite:///{sys.argv[1]}?synchronous=normal", consumer="c", lease="500ms")
def handler(body):
    if body == "poison":
        os.kill(os.getpid(), 9)
    return body
print(once.run_many([semel.Delivery(key=k, body=k) for k in ("poison", "a", "b")], handler), flush=True)
"""


@pytest.mark.slow
def test_an_event_that_kills_its_worker_does_not_raise_its_neighbours_attempts(tmp_path: Path) -> None:
    path = tmp_path / "semel.db"
    for _ in range(4):
        ended = subprocess.run(
            [sys.executable, "-c", KILLED, str(path)], capture_output=True, text=True, timeout=30, check=False
        )
        assert ended.returncode == -signal.SIGKILL, ended
    once = once_on(path, lease="5s")
    given = [semel.Delivery(key=key, body=key) for key in ("poison", "a", "b")]
    outcomes = once.run_many(given, lambda _body: semel.current().attempt)
    attempts = [outcome.value for outcome in outcomes if isinstance(outcome, Done)]
    assert attempts == [5, 2, 2]
    once.close()
