"""`make soak`: hold a rate of events for an hour on each store and on `semel serve`, and record what it costs.

Each place has a worker process of its own (`soak_worker`), which delivers every event at least twice and appends a
line to a file for each effect. The file is counted at the end: nothing lost, nothing twice. Meanwhile latencies,
memory and descriptors of the worker and of the servers behind it are sampled. `soak.json` and `soak.svg` are written
to `--out`.
"""

import contextlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import semel
from benchmarks.service import serve
from benchmarks.soak_page import Sample, Soak, SoakedPlace, plot
from benchmarks.soak_worker import Interval
from benchmarks.suite import RESULTS, Loads

PLACES = ("sqlite", "redis", "postgres", "serve")


class Place:
    """A worker on one store, and the servers behind it."""

    def __init__(self, name: str, url: str, servers: list[int], folder: Path, options: Namespace) -> None:
        self.name, self.servers = name, servers
        self.effects = folder / f"effects-{name}"
        self.samples: list[Sample] = []
        command = [sys.executable, "-m", "benchmarks.soak_worker", url, "--rate", str(options.rate)]
        command += ["--seconds", str(options.minutes * 60), "--every", str(options.every)]
        command += ["--effects", str(self.effects)]
        self.output = (folder / f"output-{name}").open("w+b")
        self.process = subprocess.Popen(command, stdout=self.output)
        self.begun_s = time.monotonic()
        self._read = 0

    def sample(self) -> None:
        """Look at the processes, once for each interval that the worker has reported since."""
        lines = Path(self.output.name).read_bytes().splitlines(keepends=True)
        ended = [line for line in lines[self._read :] if line.endswith(b"\n")]
        self._read += len(ended)
        if not ended or self.process.poll() is not None:
            return
        figures = msgspec.json.decode(ended[-1], type=Interval)
        behind = [pid for server in self.servers for pid in family(server)]
        self.samples.append(
            Sample(
                at_s=round(time.monotonic() - self.begun_s, 1),
                p50_us=round(figures.p50_us),
                p99_us=round(figures.p99_us),
                worker_kb=memory_kb(self.process.pid),
                worker_descriptors=descriptors(self.process.pid),
                server_kb=sum(map(memory_kb, behind)),
                server_descriptors=sum(map(descriptors, behind)),
            )
        )

    def result(self) -> SoakedPlace:
        """Count the effects. Raises `RuntimeError` if the worker has failed."""
        if self.process.wait() != 0:
            raise RuntimeError(f"the worker on {self.name} failed; its output is above")
        last = Path(self.output.name).read_bytes().splitlines()[-1]
        total = msgspec.json.decode(last, type=Interval)
        counts = Counter(self.effects.read_bytes().split())
        return SoakedPlace(
            name=self.name,
            total=total,
            effects=sum(counts.values()),
            lost=total.events - len(counts),
            doubled=sum(counts.values()) - len(counts),
            samples=self.samples,
        )

    def close(self) -> None:
        """End the worker, if it still runs."""
        self.process.kill()
        self.process.wait()
        self.output.close()


def family(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    found = [pid]
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
            found += family(int(child))
    return found


def memory_kb(pid: int) -> int:
    """Return the memory of a process; shared pages count in equal parts for those who share them."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def descriptors(pid: int) -> int:
    """Return how many descriptors a process has open."""
    with contextlib.suppress(OSError):
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return 0


@contextlib.contextmanager
def places(options: Namespace, folder: Path) -> Iterator[list[Place]]:
    """Start the servers and the workers."""
    from tests.services import postgres, redis

    with contextlib.ExitStack() as stack:
        found: list[Place] = []
        for name in options.only or PLACES:
            servers: list[int] = []
            if name == "sqlite":
                url = f"sqlite:///{folder}/soak.db"
            elif name == "redis":
                own = stack.enter_context(redis.own(folder))
                url, servers = own.url, [own.pid]
            elif name == "postgres":
                database = stack.enter_context(postgres.own(folder))
                url, servers = database.url, database.state["pids"]
            else:
                before = set(family(os.getpid()))
                port = stack.enter_context(serve(f"sqlite:///{folder}/served.db", folder))
                url, servers = f"http://127.0.0.1:{port}", sorted(set(family(os.getpid())) - before)[:1]
            found.append(Place(name, url, servers, folder, options))
            stack.callback(found[-1].close)
        yield found


def measure(options: Namespace) -> Soak:
    """Run the soak."""
    loads = Loads()
    soak = Soak(
        minutes=options.minutes,
        rate=options.rate,
        every_s=options.every,
        cores=os.cpu_count() or 1,
        loads=loads.bounds(),
        versions={"semel": semel.__version__, "python": platform.python_version()},
        on=datetime.now(UTC).date().isoformat(),
    )
    with tempfile.TemporaryDirectory(dir=options.disk) as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL refuses to run as root and runs as another user
        with places(options, folder) as found:
            told_s = time.monotonic()
            while any(place.process.poll() is None for place in found):
                time.sleep(min(options.every / 4, 1))
                for place in found:
                    place.sample()
                if time.monotonic() - told_s > 60:
                    told_s = time.monotonic()
                    loads.note()
                    sys.stderr.write(
                        f"{(told_s - found[0].begun_s) / 60:.0f} of {options.minutes:g} minutes\n"
                    )
            soak.places = [place.result() for place in found]
    loads.note()
    soak.loads = loads.bounds()
    return soak


def main() -> int:
    """Run the command line. Returns 1 if an event had no effect or two, or a delivery got a wrong answer."""
    parser = ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=50.0, help="new events a second at each place")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between samples")
    parser.add_argument("--only", action="append", choices=PLACES, help="one place; may be repeated")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for soak.json and soak.svg")
    parser.add_argument(
        "--disk", type=Path, help="where the stores are (default: the folder for temporary files)"
    )
    options = parser.parse_args()
    soak = measure(options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "soak.json").write_bytes(msgspec.json.encode(soak) + b"\n")
    (options.out / "soak.svg").write_text(plot(soak), encoding="utf-8")
    for place in soak.places:
        total = place.total
        sys.stdout.write(
            f"{place.name}: {total.events:,} events, {total.calls:,} deliveries, {place.effects:,} effects,"
            f" {place.lost} lost, {place.doubled} doubled, {total.wrong} wrong answers;"
            f" p50 {total.p50_us / 1e3:.1f} ms, p99 {total.p99_us / 1e3:.1f} ms"
            f"{f', {total.example}' if total.example else ''}\n"
        )
    return int(not all(place.sound for place in soak.places))


if __name__ == "__main__":
    sys.exit(main())
