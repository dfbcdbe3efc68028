"""Progress of `semel dedup` in a store: one small record of each instance, for the dashboard."""

import logging
import os
import platform
import secrets
import socket
from collections.abc import Sequence
from importlib.metadata import version
from threading import Event, Lock, Thread
from time import time

import msgspec

from semel.core.commands import Answer, Item
from semel.core.protocols import Store
from semel.errors import SemelError, StoreUnavailable
from semel.observe.limited_log import LimitedLog
from semel.observe.numbered import ALIVE_US, Asking, NumberedRecord, NumberedState, read_numbered
from semel.runtime.generators import drive
from semel.types import Unavailable

__all__ = ["InstanceFigures", "ProgressWriter", "SeenDedup", "dedups"]

CONSUMER = "semel.dedup"
WRITE_S = 5.0

_log = LimitedLog(logging.getLogger("semel.streams"))


class InstanceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Where an instance is."""

    received: int = 0
    passed: int = 0
    duplicates: int = 0
    mismatches: int = 0
    late: int = 0
    dead_lettered: int = 0
    aborts: int = 0
    rate: float = 0.0
    """Records for each second, lately."""
    partitions: int = 0
    restoring: int = 0
    restore_left: int = 0
    restore_total: int = 0
    lag: int = 0
    index_bytes: int = 0


class DedupState(NumberedState, kw_only=True, omit_defaults=True):
    """What the record of an instance holds."""

    name: str
    """Topic and group, without credentials."""
    host: str
    pid: int
    version: str
    window: str
    figures: InstanceFigures


class SeenDedup(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that was seen."""

    name: str
    host: str
    pid: int
    version: str
    window: str
    figures: InstanceFigures
    seen_us: int
    """When it was written last, by the store's clock."""

    def is_alive(self, now_us: int) -> bool:
        """Whether it was written lately."""
        return self.seen_us + ALIVE_US >= now_us


class ProgressWriter:
    """Writes the progress of one instance in a thread of its own: a store that is away holds nothing up."""

    def __init__(self, store: Store, name: str, window: str) -> None:
        self._store = store
        self._record = NumberedRecord(CONSUMER)
        self._state = DedupState(
            secrets.token_hex(4),
            name=name,
            host=socket.gethostname() or platform.node(),
            pid=os.getpid(),
            version=version("semel"),
            window=window,
            figures=InstanceFigures(),
        )
        self._lock = Lock()
        self._over = Event()
        self._thread = Thread(target=self._run, name="semel-dedup-progress", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def set(self, figures: InstanceFigures) -> None:
        """Set what is written next."""
        with self._lock:
            self._state.figures = figures

    def close(self) -> None:
        """Write that it stopped, and end the thread. Idempotent."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._write()
            while not self._over.wait(WRITE_S):
                self._write()
            if self._record.was_written:
                self._write(stopped=True)
        finally:
            self._store.close()

    def _write(self, *, stopped: bool = False) -> None:
        with self._lock:
            state = msgspec.structs.replace(self._state, stopped=stopped)
        try:
            self._store.open()
            drive(self._record.write(state, time() * 1e6), self._send)
        except SemelError as error:
            _log.warning("the progress could not be written: %s", error)

    def _send(self, items: Sequence[Item]) -> Sequence[Answer]:
        try:
            return self._store.send(items)
        except StoreUnavailable as error:
            return [Unavailable(error)] * len(items)


def dedups() -> Asking:
    """Return the instances that were seen within the last hour and did not stop, by name."""
    found: list[SeenDedup] = []
    for state, seen_us in (yield from read_numbered(CONSUMER, DedupState)):
        found.append(
            SeenDedup(
                name=state.name,
                host=state.host,
                pid=state.pid,
                version=state.version,
                window=state.window,
                figures=state.figures,
                seen_us=seen_us,
            )
        )
    return sorted(found, key=lambda each: (each.name, each.host, each.pid))
