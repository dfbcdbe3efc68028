"""What the tests of the SQLite store share: short items, hashes of folders, and other processes."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from semel.core.commands import Claim, Granted, Lookup, Settle
from semel.stores.sqlite import SqliteStore
from semel.types import Id

SECOND = 1_000_000
HOUR = 3600 * SECOND
LEASE = 30 * SECOND
WINDOW = 24 * HOUR


def named(key: str, consumer: str = "billing", tenant: str = "") -> Id:
    return (tenant, consumer, key)


def claim(key: str, owner: bytes | None = None, **more: Any) -> Claim:
    settings = {"lease_us": LEASE, "window_us": WINDOW, **more}
    return Claim(id=named(key), owner=owner or os.urandom(16), **settings)


def settle(held: Claim, granted: Granted, value: bytes | None = None, to: Any = "done") -> Settle:
    return Settle(held.id, held.owner, granted.fence, to, value, held.window_us, held.lease_us)


def hold(store: SqliteStore, key: str, **more: Any) -> tuple[Claim, Granted]:
    item = claim(key, **more)
    (granted,) = store.send([item])
    assert isinstance(granted, Granted), granted
    return item, granted


def finish(store: SqliteStore, key: str, value: bytes | None = b"jnull", **more: Any) -> None:
    item, granted = hold(store, key, **more)
    store.send([settle(item, granted, value)])


def lookup(store: SqliteStore, key: str) -> Any:
    return store.send([Lookup(named(key))])[0]


def hashes(folder: Path) -> dict[str, str]:
    """The name and hash of every file in the folder."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


@contextmanager
def process(script: str, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
    """Another Python that runs the script; it is gone at the end."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def line(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def say(child: "subprocess.Popen[str]", text: str = "") -> None:
    assert child.stdin is not None
    child.stdin.write(text + "\n")
    child.stdin.flush()


def forked(work: Callable[[], str]) -> str:
    """What `work` returns in a forked child."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = work()
        except BaseException as error:  # noqa: BLE001 - the parent has to hear of anything
            said = repr(error)
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


def in_child(store: SqliteStore, key: str) -> str:
    """Fork, use the store in the child, and say what came of it."""

    def use() -> str:
        finish(store, key)
        state: str = lookup(store, key).state
        store.close()
        return state

    return forked(use)
