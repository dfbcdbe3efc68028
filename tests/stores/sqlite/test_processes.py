"""Several threads and processes on one file: killed, stopped, forked, and fair to one another."""

import os
import random
import signal
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from semel.core.commands import Granted, Lookup
from semel.errors import StoreClosed, StoreUnavailable
from semel.stores.sqlite import SqliteStore
from semel.stores.sqlite.locks import RESERVED_BYTE, WAL_WRITE_BYTE, lock_holders
from semel.types import Busy, Record
from tests.stores.sqlite.tools import claim, finish, hold, in_child, line, lookup, named, process, say, settle
from tests.waiting import await_true

pytestmark = pytest.mark.slow

CLAIMING = """
import itertools, os, sys
from semel.core.commands import Claim, Settle
from semel.stores.sqlite import SqliteStore
store = SqliteStore(sys.argv[1])
store.open()
for number in itertools.count():
    keys = [f"{sys.argv[2]}-{number}-{each}" for each in range(3)]
    items = [Claim(("", "billing", key), os.urandom(16), 10**9, 10**10) for key in keys]
    answers = store.send(items)
    print("claimed", *(f"{item.id[2]}/{answer.fence}" for item, answer in zip(items, answers)), flush=True)
    pairs = zip(items, answers)
    store.send([Settle(item.id, item.owner, answer.fence, "done", b"j1", 10**10, 10**9) for item, answer in pairs])
    print("done", *keys, flush=True)
"""


def test_every_answer_is_there_after_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    chance = random.Random(3)
    claimed: dict[str, int] = {}
    done: set[str] = set()
    for life in range(8):
        with process(CLAIMING, path, life) as child:
            lines = [line(child) for _ in range(chance.randint(1, 60))]
            child.kill()
            assert child.stdout is not None
            lines += child.stdout.read().splitlines()  # said before it died, so promised too
        for said in lines:
            what, *words = said.split()
            if what == "claimed":
                claimed |= {key: int(fence) for key, fence in (word.split("/") for word in words)}
            elif said.startswith("done") and len(words) == 3:
                done |= set(words)
        store = SqliteStore(path)
        found = store.send([Lookup(named(key)) for key in claimed])
        for key, record in zip(claimed, found, strict=True):
            assert isinstance(record, Record), key
            assert record.fence == claimed[key]
            assert record.state == "done" or key not in done
        store.close()
    assert len(done) > 50
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


STOPPING = """
import sys
from semel.core.commands import Claim
from semel.stores.sqlite import SqliteStore
store = SqliteStore(sys.argv[1])
store.open()
store._writer.execute("BEGIN IMMEDIATE")
print("holding", flush=True)
input()
"""


