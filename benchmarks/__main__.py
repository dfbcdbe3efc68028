"""`python -m benchmarks`: measure, print a table, write JSON and a plot."""

import argparse
import platform
import sqlite3
import sys
import tempfile
from pathlib import Path

import msgspec

import semel
from benchmarks import inbox, memory, postgres, redis, sqlite
from benchmarks.measure import Row
from benchmarks.plot import svg


def main() -> int:
    """Run the chosen benchmarks. Exit code 1 if an aim is missed and `--strict` was given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        choices=["memory", "sqlite", "postgres", "redis", "inbox"],
        help="measure one store, or the inbox",
    )
    parser.add_argument("--out", type=Path, help="folder for embedded.json and embedded.svg")
    parser.add_argument("--disk", type=Path, help="folder for the database files (default: temporary)")
    parser.add_argument("--strict", action="store_true", help="fail when an aim is missed")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        if options.only in (None, "memory"):
            rows += memory.rows()
        if options.only in (None, "sqlite"):
            rows += sqlite.rows(Path(folder))
        if options.only == "postgres":
            rows += postgres.rows(Path(folder))
        if options.only == "redis":
            rows += redis.rows(Path(folder))
        if options.only == "inbox":
            rows += inbox.rows(Path(folder))
    show(rows)
    if options.out is not None:
        write(rows, options.out)
    missed = [row for row in rows if row.aim is not None and row.ratio < row.aim]
    return 1 if missed and options.strict else 0


def show(rows: list[Row]) -> None:
    """Print the table."""
    print(f"{'store':8}{'what':28}{'per second':>14}{'ratio':>9}  {'of':22}{'aim':>6}")
    for row in rows:
        aim = "" if row.aim is None else f"{row.aim:g}"
        verdict = "" if row.aim is None else "  ok" if row.ratio >= row.aim else "  below"
        print(f"{row.store:8}{row.what:28}{row.rate:14,.0f}{row.ratio:9.2f}  {row.limit:22}{aim:>6}{verdict}")


def write(rows: list[Row], folder: Path) -> None:
    """Keep the figures with what they were measured on."""
    folder.mkdir(parents=True, exist_ok=True)
    report = {
        "versions": {
            "semel": semel.__version__,
            "python": sys.version.split()[0],
            "sqlite": sqlite3.sqlite_version,
            "msgspec": msgspec.__version__,
            "machine": platform.machine(),
        },
        "rows": [
            {
                **msgspec.to_builtins(row),
                "rate": round(row.rate),
                "limit_rate": round(row.limit_rate),
                "ratio": round(row.ratio, 3),
            }
            for row in rows
        ],
    }
    (folder / "embedded.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    title = "semel against the raw limit, embedded stores (bar = ratio, tick = aim)"
    (folder / "embedded.svg").write_text(svg(rows, title))


if __name__ == "__main__":
    sys.exit(main())
