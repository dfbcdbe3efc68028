"""See to it that no server outlives its run, however the run ends: `python guard.py PID FOLDER`.

Servers are written down in a folder by process id and time of birth. The guard is a process of its own that waits for
the end of the run's first process, and then stops whatever is still written down. A signal tied to the death of the
parent would not do: servers are shared, and the worker that starts one may leave before the others.
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
from pathlib import Path

STOP_S = 5.0
_LOOK_S = 0.02


def watch_over(run_pid: int, folder: Path) -> None:
    """Start the guard of this run, unless it has one. Only Linux lets one wait for a stranger's end."""
    if not hasattr(os, "pidfd_open"):
        return
    with contextlib.suppress(FileExistsError):
        (folder / "guarded").touch(exist_ok=False)
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(run_pid), str(folder)],
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
    return _stat(pid)[:1] not in ([], ["Z"], ["X"])


def born(pid: int) -> str:
    """When the process began, in ticks since the computer did; empty: there is none."""
    return "".join(_stat(pid)[19:20])


def _stat(pid: int) -> list[str]:
    """What stands after the name in the process's line of the table, beginning with its state."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def stop(pids: list[int]) -> None:
    """Ask them to end, and make those end that do not."""
    between_looks = threading.Event()  # never set: strangers' processes send no signal
    for number in (signal.SIGINT, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        give_up_at = time.monotonic() + STOP_S
        while (pids := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < give_up_at:
            between_looks.wait(_LOOK_S)


def main() -> None:
    run_pid, folder = int(sys.argv[1]), Path(sys.argv[2])
    with contextlib.suppress(ProcessLookupError):
        run = os.pidfd_open(run_pid)
        select.select([run], [], [])
    stop(still_written_down(folder))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
