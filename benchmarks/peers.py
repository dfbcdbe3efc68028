"""Semel, a careful version by hand, and other libraries, in turns in one run.

Each contender runs in its own process (`contender.py`), and other libraries in their own environments.
The cost is processor time of client and server together, which a busy computer disturbs less than rates; the result
has both.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from collections import defaultdict
from collections.abc import Callable, Iterator
from operator import truediv
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.page import Row

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parent / ".venv-peers"
"""One environment for each library that is not semel: they need different versions of the same packages."""
NEEDS: dict[str, list[str]] = {
    "idemkit": ["idemkit", "redis[hiredis]", "asyncpg"],
    "powertools": ["aws-lambda-powertools", "boto3", "redis[hiredis]"],
    "dbos": ["dbos"],
    "quixstreams": ["quixstreams"],
    "asgi-idempotency-header": ["asgi-idempotency-header", "fastapi", "redis"],
}
ROUNDS = 3
NOISE_UNKNOWN = 0.5
"""The noise of a single round, which has no spread to measure."""
EVENTS_MIN = 150
"""Processor time of a server is counted in steps of 10 ms, so fewer events would measure nothing."""
LOSS = 0.10
"""The smallest loss that `--check` reports, if the noise of the stored figures was smaller."""
FIRST_OF_ALL = "by hand"
"""The contender whose cost is 1."""


class Case(msgspec.Struct, frozen=True):
    """One contender on one store, called in one way."""

    store: str
    shape: str
    contender: str
    events: int
    tasks: int = 0

    @property
    def library(self) -> str:
        """The library, without the way in which it is called."""
        return self.contender.partition(",")[0]


SINGLE, ONE_TASK, TASKS, BATCHES = "one by one", "one task", "50 tasks", "batches of 500"
INBOX, UNWAITED, HTTP = "inbox, one event", "durable_claims=false", "HTTP requests"
CASES = (
    Case("redis", SINGLE, "by hand", 3000),
    Case("redis", SINGLE, "semel", 3000),
    Case("redis", SINGLE, "powertools", 1500),
    Case("redis", ONE_TASK, "semel, tasks", 3000, tasks=1),
    Case("redis", ONE_TASK, "idemkit", 1500, tasks=1),
    Case("redis", TASKS, "semel, tasks", 10_000, tasks=50),
    Case("redis", TASKS, "idemkit", 3000, tasks=50),
    Case("redis", BATCHES, "semel, batches", 20_000),
    Case("postgresql", SINGLE, "by hand", 1500),
    Case("postgresql", SINGLE, "semel", 1500),
    Case("postgresql", UNWAITED, "semel, unwaited", 1500),
    Case("postgresql", SINGLE, "dbos", 400),
    Case("postgresql", INBOX, "by hand, inbox", 1500),
    Case("postgresql", INBOX, "semel, inbox", 1500),
    Case("postgresql", ONE_TASK, "semel, tasks", 1500, tasks=1),
    Case("postgresql", ONE_TASK, "idemkit", 800, tasks=1),
    Case("postgresql", TASKS, "semel, tasks", 10_000, tasks=50),
    Case("postgresql", TASKS, "idemkit", 2000, tasks=50),
    Case("postgresql", BATCHES, "semel, batches", 20_000),
    Case("sqlite", SINGLE, "by hand", 3000),
    Case("sqlite", SINGLE, "semel", 3000),
    Case("sqlite", TASKS, "semel, tasks", 10_000, tasks=50),
    Case("sqlite", BATCHES, "semel, batches", 20_000),
    Case("memory", SINGLE, "semel", 5000),
    Case("memory", ONE_TASK, "idemkit", 2000, tasks=1),
    Case("memory", BATCHES, "semel, batches", 20_000),
    Case("memory", HTTP, "semel, http", 2000, tasks=1),
    Case("memory", HTTP, "asgi-idempotency-header", 2000, tasks=1),
)


class Servers:
    """Servers of this run, with a database for each contender."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._redis: Any = None
        self._postgres: Any = None
        self.versions: dict[str, str] = {}

    def place_of(self, case: Case, run: str) -> tuple[str, int]:
        """Return the URL of an empty store, and the id of the server's process."""
        from tests.services import postgres, redis

        if case.store == "redis":
            if self._redis is None:
                self._redis = self._stack.enter_context(redis.own(self._folder))
                self.versions["redis"] = self._redis.ask("INFO", "server")["redis_version"]
            self._redis.ask("FLUSHALL")
            return self._redis.url, self._redis.pid
        if case.store == "postgresql":
            if self._postgres is None:
                self._postgres = self._stack.enter_context(postgres.own(self._folder))
                ((version,),) = postgres.execute(self._postgres.url, "SHOW server_version")
                self.versions["postgresql"] = version
            name = "b_" + run.replace("-", "_")
            postgres.execute(self._postgres.url, f"CREATE DATABASE {name}")
            return self._postgres.url.rpartition("/")[0] + "/" + name, self._postgres.state["pids"][0]
        return ("memory:" if case.store == "memory" else f"sqlite:///{self._folder}/{run}.db"), 0


