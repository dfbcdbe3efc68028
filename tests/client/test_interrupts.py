"""Ctrl-C at every point where Python can deliver it: nothing is held for good, nothing is lost.

A profile hook raises where the interpreter looks for signals: on entering a function and after a call into C.
Left out is the moment after a `with` has taken its lock: there only Python 3.14 looks, and leaves the lock taken
(github.com/python/cpython/issues/148874). semel does not make up for that; docs/reference/python-versions.md says so.
"""

import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import semel
from semel import Done
from semel.core.commands import Lookup
from semel.stores.memory.store import MemoryStore
from semel.stores.sqlite import SqliteStore
from tests.client.clients import Spy
from tests.waiting import await_true

PACKAGE = str(Path(semel.__file__).parent)


class Strike:
    """Raise `KeyboardInterrupt` at the n-th of semel's own points, once."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.where = ""

    def __call__(self, call: Callable[[], object]) -> bool:
        """Whether the call was long enough to be struck."""
        try:
            sys.setprofile(self._look)
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False

    def _look(self, frame: FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        if event not in ("call", "c_return") or not code.co_filename.startswith(PACKAGE):
            return
        if event == "c_return" and called.__name__ == "__enter__":
            return
        if code.co_name == "<genexpr>" or within(frame, "__del__"):
            return  # Python swallows what strikes what it throws away
        self.left -= 1
        if not self.left:
            sys.setprofile(None)
            self.where = f"{event} in {code.co_qualname}, line {frame.f_lineno}"
            raise KeyboardInterrupt


def within(frame: FrameType | None, name: str) -> bool:
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False


class Scene:
    """A client in its place, and whether it is still sound."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.once = semel.open(store, consumer="c", lease="60s")
        self.once.run("warm", lambda: None)
        self.ran: list[str] = []
        self.struck: dict[str, str] = {}
        self.checks = 0

    def handler(self, body: str = "k") -> str:
        self.ran.append(body)
        return body

    def record(self, key: str) -> semel.Record | None:
        answer = self.store.send([Lookup(("", "c", key))])[0]
        return answer if isinstance(answer, semel.Record) else None

    def sound(self, key: str) -> bool:
        """Absent, done, or released with its attempt given back."""
        record = self.record(key)
        if record is None or record.state == "done":
            return True
        if key in self.ran:  # struck between the effect and its record: as after a crash, the lease decides
            return record.state == "claimed"
        return (record.owner, record.attempt) == (b"", 0)

    def check(self, keys: list[str], where: str) -> None:
        runtime = self.once._runtime
        assert runtime.keeper.kept == {}, where
        for key in keys:
            self.struck[key] = where
            assert await_true(partial(self.sound, key)), f"{key} is held after {where}: {self.record(key)}"
        assert runtime.watches._rooms == {}, where
        self.checks += 1
        outcome = self.once.using(semel.Policy(wait_s=0)).run(f"after{self.checks}", str)
        assert outcome == Done(""), where

    def close(self) -> None:
        self.once.close()
        unsound = {key: where for key, where in self.struck.items() if not self.sound(key)}
        self.store.close()
        assert unsound == {}


STORES: dict[str, Callable[[Path], Any]] = {
    "direct": lambda _path: Spy(MemoryStore()),
    "gathered": lambda _path: Spy(MemoryStore(), instant=False),
    "sqlite": lambda path: SqliteStore(path / "semel.db", synchronous="NORMAL"),
}


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_run_survives_an_interrupt_anywhere(store: str, tmp_path: Path) -> None:
    scene, at, struck = Scene(STORES[store](tmp_path)), 0, True
    while struck:
        at += 1
        key = f"k{at}"
        strike = Strike(at)
        struck = strike(partial(scene.once.run, key, scene.handler, key))
        scene.check([key], strike.where)
    assert at > 15
    scene.close()


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_run_many_survives_an_interrupt_anywhere(store: str, tmp_path: Path) -> None:
    scene, at, struck = Scene(STORES[store](tmp_path)), 0, True
    while struck:
        at += 1
        keys = [f"k{at}-{number}" for number in range(3)]
        given = [semel.Delivery(key=key, body=key) for key in keys]
        strike = Strike(at)
        struck = strike(partial(scene.once.run_many, given, scene.handler))
        scene.check(keys, strike.where)
    assert at > 40
    scene.close()


@pytest.mark.slow
def test_waiting_survives_an_interrupt_anywhere(tmp_path: Path) -> None:
    """A duplicate of a held key, with a wait that is short: struck while it watches, sleeps and claims again."""
    scene, at, struck = Scene(Spy(MemoryStore(), instant=False)), 0, True
    held = scene.once.claim("held")
    assert isinstance(held, semel.Claimed)
    patient = scene.once.using(semel.Policy(wait_s=0.005))
    while struck:
        at += 1
        strike = Strike(at)
        struck = strike(lambda: patient.run("held", scene.handler, "held"))
        assert scene.ran == []
        scene.check([], strike.where)
    assert at > 30
    record = scene.record("held")
    assert record is not None
    assert record.owner == held.claim.owner
    scene.close()


SCRIPT = """
import signal, sys, threading
import semel
from semel.stores.sqlite import SqliteStore

class Slow(SqliteStore):
    holding = False
    def send(self, items):
        if Slow.holding and not any(type(item).__name__ == "Settle" for item in items):
            entered.set()
            if threading.current_thread() is not threading.main_thread() or sys.argv[2] == "straight":
                assert go.wait(10) or True
        return super().send(items)

entered, go = threading.Event(), threading.Event()
once = semel.open(Slow(sys.argv[1], synchronous="NORMAL"), consumer="c", lease="60s")
once.run("warm", lambda: None)
Slow.holding = True
if sys.argv[2] == "queued":
    other = threading.Thread(target=once.run, args=("other", lambda: 1))
    other.start()
    entered.wait(10)
    entered.clear()

def strike():
    entered.wait(10) if sys.argv[2] == "straight" else threading.Event().wait(0.2)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    threading.Event().wait(0.1)
    Slow.holding = False
    go.set()

threading.Thread(target=strike).start()
once.run("k", lambda: 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("path", ["straight", "queued"])
def test_ctrl_c_that_ends_the_program_gives_the_claim_back(path: str, tmp_path: Path) -> None:
    file = tmp_path / "semel.db"
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(file), path],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode in (-signal.SIGINT, 130), ended.stderr
    assert "KeyboardInterrupt" in ended.stderr
    store = SqliteStore(file)
    answer = store.send([Lookup(("", "c", "k"))])[0]
    store.close()
    assert not isinstance(answer, semel.Record) or (answer.owner, answer.attempt) == (b"", 0), answer
