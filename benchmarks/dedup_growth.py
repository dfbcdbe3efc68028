"""How the local index of `semel dedup` grows: bytes per mark, memory, and the cost of a batch, up to many marks.

`python -m benchmarks.dedup_growth --marks 10000000`. No broker: batches of new ids are looked up and added as `dedup`
does it, through a window that moves on, so that old parts are dropped. Memory is that of the process.
`--decades --marks 100000000` fills one window only, and measures at 1, 2 and 5 times each power of ten; then it builds
a new index from marks alone, as a restore does, without the broker that they would come from.
"""

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from itertools import cycle
from pathlib import Path

import msgspec

from semel.streams.mark_format import DIGEST_BYTES, pack_time
from semel.streams.rocks import RocksIndex, RocksIndexes

BATCH = 4000
STEPS = 10
DECADES_FROM = 100_000
RESTORED = 3_000_000
MILLION = 1_000_000
WINDOW_US = 24 * 3600 * 10**6
START_US = 1_800_000_000_000_000


class GrowthStep(msgspec.Struct, kw_only=True):
    """The index at one size."""

    marks: int
    mark_bytes: float
    memory_mb: float
    """Resident memory of the process."""
    cpu_us: float
    """Processor time for each mark of this step, look-up and write."""


class DecadeStep(GrowthStep, kw_only=True):
    """The index at one size, and how fast it came to it from the step before."""

    marks_per_s: int
    """By the clock, on a computer that may have had other work."""
    load: float


class RestoreStep(msgspec.Struct, kw_only=True):
    """What the next million marks of a restore took, after so many."""

    marks: int
    seconds: float
    cpu_s: float


class DecadeFigures(msgspec.Struct, kw_only=True):
    """What a run over decades measured, and on which computer."""

    cores: int
    python: str
    minutes: float
    steps: list[DecadeStep]
    restore: list[RestoreStep]


class GrowthFigures(msgspec.Struct, kw_only=True):
    """What one run measured, and on which computer."""

    cores: int
    python: str
    loads: list[float]
    """The load of the computer before and after."""
    growing: list[GrowthStep]
    """One window that fills."""
    moving: list[GrowthStep]
    """The window moves on, as often as its marks come again: what is over is dropped."""


def measure(marks: int, folder: Path) -> GrowthFigures:
    """Fill one window with marks, then let it move on by as many."""
    loads = [os.getloadavg()[0]]
    indexes = RocksIndexes(folder, WINDOW_US)
    index = indexes.open(0, "bench", 0, 0)
    each_us = WINDOW_US // marks
    growing: list[GrowthStep] = []
    moving: list[GrowthStep] = []
    number = 0
    for steps in (growing, moving):
        for _ in range(STEPS):
            cpu, began = time.process_time(), number
            while number < began + marks // STEPS:
                number = _add_batch(index, number, each_us)
            held = min(number, marks)
            steps.append(
                GrowthStep(
                    marks=held,
                    mark_bytes=round(index.size_bytes() / held, 1),
                    memory_mb=round(_resident_bytes() / 1e6, 1),
                    cpu_us=round((time.process_time() - cpu) / (number - began) * 1e6, 2),
                )
            )
            print(steps[-1], file=sys.stderr)
    index.close()
    indexes.close()
    loads.append(os.getloadavg()[0])
    return GrowthFigures(
        cores=os.cpu_count() or 1,
        python=platform.python_version(),
        loads=[round(each, 1) for each in loads],
        growing=growing,
        moving=moving,
    )


def _add_batch(index: RocksIndex, number: int, each_us: int, *, look: bool = True) -> int:
    """Look up and add the next ids, which are new; returns how many there are then."""
    digests = [sha256(at.to_bytes(8, "big")).digest()[:DIGEST_BYTES] for at in range(number, number + BATCH)]
    assert not look or index.find(digests) == [None] * BATCH
    added = {
        digest: pack_time(START_US + (number + at) * each_us) + at.to_bytes(8, "big")
        for at, digest in enumerate(digests)
    }
    number += BATCH
    index.add(added, number, START_US + number * each_us - WINDOW_US)
    return number


def measure_decades(
    marks: int, folder: Path, report: Callable[[DecadeFigures], None], minutes: float = float("inf")
) -> None:
    """Fill one window, and report at each size; then what a restore of the first marks takes.

    After so many minutes the filling ends where it is.
    """
    began_at = time.monotonic()
    figures = DecadeFigures(
        cores=os.cpu_count() or 1, python=platform.python_version(), minutes=0, steps=[], restore=[]
    )

    def note() -> None:
        figures.minutes = round((time.monotonic() - began_at) / 60, 1)
        report(figures)

    each_us = WINDOW_US // marks
    indexes = RocksIndexes(folder, WINDOW_US)
    index = indexes.open(0, "bench", 0, 0)
    number, size = 0, DECADES_FROM
    for factor in cycle((2, 2.5, 2)):
        cpu, clock, began = time.process_time(), time.monotonic(), number
        while number < size and time.monotonic() < began_at + minutes * 60:
            number = _add_batch(index, number, each_us)
        if number == began:
            break
        figures.steps.append(
            DecadeStep(
                marks=number,
                mark_bytes=round(index.size_bytes() / number, 1),
                memory_mb=round(_resident_bytes() / 1e6, 1),
                cpu_us=round((time.process_time() - cpu) / (number - began) * 1e6, 2),
                marks_per_s=round((number - began) / (time.monotonic() - clock)),
                load=round(os.getloadavg()[0], 1),
            )
        )
        note()
        if size >= marks:
            break
        size = min(marks, int(size * factor))
    index.close()
    again = indexes.open(1, "bench", 0, 0)
    number = 0
    while number < min(RESTORED, marks):
        cpu, clock, began = time.process_time(), time.monotonic(), number
        while number < began + MILLION:
            number = _add_batch(again, number, each_us, look=False)
        figures.restore.append(
            RestoreStep(
                marks=began,
                seconds=round(time.monotonic() - clock, 1),
                cpu_s=round(time.process_time() - cpu, 1),
            )
        )
        note()
    again.close()
    indexes.close()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Measure and print; with `--out` write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dedup_growth", description=__doc__)
    parser.add_argument("--marks", type=int, default=10_000_000, help="marks of one window")
    parser.add_argument("--out", type=Path, help="folder for dedup_growth.json")
    parser.add_argument("--decades", action="store_true", help="one window, in growing steps, and a restore")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of --decades: how long to fill")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="semel-growth-"))
    try:
        if options.decades:
            measure_decades(
                options.marks, folder, lambda figures: _report_decades(figures, options.out), options.minutes
            )
            return 0
        figures = measure(options.marks, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = msgspec.json.format(msgspec.json.encode(figures), indent=2)
    print(text.decode())
    if options.out is not None:
        (options.out / "dedup_growth.json").write_bytes(text + b"\n")
    return 0


def _report_decades(figures: DecadeFigures, out: Path | None) -> None:
    """Show the latest step, and write all of them: a run that is ended keeps what it has measured."""
    print(figures.minutes, (figures.restore or figures.steps)[-1], file=sys.stderr)
    if out is not None:
        text = msgspec.json.format(msgspec.json.encode(figures), indent=2)
        (out / "dedup_decades.json").write_bytes(text + b"\n")


if __name__ == "__main__":
    sys.exit(main())
