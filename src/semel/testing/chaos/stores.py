"""The store of a chaos run: find it, refuse one that is in use, cut it off, and clean up."""

import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from semel.core.commands import Count, Forget, Lookup, answer_or_raise
from semel.core.protocols import Store
from semel.errors import PolicyInvalid, StoreUnknown, UsageError
from semel.runtime.process import load_object
from semel.stores.registry import store_for
from semel.testing.proxy import Proxy
from semel.types import Record

__all__ = ["StoreFaults", "fault_injector", "find_chaos_store", "forget_all", "refuse_used", "unknown_keys"]

PORTS = {"redis": 6379, "valkey": 6379, "postgresql": 5432, "postgres": 5432, "http": 80}
"""The schemes whose stores a proxy can stand in front of, and their ports."""
POSTGRES_SOCKET = "/var/run/postgresql"
_OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
BATCH = 100
LOCK_WAIT_S = 10.0


def find_chaos_store(spec: str) -> Any:
    """Return the store of a URL, or of `module:function`, which is called without arguments."""
    try:
        return store_for(spec)
    except StoreUnknown:
        if not _OBJECT.fullmatch(spec):
            raise
        return load_object(spec)()


def open_directly(spec: str) -> Store:
    """Open the store, not through a proxy. Raises `UsageError` for one that only event loops can use."""
    store = find_chaos_store(spec)
    if not isinstance(store, Store):
        raise UsageError(f"{spec} serves event loops only; chaos needs a store with a blocking side too")
    store.open()
    return store


@contextmanager
def directly(spec: str) -> Iterator[Store]:
    """Open the store for a while."""
    store = open_directly(spec)
    try:
        yield store
    finally:
        store.close()


def refuse_used(store: Store, consumer: str) -> None:
    """Raise `PolicyInvalid` if the store holds records of others."""
    counted = answer_or_raise(store.send([Count()])[0])
    others = {name: number for name, number in counted.consumers.items() if name != consumer and number}
    marks = counted.marks
    if not others and not marks:
        return
    held = ", ".join([f"{number} of consumer {name!r}" for name, number in sorted(others.items())][:3])
    what = held or f"{marks} marks"
    raise PolicyInvalid(
        f"{store.name} holds other records ({what}); chaos cuts the store off and kills its users. Use a store of its"
        " own, or --force (force=True) if nobody else works with it"
    )


def unknown_keys(store: Store, consumer: str, keys: Iterable[str]) -> set[str]:
    """Return the keys whose outcome is recorded as unknown."""
    found: set[str] = set()
    for some in _batches(list(keys)):
        answers = store.send([Lookup(("", consumer, key)) for key in some])
        for key, answer in zip(some, answers, strict=True):
            record = answer_or_raise(answer)
            if isinstance(record, Record) and record.state == "unknown":
                found.add(key)
    return found


def forget_all(store: Store, consumer: str, keys: Iterable[str]) -> None:
    """Remove the records of the run."""
    for some in _batches(list(keys)):
        store.send([Forget(("", consumer, key), force=True) for key in some])


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    return (keys[at : at + BATCH] for at in range(0, len(keys), BATCH))


class StoreFaults(Protocol):
    """Cuts workers off from their store."""

    url: str
    """The store's URL for workers."""
    cuts: bool
    """Whether the store can be cut off."""
    replies: bool
    """Whether single replies can be cut."""

    def cut_off(self, seconds: float) -> None:
        """Cut all workers off, for so long."""
        ...

    def lose_reply(self) -> None:
        """Cut the next reply of the store."""
        ...

    @property
    def active(self) -> bool:
        """Whether a fault goes on; ends one whose time is over."""
        ...

    def restore(self) -> None:
        """End the fault that goes on."""
        ...

    def close(self) -> None:
        """End all faults, for good."""
        ...