def python_for(library: str) -> str:
    """Return the interpreter that has the library; its environment is created at first use."""
    if library not in NEEDS:
        return sys.executable
    folder = ENVIRONMENTS / library
    interpreter = folder / "bin" / "python"
    if not (folder / "made").exists():
        print(f"making an environment for {library}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *NEEDS[library]], check=True)
        (folder / "made").touch()
    return str(interpreter)


def version_of(library: str) -> str:
    """Return the version of a contender in its environment."""
    asked = f"from importlib.metadata import version; print(version({NEEDS[library][0]!r}))"
    told = subprocess.run([python_for(library), "-c", asked], capture_output=True, text=True, check=True)
    return told.stdout.strip()


def measure(case: Case, servers: Servers, run: str) -> list[dict[str, Any]]:
    """Measure the two phases of one contender."""
    url, pid = servers.place_of(case, run)
    job = {
        "contender": case.contender, "url": url, "server_pid": pid, "events": case.events, "tasks": case.tasks,
        "run": run,
        "size_command": [] if case.store == "memory" else [sys.executable, "-P", str(HERE / "stored_bytes.py"), url],
    }  # fmt: skip
    command = [python_for(case.library), "-P", str(HERE / "contender.py"), json.dumps(job)]
    environment = os.environ | ({} if case.library in NEEDS else {"PYTHONPATH": str(HERE.parent / "src")})
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{case.contender} on {case.store} failed:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"phase"')]


def rows_of(
    cases: list[Case], rounds: int, note_load: Callable[[], None]
) -> tuple[list[Row], dict[str, str]]:
    """Measure all cases in turns; return medians of the rounds."""
    found: dict[tuple[Case, str], list[dict[str, Any]]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)  # PostgreSQL refuses to run as root and runs as another user
        servers = Servers(folder, stack)
        for at in range(rounds):
            for number, case in enumerate(cases):
                progress = f"round {at + 1} of {rounds}: {case.store}, {case.shape}, {case.contender}"
                print(
                    f"{progress:70}", end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True
                )
                note_load()
                for phase in measure(case, servers, f"r{at}-{number}"):
                    found[case, phase["phase"]].append(phase)
        versions = servers.versions
    return list(_medians(found)), versions


def _medians(found: dict[tuple[Case, str], list[dict[str, Any]]]) -> Iterator[Row]:
    costs: dict[tuple[str, bool, str], list[float]] = {}
    for (case, phase), rounds in found.items():
        each = [round_["client_us"] + round_["server_us"] for round_ in rounds]
        cost = statistics.median(each)
        beside = (case.store, case.shape == INBOX, phase)  # an inbox is compared with a transaction by hand
        if case.library == FIRST_OF_ALL:
            costs[beside] = each
        base = costs.get(beside)

        def median(name: str, rounds: list[dict[str, Any]] = rounds) -> float | None:
            values = [round_[name] for round_ in rounds if name in round_]
            return round(statistics.median(values), 1) if values else None

        yield Row(
            store=case.store, shape=case.shape, contender=case.library, phase=phase,
            rate=round(statistics.median(round_["rate"] for round_ in rounds)),
            client_us=median("client_us") or 0.0, server_us=median("server_us") or 0.0,
            p50_us=median("p50_us"), p99_us=median("p99_us"),
            ratio=None if base is None else round(cost / statistics.median(base), 2),
            ratio_least=None if base is None else round(min(map(truediv, each, base)), 2),
            noise=round((max(each) - min(each)) / cost, 2) if len(each) > 1 else NOISE_UNKNOWN,
            bytes_each=median("bytes"),
        )  # fmt: skip


def chosen(store: str | None, libraries: list[str] | None, *, check: bool) -> list[Case]:
    """Return the cases of a store and of these libraries. `check`: only semel's that have a ratio to by hand."""
    return [
        case
        for case in CASES
        if store in (None, case.store)
        and (not libraries or case.library in libraries)
        and (not check or (case.store != "memory" and case.library in ("semel", FIRST_OF_ALL)))
    ]


def shortened(case: Case, part: int) -> Case:
    """Return the case with a part of its events."""
    return msgspec.structs.replace(case, events=max(case.events // part, EVENTS_MIN))


def versions_of(cases: list[Case]) -> dict[str, str]:
    """Return the versions of the libraries that are not semel."""
    return {library: version_of(library) for library in NEEDS if any(c.library == library for c in cases)}


def losses(kept: list[Row], now: list[Row]) -> list[str]:
    """Return a line for each case in which semel costs more, relative to by hand, than in the stored figures.

    The stored ratio may vary by the noise that was measured with it. The new one counts as a loss if it is beyond
    that in every round: a disturbance by other work hits one of the two contenders in some rounds only.
    """
    before = {row.place: row for row in kept if row.contender == "semel" and row.ratio is not None}
    found = []
    for row in now:
        old = before.get(row.place)
        if old is None or old.ratio is None or row.ratio is None:
            continue
        allowed = old.ratio * (1 + max(LOSS, old.noise))
        if (row.ratio_least or row.ratio) > allowed:
            found.append(
                f"{' / '.join(row.place)}: {row.ratio:.2f} of by hand and {row.ratio_least:.2f} in the best round,"
                f" was {old.ratio:.2f}, allowed {allowed:.2f}"
            )
    return found


def show(rows: list[Row]) -> None:
    """Print the table."""
    print(f"{'store':12}{'called':16}{'contender':12}{'phase':8}{'per second':>12}{'client us':>11}{'server us':>11}"
          f"{'p99 us':>9}{'of by hand':>12}")  # fmt: skip
    for row in rows:
        p99 = "" if row.p99_us is None else f"{row.p99_us:,.0f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        print(f"{row.store:12}{row.shape:16}{row.contender:12}{row.phase:8}{row.rate:12,.0f}{row.client_us:11,.1f}"
              f"{row.server_us:11,.1f}{p99:>9}{ratio:>12}")  # fmt: skip
