"""Record histories of every store under faults, check them, and keep the figures for the page about proofs.

`python -m tests.histories.measure --calls 1000 --faults 20` writes `results.json`.
"""

import random
import sys
import tempfile
from argparse import ArgumentParser
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from semel.testing.histories import check_history
from tests.histories.storm import PLACES, Storm
from tests.services import server

FILE = Path(__file__).with_name("results.json")


class HistoryRow(Struct):
    """The figures of one store."""

    store: str
    calls: int
    unanswered: int
    overlapping: int
    faults: int
    keys: int = 12
    undecided: int = 0
    """Keys whose calls have too many orders to try them all."""


class KeptHistories(Struct):
    """The figures of one run."""

    on: str
    """The day."""
    calls_of_a_worker: int
    rows: list[HistoryRow]


def main() -> int:
    """Run. Returns 1, and keeps nothing, if an answer is not explained."""
    parser = ArgumentParser(
        prog="python -m tests.histories.measure", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--calls", type=int, default=1000, help="calls of each worker")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--only", action="append", choices=list(PLACES), help="the others keep their figures")
    options = parser.parse_args()
    rows: list[HistoryRow] = []
    try:
        for name, place_in in PLACES.items():
            if options.only and name not in options.only:
                continue
            with tempfile.TemporaryDirectory() as made:
                folder = Path(made)
                with place_in(folder) as place, Storm(folder, place, options.calls) as storm:
                    storm.run(options.faults, random.Random(name))
                    result = check_history(storm.history())
            sys.stderr.write(f"{name}: {result}\n")
            if result.unexplained:
                return 1
            rows.append(
                HistoryRow(
                    name, result.calls, result.unanswered, result.overlapping, storm.faults, result.keys,
                    len(result.undecided),
                )
            )  # fmt: skip
    finally:
        server.stop_all()
        server.clear()
    if options.only and FILE.exists():
        earlier = msgspec.json.decode(FILE.read_bytes(), type=KeptHistories).rows
        rows += [row for row in earlier if row.store not in options.only]
    rows.sort(key=lambda row: list(PLACES).index(row.store))
    kept = KeptHistories(datetime.now(UTC).date().isoformat(), options.calls, rows)
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
