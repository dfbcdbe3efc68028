"""Starts the demo's workers: one process with all imports done forks them, so a start takes milliseconds.

When the demo ends or dies, this process kills the remaining workers and ends.
"""

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from semel.cli.demo import worker
from semel.cli.demo.queue import Mode

__all__ = ["Nursery", "Order"]

_PR_SET_PDEATHSIG = 1
_MESSAGE_BYTES = 4096
_START = "from semel.cli.demo.worker_pool import main; main()"
_END_WAIT_S = 5.0


class Order(msgspec.Struct, frozen=True):
    """A request for one worker."""

    folder: str
    mode: Mode


class Nursery:
    """The demo's connection to the process that starts workers. `close` leaves no process behind."""

    def __init__(self, errors: Path) -> None:
        ours, theirs = socket.socketpair()
        self._control = ours
        with errors.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - this very program
                [sys.executable, "-c", _START], stdin=theirs.fileno(), stdout=log, stderr=log
            )
        theirs.close()

    def start(self, folder: Path, mode: Mode) -> tuple[int, socket.socket]:
        """Start a worker. Returns its process id and our end of its socket. Raises `OSError` if the pool has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [msgspec.json.encode(Order(str(folder), mode))], [theirs.fileno()])
        answer = self._control.recv(_MESSAGE_BYTES)
        if not answer:
            ours.close()
            raise ConnectionError("the process that starts the workers has ended")
        return int(answer), ours

    def close(self) -> None:
        """End every worker and the pool, and wait for it."""
        self._control.close()
        try:
            self._process.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Serve orders from stdin, a socket, until it is closed; then kill the remaining workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=os.dup(0))
    children: set[int] = set()
    try:
        while True:
            if select.select((control,), (), (), 0.25)[0]:
                order, ends, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 1)
                if not order:
                    return
                pid = _fork(control, msgspec.json.decode(order, type=Order), ends[0])
                children.add(pid)
                control.send(str(pid).encode())
            _reap(children)
    except OSError:
        return
    finally:
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _fork(control: socket.socket, order: Order, end: int) -> int:
    pid = os.fork()
    if pid:
        os.close(end)
        return pid
    code = 1
    try:
        die_with_parent()
        control.close()
        os.close(0)
        code = worker.main(socket.socket(fileno=end), Path(order.folder), order.mode)
    finally:
        os._exit(code)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even while it is stopped. Linux only."""
    if sys.platform == "linux":
        libc: Any = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _reap(children: set[int]) -> None:
    for pid in list(children):
        if os.waitpid(pid, os.WNOHANG)[0]:
            children.discard(pid)
