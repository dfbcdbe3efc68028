"""A PostgreSQL for tests: from `SEMEL_TEST_POSTGRES_URL`, an installed binary, or the package manager."""

import contextlib
import hashlib
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg

from tests.services import programs, server
from tests.services.server import Missing, State
from tests.waiting import await_true

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "fsync": "on",
    "synchronous_commit": "on",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "deadlock_timeout": "200ms",
    "log_min_messages": "fatal",
    "autovacuum_naptime": "10s",
}


def url() -> str:
    """The URL of a database of this run's own."""
    found: str = server.shared("postgres", _start)["url"]
    return found


def place(name: object) -> str:
    """A store URL with a schema of its own for each name; the same name means the same records."""
    schema = "t_" + hashlib.sha256(f"{os.getpid()}:{name}".encode()).hexdigest()[:20]
    return f"{url()}?schema={schema}&pool_max=16"


class Own:
    """A server of one test's own, to be killed, restarted and ruined."""

    def __init__(self, folder: Path, copied_from: "Own | None" = None) -> None:
        self.folder = folder
        self.binaries = _binaries()
        self.port = server.free_port()
        self.state: State = {}
        if copied_from is None:
            _initdb(self.binaries, folder)
        else:
            _copy(self.binaries, folder, copied_from.port)
        self.start()

    @property
    def url(self) -> str:
        return str(self.state["url"])

    def start(self, **settings: str) -> None:
        self.state = _run(self.binaries, self.folder, self.port, settings)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: an orderly end that cuts connections; SIGQUIT: at once, as in a crash."""
        for pid in self.state.get("pids", ()):
            server.end(pid, how)
        self.state = {}

    def restart(self, how: signal.Signals = signal.SIGINT) -> None:
        self.kill() if how == signal.SIGKILL else self.stop(how)
        self.start()

    def kill(self) -> None:
        """End it and all its processes with -9: nobody has time to write anything."""
        (pid,) = self.state["pids"]
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        family = [pid, *map(int, children)]
        for each in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        for each in family:
            assert await_true(lambda each=each: not server.is_alive(each), server.STOP_S)  # type: ignore[misc]
        self.state = {}

    def standby(self, folder: Path) -> "Own":
        """A copy of it that follows it by streaming; to be stopped by the caller."""
        folder.mkdir()
        return Own(folder, copied_from=self)


@contextlib.contextmanager
def own(folder: Path | None = None) -> Iterator[Own]:
    """A server of one's own in this folder (default: one of this run's), stopped at the end."""
    with contextlib.ExitStack() as stack:
        place = (folder or stack.enter_context(server.folder())) / "server"
        place.mkdir()
        try:
            mine = Own(place)
        except Missing as missing:
            import pytest

            pytest.skip(f"no postgres: {missing}")
        try:
            yield mine
        finally:
            mine.stop(signal.SIGQUIT)


def execute(at: str, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """Run one statement on a connection of its own."""
    with psycopg.connect(_bare(at), autocommit=True) as connection:
        cursor = connection.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []


def _bare(at: str) -> str:
    parts = urlsplit(at)
    return urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))


def stopped(state: State) -> None:
    """The run is over: remove the database that it had on somebody else's server."""
    at, name = state["drop"]
    execute(at, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def _start(folder: Path) -> State:
    given = programs.given("postgres")
    if given:
        name = f"semel_test_{os.urandom(6).hex()}"
        try:
            execute(given, f"CREATE DATABASE {name}")
        except psycopg.Error as error:
            raise Missing(
                f"the server named by {programs.PROGRAMS['postgres'].instead} does not serve: {error}"
            ) from error
        parts = urlsplit(given)
        return {
            "url": urlunsplit((parts.scheme, parts.netloc, f"/{name}", "", "")),
            "stop": __name__,
            "drop": [given, name],
        }
    binaries = _binaries()
    _initdb(binaries, folder)
    return _run(binaries, folder, server.free_port(), {})


def _binaries() -> Path:
    return Path(programs.find_or_install("postgres")).resolve().parent


def user() -> str | None:
    """Whom the server runs as: it refuses root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            pwd.getpwnam(name)
            return name
    raise Missing("PostgreSQL refuses to run as root, and there is no other user")


def give(folder: Path) -> None:
    """Let the server have a folder."""
    who = user()
    if who is not None:
        shutil.chown(folder, who)


def _initdb(binaries: Path, folder: Path) -> None:
    _make(
        [str(binaries / "initdb"), "-U", "semel", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"],
        folder,
    )


def _copy(binaries: Path, folder: Path, port: int) -> None:
    _make(
        [str(binaries / "pg_basebackup"), "-h", "127.0.0.1", "-p", str(port), "-U", "semel", "-R", "-N",
         "-c", "fast"],
        folder,
    )  # fmt: skip


def _make(command: list[str], folder: Path) -> None:
    """Have a program of the server make its data in the folder."""
    who = user()
    data = folder / "data"
    data.mkdir(mode=0o700)
    give(folder)
    give(data)
    made = subprocess.run(
        [*command, "-D", str(data)],
        user=who, group=who, extra_groups=[] if who else None, cwd=folder, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if made.returncode:
        raise Missing(f"{command[0]} failed: {made.stderr}")


def _run(binaries: Path, folder: Path, port: int, settings: dict[str, str]) -> State:
    log = folder / "log"
    command = [str(binaries / "postgres"), "-D", str(folder / "data"), "-p", str(port), "-k", ""]
    for name, value in (_SETTINGS | settings).items():
        command += ["-c", f"{name}={value}"]
    pid = server.spawn(command, log, user=user())
    at = f"postgresql://semel@127.0.0.1:{port}/postgres"

    def answers() -> bool:
        if not server.is_alive(pid):
            raise Missing(f"postgres ended: {log.read_text(encoding='utf-8', errors='replace')[-2000:]}")
        try:
            execute(at, "SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    server.await_ready(answers, "postgres", log)
    return {"url": at, "pids": [pid], "port": port}
