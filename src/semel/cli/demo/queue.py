"""The plan of a storm, and the messages between its queue and its workers."""

import random
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
    "Go",
    "Mode",
    "Nack",
    "Phase",
    "Ready",
    "WorkerFault",
    "draw",
    "from_queue",
    "from_worker",
]

Mode: TypeAlias = Literal["inbox", "lease", "control"]
Phase: TypeAlias = Literal["claimed", "effect done", "committed", "before ack"]
PHASES: tuple[Phase, ...] = ("claimed", "effect done", "committed", "before ack")
"""The phases at which a worker can be killed, in their order."""


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


from_queue: msgspec.json.Decoder[Deliver | Go] = msgspec.json.Decoder(Deliver | Go)
from_worker: msgspec.json.Decoder[Ready | Arrived | Ack | Nack] = msgspec.json.Decoder(
    Ready | Arrived | Ack | Nack
)


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


class WorkerFault(Struct, frozen=True):
    """One kill or pause of the worker that handles an event."""

    kind: Literal["kill", "pause"]
    phase: Phase


class DemoPlan(Struct):
    """One storm."""

    events: list[str]
    sent: list[str]
    """Every event at least once, in the order of sending."""
    hits: dict[str, list[WorkerFault]]
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
    hits: dict[str, list[WorkerFault]] = {}
    for phase in struck:
        # An event is committed once, so it can be hit once in that phase; in other phases again.
        again = [
            name for name in hits if phase != "committed" or WorkerFault("kill", phase) not in hits[name]
        ]
        name = rng.choice(again) if again and (not free or rng.random() < AGAIN) else free.pop()
        hits.setdefault(name, []).append(WorkerFault("kill", phase))
    for phase in PAUSES[mode]:
        hits.setdefault(free.pop() if free else rng.choice(names), []).append(WorkerFault("pause", phase))
    for struck_here in hits.values():
        struck_here.sort(key=lambda hit: (PHASES.index(hit.phase), hit.kind))
    return DemoPlan(names, [name for _, name in sorted(at)], hits, random.Random(rng.random()))  # noqa: S311