def test_a_stopped_writer_is_waited_for_only_so_long(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db", busy_wait_s=0.2)
    finish(store, "k")
    with process(STOPPING, tmp_path / "a.db") as child:
        assert line(child) == "holding"
        child.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(
            StoreUnavailable, match=rf"another writer \(process {child.pid}\) has held the lock"
        ):
            store.send([claim("new")])
        assert 0.2 <= time.monotonic() - began < 2
        assert lookup(store, "k").state == "done"  # looking goes on
        child.kill()
        child.send_signal(signal.SIGCONT)
        child.wait(10)
        assert isinstance(store.send([claim("new")])[0], Granted)  # the dead let go of their locks
    store.close()


def test_who_holds_a_lock_is_read_from_the_system() -> None:
    locks = (
        "1: POSIX  ADVISORY  WRITE 41 fd:01:777 120 120\n"
        "1: -> POSIX  ADVISORY  WRITE 42 fd:01:777 120 120\n"
        "2: POSIX  ADVISORY  READ  43 fd:01:777 120 120\n"
        "3: POSIX  ADVISORY  WRITE 44 fd:01:777 123 128\n"
        "4: POSIX  ADVISORY  WRITE 45 00:2f:888 1073741825 EOF\n"
        "5: FLOCK  ADVISORY  WRITE 46 fd:01:777 0 EOF\n"
    )
    assert list(lock_holders(locks, {777: WAL_WRITE_BYTE})) == [41]
    assert list(lock_holders(locks, {888: RESERVED_BYTE})) == [45]


def test_close_ends_a_call_that_waits(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db", busy_wait_s=60)
    store.open()
    blocker = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    errors: list[BaseException] = []

    def send() -> None:
        try:
            store.send([claim("k")])
        except StoreClosed as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    assert await_true(store._writing.locked)
    store.close()
    thread.join(5)
    assert len(errors) == 1
    blocker.execute("ROLLBACK")
    blocker.close()


def test_one_of_many_threads_gets_the_claim(tmp_path: Path) -> None:
    stores = [SqliteStore(tmp_path / "a.db", synchronous="NORMAL") for _ in range(2)]
    barrier = threading.Barrier(8)
    winners: list[str] = []

    def run(number: int) -> None:
        barrier.wait()
        for key in range(40):
            (answer,) = stores[number % 2].send([claim(f"k{key}")])
            if isinstance(answer, Granted):
                winners.append(f"k{key}")
            else:
                assert isinstance(answer, Busy)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(winners) == sorted(f"k{key}" for key in range(40))
    for store in stores:
        store.close()


HAMMERING = """
import sys, time
from semel.core.commands import Claim
from semel.stores.sqlite import SqliteStore
store = SqliteStore(sys.argv[1])
store.open()
print("ready", flush=True)
input()
ends, number = time.monotonic() + float(sys.argv[3]), 0
while time.monotonic() < ends:
    store.send([Claim(("", "c", f"{sys.argv[2]}-{number}"), b"o" * 16, 10**9, 10**9)])
    number += 1
print(number, flush=True)
store.close()
"""


def test_no_process_is_starved(tmp_path: Path) -> None:
    arguments = [(tmp_path / "a.db", number, 1.5) for number in range(4)]
    with closing(SqliteStore(tmp_path / "a.db")) as store:
        store.open()
    with (
        process(HAMMERING, *arguments[0]) as one,
        process(HAMMERING, *arguments[1]) as two,
        process(HAMMERING, *arguments[2]) as three,
        process(HAMMERING, *arguments[3]) as four,
    ):
        children = [one, two, three, four]
        assert [line(child) for child in children] == ["ready"] * 4
        for child in children:
            say(child)
        counts = sorted(int(line(child)) for child in children)
    assert counts[0] > counts[-1] / 10, counts


def test_an_interrupted_call_leaves_no_transaction_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "a.db")
    item, granted = hold(store, "before")

    def interrupted(last_us: int, offset_us: int) -> tuple[int, int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store.clock, "tick", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.send([claim("k")])
        with pytest.raises(KeyboardInterrupt):
            lookup(store, "k")
    finish(store, "k")
    store.send([settle(item, granted)])
    assert [lookup(store, key).state for key in ("k", "before")] == ["done", "done"]
    store.close()


def test_listeners_hear_of_what_is_settled_not_of_claims(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db")
    heard: list[str] = []
    stop = store.watch(lambda record_id: heard.append(record_id[2]))
    item, granted = hold(store, "k")
    assert heard == []
    store.send([settle(item, granted)])
    assert heard == ["k"]
    store.send([settle(item, granted)])  # already
    assert heard == ["k"]
    stop()
    finish(store, "other")
    assert heard == ["k"]
    store.close()


# --- fork ---


def test_parent_and_child_go_on_after_a_fork(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db")
    item, granted = hold(store, "before")
    for number in range(3):
        assert in_child(store, f"child{number}") == "done"
        finish(store, f"parent{number}")
    store.send([settle(item, granted)])
    states = {key: lookup(store, key).state for key in ("before", "child0", "child2", "parent0", "parent2")}
    assert set(states.values()) == {"done"}
    store.close()
    connection = sqlite3.connect(tmp_path / "a.db")
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_the_childs_connection_holds_locks_of_its_own(tmp_path: Path) -> None:
    """The log must not be taken away under the child when the parent closes."""
    store = SqliteStore(tmp_path / "a.db")
    finish(store, "before")
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = b"?"
        try:
            finish(store, "one")
            os.write(from_child, b".")
            os.read(to_child, 1)
            finish(store, "two")
            said = b"+" if Path(store.path + "-wal").exists() else b"-"
        finally:
            os.write(from_child, said)
            os.read(to_child, 1)
            os._exit(0)
    assert os.read(to_parent, 1) == b"."
    finish(store, "parent")
    store.close()
    os.write(from_parent, b".")
    assert os.read(to_parent, 1) == b"+"
    os.write(from_parent, b".")
    os.waitpid(pid, 0)
    again = SqliteStore(tmp_path / "a.db")
    assert [lookup(again, key).state for key in ("before", "one", "two", "parent")] == ["done"] * 4
    again.close()
    for end in (to_child, from_parent, to_parent, from_child):
        os.close(end)


def test_a_fork_waits_for_a_transaction_of_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "a.db")
    store.open()
    go_on, inside = threading.Event(), threading.Event()
    tick = store.clock.tick

    def slow(last_us: int, offset_us: int) -> tuple[int, int]:
        inside.set()
        go_on.wait(10)
        return tick(last_us, offset_us)

    monkeypatch.setattr(store.clock, "tick", slow)
    thread = threading.Thread(target=lambda: finish(store, "threaded"))
    thread.start()
    inside.wait(10)
    threading.Timer(0.05, go_on.set).start()
    assert in_child(store, "child") == "done"
    thread.join()
    assert lookup(store, "threaded").state == "done"
    store.close()
