"""`python -m benchmarks`: measure, print a table, write JSON and a plot."""

import argparse
import platform
import sqlite3
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

import semel
from benchmarks import bloom, hooks, inbox, memory, outbox, postgres, redis, runner, service, sqlite, tiers
from semel.cli.bench.measure import Measurement, svg

MODULES: dict[str, Any] = {
    "memory": memory,
    "sqlite": sqlite,
    "postgres": postgres,
    "redis": redis,
    "inbox": inbox,
    "outbox": outbox,
    "runner": runner,
    "bloom": bloom,
    "hooks": hooks,
    "tiers": tiers,
    "service": service,
}
DRIVERS = {
    "bloom": ["rbloom"],
    "hooks": ["prometheus_client"],
    "tiers": ["psycopg", "redis"],
    "inbox": ["psycopg"],
    "outbox": ["psycopg", "redis"],
    "runner": ["psycopg", "redis", "nats-py", "confluent-kafka", "faststream", "idemkit"],
    "postgres": ["psycopg"],
    "redis": ["redis", "hiredis"],
    "service": ["fastapi", "uvicorn", "redis"],
}
EMBEDDED = ["memory", "sqlite"]


def main() -> int:
    """Run the chosen benchmarks. Exit code 1 if an aim is missed and `--strict` was given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=MODULES, help="measure one store (default: the embedded ones)")
    parser.add_argument("--out", type=Path, help="folder for the figures: NAME.json and NAME.svg")
    parser.add_argument("--disk", type=Path, help="folder for the database files (default: temporary)")
    parser.add_argument("--strict", action="store_true", help="fail when an aim is missed")
    options = parser.parse_args()
    names = [options.only] if options.only else EMBEDDED
    rows: list[Measurement] = []
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        Path(folder).chmod(0o755)  # some servers refuse to run as root and run as another user
        for name in names:
            rows += MODULES[name].rows(Path(folder))
    show(rows)
    if options.out is not None:
        write(rows, options.out, options.only or "embedded")
    missed = [row for row in rows if row.aim is not None and row.ratio < row.aim]
    return 1 if missed and options.strict else 0


def show(rows: list[Measurement]) -> None:
    """Print the table."""
    print(f"{'store':10}{'what':42}{'per second':>14}{'ratio':>9}  {'of':22}{'aim':>6}")
    for row in rows:
        aim = "" if row.aim is None else f"{row.aim:g}"
        verdict = "" if row.aim is None else "  ok" if row.ratio >= row.aim else "  below"
        print(
            f"{row.store:10}{row.what:42}{row.rate:14,.0f}{row.ratio:9.2f}  {row.limit:22}{aim:>6}{verdict}"
        )


def write(rows: list[Measurement], folder: Path, name: str) -> None:
    """Write the figures and a description of the computer to JSON, and a plot."""
    folder.mkdir(parents=True, exist_ok=True)
    report = {
        "versions": {
            "semel": semel.__version__,
            "python": sys.version.split()[0],
            "sqlite": sqlite3.sqlite_version,
            "msgspec": msgspec.__version__,
            **{driver: version(driver) for driver in DRIVERS.get(name, ())},
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
    (folder / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    title = f"semel against the raw limit, {name} (bar = ratio, tick = aim)"
    (folder / f"{name}.svg").write_text(svg(rows, title))


if __name__ == "__main__":
    sys.exit(main())
