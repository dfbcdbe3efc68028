"""A worker process that calls a store in every way, from several threads, on few keys: its calls are recorded.

`python -m tests.histories.worker FILE SEED CALLS URL [CACHE]`; it prints how many calls it has made.
"""

import contextlib
import random
import sys
import threading
from typing import Any

import semel
from semel.core.commands import Claim, Forget, Granted, Item, Lookup, Renew, Resolve, Settle
from semel.core.protocols import Store
from semel.errors import SemelError
from semel.stores.registry import store_for
from semel.testing.histories import RecordingStore
from semel.types import Id, Record, Unavailable, Unknown

THREADS = 3
KEYS = tuple(f"k{number}" for number in range(12))
LEASES_US = (4_000, 20_000, 60_000)
WINDOW_US = 3_600_000_000
TURNS_MAX = 2
OPENINGS = 30
BACKOFF_S = 1.0
"""While the store gives no answer: otherwise thousands of calls without one would say nothing."""
TRIES = 3
"""How often an item is sent while the store gives no answer; then its fate stays unknown."""


def open_store(url: str, cache: str = "") -> Store:
    """The store; with a cache, a tiered one."""
    if cache:
        return semel.tiered(cache=cache, truth=url)
    store = store_for(url)
    assert isinstance(store, Store)
    return store


class Caller:
    """One thread: claims, renews, settles, looks, forgets and resolves, mostly what it has been granted."""

    def __init__(self, store: Store, seed: str) -> None:
        self.store = store
        self.chance = random.Random(seed)
        self.calls = 0
        self.backoff = threading.Event()  # never set

    def run(self, calls: int) -> None:
        for _ in range(TURNS_MAX * calls):  # an end, even if nothing is ever answered
            if self.calls < calls:
                self.turn()

    def turn(self) -> None:
        key = self.chance.choice(KEYS)
        quarantine = key == KEYS[0]
        record_id: Id = ("", "careful" if quarantine else "plain", key)
        verb = self.chance.random()
        if verb < 0.08:
            self.send(Lookup(record_id))
        elif verb < 0.14:
            self.send(Forget(record_id, force=self.chance.random() < 0.5))
        elif verb < 0.2 and quarantine:
            self.resolve(record_id)
        else:
            self.claim(record_id, quarantine=quarantine)

    def claim(self, record_id: Id, *, quarantine: bool) -> None:
        owner = self.chance.randbytes(16)
        lease_us = self.chance.choice(LEASES_US)
        answer = self.send(Claim(record_id, owner, lease_us, WINDOW_US, quarantine=quarantine))
        if isinstance(answer, Unknown):
            self.resolve(record_id)
        if not isinstance(answer, Granted):
            return
        while self.chance.random() < 0.4:
            step = ("mail", self.chance.randbytes(2)) if self.chance.random() < 0.3 else None
            self.send(Renew(record_id, owner, answer.fence, lease_us, step))
        end = self.chance.random()
        if end < 0.12:
            return  # as a worker that dies
        to: Any = "done" if end < 0.45 else "released" if end < 0.8 else "failed" if end < 0.9 else "unknown"
        to = "released" if to == "unknown" and not quarantine else to
        value = None if to in ("released", "unknown") else b"r%d" % self.chance.getrandbits(30)
        self.send(Settle(record_id, owner, answer.fence, to, value, WINDOW_US, lease_us))
        if to in ("done", "failed") and self.chance.random() < 0.8:
            self.send(Forget(record_id, fence=answer.fence))  # or every key would soon be done for ever

    def resolve(self, record_id: Id) -> None:
        found = self.send(Lookup(record_id))
        if isinstance(found, Record) and found.state == "unknown":
            to: Any = self.chance.choice(("done", "absent", "claimed"))
            owner = self.chance.randbytes(16)
            value = b"resolved" if to == "done" else None
            self.send(Resolve(record_id, found.fence, to, value, WINDOW_US, owner, LEASES_US[1]))

    def send(self, item: Item) -> Any:
        """The answer; `None` without one. The same item, with the same owner, is sent again, as flows do."""
        for _ in range(TRIES):
            try:
                (answer,) = self.store.send([item])
            except SemelError as error:
                answer = Unavailable(error)
            if not isinstance(answer, Unavailable):
                self.calls += 1
                return answer
            self.backoff.wait(BACKOFF_S)
        return None


def run_events(store: Store, seed: str, calls: int) -> None:
    """The real flows, through a client with a store of its own, on the same keys."""
    chance = random.Random(seed)
    policy = semel.Policy(wait_s=0)
    once = semel.open(store, consumer="plain", lease="20ms", window="1h", policy=policy)
    with contextlib.suppress(SemelError), once:
        for number in range(calls):
            try:
                once.run(chance.choice(KEYS[1:]), str, number)
            except SemelError:
                threading.Event().wait(BACKOFF_S)


def open_patiently(store: Store) -> None:
    """Open the store, also if a fault is under way. Raises if it stays so."""
    for _ in range(OPENINGS):
        try:
            return store.open()
        except SemelError:
            threading.Event().wait(BACKOFF_S)
    return store.open()


def main() -> int:
    """Make the calls."""
    path, seed, calls, url, *cache = sys.argv[1:]
    store = RecordingStore(open_store(url, *cache), path, worker=seed)
    open_patiently(store)
    try:
        callers = [Caller(store, f"{seed}/{number}") for number in range(THREADS)]
        each = int(calls) // (THREADS + 1)
        threads = [
            threading.Thread(target=caller.run, args=(each,), name=f"t{number}")
            for number, caller in enumerate(callers)
        ]
        for thread in threads:
            thread.start()
        mine = RecordingStore(open_store(url, *cache), f"{path}-client", worker=f"{seed}/client")
        run_events(mine, seed, each // 3)
        for thread in threads:
            thread.join()
    finally:
        store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
