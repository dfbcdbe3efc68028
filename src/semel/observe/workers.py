"""Heartbeats of workers: one small record of each process, found by number, which expires when it stops.

A heartbeat is one write: a claim without owner and lease, which replaces the metadata of the record. Readers need no
listing of records: the keys are `0`, `1` and so on, and each process takes the lowest free number. If two processes
take the same one, the one that finds the other's mark there takes another.
"""

import os
import platform
import secrets
import socket
from collections.abc import Generator, Sequence
from importlib.metadata import version
from typing import Any, TypeAlias

import msgspec

from semel.core.commands import Admit, Answer, Claim, Granted, Item, Lookup
from semel.core.machine import NOBODY
from semel.observe.counters import CounterHook
from semel.types import Record, Unavailable

__all__ = ["ALIVE_US", "BEAT_S", "Heartbeat", "SeenWorker", "workers"]

TENANT = CONSUMER = "semel.workers"
"""A tenant of semel's own, so that no user's statistics count these records."""
BEAT_S = 10.0
ALIVE_US = 6 * 10_000_000
"""A number whose last heartbeat is older than this is free."""
KEPT_US = 3600 * 10**6
"""How long a worker that died is still listed, with its last heartbeat."""
PAGE = 16
NUMBERS_MAX = 4096
CONSUMERS_MAX = 50
"""The most consumers that a heartbeat names; a record's metadata is small."""

Asking: TypeAlias = Generator[Sequence[Item], Sequence[Answer], Any]
"""A generator that yields items for the store and receives their answers."""


class WorkerState(msgspec.Struct, omit_defaults=True):
    """What a heartbeat stores."""

    mark: str
    host: str
    pid: int
    version: str
    consumers: list[tuple[str, str]] = msgspec.field(default_factory=list[tuple[str, str]])
    """Tenants and consumers."""
    in_flight: int = 0
    stopped: bool = False


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


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(WorkerState).decode


class Heartbeat:
    """Writes the heartbeats of one process. Not thread-safe."""

    def __init__(self, tally: CounterHook) -> None:
        self._tally = tally
        self._number = -1
        self._admitted = False
        self._state = WorkerState(
            secrets.token_hex(4), socket.gethostname() or platform.node(), os.getpid(), version("semel")
        )

    @property
    def was_written(self) -> bool:
        """Whether a heartbeat was written, or tried."""
        return self._number >= 0

    def beat(self, *, stopped: bool = False) -> Asking:
        """Write a heartbeat; returns whether the store confirmed it. One read and one write."""
        if not self._admitted:
            (mode,) = yield (Admit(TENANT, CONSUMER, "lease"),)
            if isinstance(mode, Unavailable):
                return False
            self._admitted = True
        if not (yield from self._hold_number()):
            return False
        state = self._state
        state.consumers = self._tally.consumers()[:CONSUMERS_MAX]
        state.in_flight, state.stopped = self._tally.in_flight()[0], stopped
        (answer,) = yield (Claim(_place(self._number), NOBODY, 0, KEPT_US, meta=_encode(state)),)
        return isinstance(answer, Granted)

    def _hold_number(self) -> Asking:
        """Keep the number, or take the lowest free one. Returns `False` if the store does not answer."""
        if self._number >= 0:
            (found,) = yield (Lookup(_place(self._number)),)
            if isinstance(found, Unavailable):
                return False
            if self._is_free(found):
                return True
        for at in range(0, NUMBERS_MAX, PAGE):
            answers = yield [Lookup(_place(number)) for number in range(at, at + PAGE)]
            for number, answer in enumerate(answers, at):
                if isinstance(answer, Unavailable):
                    return False
                if self._is_free(answer):
                    self._number = number
                    return True
        return False

    def _is_free(self, found: Any) -> bool:
        """Whether a record is this worker's own, or of one that has ended."""
        state = _state_of(found)
        if state is None or state.stopped or state.mark == self._state.mark:
            return True
        return bool(found.lease_until_us + ALIVE_US < self._tally.now_s * 1e6)


def workers() -> Asking:
    """Return the workers that were seen within the last hour and did not stop, the latest heartbeat first."""
    found: list[SeenWorker] = []
    for at in range(0, NUMBERS_MAX, PAGE):
        answers = yield [Lookup(_place(number)) for number in range(at, at + PAGE)]
        states = [(_state_of(answer), answer) for answer in answers]
        for state, record in states:
            if state is None or state.stopped or not isinstance(record, Record):
                continue
            found.append(
                SeenWorker(
                    host=state.host,
                    pid=state.pid,
                    version=state.version,
                    consumers=tuple(state.consumers),
                    in_flight=state.in_flight,
                    seen_us=record.lease_until_us,
                )
            )
        if not any(isinstance(answer, Record) for answer in answers):
            break
    return sorted(found, key=lambda each: -each.seen_us)


def _state_of(answer: Any) -> WorkerState | None:
    if not isinstance(answer, Record) or answer.meta is None:
        return None
    try:
        return _decode(answer.meta)
    except msgspec.MsgspecError:
        return None


def _place(number: int) -> tuple[str, str, str]:
    return (TENANT, CONSUMER, str(number))
