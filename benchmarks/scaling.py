"""`python -m benchmarks.scaling`: throughput over worker processes, on a Redis Cluster of six nodes and on PostgreSQL.

Each worker is a process that completes new events in batches of 500, as a runner does. On the cluster a master is then
killed under load: how long nothing is completed, and what is forgotten or runs twice.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import semel
from benchmarks.contender import server_cpu_s
from tests.services import postgres, redis, server

BATCH = 500
WORKERS = (1, 2, 4)
NODES = 6
KEPT = Path(__file__).parent / "results" / "scaling.json"


def work(url: str, seconds: float, *, check: bool) -> None:
    """Complete events for so long, and print what came of it as JSON. Begins when a line is read."""
    calls: Counter[str] = Counter()
    done: list[str] = []

    def handle(key: str) -> int:
        calls[key] += 1
        return 1

    with semel.open(url, consumer="orders", window="1h") as once:
        once.run("warm", int)
        print("ready", flush=True)
        sys.stdin.readline()
        cpu, begun = time.process_time(), time.monotonic()
        last, gap_s, refused = begun, 0.0, 0
        while time.monotonic() < begun + seconds:
            waiting = [str(uuid.uuid4()) for _ in range(BATCH)]
            while waiting:
                outcomes = once.run_many([(key, key) for key in waiting], handle)
                good = [k for k, each in zip(waiting, outcomes, strict=True) if isinstance(each, semel.Done)]
                if good:
                    gap_s, last = max(gap_s, time.monotonic() - last), time.monotonic()
                done += good
                refused += len(waiting) - len(good)
                known = set(good)
                waiting = [key for key in waiting if key not in known]
        spent = {"events": len(done), "wall_s": time.monotonic() - begun, "cpu_s": time.process_time() - cpu}
        if check:
            for at in range(0, len(done), BATCH):
                once.run_many([(key, key) for key in done[at : at + BATCH]], handle)
        twice = sum(1 for count in calls.values() if count > 1)
    print(json.dumps({**spent, "gap_s": gap_s, "refused": refused, "twice": twice}), flush=True)


@contextmanager
def workers(url: str, count: int, seconds: float, *, check: bool = False) -> Iterator[list[dict[str, Any]]]:
    """Start workers at the same moment; their results are there after the block."""
    results: list[dict[str, Any]] = []
    command = [sys.executable, "-m", "benchmarks.scaling", "--work", url, "--seconds", str(seconds)]
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    command + ["--check"] * check, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for _ in range(count)
        ]
        for each in started:
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n"
        for each in started:
            assert each.stdin is not None
            each.stdin.write("go\n")
            each.stdin.flush()
        yield results
        for each in started:
            assert each.stdout is not None
            results.append(json.loads(each.stdout.readline()))


def throughput(url: str, pids: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Measure each number of workers; processor time is microseconds for an event."""
    lines: list[dict[str, Any]] = []
    for count in WORKERS:
        before = sum(map(server_cpu_s, pids))
        load = os.getloadavg()[0]
        with workers(url, count, seconds) as results:
            pass
        events = sum(each["events"] for each in results)
        lines.append(
            {
                "workers": count,
                "events_s": round(sum(each["events"] / each["wall_s"] for each in results)),
                "client_us": round(sum(each["cpu_s"] for each in results) * 1e6 / events, 1),
                "server_us": round((sum(map(server_cpu_s, pids)) - before) * 1e6 / events, 1),
                "load": round(load, 1),
            }
        )
        print(json.dumps(lines[-1]), flush=True)
    return lines


def failover(cluster: Any, seconds: float) -> dict[str, Any]:
    """Kill a master while four workers complete events."""
    load = os.getloadavg()[0]
    with workers(cluster.url, 4, seconds, check=True) as results:
        time.sleep(seconds / 3)
        server.end(cluster.pids[0], signal.SIGKILL)
    events = sum(each["events"] for each in results)
    line = {
        "workers": 4,
        "seconds": seconds,
        "events": events,
        "gap_s": round(max(each["gap_s"] for each in results), 1),
        "refused": sum(each["refused"] for each in results),
        "ran_again": sum(each["twice"] for each in results),
        "load": round(load, 1),
    }
    print(json.dumps(line), flush=True)
    return line


def main() -> int:
    """Measure both, print the lines and keep them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each measurement takes")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.seconds, check=options.check)
        return 0
    kept: dict[str, Any] = {"taken": datetime.now(UTC).strftime("%Y-%m-%d"), "cores": os.cpu_count()}
    with postgres.own() as own:
        kept["postgres"] = throughput(own.url, own.state["pids"][:1], options.seconds)
    with tempfile.TemporaryDirectory() as folder, redis.own_cluster(Path(folder), NODES) as cluster:
        kept["cluster"] = throughput(cluster.url, cluster.pids, options.seconds)
        kept["failover"] = failover(cluster, 3 * options.seconds)
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
