"""What a failover of Redis loses, with `WAIT` and without it: measured, and compared with what `explain` says.

`python -m tests.stores.redis.failover` measures behind sentinels and in a cluster, and keeps the figures for the page
about proofs in `failover.json`.
"""

import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
from msgspec import Struct

from semel.core.commands import Granted, Item
from semel.core.ids import digest
from semel.observe.explain import explain
from semel.observe.probes import weaknesses
from semel.stores.redis import RedisStore
from semel.types import Completed
from tests.services import redis, server
from tests.stores.redis.tools import claim, done, kinds
from tests.waiting import await_true

FILE = Path(__file__).with_name("failover.json")
BATCH = 20
BATCHES = 5
"""So many are completed by each client before the next thing happens."""
ENDLESS = 1_000_000
HOUR_US = 3_600_000_000
WAIT_S = 0.05
WITHIN_S = 60.0


class FailoverRow(Struct):
    """The figures of one client in one failover."""

    place: str
    replica: str
    """What the replica did before its master was killed: `follows` or `cut off`."""
    wait_replicas: int
    completed: int
    """Records whose completion was answered."""
    behind: int
    """Those of them that were completed while the replica was cut off."""
    reported: int
    """Those that the client logged as not replicated in time."""
    lost: int
    unreported: int
    """Records that were lost and not reported."""
    explained: str
    """What `explain` says of a failover to this client."""

    @property
    def as_explained(self) -> bool:
        """Whether no more was lost than `explain` says, and what was behind was lost."""
        least = self.behind <= self.lost
        if self.wait_replicas:
            return least and self.unreported == 0 and "only if they were logged" in self.explained
        return least and self.reported == 0 and "had not reached the new master" in self.explained


class KeptFailovers(Struct):
    """The figures of one run."""

    on: str
    """The day."""
    rows: list[FailoverRow]


class Failing(NamedTuple):
    """A master that will be killed, and its replica."""

    url: str
    master: int
    replica: int
    pid: int
    """Of the master."""
    map_port: int = 0
    """The cluster's master whose keys count; 0: all do."""

    def cut_off(self) -> None:
        """Part the replica from its master: it may not log in any more, and its connection ends."""
        for name in ("masteruser", "masterauth"):
            redis.ask(self.replica, "CONFIG", "SET", name, "nobody")
        redis.ask(self.master, "CLIENT", "KILL", "TYPE", "replica")

    def is_over(self) -> bool:
        """Whether the replica has become the master."""
        return bool(redis.ask(self.replica, "INFO", "replication")["role"] == "master")


@contextmanager
def sentinel(folder: Path) -> Iterator[Failing]:
    """A master, a replica and three sentinels."""
    with redis.trio(folder, down_after_ms=1000) as trio:
        yield Failing(trio.url, trio.master, trio.replica, trio.pids[0])


@contextmanager
def cluster(folder: Path) -> Iterator[Failing]:
    """Three masters with a replica each; the first is killed."""
    with redis.own_cluster(folder, redis.NODES) as made:
        first, replica = made.ports[0], made.ports[redis.MASTERS]
        assert await_true(lambda: redis.ask(replica, "INFO", "replication")["master_link_status"] == "up", 30)
        yield Failing(made.url, first, replica, made.pids[0], first)


PLACES: dict[str, Callable[[Path], AbstractContextManager[Failing]]] = {
    "sentinel": sentinel,
    "cluster": cluster,
}


