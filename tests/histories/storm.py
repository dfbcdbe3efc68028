"""Workers on one store, and faults around them: kills, stops, cut connections, servers that end and come back."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from semel.clock import SystemClock
from semel.core.commands import Lookup
from semel.testing.histories import History, RecordingStore, read_history
from semel.testing.proxy import Proxy
from tests.histories.worker import KEYS, open_store
from tests.server import places
from tests.services import postgres, redis
from tests.services.links import Link, link_to
from tests.waiting import await_true

WORKERS = 2
WITHIN_S = 240.0
STOPPED_S = 1.0
"""The longest stop of a worker: much longer than its leases."""


class Place(NamedTuple):
    """A store, and what can be done to it."""

    url: str
    cache: str = ""
    proxies: tuple[Proxy, ...] = ()
    restart: Callable[[], None] | None = None
    fail_over: Callable[[], None] | None = None
    link: Link | None = None
    """What the first worker alone reaches the store by."""
    linked_url: str = ""


class Storm:
    """Starts workers, lets them work until something has been recorded, and hurts them meanwhile."""

    def __init__(self, folder: Path, place: Place, calls: int) -> None:
        self.folder, self.place, self.calls = folder, place, calls
        self.workers: list[subprocess.Popen[bytes]] = []
        self.started = 0
        self.faults = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()

    @property
    def files(self) -> list[Path]:
        """What was recorded, one file for each worker."""
        return sorted(self.folder.glob("history-*"))

    def start_worker(self) -> None:
        """Start one more."""
        self.started += 1
        name = f"w{self.started}"
        more = [self.place.cache] if self.place.cache else []
        command = [sys.executable, "-m", "tests.histories.worker", str(self.folder / f"history-{name}"), name]
        url = self.place.url
        if self.place.link and self.started == 1:
            command, url = [*self.place.link.prefix, *command], self.place.linked_url
        self.workers.append(subprocess.Popen([*command, str(self.calls), url, *more]))

    def size(self) -> int:
        """How many bytes are recorded."""
        return sum(file.stat().st_size for file in self.files)

    def await_more(self, size: int = 6_000) -> None:
        """Wait until the workers have done some more, or all have ended."""
        wanted = self.size() + size
        assert await_true(
            lambda: self.size() >= wanted or all(each.poll() is not None for each in self.workers), WITHIN_S
        )

    def run(self, rounds: int, chance: random.Random) -> None:
        """Hurt the workers so many times, then let those that are left finish."""
        for _ in range(WORKERS):
            self.start_worker()
        self.await_more()
        faults = [self.part_one] if self.place.link else []  # first, while that one works
        faults += [self.kill, self.stop_and_continue]
        faults += [self.cut_replies, self.cut_requests, self.part] if self.place.proxies else []
        faults += [self.restart] if self.place.restart else []
        faults += [self.fail_over] if self.place.fail_over else []
        plan = [*faults] + [chance.choice(faults) for _ in range(max(rounds - len(faults), 0))]
        for fault in plan[: max(rounds, len(faults))]:
            if all(each.poll() is not None for each in self.workers):
                self.start_worker()
                self.await_more()
            fault()
            self.faults += 1
            self.await_more()
        for worker in self.workers:
            assert worker.wait(WITHIN_S) in (0, -signal.SIGKILL)

    def kill(self) -> None:
        """Kill a worker at whatever it does, and start another."""
        self.workers[-1].kill()
        self.start_worker()

    def stop_and_continue(self) -> None:
        """Stop a worker for longer than its leases: the others go on meanwhile."""
        stopped = self.workers[0]
        if stopped.poll() is None:
            os.kill(stopped.pid, signal.SIGSTOP)
            wanted = self.size() + 2_000
            await_true(lambda: self.size() >= wanted, STOPPED_S)  # on SQLite it may hold the lock
            os.kill(stopped.pid, signal.SIGCONT)

    def cut_replies(self) -> None:
        """Requests arrive, and their replies do not."""
        for proxy in self.place.proxies:
            proxy.cut_next("cut_reply", 3)

    def cut_requests(self) -> None:
        """Requests do not arrive."""
        for proxy in self.place.proxies:
            proxy.cut_next("cut_request", 2)

    def part(self) -> None:
        """Part all workers from the store: replies are held, then all connections end."""
        for proxy in self.place.proxies:
            proxy.arrived.clear()
            proxy.mode = "swallow"
            await_true(proxy.arrived.is_set, 2)
            proxy.mode = "pass"
            proxy.cut()

    def part_one(self) -> None:
        """Part one worker from the store for longer than its leases, and let the others go on."""
        assert self.place.link is not None
        self.place.link.part()
        wanted = self.size() + 4_000
        await_true(lambda: self.size() >= wanted, STOPPED_S)
        self.place.link.join()

    def restart(self) -> None:
        """Kill the server, and start it again."""
        assert self.place.restart is not None
        self.place.restart()

    def fail_over(self) -> None:
        """Let a replica that has everything take the server's place."""
        assert self.place.fail_over is not None
        self.place.fail_over()

    def history(self) -> History:
        """All calls; at last each key is looked up once more, while no fault is under way."""
        with ExitStack() as stack:
            store = RecordingStore(
                open_store(self.place.url, self.place.cache), self.folder / "history-end", worker="end"
            )
            stack.callback(store.close)
            store.open()
            for key in KEYS:
                store.send([Lookup(("", "careful" if key == KEYS[0] else "plain", key))])
        return read_history(self.files)


