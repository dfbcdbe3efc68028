"""Real server processes that share a store and a table, to be killed."""

import contextlib
import json
import os
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import psycopg

from tests.ingest.signed import SECRET
from tests.services import server
from tests.waiting import await_true

ROOT = Path(__file__).parent.parent.parent


class Fleet:
    """Instances on ports of their own; rows in PostgreSQL or SQLite; who ran what, in a file."""

    def __init__(self, folder: Path, store: str, rows: str, lease: str = "1s", **more: Any) -> None:
        self.folder = folder
        self.rows_url = rows
        self.table = f"events_{uuid4().hex[:12]}"
        self.runs_file = folder / "runs"
        self.runs_file.touch()
        self.setup = {
            "store": store,
            "rows": rows,
            "table": self.table,
            "runs": str(self.runs_file),
            "lease": lease,
            "secret": SECRET,
            **more,
        }
        self.pids: dict[int, int] = {}
        """Process ids by port."""

    def start(self, instances: int) -> None:
        ports = [server.free_port() for _ in range(instances)]
        for port in ports:
            self.pids[port] = uvicorn(
                "tests.ingest.instance:app", port, self.folder / f"log{port}", FLEET=json.dumps(self.setup)
            )
        for port in ports:
            server.await_ready(lambda port=port: _answers(port), "uvicorn", self.folder / f"log{port}")  # type: ignore[misc]

    def kill(self, pid: int, how: signal.Signals = signal.SIGKILL) -> None:
        server.end(pid, how)
        self.pids = {port: each for port, each in self.pids.items() if each != pid}

    def stop(self) -> None:
        for pid in self.pids.values():
            server.end(pid, signal.SIGKILL)
        self.pids = {}

    def runs(self) -> list[tuple[str, int, int]]:
        """(event, process, attempt), in the order in which handlers began."""
        lines = [line.split() for line in self.runs_file.read_text().splitlines()]
        return [(event, int(pid), int(attempt)) for event, pid, attempt in lines]

    def rows(self) -> Counter[str]:
        query = f"SELECT event_id FROM {self.table}"
        try:
            if self.rows_url.startswith("sqlite"):
                with contextlib.closing(sqlite3.connect(self.rows_url.removeprefix("sqlite:///"))) as file:
                    return Counter(row[0] for row in file.execute(query))
            with psycopg.connect(self.rows_url) as connection:
                return Counter(row[0] for row in connection.execute(query))
        except (psycopg.errors.UndefinedTable, sqlite3.OperationalError):
            return Counter()  # nothing was persisted yet

    def await_rows(self, expected: set[str], wait_s: float = 60) -> Counter[str]:
        """The rows, once there is one for each of these events."""
        await_true(lambda: set(self.rows()) >= expected, wait_s)
        return self.rows()

    def owner(self, event: str, wait_s: float = 30) -> int:
        """The process that has begun with the event."""
        assert await_true(lambda: any(run[0] == event for run in self.runs()), wait_s)
        return next(pid for name, pid, _ in self.runs() if name == event)


def environment(path: Path = ROOT, **more: str) -> dict[str, str]:
    """For processes that import this source, and what is in `path`."""
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(path)))}


def uvicorn(app: str, port: int, log: Path, path: Path = ROOT, **more: str) -> int:
    """Start a server of this application; its process id."""
    command = [sys.executable, "-m", "uvicorn", app, "--port", str(port), "--log-level", "warning"]
    return server.spawn(command, log, env=environment(path, **more))


def _answers(port: int) -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/", trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False


@contextlib.contextmanager
def fleet(folder: Path, store: str, rows: str, **more: Any) -> Iterator[Fleet]:
    """Instances that are stopped at the end."""
    mine = Fleet(folder, store, rows, **more)
    try:
        yield mine
    finally:
        mine.stop()
