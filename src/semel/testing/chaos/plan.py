"""Draw the rounds of a chaos run from its seed: which events, how often, in which order, and which faults."""

import random
from collections.abc import Collection
from typing import Literal, TypeAlias

from msgspec import Struct

from semel.testing.chaos.messages import PHASES, Phase

__all__ = ["FAULT_KINDS", "ChaosRound", "FaultKind", "PlannedFault", "draw_round"]

FaultKind: TypeAlias = Literal["kill", "pause", "store cut off", "reply lost", "ack lost"]

FAULT_KINDS: tuple[FaultKind, ...] = ("kill", "pause", "store cut off", "reply lost", "ack lost")

COPIES = (1, 2, 3, 4)
COPIES_WEIGHTS = (40, 35, 15, 10)
"""How often a producer sends one event: twice on the average."""
SPREAD_EVENTS = 8
"""The largest distance between copies of an event, in events: small enough to race."""
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""After which share of the handler's lines a fault hits between two of them."""
CUT_LEASES = (0.4, 1.5)
"""How long the store is cut off: within the lease, and past it."""

KILLS: tuple[Phase, ...] = ("received", "claimed", "line", "line", "returned", "recorded")
PAUSES: tuple[Phase, ...] = ("claimed", "line", "returned")
CUTS: tuple[Phase, ...] = ("received", "returned")
REPLIES_LOST: tuple[Phase, ...] = ("received", "returned")


class PlannedFault(Struct, frozen=True):
    """One fault of one event, at the given phase of one of its deliveries."""

    kind: FaultKind
    phase: Phase
    share: float = 0.0
    """Phase `line`: after this share of the handler's lines."""
    leases: float = 0.0
    """How long it lasts, in leases."""


class ChaosRound(Struct, frozen=True):
    """One round: its events by number, the messages in the order of sending, and the faults by event."""

    number: int
    events: list[int]
    sent: list[int]
    faults: dict[int, list[PlannedFault]]


def draw_round(
    seed: int,
    number: int,
    events: int,
    *,
    pause_leases: float,
    cuts: bool,
    replies: bool,
    kinds: Collection[str] = (),
) -> ChaosRound:
    """Return a round. The same arguments give the same round; it does not depend on earlier rounds.

    `cuts`: the store can be cut off. `replies`: single replies of the store can be cut. `kinds`: only these faults; by
    default all.
    """
    rng = random.Random(f"{seed}:{number}:{events}")
    names = list(range(number * events, (number + 1) * events))
    copies = rng.choices(COPIES, COPIES_WEIGHTS, k=events)
    at = [
        (place + rng.uniform(0, SPREAD_EVENTS), name)
        for place, name in enumerate(names)
        for _ in range(copies[place])
    ]
    planned = [PlannedFault("kill", phase, _share(rng, phase)) for phase in KILLS]
    planned += [PlannedFault("pause", phase, _share(rng, phase), pause_leases) for phase in PAUSES]
    drawn = [PlannedFault("store cut off", rng.choice(CUTS), leases=rng.choice(CUT_LEASES))]
    lost = [PlannedFault("reply lost", phase) for phase in REPLIES_LOST]
    planned += (drawn if cuts else []) + (lost if replies else []) + [PlannedFault("ack lost", "recorded")]
    planned = [fault for fault in planned if not kinds or fault.kind in kinds]
    free = rng.sample(names, len(names))
    faults: dict[int, list[PlannedFault]] = {}
    for fault in planned:
        name = free.pop() if free else rng.choice(names)
        faults.setdefault(name, []).append(fault)
    order = list(PHASES)
    for of_event in faults.values():
        of_event.sort(key=lambda fault: (order.index(fault.phase), fault.share))
    return ChaosRound(number, names, [name for _, name in sorted(at)], faults)


def _share(rng: random.Random, phase: Phase) -> float:
    return rng.choice(SHARES) if phase == "line" else 0.0
