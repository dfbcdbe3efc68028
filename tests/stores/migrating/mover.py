"""A worker process of a move: delivers every event, and dies by `kill -9` where it is told to.

Usage: mover.py FOLDER SIDE SEED POINT. SIDE is old, new or both. POINT: `claim` dies between the claims in the two
stores, `settle` between the two results, `effect` in the handler before its effect, `none` nowhere. It says when it is
ready, and starts when its standard input ends.
"""

import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import semel
from semel.core.commands import Answer, Claim, Item, Settle
from semel.core.protocols import Store
from semel.stores import store_for
from semel.stores.sqlite import SqliteStore

SHARED = [f"evt_{number}" for number in range(60)]
WORKERS_MAX = 6
OWN = [[f"own_{seed}_{number}" for number in range(3)] for seed in range(WORKERS_MAX)]
"""Events that only one worker delivers: enough of them to die of, if the others were faster with the shared ones."""
KEYS = [*SHARED, *(key for keys in OWN for key in keys)]
LEASE_S = 600
"""No living worker loses its claim, however busy the computer is."""


def die() -> None:
    """End as by a power failure."""
    os.kill(os.getpid(), signal.SIGKILL)


def stores_of(folder: Path) -> tuple[Store, Store]:
    """Return the old and the new store: those whose URLs are in the folder, or two files there."""
    urls = folder / "urls"
    if urls.exists():
        old, new = map(store_for, urls.read_text().split())
        assert isinstance(old, Store)
        assert isinstance(new, Store)
        return old, new
    return SqliteStore(folder / "old.db", synchronous="NORMAL"), SqliteStore(
        folder / "new.db", synchronous="NORMAL"
    )


def make_deadly(store: Any, kind: type[Item] | None) -> None:
    """Let the process die before the store is sent this kind of item for the second time."""
    send, left = store.send, 2

    def deadly_send(items: Sequence[Item], /) -> list[Answer]:
        nonlocal left
        if any(type(item) is kind for item in items):
            left -= 1
            if not left:
                die()
        answers: list[Answer] = send(items)
        return answers

    store.send = deadly_send


def main(folder: Path, side: str, seed: int, point: str) -> None:
    """Deliver all shared events once, in an order of this worker's own, with its own ones among them."""
    shared = random.Random(seed).sample(SHARED, len(SHARED))
    kinds: dict[str, Any] = {"claim": Claim, "settle": Settle}
    old, new = stores_of(folder)
    make_deadly(new, kinds.get(point))
    store = {"old": old, "new": new}.get(side) or semel.migrating(old=old, new=new)
    ledger = os.open(folder / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    calls = 0

    def effect(key: str) -> str:
        nonlocal calls
        calls += 1
        if point == "effect" and calls == 3:
            die()
        os.write(ledger, f"{key}\n".encode())
        return f"receipt of {key}"

    with semel.open(store, consumer="mover", policy=semel.Policy(lease_s=LEASE_S, wait_s=0)) as once:
        once.records.stats()
        os.write(1, b"ready\n")
        sys.stdin.read()
        for key in (*shared[:20], *OWN[seed], *shared[20:]):
            outcome = once.run(key, effect, key)
            assert isinstance(outcome, semel.Done | semel.Busy), (key, outcome)
            assert isinstance(outcome, semel.Busy) or outcome.value == f"receipt of {key}", (key, outcome)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