@contextmanager
def sqlite(folder: Path) -> Iterator[Place]:
    yield Place(f"sqlite:///{folder}/semel.db")


class RedisPair:
    """A master and its replica; clients come through proxies, which lead to the master of the day."""

    def __init__(self, master: redis.Own, replica: redis.Own) -> None:
        self.master, self.replica = master, replica
        self.fronts: tuple[Proxy, ...] = ()
        self._follow()

    def _follow(self) -> None:
        self.replica.ask("REPLICAOF", "127.0.0.1", self.master.port)

    def restart(self) -> None:
        """Kill the master, and start it again."""
        self.master.restart()

    def fail_over(self) -> None:
        """Let the replica take over when it has everything; the old master follows it from then on."""
        assert await_true(lambda: _has_replica(self.master), 60)
        self.master.ask("FAILOVER", "TO", "127.0.0.1", self.replica.port)
        assert await_true(lambda: self.replica.ask("INFO", "replication")["role"] == "master", 60)
        self.master, self.replica = self.replica, self.master
        for front in self.fronts:
            front.lead_to(self.master.port)
            front.cut()


def _has_replica(master: redis.Own) -> bool:
    followers = master.ask("INFO", "replication")
    return bool(followers.get("slave0", {}).get("state") == "online")


@contextmanager
def on_redis(folder: Path) -> Iterator[Place]:
    with (
        redis.own(folder, appendfsync="always") as first,
        redis.own(folder, appendfsync="always") as second,
        Proxy(first.port) as proxy,
        link_to(first.port) as link,
    ):
        pair = RedisPair(first, second)
        pair.fronts = (proxy, link.proxy)
        yield Place(
            f"redis://127.0.0.1:{proxy.port}/0",
            proxies=pair.fronts,
            restart=pair.restart,
            fail_over=pair.fail_over,
            link=link,
            linked_url=f"redis://{link.host}:{link.port}/0?answer_s=0.5&connect_s=0.5",  # it gives up meanwhile
        )


@contextmanager
def on_postgres(folder: Path) -> Iterator[Place]:
    folder.chmod(0o755)
    with postgres.own() as server, Proxy(server.port) as proxy, link_to(server.port) as link:
        address = f"127.0.0.1:{server.port}"
        yield Place(
            server.url.replace(address, f"127.0.0.1:{proxy.port}") + "?schema=histories",
            proxies=(proxy, link.proxy),
            restart=lambda: server.restart(signal.SIGQUIT),
            link=link,
            linked_url=server.url.replace(address, f"{link.host}:{link.port}") + "?schema=histories",
        )


@contextmanager
def tiers(folder: Path) -> Iterator[Place]:
    with redis.own(folder) as server, Proxy(server.port) as proxy:
        yield Place(
            f"sqlite:///{folder}/truth.db",
            f"redis://127.0.0.1:{proxy.port}/0",
            proxies=(proxy,),
            restart=server.restart,
        )


@contextmanager
def service(folder: Path) -> Iterator[Place]:
    at = urlsplit(places.address(folder, SystemClock()))
    assert at.port
    with Proxy(at.port) as proxy:  # no link: it answers to names of this computer only
        yield Place(f"http://127.0.0.1:{proxy.port}{at.path}", proxies=(proxy,))


PLACES = {
    "sqlite": sqlite,
    "redis": on_redis,
    "postgres": on_postgres,
    "redis-over-sqlite": tiers,
    "service": service,
}
