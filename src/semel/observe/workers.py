"""Heartbeats of workers: one small record of each process, which expires when it stops."""

import os
import platform
import secrets
import socket
from importlib.metadata import version

import msgspec

from semel.observe.counters import CounterHook
from semel.observe.numbered import ALIVE_US, Asking, NumberedRecord, NumberedState, read_numbered

__all__ = ["ALIVE_US", "BEAT_S", "Heartbeat", "SeenWorker", "workers"]

CONSUMER = "semel.workers"
BEAT_S = 10.0
CONSUMERS_MAX = 50
"""The most consumers that a heartbeat names; a record's metadata is small."""


class WorkerState(NumberedState, kw_only=True, omit_defaults=True):
    """What a heartbeat stores."""

    host: str
    pid: int
    version: str
    consumers: list[tuple[str, str]] = msgspec.field(default_factory=list[tuple[str, str]])
    """Tenants and consumers."""
    in_flight: int = 0
    sources: list[tuple[str, str, str]] = msgspec.field(default_factory=list[tuple[str, str, str]])
    """Tenants, consumers, and where their deliveries came from."""
    urls: list[str] = msgspec.field(default_factory=list[str])
    """The URLs of its sources, without their passwords."""


class SeenWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A process that was seen."""

    host: str
    pid: int
    version: str
    consumers: tuple[tuple[str, str], ...]
    """Tenants and consumers that it has worked for."""
    in_flight: int
    """Claims that it held at its last heartbeat."""
    seen_us: int
    """Its last heartbeat, by the store's clock."""
    sources: tuple[tuple[str, str, str], ...] = ()
    """Tenants, consumers, and the sources from which it had deliveries for them."""
    urls: tuple[str, ...] = ()
    """The URLs of its known sources, without their passwords."""


class Heartbeat:
    """Writes the heartbeats of one process. Not thread-safe."""

    def __init__(self, tally: CounterHook) -> None:
        self._tally = tally
        self._record = NumberedRecord(CONSUMER)
        self._state = WorkerState(
            secrets.token_hex(4),
            host=socket.gethostname() or platform.node(),
            pid=os.getpid(),
            version=version("semel"),
        )

    @property
    def was_written(self) -> bool:
        """Whether a heartbeat was written, or tried."""
        return self._record.was_written

    def beat(self, *, stopped: bool = False) -> Asking:
        """Write a heartbeat; returns whether the store confirmed it. One read and one write."""
        state = self._state
        state.consumers = self._tally.consumers()[:CONSUMERS_MAX]
        state.in_flight, state.stopped = self._tally.in_flight()[0], stopped
        state.sources = self._tally.sources()[:CONSUMERS_MAX]
        state.urls = list(self._tally.source_urls)
        return (yield from self._record.write(state, self._tally.now_s * 1e6))


def workers() -> Asking:
    """Return the workers that were seen within the last hour and did not stop, the latest heartbeat first."""
    found: list[SeenWorker] = []
    for state, seen_us in (yield from read_numbered(CONSUMER, WorkerState)):
        found.append(
            SeenWorker(
                host=state.host,
                pid=state.pid,
                version=state.version,
                consumers=tuple(state.consumers),
                in_flight=state.in_flight,
                seen_us=seen_us,
                sources=tuple(state.sources),
                urls=tuple(state.urls),
            )
        )
    return sorted(found, key=lambda each: -each.seen_us)
