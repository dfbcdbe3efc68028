"""Explore every schedule of the real flows within bounds: no seed, no chance, and the shortest story of a failure.

`python -m semel.testing.explore` explores every scene; `--scene lease-plain --kills 2` one of them with other bounds.
A broken promise is printed as a story, with the command that plays it again.
"""

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from msgspec.structs import asdict, replace

from semel.core.machine import decide
from semel.testing._exploration.scenes import SCENES, Bounds, ExploredScene
from semel.testing._exploration.search import Explored, Search
from semel.testing._simulation.mutants import MUTANTS
from semel.testing._simulation.store import Flaws
from semel.testing._simulation.world import Violation

__all__ = ["MUTANTS", "SCENES", "Bounds", "Explored", "ExploredScene", "Violation", "explore", "tell"]

STATES_MAX = 3_000_000
"""About a gigabyte of memory."""

MUTANT_SCENES: dict[str, str] = {
    "takeover forgets the attempts": "killer",
    "purge of running claims": "forget",
    "fresh owner on each try": "waiting",
}
"""Where a mutant shows first, if not in the scene of its mode."""

Rules = Callable[[Any, Any, int], tuple[Any, Any]]


def scene_of(mutant: str) -> str:
    """Return the scene in which a mutant is explored."""
    return MUTANT_SCENES.get(mutant, MUTANTS[mutant].mode)


def explore(
    scene: str,
    bounds: Bounds | None = None,
    *,
    mutant: str = "",
    rules: Rules = decide,
    harm_only: bool = False,
    states_max: int = STATES_MAX,
) -> Explored:
    """Explore every schedule of a scene within the bounds, or until a promise is broken.

    `mutant`: a protocol that is broken on purpose. `rules`: another `semel.core.machine.decide`. `harm_only`: ignore
    broken rules; report only events that are lost, repeated or stuck at the end. Stops after `states_max` states;
    the result then says that it is not complete.
    """
    found = SCENES[scene]
    search = _search(found, bounds or found.bounds, mutant, rules, harm_only=harm_only)
    result = search.run(states_max)
    result.mutant = mutant
    return result


def tell(
    scene: str, bounds: Bounds | None, path: tuple[int, ...], *, mutant: str = "", rules: Rules = decide
) -> list[str]:
    """Play one schedule again and return its story, line by line. Raises `ValueError` if there is no such schedule."""
    found = SCENES[scene]
    trace: list[str] = []
    search = _search(found, bounds or found.bounds, mutant, rules, trace=trace)
    try:
        search.tell(path)
    except Violation as violation:
        trace.append(f"VIOLATION {violation}")
    return trace


def _search(
    scene: ExploredScene,
    bounds: Bounds,
    mutant: str,
    rules: Rules,
    *,
    harm_only: bool = False,
    trace: list[str] | None = None,
) -> Search:
    mode, flaws = scene.mode, Flaws(decide=rules)
    if mutant:
        broken = MUTANTS[mutant]
        flaws = broken.flaws
        changes: dict[str, Any] = {"flow": broken.flow, "acks": broken.acks}
        mode = replace(mode, **{name: change for name, change in changes.items() if change is not None})
    return Search(scene, bounds, mode=mode, flaws=flaws, harm_only=harm_only, trace=trace)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 0 if every promise held, 1 if one was broken, 2 for wrong arguments."""
    parser = ArgumentParser(
        prog="python -m semel.testing.explore", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--scene", default="all", help=f"all, or one of {', '.join(SCENES)}")
    parser.add_argument("--wide", action="store_true", help="the bounds of a run of minutes")
    parser.add_argument("--mutant", default="", help=f"break the protocol on purpose: {', '.join(MUTANTS)}")
    parser.add_argument("--replay", metavar="PATH", help="play the schedule with these moves, such as 0.3.1")
    parser.add_argument(
        "--states-max", type=int, default=STATES_MAX, help="stop after this many states (default %(default)s)"
    )
    for name in asdict(Bounds()):
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, metavar="N", help="a bound; each scene has its own"
        )
    options = parser.parse_args(arguments)
    if options.mutant and options.mutant not in MUTANTS:
        parser.error(f"no mutant {options.mutant!r}")
    if options.mutant and options.scene == "all":
        options.scene = scene_of(options.mutant)
    if options.scene not in ("all", *SCENES):
        parser.error(f"no scene {options.scene!r}")
    if options.replay is not None and options.scene == "all":
        parser.error("--replay needs --scene, as it was printed")
    names = list(SCENES) if options.scene == "all" else [options.scene]
    broken = False
    for name in names:
        bounds = _bounds(name, options)
        if options.replay is None:
            broken |= _explore(name, bounds, options)
        else:
            try:
                path = tuple(int(number) for number in options.replay.split(".") if number)
                story = tell(name, bounds, path, mutant=options.mutant)
            except ValueError as error:
                parser.error(f"--replay {options.replay!r}: {error}")
            sys.stdout.write("\n".join(story) + "\n")
            broken |= story[-1].startswith("VIOLATION")
    return int(broken)


def _bounds(name: str, options: Namespace) -> Bounds:
    bounds = SCENES[name].wide if options.wide else SCENES[name].bounds
    given = {field: getattr(options, field) for field in asdict(bounds)}
    return replace(bounds, **{field: value for field, value in given.items() if value is not None})


def _explore(name: str, bounds: Bounds, options: Namespace) -> bool:
    started = time.perf_counter()
    result = explore(name, bounds, mutant=options.mutant, states_max=options.states_max)
    took_s = time.perf_counter() - started
    sys.stdout.write(f"{result} ({took_s:.1f} s)\n")
    if result.violation is None:
        return False
    story = tell(name, bounds, result.path, mutant=options.mutant)
    sys.stdout.write("".join(f"  {line}\n" for line in story))
    sys.stdout.write(f"play it again with: {_command(name, bounds, result)}\n")
    return True


def _command(name: str, bounds: Bounds, result: Explored) -> str:
    """Return the command that plays a schedule again."""
    usual = asdict(SCENES[name].bounds)
    changed = [
        f" --{field.replace('_', '-')} {value}"
        for field, value in asdict(bounds).items()
        if value != usual[field]
    ]
    mutant = f" --mutant {result.mutant!r}" if result.mutant else ""
    path = ".".join(str(number) for number in result.path)
    return f"python -m semel.testing.explore --scene {name}{mutant}{''.join(changed)} --replay {path}"


if __name__ == "__main__":
    sys.exit(main())
