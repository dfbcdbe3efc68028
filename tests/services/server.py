"""One server per run: who comes first starts it, all workers share it, who leaves last stops it.

The processes of a run find each other by the marker that `tests.leftovers` puts into the environment; the
state of each server is a JSON file in a folder of that name, guarded by a file lock.
"""

import contextlib
import fcntl
import importlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.services import guard
from tests.services.guard import MARKER
from tests.waiting import await_true

State: TypeAlias = dict[str, Any]
"""What is known of a running server, as JSON. `pids`: its processes, stopped with SIGINT in this order;
`stop`: the module whose `stopped(state)` does what else is to be done."""

PORTS = range(12_000, 32_000)
"""Below those that systems give to clients, and low enough for a cluster's second port."""
NOBODY = 1
"""A port on which nobody listens."""
READY_S = 60.0
STOP_S = 20.0

_held: dict[str, int] = {}
"""The services that this process uses: file descriptors with a shared lock."""
_states: dict[str, State] = {}


_refused = ""
"""Why no server may be used in this run; empty if it may."""


class Missing(Exception):
    """The service cannot be had here; says why."""


def shared(name: str, start: Callable[[Path], State]) -> State:
    """The state of the one server of this run, started in an empty folder by whoever comes first.

    Skips the test where the service cannot be had, which `SEMEL_TEST_REQUIRE=all` makes a failure.
    """
    _fail_if_refused()
    if name in _states:
        return _states[name]
    folder = run_folder()
    folder.mkdir(mode=0o755, exist_ok=True)
    with _locked(folder / f"{name}.lock"):
        reason = folder / f"{name}.missing"
        if reason.exists():
            pytest.skip(f"no {name}: {reason.read_text(encoding='utf-8')}")
        _use(name)
        file = folder / f"{name}.json"
        if not file.exists():
            place = folder / name
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(mode=0o755)
            try:
                state = start(place)
            except Missing as missing:
                reason.write_text(str(missing), encoding="utf-8")
                pytest.skip(f"no {name}: {missing}")
            file.write_text(json.dumps(state), encoding="utf-8")
        _states[name] = json.loads(file.read_text(encoding="utf-8"))
    return _states[name]


def refuse(reason: str) -> None:
    """Let every test fail that uses a server: this run has deselected them."""
    global _refused  # noqa: PLW0603 - one process, one run
    _refused = reason


def _fail_if_refused() -> None:
    if _refused:
        pytest.fail(_refused)


def leave() -> None:
    """This process needs no server any more; those that nobody uses are stopped."""
    for name, descriptor in list(_held.items()):
        del _held[name]
        _states.pop(name, None)
        with _locked(run_folder() / f"{name}.lock"):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass  # others go on
            else:
                _stop(name)
            os.close(descriptor)


def stop_all() -> list[int]:
    """Stop whatever still runs: its users may have been killed. Returns those that no shared service accounts for."""
    for file in run_folder().glob("*.json"):
        _stop(file.stem)
    left = guard.still_written_down(run_folder())
    guard.stop(lambda: guard.sessions(left))
    return left


def missing() -> dict[str, str]:
    """The services of this run that could not be had, with the reasons."""
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(run_folder().glob("*.missing"))}


def clear() -> None:
    """Remove what the run has left on disk."""
    shutil.rmtree(run_folder(), ignore_errors=True)


def run_folder() -> Path:
    """The folder that the processes of this run share."""
    return Path(tempfile.gettempdir()) / f"semel-services-{_marker()}"


def _marker() -> str:
    """What the processes of this run carry in their environment."""
    return os.environ.get(MARKER) or f"alone-{os.getpid()}"


def _run_pid() -> int:
    """The process that the run begins and ends with; the marker names it."""
    return int(_marker().rpartition("-")[2])


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder that servers of other users can reach, for one test; pytest keeps its own folders to itself."""
    run_folder().mkdir(mode=0o755, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=run_folder()))
    made.chmod(0o755)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


# --- what every kind of server needs ------------------------------------------------------------


def free_port() -> int:
    """A loopback port that nobody uses now, and that no client is given by chance while its server is restarted."""
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def spawn(
    command: Sequence[str], log: Path, *, user: str | None = None, env: Mapping[str, str] | None = None
) -> int:
    """Start a server process in a session of its own; its output goes to `log`. Returns its id.

    It ends with the run at the latest, even if the run is killed.
    """
    _fail_if_refused()
    folder = run_folder()
    folder.mkdir(mode=0o755, exist_ok=True)
    guard.watch_over(_run_pid(), folder, _marker())
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            user=user, group=user, extra_groups=[] if user else None, cwd=log.parent,
            env={**(os.environ if env is None else env), MARKER: _marker()},
        )  # fmt: skip
    process.returncode = 0  # it outlives this object, on purpose: no warning about that
    _children.append(process.pid)
    guard.write_down(process.pid, folder)
    return process.pid


def await_ready(probe: Callable[[], bool], what: str, log: Path, wait_s: float = READY_S) -> None:
    """Ask until the server answers; raises with the end of its log when it does not."""
    if not await_true(probe, wait_s):
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        raise Missing(f"{what} did not answer within {wait_s:g} s: {text[-2000:]}")


def end(pid: int, first: signal.Signals = signal.SIGINT, wait_s: float = STOP_S) -> None:
    """Stop a server process, gently at first, and then with its children."""
    for number in (first, signal.SIGKILL):
        for each in [pid] if number == first else [pid, *guard.sessions([pid])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, number)
        if await_true(lambda: not is_alive(pid), wait_s):
            guard.strike_out(pid, run_folder())
            return
    raise RuntimeError(f"process {pid} does not end")


def is_alive(pid: int) -> bool:
    """Whether the process runs. One of ours that has ended is taken leave of: until then its number is in use."""
    if pid in _children:
        with contextlib.suppress(ChildProcessError):
            ended, _ = os.waitpid(pid, os.WNOHANG)
            if not ended:
                return True
        _children.remove(pid)
    return guard.is_alive(pid)


# --- inside -------------------------------------------------------------------------------------

_children: list[int] = []


def _use(name: str) -> None:
    if name not in _held:
        descriptor = os.open(run_folder() / f"{name}.users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        _held[name] = descriptor


def _stop(name: str) -> None:
    file = run_folder() / f"{name}.json"
    with contextlib.suppress(FileNotFoundError):
        state = json.loads(file.read_text(encoding="utf-8"))
        for pid in state.get("pids", ()):
            end(pid)
        if "stop" in state:
            importlib.import_module(state["stop"]).stopped(state)
        file.unlink()
        shutil.rmtree(run_folder() / name, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    if not path.parent.exists():
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