class NoFaults:
    """For a store that nothing can stand in front of."""

    cuts: bool = False
    replies: bool = False
    active: bool = False

    def __init__(self, url: str) -> None:
        self.url: str = url

    def cut_off(self, seconds: float) -> None:
        """Do nothing."""

    def lose_reply(self) -> None:
        """Do nothing."""

    def restore(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class LockFaults(NoFaults):
    """For a SQLite file: another process holds its lock, so that nobody can write."""

    cuts: bool = True

    def __init__(self, url: str, path: Path) -> None:
        super().__init__(url)
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._until = 0.0

    def cut_off(self, seconds: float) -> None:
        """Hold the lock."""
        if self._connection is not None:
            return
        connection = sqlite3.connect(self._path, isolation_level=None, timeout=LOCK_WAIT_S)
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.Error:
            connection.close()
            return
        self._connection, self._until = connection, monotonic() + seconds

    @property
    def active(self) -> bool:  # type: ignore[override]
        """Whether the lock is held."""
        if self._connection is not None and monotonic() >= self._until:
            self.restore()
        return self._connection is not None

    def close(self) -> None:
        """Release the lock."""
        self.restore()

    def restore(self) -> None:
        """Release the lock."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            connection.close()


class ProxyFaults:
    """For a store behind TCP: a proxy stands in front of it."""

    cuts: bool = True
    replies: bool = True

    def __init__(self, url: str, host: str, port: int) -> None:
        self._proxy = Proxy(port, host)
        self._proxy.__enter__()
        self.url: str = _with_port(url, self._proxy.port)
        self._until = 0.0

    def cut_off(self, seconds: float) -> None:
        """End all connections, and refuse new ones."""
        self._proxy.mode = "refuse"
        self._until = monotonic() + seconds
        self._proxy.cut()

    def lose_reply(self) -> None:
        """Hand the next request on, and cut its connection when the store answers."""
        if self._proxy.mode == "pass":
            self._proxy.cut_replies(1)

    @property
    def active(self) -> bool:
        """Whether the store is cut off, or a reply is still to be lost."""
        if self._proxy.mode == "refuse" and monotonic() >= self._until:
            self._proxy.mode = "pass"
        return self._proxy.mode != "pass"

    def restore(self) -> None:
        """Let all pass."""
        self._proxy.mode = "pass"

    def close(self) -> None:
        """Close the proxy."""
        self._proxy.__exit__(None, None, None)


def fault_injector(spec: str, store: Store) -> StoreFaults:
    """Return what can cut workers off from this store."""
    path = getattr(store, "path", None)
    if store.name.startswith("sqlite") and path is not None:
        return LockFaults(spec, Path(path))
    scheme = spec.partition(":")[0]
    if scheme not in PORTS:
        return NoFaults(spec)
    parts = urlsplit(spec)
    host, port = _server(spec)
    if "," in parts.netloc or "," in host:
        return NoFaults(spec)  # several servers: the driver chooses one
    return ProxyFaults(spec, host, port)


def _server(url: str) -> tuple[str, int]:
    """Return the host and port of a URL; for PostgreSQL, also those in its options, and its socket file."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    postgres = parts.scheme.startswith("postgres")
    host = (options.get("host") if postgres else None) or parts.hostname or ""
    port = int((options.get("port") if postgres else None) or parts.port or PORTS[parts.scheme])
    if postgres and not host:
        host = POSTGRES_SOCKET if Path(POSTGRES_SOCKET, f".s.PGSQL.{port}").exists() else "127.0.0.1"
    if host.startswith("/"):
        host = f"{host}/.s.PGSQL.{port}"
    return host or "127.0.0.1", port


def _with_port(url: str, port: int) -> str:
    """Return the URL with the proxy as its server."""
    parts = urlsplit(url)
    login, at, _ = parts.netloc.rpartition("@")
    query = parts.query
    if parts.scheme.startswith("postgres"):
        query = urlencode([each for each in parse_qsl(query) if each[0] not in ("host", "port", "hostaddr")])
    return urlunsplit((parts.scheme, f"{login}{at}127.0.0.1:{port}", parts.path, query, parts.fragment))
