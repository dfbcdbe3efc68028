"""Events per second through `semel dedup`, bytes per mark, restore time per million; Quix Streams and Flink beside it.

`python -m benchmarks.dedup --events 200000`. One broker of this run, four partitions, JSON events, a tenth of them
copies, transactions on both sides. Each contender is its own process and drains a topic that was filled before.
"""

import argparse
import gc
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.dedup_flink import VERSION, run_flink
from benchmarks.peers import python_for, version_of

PARTITIONS = 4
COPIES = 0.1
GROUP = "bench"
WINDOW = "24h"
LIBRARY = "quixstreams"


class DedupFigures(msgspec.Struct, kw_only=True):
    """What one run measured, and on which computer."""

    events: int
    cores: int
    python: str
    loads: list[float]
    """The load of the computer before and after."""
    rate: float
    cpu_us: float
    """Processor time of the process for each event, its Kafka client's threads included."""
    mark_bytes: float
    """Local disk for each mark."""
    restore_s_per_million: float
    restore_rate: float
    restore_cpu_us: float
    """Processor time for each mark of a restore."""
    peers: list["PeerFigures"] = []


class PeerFigures(msgspec.Struct, kw_only=True):
    """What another library or program did with such a topic, or why it did not."""

    name: str
    events: int = 0
    load: float = 0.0
    """The load of the computer afterwards."""
    rate: float | None = None
    cpu_us: float | None = None
    times_the_rate: float | None = None
    """How many times as fast semel is."""
    times_the_cpu: float | None = None
    missing: str = ""
    """Why it was not measured."""


def fill(servers: str, topic: str, events: int) -> int:
    """Fill a topic; returns how many ids are in it."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    admin = AdminClient({"bootstrap.servers": servers})
    names = (topic, f"{topic}.out", f"{topic}.quix", f"{topic}.flink")
    for made in admin.create_topics([NewTopic(name, PARTITIONS, 1) for name in names]).values():
        made.result(60)
    producer = Producer(
        {"bootstrap.servers": servers, "linger.ms": 20, "queue.buffering.max.messages": 2_000_000}
    )
    chance, ids = random.Random(7), 0
    for _ in range(events):
        copy = ids and chance.random() < COPIES
        number = chance.randrange(ids) if copy else ids
        id_ = f"evt-{number:09}"
        ids += not copy
        body = {
            "id": id_,
            "type": "order.paid",
            "customer": f"c{number * 7919 % 9999}",
            "cents": 4200,
            "note": "x" * 60,
        }
        producer.produce(topic, json.dumps(body), id_)
        producer.poll(0)
    assert producer.flush(300) == 0
    return ids


def drain(servers: str, topic: str, folder: str) -> None:
    """Run semel until nothing is left, and print what it took. In a process of its own."""
    from semel.streams import Dedup

    dedup = Dedup(
        f"kafka://{servers}/{topic}?group={GROUP}", f"{topic}.out", key="id", window=WINDOW, state=folder
    )
    begun: list[float] = []
    cpu: list[float] = []
    restored: list[tuple[float, float]] = []

    def note() -> None:
        counts = dedup.counts
        if counts.received and not begun:
            begun.append(time.monotonic())
            cpu.append(time.process_time())
            before.append(counts.received)
        if counts.restored and not counts.received:
            restored.append((time.monotonic(), time.process_time()))

    before: list[int] = []
    opened = (time.monotonic(), time.process_time())
    with dedup:
        gc.freeze()  # as the command does
        dedup.run(until_idle=True, on_step=note, wait_s=0.2)
    counts = dedup.counts
    took_s = (time.monotonic() - begun[0] - 0.2) if begun else 0.0
    told = {
        "rate": (counts.received - before[0]) / took_s if begun else 0.0,
        "cpu_us": (time.process_time() - cpu[0]) / (counts.received - before[0]) * 1e6 if begun else 0.0,
        "passed": counts.passed,
        "restored": counts.restored,
        "restore_s": restored[-1][0] - opened[0] if restored else 0.0,
        "restore_cpu_s": restored[-1][1] - opened[1] if restored else 0.0,
    }
    print(json.dumps(told))


QUIX = """
import json, sys, time
from quixstreams import Application
servers, topic, total = sys.argv[1], sys.argv[2], int(sys.argv[3])
app = Application(broker_address=servers, consumer_group="quix", auto_offset_reset="earliest", loglevel="ERROR",
    processing_guarantee="exactly" + "-once", state_dir=sys.argv[4], commit_every=2000)
