"""See to it that no process outlives its test run, however the run ends: `python guard.py PID FOLDER MARKER`.

The guard is a process of its own that waits for the end of the run's first process, or of the `make` that started it,
and then stops every process of the run. A signal tied to the death of the parent would not do: servers are shared,
and the worker that starts one may leave before the others.

Two things tell the processes of a run. They inherit a marker in their environment, which some servers overwrite.
Servers are also written down in a folder, by id and time of birth, and each leads a session that its children are in.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

MARKER = "SEMEL_TEST_RUN"
STOP_S = 5.0
_LOOK_S = 0.02
_STATE, _PARENT, _SESSION, _BORN = 0, 1, 3, 19
"""Where these stand in a process's line of the table, counted from after its name."""


def watch_over(run_pid: int, folder: Path, marker: str) -> None:
    """Start the guard of this run, unless it has one. Only Linux lets one wait for a stranger's end."""
    if not hasattr(os, "pidfd_open"):
        return
    with contextlib.suppress(FileExistsError):
        (folder / "guarded").touch(exist_ok=False)
        command = [
            sys.executable,
            "-I",
            "-S",
            str(Path(__file__).resolve()),
            str(run_pid),
            str(folder),
            marker,
        ]
        guard = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, env={}, cwd="/",
        )  # fmt: skip
        guard.returncode = 0  # it outlives this process, on purpose: no warning about that


def write_down(pid: int, folder: Path) -> None:
    """Remember a server, to be stopped with the run."""
    (folder / "servers").mkdir(exist_ok=True)
    (folder / "servers" / str(pid)).write_text(born(pid), encoding="ascii")


def strike_out(pid: int, folder: Path) -> None:
    """It has ended."""
    (folder / "servers" / str(pid)).unlink(missing_ok=True)


def still_written_down(folder: Path) -> list[int]:
    """The servers that were not stopped and still run; an id that went to another process is none of them."""
    files = folder.glob("servers/*")
    return sorted(
        int(file.name)
        for file in files
        if is_alive(int(file.name)) and file.read_text(encoding="ascii") == born(int(file.name))
    )


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits for its parent does not."""
    return _field(pid, _STATE) not in ("", "Z", "X")


def born(pid: int) -> str:
    """When the process began, in ticks since the computer did; empty: there is none."""
    return _field(pid, _BORN)


def _field(pid: int, place: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return "".join(text.rpartition(")")[2].split()[place : place + 1])


def sessions(leaders: list[int]) -> list[int]:
    """The living processes of the sessions that these lead, and they themselves."""
    wanted = set(map(str, leaders))
    return [pid for pid in _processes() if _field(pid, _SESSION) in wanted and is_alive(pid)]


def marked(marker: str) -> list[int]:
    """The living processes that carry the marker in their environment, except this one."""
    needle = f"{MARKER}={marker}".encode()
    found = []
    for pid in _processes():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it ended while we looked, or it is somebody else's
        if needle in environment and pid != os.getpid() and is_alive(pid):
            found.append(pid)
    return found


def _processes() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]


def stop(find: Callable[[], list[int]]) -> None:
    """Ask those that `find` finds to end, and kill those that do not, until it finds none."""
    between_looks = threading.Event()  # never set: strangers' processes send no signal
    for number in (signal.SIGINT, signal.SIGKILL):
        asked: set[int] = set()
        give_up_at = time.monotonic() + STOP_S
        while (pids := find()) and time.monotonic() < give_up_at:
            for pid in set(pids) - asked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            asked.update(pids)
            between_looks.wait(_LOOK_S)


def _await_the_end(run_pid: int) -> None:
    """Wait for the run; one whose `make` is killed is ended."""
    with contextlib.suppress(ProcessLookupError):
        run = os.pidfd_open(run_pid)
        watched = [run]
        parent = int(_field(run_pid, _PARENT) or 0)
        with contextlib.suppress(OSError):
            if Path(f"/proc/{parent}/comm").read_text(encoding="utf-8").strip() == "make":
                watched.append(os.pidfd_open(parent))
        ended, _, _ = select.select(watched, [], [])
        if run not in ended:
            signal.pidfd_send_signal(run, signal.SIGTERM)
            select.select([run], [], [], STOP_S)
            signal.pidfd_send_signal(run, signal.SIGKILL)


def main() -> None:
    run_pid, folder, marker = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    _await_the_end(run_pid)
    leaders = still_written_down(folder)  # once: children may outlive them
    stop(lambda: [*sessions(leaders), *marked(marker)])
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
