"""What a storm will do, drawn from one seed: who lives when, and who is killed or stopped."""

import random
from typing import Literal, NamedTuple

from tests.whole.actors import COMMANDS
from tests.whole.scene import LEASE_S, Kind

__all__ = ["Act", "Plan", "draw"]

Fate = Literal["end", "kill", "stop"]


class Act(NamedTuple):
    """One life of one process."""

    role: str
    seed: str
    life_s: float
    fate: Fate
    """How it ends: by SIGTERM, by SIGKILL, or stopped for a while and then killed or ended."""
    stopped_s: float
    killed_after: bool


class Plan(NamedTuple):
    """One storm."""

    file_kind: Literal["own", "guest in wal", "guest in delete"]
    """Whose SQLite file it is, and in which journal mode."""
    slots: list[list[Act]]
    """The processes of a slot live one after the other."""


SERVICES = ("consume", "listen")
SQL_SERVICES = ("consume-inbox", "relay", "consume-chain")


def draw(kind: Kind, seed: int, seconds: float) -> Plan:
    """The storm of this seed."""
    chance = random.Random(f"{seed}:{kind}:{seconds}")
    file_kind: Literal["own", "guest in wal", "guest in delete"] = chance.choices(
        ("own", "guest in wal", "guest in delete"), (5, 4, 1)
    )[0]
    slots = [
        _lives(chance, seconds, ("worker",), (1.0, 4.0)),
        _lives(chance, seconds, ("worker",), (1.0, 4.0)),
        _lives(chance, seconds, ("serve",), (3.0, 7.0)),
        _lives(chance, seconds, SERVICES, (2.0, 5.0)),
        _lives(chance, seconds, tuple(COMMANDS), (0.1, 1.5)),
    ]
    if kind != "redis":
        slots.append(_lives(chance, seconds, SQL_SERVICES, (2.0, 5.0)))
    return Plan(file_kind, slots)


def _lives(
    chance: random.Random, seconds: float, roles: tuple[str, ...], life_s: tuple[float, float]
) -> list[Act]:
    acts: list[Act] = []
    left, turn = seconds, list(roles)
    while left > 0:
        if not acts or len(acts) % len(turn) == 0:
            chance.shuffle(turn)
        life = chance.uniform(*life_s)
        fate: Fate = chance.choices(("end", "kill", "stop"), (3, 5, 3))[0]
        stopped_s = chance.choice((0.3, 1.0, LEASE_S * 1.5)) if fate == "stop" else 0.0
        role = turn[len(acts) % len(turn)]
        acts.append(Act(role, f"{chance.random()}", life, fate, stopped_s, chance.random() < 0.5))
        left -= life + stopped_s
    return acts
