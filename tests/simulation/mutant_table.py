"""Run every one-place change of the machine through the exploration, and keep what became of it.

`python -m tests.simulation.mutant_table` writes `machine_mutants.json`. A change is killed by the schedule that breaks
a promise; the test plays that schedule again. A change that gives the same answers and records as the machine to
everything that any schedule asks leads to the same states, so it is the same protocol within the bounds. The rest
differ and break no promise: they change what no promise is about, or need more faults than the bounds allow, which are
smaller than those of the scenes themselves (one lease passes, no late messages, no stalls) so that hundreds of
explorations take minutes. The contract finds all of these out, except what `test_machine_mutants` allows.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from semel.core.machine import decide
from semel.testing.explore import SCENES, Bounds, explore
from tests.contract.machine_mutants import Change, changes

NARROW = {
    name: replace(scene.bounds, late=0, stalls=0, ticks=min(scene.bounds.ticks, 1))
    for name, scene in SCENES.items()
}
"""The bounds of each scene."""
FILE = Path(__file__).with_name("machine_mutants.json")
Rules = Callable[[Any, Any, int], tuple[Any, Any]]


class Fate(Struct, omit_defaults=True):
    """What became of a change."""

    scene: str = ""
    """Where a promise was broken; empty: nowhere."""
    kind: str = ""
    """Which promise."""
    path: tuple[int, ...] = ()
    """The schedule."""
    differs_in: tuple[str, ...] = ()
    """Survivors: the scenes in which an answer or a record differs."""


def asked_in(scene: str, bounds: Bounds) -> list[tuple[Any, Any, int]]:
    """Return everything that the schedules of a scene ask the machine."""
    asked: dict[tuple[Any, Any, int], None] = {}

    def rules(record: Any, item: Any, now: int) -> tuple[Any, Any]:
        asked[record, item, now] = None
        return decide(record, item, now)

    explore(scene, bounds, rules=rules)
    return list(asked)


def differs(changed: Rules, asked: list[tuple[Any, Any, int]], answers: list[Any]) -> bool:
    """Whether a change answers or writes anything else."""
    for (record, item, now), expected in zip(asked, answers, strict=True):
        try:
            found = changed(record, item, now)
        except Exception:  # noqa: BLE001 - whatever it raises, it differs
            return True
        if found != expected:
            return True
    return False


class Questions:
    """Everything that is asked in the scenes, with the machine's answers."""

    def __init__(self, bounds: dict[str, Bounds]) -> None:
        self.bounds = bounds
        asked = {scene: asked_in(scene, each) for scene, each in bounds.items()}
        self.asked = dict(sorted(asked.items(), key=lambda each: len(each[1])))
        self.answers = {scene: [decide(*each) for each in inputs] for scene, inputs in self.asked.items()}

    def fate_of(self, change: Change) -> Fate:
        """Explore a change in each scene in which it differs, until a promise is broken."""
        changed: Rules = change.module().decide
        scenes = [
            scene for scene, asked in self.asked.items() if differs(changed, asked, self.answers[scene])
        ]
        for scene in scenes:
            try:
                result = explore(scene, self.bounds[scene], rules=changed)
            except Exception as error:  # noqa: BLE001 - a store that raises is found out
                return Fate(scene, f"raises {type(error).__name__}")
            if result.violation is not None:
                return Fate(scene, result.violation.kind, result.path)
        return Fate(differs_in=tuple(scenes))


def read() -> dict[str, Fate]:
    """Return what is kept."""
    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, Fate])


def main() -> int:
    """Run all, with progress."""
    fates: dict[str, Fate] = {}
    everything = changes()
    questions = Questions(NARROW)
    sys.stderr.write(f"{sum(map(len, questions.asked.values())):,} different questions\n")
    for number, change in enumerate(everything, 1):
        fates[change.name] = fate = questions.fate_of(change)
        sys.stderr.write(
            f"{number} of {len(everything)}: {change.name[:70]}: {fate.scene or fate.differs_in}\n"
        )
    write(fates)
    return 0


def write(fates: dict[str, Fate]) -> None:
    """Keep what is known."""
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(fates)) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
