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
from semel.stores.sqlite import SqliteStore

KEYS = [f"evt_{number}" for number in range(60)]
LEASE_S = 600
"""No living worker loses its claim, however busy the computer is."""


def die() -> None:
    """End as by a power failure."""
    os.kill(os.getpid(), signal.SIGKILL)


class DyingStore(SqliteStore):
    """A store whose process dies before it is sent the given kind of item for the second time."""

    def __init__(self, path: Path, kind: type[Item] | None) -> None:
        super().__init__(path, synchronous="NORMAL")
        self._kind = kind
        self._left = 2

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        if any(type(item) is self._kind for item in items):
            self._left -= 1
            if not self._left:
                die()
        return super().send(items)


def main(folder: Path, side: str, seed: int, point: str) -> None:
    """Deliver all events once, in an order of this worker's own."""
    chance = random.Random(seed)
    kinds: dict[str, Any] = {"claim": Claim, "settle": Settle}
    old = SqliteStore(folder / "old.db", synchronous="NORMAL")
    new = DyingStore(folder / "new.db", kinds.get(point))
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
        for key in chance.sample(KEYS, len(KEYS)):
            outcome = once.run(key, effect, key)
            assert isinstance(outcome, semel.Done | semel.Busy), (key, outcome)
            assert isinstance(outcome, semel.Busy) or outcome.value == f"receipt of {key}", (key, outcome)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
