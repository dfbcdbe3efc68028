"""Worker processes for tests that kill them, and their sockets."""

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

__all__ = ["Nursery", "WorkerSocket", "die_with_parent"]

M = TypeVar("M")
Entry: TypeAlias = Callable[[socket.socket, bytes], int]
RECEIVE_BYTES = 64 * 1024

_encode = msgspec.json.Encoder().encode


class WorkerSocket(Generic[M]):
    """One end of a worker's socket: a message per line. `decoder`: for the messages of the other end."""

    def __init__(self, end: socket.socket, decoder: msgspec.json.Decoder[M]) -> None:
        self.end: socket.socket = end
        self._decoder = decoder
        self._buffer = b""

    def say(self, message: msgspec.Struct) -> None:
        """Send one message. Raises `OSError` when the other end is gone."""
        self.end.sendall(_encode(message) + b"\n")

    def hear(self) -> Iterator[M]:
        """Wait for messages and return them. Raises `EOFError` when the other end is gone."""
        try:
            received = self.end.recv(RECEIVE_BYTES)
        except ConnectionError:
            received = b""
        if not received:
            raise EOFError
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        for line in lines:
            yield self._decoder.decode(line)


_PR_SET_PDEATHSIG = 1
_MESSAGE_BYTES = 64 * 1024
_START = "from semel.testing.worker_processes import main; main()"
_END_WAIT_S = 5.0


class Nursery:
    """The connection to a process that starts workers. `close` leaves no process behind.

    That process has imported the module of `entry`, `module:function`, and forks the workers, so a start takes
    milliseconds. A worker is a call `function(socket, order)` that returns the exit code. When this process ends or
    dies, the other one kills the remaining workers and ends. `errors`: the file for what workers print.
    """

    def __init__(self, entry: str, errors: Path) -> None:
        ours, theirs = socket.socketpair()
        self._control = ours
        with errors.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - this very program
                [sys.executable, "-c", _START, entry], stdin=theirs.fileno(), stdout=log, stderr=log
            )
        theirs.close()

    def start(self, order: msgspec.Struct) -> tuple[int, socket.socket]:
        """Start a worker. Returns its process id and our end of its socket. Raises `OSError` if the pool has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [msgspec.json.encode(order)], [theirs.fileno()])
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
    module, _, name = sys.argv[1].partition(":")
    work: Entry = getattr(import_module(module), name)
    control = socket.socket(fileno=os.dup(0))
    children: set[int] = set()
    try:
        while True:
            if select.select((control,), (), (), 0.25)[0]:
                order, ends, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 1)
                if not order:
                    return
                pid = _fork(control, work, order, ends[0])
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


def _fork(control: socket.socket, work: Entry, order: bytes, end: int) -> int:
    pid = os.fork()
    if pid:
        os.close(end)
        return pid
    code = 1
    try:
        die_with_parent()
        control.close()
        os.close(0)
        code = work(socket.socket(fileno=end), order)
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