seen = [0, 0.0, 0.0]
def is_first(value, state):
    seen[0] += 1
    if seen[0] == 1000:
        seen[1], seen[2] = time.monotonic(), time.process_time()
    if seen[0] == total:
        took = time.monotonic() - seen[1]
        cpu = time.process_time() - seen[2]
        print(json.dumps({"rate": (total - 1000) / took, "cpu_us": cpu / (total - 1000) * 1e6}))
        sys.stdout.flush()
        app.stop()
    if state.get(value["id"]) is not None:
        return False
    state.set(value["id"], 1)
    return True
frame = app.dataframe(app.topic(topic, value_deserializer="json"))
frame = frame.filter(is_first, stateful=True).to_topic(app.topic(topic + ".quix", value_serializer="json"))
app.run()
"""


def run(command: list[str]) -> dict[str, Any]:
    """Run a contender; it prints one line of JSON."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{command[1:4]} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    told: dict[str, Any] = json.loads(lines[-1])
    return told


def measure(servers: str, events: int, *, peer_events: int, folder: Path) -> DedupFigures:
    """Measure semel, then its restore, then the others."""
    loads = [os.getloadavg()[0]]
    topic = f"bench-{os.urandom(4).hex()}"
    ids = fill(servers, topic, events)
    ours = [sys.executable, "-m", "benchmarks.dedup", "--drain", servers, topic, str(folder / "state")]
    first = run(ours)
    assert first["passed"] == ids, (first, ids)
    held = sum(each.stat().st_size for each in (folder / "state").rglob("*") if each.is_file())
    shutil.rmtree(folder / "state")
    again = run(ours)
    assert again["restored"] == ids, (again, ids)
    loads.append(os.getloadavg()[0])
    figures = DedupFigures(
        events=events, cores=os.cpu_count() or 1, python=platform.python_version(),
        loads=[round(each, 1) for each in loads], rate=round(first["rate"]), cpu_us=round(first["cpu_us"], 1),
        mark_bytes=round(held / ids, 1), restore_rate=round(ids / max(again["restore_s"], 1e-9)),
        restore_s_per_million=round(again["restore_s"] / ids * 1e6, 1),
        restore_cpu_us=round(again["restore_cpu_s"] / ids * 1e6, 1),
    )  # fmt: skip
    if peer_events:
        for name, run_peer in (("Quix Streams", _run_quix), ("Flink SQL", _run_flink)):
            small = f"bench-{os.urandom(4).hex()}"
            ids = fill(servers, small, peer_events)
            figures.peers.append(
                _peer_figures(figures, name, run_peer, servers, small, peer_events, ids, folder)
            )
    return figures


def _run_quix(servers: str, topic: str, events: int, _ids: int, folder: Path) -> tuple[str, float, float]:
    told = run([python_for(LIBRARY), "-c", QUIX, servers, topic, str(events), str(folder / "quix")])
    return version_of(LIBRARY), told["rate"], told["cpu_us"]


def _run_flink(servers: str, topic: str, events: int, ids: int, folder: Path) -> tuple[str, float, float]:
    (folder / "flink").mkdir()
    found = run_flink(servers, topic, events, ids, folder / "flink")
    return VERSION, found.rate, found.cpu_us


def _peer_figures(
    ours: DedupFigures,
    name: str,
    run_peer: Callable[[str, str, int, int, Path], tuple[str, float, float]],
    servers: str,
    topic: str,
    events: int,
    ids: int,
    folder: Path,
) -> PeerFigures:
    """Run another; where it cannot be had, say why."""
    try:
        version, rate, cpu_us = run_peer(servers, topic, events, ids, folder)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return PeerFigures(name=name, missing=str(error))
    return PeerFigures(
        name=f"{name} {version}", events=events, load=round(os.getloadavg()[0], 1), rate=round(rate),
        cpu_us=round(cpu_us, 1), times_the_rate=round(ours.rate / rate, 1),
        times_the_cpu=round(cpu_us / ours.cpu_us, 1),
    )  # fmt: skip


def main() -> int:
    """Measure and print; with `--out` write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dedup", description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument(
        "--peer-events", type=int, default=50_000, help="events for the others; 0: without them"
    )
    parser.add_argument("--servers", help="a broker to use instead of one of this run's own")
    parser.add_argument("--out", type=Path, help="folder for dedup.json")
    parser.add_argument("--drain", nargs=3, metavar=("SERVERS", "TOPIC", "STATE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drain:
        drain(*options.drain)
        return 0
    from tests.services import kafka, server

    try:
        with tempfile.TemporaryDirectory() as name:
            servers = options.servers or kafka.servers()
            figures = measure(servers, options.events, peer_events=options.peer_events, folder=Path(name))
    finally:
        server.stop_all()
    print(msgspec.json.format(msgspec.json.encode(figures), indent=2).decode())
    if options.out is not None:
        (options.out / "dedup.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
