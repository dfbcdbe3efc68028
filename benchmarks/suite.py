"""`make bench`: measure everything that the documentation shows, and write it; `make bench-check`: compare with that.

Contenders in turns (`peers`), growth (`growth`), the ways to find duplicates (`methods`), and the profile of single
calls and batches (`layers`). The limits of the servers are another program: `python -m benchmarks`.
"""

import argparse
import contextlib
import os
import platform
import sys
import tempfile
from pathlib import Path

import msgspec

import semel
from benchmarks import growth, layers, page, peers
from benchmarks.methods import methods

RESULTS = Path(__file__).resolve().parent / "results"
PARTS = ["peers", "growth", "methods", "layers"]
QUICK = 10
"""The short form takes this part of the events."""


class Loads:
    """Notes the load of the computer between measurements."""

    def __init__(self) -> None:
        self._seen = [os.getloadavg()[0]]

    def note(self) -> None:
        """Note it now."""
        self._seen.append(os.getloadavg()[0])

    def bounds(self) -> tuple[float, float]:
        """Return the least and the greatest."""
        return round(min(self._seen), 1), round(max(self._seen), 1)


def measure(options: argparse.Namespace) -> page.Report:
    """Run the parts that were asked for."""
    loads = Loads()
    report = page.Report(
        versions={"semel": semel.__version__, "python": platform.python_version()},
        quick=options.quick, rounds=options.rounds, cores=os.cpu_count() or 1, loads=loads.bounds(),
    )  # fmt: skip
    parts = options.only or PARTS
    if "peers" in parts:
        cases = peers.chosen(options.store, options.contender, check=options.check is not None)
        cases = [peers.shortened(case, QUICK) for case in cases] if options.quick else cases
        report.rows, servers = peers.rows_of(cases, options.rounds, loads.note)
        report.versions |= servers | peers.versions_of(cases)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.disk)))
        folder.chmod(0o755)  # PostgreSQL refuses to run as root and runs as another user
        if "growth" in parts:
            stores = tuple(each for each in growth.STORES if options.store in (None, each.partition(",")[0]))
            growth_loads = Loads()
            rounds = 1 if options.check is None else options.rounds
            report.growth = growth.best(
                [growth.curves(folder, options.largest, stores, growth_loads.note) for _ in range(rounds)]
            )
            report.growth_loads = growth_loads.bounds()
            report.growth_disk = "memory" if folder.is_relative_to("/dev/shm") else "disk"
        if "layers" in parts and options.check is None:
            layers_loads = Loads()
            report.layers = layers.layers(folder, layers_loads.note)
            report.layers_loads = layers_loads.bounds()
        if "methods" in parts and options.check is None:
            report.methods = methods(folder, 20_000 if options.quick else 200_000)
            loads.note()
    report.loads = loads.bounds()
    return report


def keep_other_parts(report: page.Report, measured: list[str], file: Path) -> None:
    """Take the parts that were not measured now from an earlier report."""
    earlier = msgspec.json.decode(file.read_bytes(), type=page.Report)
    if "peers" not in measured:
        report.rows, report.quick, report.rounds = earlier.rows, earlier.quick, earlier.rounds
    if "growth" in measured:
        now = {point.store for point in report.growth}
        points = [*report.growth, *(point for point in earlier.growth if point.store not in now)]
        report.growth = sorted(points, key=lambda point: growth.STORES.index(point.store))
        report.growth_loads = _both(earlier.growth_loads, report.growth_loads)
    else:
        report.growth, report.growth_disk = earlier.growth, earlier.growth_disk
        report.growth_loads = earlier.growth_loads
    if "methods" not in measured:
        report.methods = earlier.methods
    if "layers" not in measured:
        report.layers, report.layers_loads = earlier.layers, earlier.layers_loads
    report.versions = earlier.versions | report.versions
    own_loads = {"growth", "layers"}.issuperset(measured)
    report.loads = earlier.loads if own_loads else _both(earlier.loads, report.loads)


def _both(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return min(one[0], other[0]), max(one[1], other[1])


def main() -> int:
    """Measure and print; with `--out` write the figures, with `--check` compare them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the events: a few minutes")
    parser.add_argument("--only", action="append", choices=PARTS, help="these parts only")
    parser.add_argument(
        "--store", choices=sorted({case.store for case in peers.CASES}), help="one store only"
    )
    parser.add_argument("--contender", action="append", help="these libraries only")
    parser.add_argument("--rounds", type=int, default=peers.ROUNDS)
    parser.add_argument("--largest", type=int, help="marks held at the end of the growth curves")
    parser.add_argument("--disk", type=Path, help="folder for database files (default: temporary)")
    parser.add_argument(
        "--out", type=Path, help="folder for suite.json and the plots; writes the page and the README"
    )
    parser.add_argument(
        "--render",
        action="store_true",
        help="measure nothing; write the pages and plots from the stored figures",
    )
    parser.add_argument("--check", type=Path, metavar="JSON", help="compare with these stored figures")
    options = parser.parse_args()
    if options.render:
        stored = msgspec.json.decode((RESULTS / "suite.json").read_bytes(), type=page.Report)
        page.write(stored, RESULTS, docs=True)
        return 0
    options.largest = options.largest or (100_000 if options.quick else 2_000_000)
    report = measure(options)
    peers.show(report.rows)
    for point in report.growth:
        print(f"{point.store:42}{point.held:12,}{point.rate:12,.0f} / s   keeps {point.kept:.2f}")
    for method in report.methods:
        print(f"{method.name:44}{method.called:16}{method.rate:12,.0f} / s{method.cpu_us:10.1f} us")
    if options.out is not None:
        if options.only and (options.out / "suite.json").exists():
            keep_other_parts(report, options.only, options.out / "suite.json")
        page.write(report, options.out, docs=options.out.resolve() == RESULTS)
    if options.check is None:
        return 0
    kept = msgspec.json.decode(options.check.read_bytes(), type=page.Report)
    found = [*peers.losses(kept.rows, report.rows), *growth.losses(kept.growth, report.growth)]
    for line in found:
        print(f"lost: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
