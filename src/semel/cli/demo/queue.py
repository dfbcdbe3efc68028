"""An at-least-once queue: it delivers a message again and again until it is acknowledged."""

import heapq
import random
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

__all__ = [
    "KILLS_MIN",
    "PHASES",
    "Ack",
    "Arrived",
    "Deliver",
    "DemoPlan",
    "DemoQueue",
    "Go",
    "Hit",
    "Mode",
    "Nack",
    "Phase",
    "Ready",
    "WorkerSocket",
    "draw",
]

VISIBILITY_S = 0.5
"""A delivery that is not acknowledged by then goes to another worker, before a stopped worker continues."""


class Flight(Struct):
    """One delivery in flight."""

    worker: int
    until: float


class DemoQueue:
    """Messages by number; each is ready, delayed, in flight or acknowledged."""

    def __init__(self, events: Iterable[str]) -> None:
        self.events: list[str] = list(events)
        self.deliveries: int = 0
        self._ready = deque(range(len(self.events)))
        self._delayed: list[tuple[float, int]] = []
        self._flying: dict[int, Flight] = {}
        self._left = set(self._ready)

    @property
    def left(self) -> int:
        """How many messages are not acknowledged."""
        return len(self._left)

    def take(self, worker: int, now: float) -> int | None:
        """Return the next message for this worker, or `None`."""
        while self._ready:
            number = self._ready.popleft()
            if number in self._left and number not in self._flying:
                self._flying[number] = Flight(worker, now + VISIBILITY_S)
                self.deliveries += 1
                return number
        return None

    def ack(self, number: int) -> None:
        """Acknowledge a message; a late acknowledgement counts too."""
        self._left.discard(number)
        self._flying.pop(number, None)

    def nack(self, number: int, at: float) -> None:
        """Deliver it again, not before `at`."""
        self._flying.pop(number, None)
        heapq.heappush(self._delayed, (at, number))

    def abandon(self, worker: int) -> None:
        """Requeue the messages of a worker that died, in front of the others."""
        for number in [number for number, flight in self._flying.items() if flight.worker == worker]:
            del self._flying[number]
            self._ready.appendleft(number)

    def tick(self, now: float) -> float | None:
        """Move due messages to ready. Returns the time of the next one."""
        while self._delayed and self._delayed[0][0] <= now:
            self._ready.append(heapq.heappop(self._delayed)[1])
        for number in [number for number, flight in self._flying.items() if flight.until <= now]:
            del self._flying[number]
            self._ready.append(number)
        ends = [flight.until for flight in self._flying.values()]
        return min([*ends, *(at for at, _ in self._delayed[:1])], default=None)


Mode: TypeAlias = Literal["inbox", "lease", "control"]
Phase: TypeAlias = Literal["claimed", "effect done", "committed", "before ack"]
PHASES: tuple[Phase, ...] = ("claimed", "effect done", "committed", "before ack")
"""The phases at which a worker can be killed, in their order."""

RECEIVE_BYTES = 64 * 1024


class Ready(Struct, frozen=True, tag=True):
    """A worker is connected to its store and takes deliveries."""

    pid: int


class Deliver(Struct, frozen=True, tag=True):
    """One delivery. `watched`: report each phase, and wait for `Go`."""

    number: int
    event: str
    watched: bool = False


class Arrived(Struct, frozen=True, tag=True):
    """The worker has reached a phase of a watched delivery and waits."""

    number: int
    phase: Phase
    attempt: int = 1


class Go(Struct, frozen=True, tag=True):
    """Go on."""


class Ack(Struct, frozen=True, tag=True):
    """The delivery is finished. `answer`: the value of this event's first run."""

    number: int
    duplicate: bool
    answer: str
    attempt: int = 1


class Nack(Struct, frozen=True, tag=True):
    """Deliver it again later. `lost`: another worker took the claim over while it ran."""

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
        """Wait for messages and return them. Raises `EOFError` when the other end is gone."""
        try:
            received = self.end.recv(RECEIVE_BYTES)
        except ConnectionError:
            received = b""
        if not received:
            raise EOFError
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        for line in lines:
            yield self._decoder.decode(line)


KILLS_MIN = len(PHASES)
"""With fewer kills not every phase would be hit."""
COPIES = (1, 2, 3, 4, 6)
COPIES_WEIGHTS = (30, 30, 20, 15, 5)
"""How often a producer sends one event: 2.5 times on the average."""
SPREAD_EVENTS = 40
"""The largest distance between copies of an event, in events: small enough to race."""
AGAIN = 0.25
"""The share of kills that hit an event for the second time."""
ACK_LOST = 0.08
"""The share of acknowledgements that never reach the queue."""
PAUSES: dict[Mode, tuple[Phase, ...]] = {
    "inbox": ("effect done", "before ack"),
    "lease": ("claimed", "effect done", "committed"),
    "control": ("effect done", "before ack"),
}
"""Where workers are stopped until their lease is over."""


class Hit(Struct, frozen=True):
    """One kill or pause of the worker that handles an event."""

    kind: Literal["kill", "pause"]
    phase: Phase


class DemoPlan(Struct):
    """One storm."""

    events: list[str]
    sent: list[str]
    """Every event at least once, in the order of sending."""
    hits: dict[str, list[Hit]]
    """By event, in the order of the phases."""
    ack_lost: random.Random
    """Decides which acknowledgements are lost."""

    def loses_ack(self) -> bool:
        """Whether the next acknowledgement is lost on its way."""
        return self.ack_lost.random() < ACK_LOST


def draw(mode: Mode, seed: int, events: int, kills: int) -> DemoPlan:
    """Draw the storm of this seed."""
    rng = random.Random(f"{seed}:{events}:{kills}")  # noqa: S311 - a storm has to be predictable
    names = [f"evt-{number:06d}" for number in range(events)]
    copies = rng.choices(COPIES, COPIES_WEIGHTS, k=events)
    at = [
        (number + rng.uniform(0, SPREAD_EVENTS), name)
        for number, name in enumerate(names)
        for _ in range(copies[number])
    ]
    struck = [PHASES[number % len(PHASES)] for number in range(kills)]
    rng.shuffle(struck)
    free = rng.sample(names, len(names))
    hits: dict[str, list[Hit]] = {}
    for phase in struck:
        # An event is committed once, so it can be hit once in that phase; in other phases again.
        again = [name for name in hits if phase != "committed" or Hit("kill", phase) not in hits[name]]
        name = rng.choice(again) if again and (not free or rng.random() < AGAIN) else free.pop()
        hits.setdefault(name, []).append(Hit("kill", phase))
    for phase in PAUSES[mode]:
        hits.setdefault(free.pop() if free else rng.choice(names), []).append(Hit("pause", phase))
    for struck_here in hits.values():
        struck_here.sort(key=lambda hit: (PHASES.index(hit.phase), hit.kind))
    return DemoPlan(names, [name for _, name in sorted(at)], hits, random.Random(rng.random()))  # noqa: S311