class FailoverClient:
    """Completes the batches that it is allowed in a thread, until the store does not answer."""

    def __init__(self, failing: Failing, wait_replicas: int, cut: threading.Event) -> None:
        self.wait_replicas = wait_replicas
        self.store = RedisStore(
            failing.url, prefix=f"wait{wait_replicas}", wait_replicas=wait_replicas, wait_replicas_s=WAIT_S
        )
        self.store.open()
        self.completed: list[str] = []
        self.behind: set[str] = set()
        self.reported: set[str] = set()
        self.batches = 0
        self._stop = threading.Event()
        self._turns = threading.Semaphore(0)
        self._cut = cut
        self._names = self._own_names(failing.map_port)
        self.explained = self._explain()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self.store.close()

    def end(self) -> None:
        """Let the batch that is under way come to its end, and begin no other."""
        self._stop.set()
        self._turns.release()
        self._thread.join()

    def _own_names(self, port: int) -> Iterator[str]:
        """Keys; in a cluster only those of one master."""
        number = 0
        while True:
            number += 1
            name = f"key {number}"
            where = self.store.core.map
            assert where is not None
            if not port or where.buckets[digest(("", "consumer", name))[0] & 63][1] == port:
                yield name

    def _explain(self) -> str:
        live = weaknesses(self.store)
        told = explain(self.store, "lease", window_us=24 * HOUR_US, lease_us=30_000_000, live=live).weaknesses
        return next(each.what for each in told if "failover loses" in each.what)

    def _run(self) -> None:
        while self._turns.acquire() and not self._stop.is_set():
            if not self._complete([next(self._names) for _ in range(BATCH)]):
                break
            self.batches += 1

    def _complete(self, names: list[str]) -> bool:
        """Claim and complete these. Returns whether all were answered."""
        behind = self._cut.is_set()
        claims = [claim(name, window_us=HOUR_US) for name in names]
        answers = self.store.send(claims)
        granted = [pair for pair in zip(claims, answers, strict=True) if isinstance(pair[1], Granted)]
        before = self.store.unreplicated
        settles: list[Item] = [done(held, answer) for held, answer in granted]
        ends = self.store.send(settles)
        kept = [
            held.id[2] for (held, _), end in zip(granted, ends, strict=True) if isinstance(end, Completed)
        ]
        self.completed += kept
        self.behind.update(kept if behind else ())
        self.reported.update(kept if self.store.unreplicated > before else ())
        return len(kept) == len(names)

    def go_on(self, batches: int) -> None:
        """Allow so many batches more."""
        self._turns.release(batches)

    def await_batches(self, batches: int) -> None:
        """Wait until so many are completed."""
        assert await_true(lambda: self.batches >= batches or not self._thread.is_alive(), WITHIN_S)

    def lost(self) -> set[str]:
        """The completed keys that the new master does not know, as soon as it is found."""
        claims = [claim(name) for name in self.completed]
        answers: list[str] = []

        def is_answered() -> bool:
            answers[:] = kinds(self.store.send(claims))
            return set(answers) <= {"Known", "Granted"}

        assert await_true(is_answered, WITHIN_S), set(answers)
        return {name for name, kind in zip(self.completed, answers, strict=True) if kind == "Granted"}


def measure(name: str, folder: Path, *, cut: bool) -> list[FailoverRow]:
    """Kill a master under two clients, one of which waits for the replica, and count what is lost."""
    parted = threading.Event()
    with ExitStack() as stack:
        failing = stack.enter_context(PLACES[name](folder))
        clients = [stack.enter_context(FailoverClient(failing, waits, parted)) for waits in (0, 1)]
        for client in clients:
            client.go_on(BATCHES)
            client.await_batches(BATCHES)
        if cut:
            failing.cut_off()
            parted.set()
        for client in clients:
            client.go_on(BATCHES if cut else ENDLESS)
            client.await_batches(2 * BATCHES)
        server.end(failing.pid, signal.SIGKILL)
        assert await_true(failing.is_over, WITHIN_S)
        for client in clients:
            client.end()
        return [_row(name, client, cut=cut) for client in clients]


def _row(name: str, client: FailoverClient, *, cut: bool) -> FailoverRow:
    lost = client.lost()
    return FailoverRow(
        place=name,
        replica="cut off" if cut else "follows",
        wait_replicas=client.wait_replicas,
        completed=len(client.completed),
        behind=len(client.behind),
        reported=len(client.reported),
        lost=len(lost),
        unreported=len(lost - client.reported),
        explained=client.explained,
    )


def main() -> int:
    """Measure all. Returns 1, and keeps nothing, if more is lost than `explain` says."""
    rows: list[FailoverRow] = []
    try:
        for name in PLACES:
            for cut in (False, True):
                with tempfile.TemporaryDirectory() as made:
                    rows += measure(name, Path(made), cut=cut)
                sys.stderr.write(f"{rows[-2]}\n{rows[-1]}\n")
    finally:
        server.stop_all()
        server.clear()
    if not all(row.as_explained for row in rows):
        return 1
    kept = KeptFailovers(datetime.now(UTC).date().isoformat(), rows)
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
