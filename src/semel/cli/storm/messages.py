"""What the queue and a worker say to each other: one JSON line each, over the worker's own socket."""

import socket
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

__all__ = [
    "PHASES",
    "Ack",
    "Arrived",
    "Deliver",
    "Go",
    "WorkerSocket",
    "Mode",
    "Nack",
    "Phase",
    "Ready",
]

Mode: TypeAlias = Literal["inbox", "lease", "control"]
Phase: TypeAlias = Literal["claimed", "effect done", "committed", "before ack"]
PHASES: tuple[Phase, ...] = ("claimed", "effect done", "committed", "before ack")
"""Where a worker can be killed, in the order in which it comes there."""

RECEIVE_BYTES = 64 * 1024


class Ready(Struct, frozen=True, tag=True):
    """A worker is connected to its store and takes deliveries."""

    pid: int


class Deliver(Struct, frozen=True, tag=True):
    """One delivery. `watched`: say where you are, and wait to be told to go on."""

    number: int
    event: str
    watched: bool = False


class Arrived(Struct, frozen=True, tag=True):
    """The worker has come to a phase of a watched delivery and waits there."""

    number: int
    phase: Phase
    attempt: int = 1


class Go(Struct, frozen=True, tag=True):
    """Go on."""


class Ack(Struct, frozen=True, tag=True):
    """The delivery is done with. `answer`: what this event's first run returned."""

    number: int
    duplicate: bool
    answer: str
    attempt: int = 1


class Nack(Struct, frozen=True, tag=True):
    """Not now: deliver it again later. `lost`: its claim went to another while it ran."""

    number: int
    retry_after_s: float = 0.0
    lost: bool = False
    why: str = ""


_encode = msgspec.json.Encoder().encode
_from_queue = msgspec.json.Decoder(Deliver | Go)
_from_worker = msgspec.json.Decoder(Ready | Arrived | Ack | Nack)


class WorkerSocket:
    """One end of a worker's socket."""

    def __init__(self, end: socket.socket, *, at_worker: bool) -> None:
        self.end = end
        self._decoder = _from_queue if at_worker else _from_worker
        self._buffer = b""

    def say(self, message: Struct) -> None:
        """Send one message. Raises `OSError` when the other end is gone."""
        self.end.sendall(_encode(message) + b"\n")

    def hear(self) -> Iterator[Ready | Arrived | Ack | Nack | Deliver | Go]:
        """What has come since; waits for something. Raises `EOFError` when the other end is gone."""
        try:
            received = self.end.recv(RECEIVE_BYTES)
        except ConnectionError:
            received = b""
        if not received:
            raise EOFError
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        for line in lines:
            yield self._decoder.decode(line)
