"""`python -m benchmarks.footprint`: the bytes that a record or a mark takes in each store, heap and index apart.

The figures behind `semel advise --rate`. Events are completed in batches, as runners do it: 36-character keys, a small
value. `digests` stores neither keys nor values. Each layout starts on an empty store; sizes are differences.
"""

import argparse
import os
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

import psycopg

import semel
from benchmarks.stored_bytes import stored_bytes
from semel.windows import Duration
from tests.services import postgres
from tests.services import redis as redis_server

BATCH = 500
LAYOUTS = ("records", "digests", "marks", "compact marks")
SIZES = (
    "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0), coalesce(sum(pg_indexes_size(c.oid)), 0)"
    " FROM pg_class AS c WHERE c.relkind = 'r' AND c.relnamespace = 'semel'::regnamespace"
)


def fill(url: str, layout: str, rows: int, window: Duration) -> None:
    """Complete or mark that many new events."""
    if layout == "digests":
        url += ("&" if "?" in url else "?") + "readable_keys=false"
    if layout == "compact marks":
        url += ("&" if "?" in url else "?") + f"marks=compact&marks_expected={rows}"
    marks = layout.endswith("marks")
    policy = semel.Policy(keep_value=layout == "records")
    with semel.open(
        url, consumer="orders", mode="mark" if marks else "lease", window=window, policy=policy
    ) as once:
        for _ in range(rows // BATCH):
            keys = [str(uuid.uuid4()) for _ in range(BATCH)]
            if marks:
                once.mark_many(keys)
            else:
                once.run_many([(key, {"paid": 42}) for key in keys], _handle)


def _handle(order: dict[str, int]) -> dict[str, int]:
    return order


def measure(store: str, layout: str, rows: int, window: Duration, folder: Path) -> tuple[float, float]:
    """Return the bytes of one record or mark, and those of its indexes among them."""
    if store == "sqlite":
        path = folder / "semel.db"
        fill(f"sqlite:///{path}", layout, rows, window)
        return path.stat().st_size / rows, 0.0
    if store == "redis":
        with redis_server.own(folder) as server:
            before = stored_bytes(server.url)
            fill(server.url, layout, rows, window)
            return (stored_bytes(server.url) - before) / rows, 0.0
    with postgres.own() as server:
        fill(server.url, layout, rows, window)
        with psycopg.connect(server.url, autocommit=True) as connection:
            row = connection.execute(SIZES).fetchone()
    return (float(row[0]) / rows, float(row[1]) / rows) if row else (0.0, 0.0)


def main(arguments: list[str] | None = None, say: Callable[[str], object] = print) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--window", default="24h")
    parser.add_argument("--only", choices=("sqlite", "redis", "postgresql"))
    given = parser.parse_args(arguments)
    say(f"{given.rows:,} each, window {given.window}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")
    for store in ("sqlite", "redis", "postgresql"):
        if given.only not in (None, store):
            continue
        for layout in LAYOUTS:
            if layout == "compact marks" and store != "redis":
                continue
            with tempfile.TemporaryDirectory(prefix="semel-footprint-") as folder:
                each, index = measure(store, layout, given.rows, given.window, Path(folder))
            say(f"{store:12} {layout:14} {each:6.0f} bytes, {index:5.0f} of them indexes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
