"""Run the real flows on a simulated store, network and clock: thousands of fault schedules, each from one seed.

`python -m semel.testing.simulate --seeds 1000 --mode lease` plays a thousand schedules of crashes, stalls, lost and
late messages; `--seed N` replays one of them with a trace of every step.
"""

import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from semel.testing._simulation.modes import MODES, Mode
from semel.testing._simulation.mutants import MUTANTS
from semel.testing._simulation.scenario import SimResult, Simulation
from semel.testing._simulation.store import Flaws
from semel.testing._simulation.world import Violation

__all__ = ["MODES", "MUTANTS", "SimResult", "Summary", "Violation", "simulate", "storm"]


class Summary(Struct, kw_only=True):
    """Totals over many seeds."""

    mode: str
    mutant: str = ""
    seeds: int = 0
    steps: int = 0
    events: int = 0
    deliveries: int = 0
    repeated: int = 0
    lost: int = 0
    given_up: int = 0
    violations: dict[int, Violation] = {}
    """By seed."""

    def add(self, result: SimResult) -> None:
        """Add the result of one seed."""
        self.seeds += 1
        for name in ("steps", "events", "deliveries", "repeated", "lost", "given_up"):
            setattr(self, name, getattr(self, name) + getattr(result, name))
        if result.violation is not None:
            self.violations[result.seed] = result.violation

    def __str__(self) -> str:
        return (
            f"{self.mutant or self.mode}: {self.seeds} seeds, {self.steps} steps, {self.events} events in"
            f" {self.deliveries} deliveries, {self.repeated} repeated, {self.lost} lost, {self.given_up} given up,"
            f" {len(self.violations)} violations"
        )


def simulate(
    mode: str, seed: int, *, mutant: str = "", harm_only: bool = False, trace: list[str] | None = None
) -> SimResult:
    """Play one seed of a mode, or of the mode that a mutant breaks. The same seed always gives the same run.

    `harm_only`: ignore broken rules; report only events that are lost, repeated or stuck at the end.
    """
    flaws, rules = Flaws(), MODES[mode]
    if mutant:
        broken = MUTANTS[mutant]
        flaws = broken.flaws
        changes: dict[str, Any] = {"flow": broken.flow, "acks": broken.acks}
        rules = replace(rules, **{name: change for name, change in changes.items() if change is not None})
    return Simulation(rules, seed, flaws=flaws, harm_only=harm_only, trace=trace).play()


def storm(mode: str, seeds: Iterable[int], *, mutant: str = "") -> Summary:
    """Play many seeds and return the totals."""
    summary = Summary(mode=mode, mutant=mutant)
    for seed in seeds:
        summary.add(simulate(mode, seed, mutant=mutant))
    return summary


def choose_modes(name: str) -> Iterator[Mode]:
    """Return the modes for a name: one mode, a family such as `lease`, or `all`."""
    for mode in MODES.values():
        if name in ("all", mode.name) or mode.name.startswith(f"{name}-"):
            yield mode


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 0 if every promise held, 1 if a seed broke one, 2 for wrong arguments."""
    parser = ArgumentParser(
        prog="python -m semel.testing.simulate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--mode", default="all", help=f"all, lease, or one of {', '.join(MODES)}")
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules to play (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, help="play this seed and print its trace")
    parser.add_argument("--mutant", default="", help=f"break the protocol on purpose: {', '.join(MUTANTS)}")
    options = parser.parse_args(arguments)
    if options.mutant and options.mutant not in MUTANTS:
        parser.error(f"no mutant {options.mutant!r}")
    modes = [MODES[MUTANTS[options.mutant].mode]] if options.mutant else list(choose_modes(options.mode))
    if not modes:
        parser.error(f"no mode {options.mode!r}")
    failed = False
    for mode in modes:
        if options.seed is not None:
            failed |= _replay(mode.name, options.seed, options.mutant)
        else:
            failed |= _storm(mode.name, range(options.first, options.first + options.seeds), options.mutant)
    return int(failed)


def _replay(mode: str, seed: int, mutant: str) -> bool:
    trace: list[str] = []
    result = simulate(mode, seed, mutant=mutant, trace=trace)
    lines = [f"{mode}, seed {seed}; times in leases", *trace]
    lines.append(f"{result.steps} steps, {result.events} events, {result.deliveries} deliveries")
    sys.stdout.write("\n".join(lines) + "\n")
    return result.violation is not None


def _storm(mode: str, seeds: range, mutant: str) -> bool:
    started = time.perf_counter()
    summary = storm(mode, seeds, mutant=mutant)
    took_s = time.perf_counter() - started
    sys.stdout.write(f"{summary} ({took_s:.1f} s, {summary.steps / took_s:,.0f} steps/s)\n")
    for seed, violation in list(summary.violations.items())[:10]:
        again = f" --mutant {mutant!r}" if mutant else ""
        sys.stdout.write(f"  seed {seed}: {violation}\n    replay with: --mode {mode} --seed {seed}{again}\n")
    return bool(summary.violations)


if __name__ == "__main__":
    sys.exit(main())
