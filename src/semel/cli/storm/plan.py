"""What the storm will do, drawn from one seed: how often each event is sent, and who is hit where."""

import random
from typing import Literal

from msgspec import Struct

from semel.cli.storm.messages import PHASES, Mode, Phase

__all__ = ["KILLS_MIN", "Hit", "DemoPlan", "draw"]

KILLS_MIN = len(PHASES)
"""Fewer could not strike at every phase."""
COPIES = (1, 2, 3, 4, 6)
COPIES_WEIGHTS = (30, 30, 20, 15, 5)
"""How often a producer sends one event: 2.5 times on the average."""
SPREAD_EVENTS = 40
"""How far apart the copies of an event may come, in events: close enough to race."""
AGAIN = 0.25
"""The share of kills that strike an event which was struck before."""
ACK_LOST = 0.08
"""The share of acknowledgements that never reach the queue."""
PAUSES: dict[Mode, tuple[Phase, ...]] = {
    "inbox": ("effect done", "before ack"),
    "lease": ("claimed", "effect done", "committed"),
    "control": ("effect done", "before ack"),
}
"""Where workers are stopped until their lease is over."""


class Hit(Struct, frozen=True):
    """One blow against the worker that handles an event."""

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
    """Decides for each acknowledgement whether it gets through."""

    def loses_ack(self) -> bool:
        """Whether the next acknowledgement is lost on its way."""
        return self.ack_lost.random() < ACK_LOST


def draw(mode: Mode, seed: int, events: int, kills: int) -> DemoPlan:
    """The storm of this seed."""
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
        # An event is committed once, so it can be struck there once; elsewhere it can be struck again.
        again = [name for name in hits if phase != "committed" or Hit("kill", phase) not in hits[name]]
        name = rng.choice(again) if again and (not free or rng.random() < AGAIN) else free.pop()
        hits.setdefault(name, []).append(Hit("kill", phase))
    for phase in PAUSES[mode]:
        hits.setdefault(free.pop() if free else rng.choice(names), []).append(Hit("pause", phase))
    for struck_here in hits.values():
        struck_here.sort(key=lambda hit: (PHASES.index(hit.phase), hit.kind))
    return DemoPlan(names, [name for _, name in sorted(at)], hits, random.Random(rng.random()))  # noqa: S311
