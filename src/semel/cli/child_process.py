"""Run one command for `semel once`: pass its output on and keep it, forward signals, end it if we end.

The command is the leader of a process group of its own. If we die, even by kill -9, a watchdog kills the
whole group; on Linux the kernel kills the command too, in case the watchdog is gone. The command
does not start before its watchdog runs, so it can never outlive us.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from msgspec import Struct

__all__ = ["CapturedOutput", "Child", "ProcessResult"]

LOOK_S = 0.2
"""How often the claim is checked while the command runs."""
TERMINATE_S = 5.0
"""The time between SIGTERM and SIGKILL when the command must stop."""
DRAIN_S = 2.0
"""How long we read output after the command's end: its background processes may hold the pipe open."""
COPY_BYTES = 64 * 1024
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

GUARD = 'read -r _ || kill -s KILL -- "-$1"'
"""The watchdog: a shell that waits for a line. End of file means that we died, and it kills the group."""
LAUNCHER = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # what Python changed when it started
    signal.signal(number, signal.SIG_DFL)
go = int(sys.argv[1])
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.read(go, 1) == b"":
    os._exit(125)
os.close(go)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.stderr.write(f"semel: {sys.argv[2]}: {error.strerror}\\n")
    sys.stderr.flush()
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)
"""
"""Executes the command after it learns that the watchdog runs."""


class CapturedOutput(Struct):
    """The beginning of an output. `cut`: the rest was not kept."""

    data: bytes = b""
    cut: bool = False


class ProcessResult(Struct, frozen=True):
    """How the command ended."""

    code: int
    """As a shell counts: 128 + n for a command that signal n ended."""
    stdout: CapturedOutput
    stderr: CapturedOutput
    signalled: int = 0
    """The signal that ended us, which we forwarded."""
    lost: bool = False
    """We ended the command because the claim was lost."""


class Child:
    """One run of a command, from the main thread. `lost()` is polled; the command stops when it is true."""

    def __init__(self, command: Sequence[str], *, output_bytes_max: int, lost: Callable[[], bool]) -> None:
        self._command = command
        self._output_bytes_max = output_bytes_max
        self._lost = lost
        self._signalled = 0
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> ProcessResult:
        """Start the command and wait for its end. Raises `OSError` when its launcher cannot be started."""
        stdout, stderr = CapturedOutput(), CapturedOutput()
        with self._forwarding(), self._start() as process:
            copies = [
                self._copy(process.stdout, sys.stdout.fileno(), stdout),
                self._copy(process.stderr, sys.stderr.fileno(), stderr),
            ]
            code, lost = self._wait(process)
            for copy in copies:
                copy.join(DRAIN_S)
        return ProcessResult(code, stdout, stderr, self._signalled, lost)

    # --- start and end ---

    @contextmanager
    def _start(self) -> Iterator[subprocess.Popen[bytes]]:
        go_read, go_write = os.pipe()
        try:
            process = subprocess.Popen(  # noqa: S603 - the user's own command
                [sys.executable, "-I", "-S", "-c", LAUNCHER, str(go_read), *self._command],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(go_read,),
                process_group=0,
            )
        except BaseException:
            os.close(go_write)
            raise
        finally:
            os.close(go_read)
        with _guarding(process.pid), _lending_terminal(process.pid):
            self._process = process
            os.write(go_write, b"g")
            os.close(go_write)
            try:
                if self._signalled:  # the signal came before the command existed
                    self._send(self._signalled)
                yield process
            finally:
                self._process = None

    def _wait(self, process: subprocess.Popen[bytes]) -> tuple[int, bool]:
        """Return the exit code, and whether we ended it because the claim was lost."""
        statuses: queue.SimpleQueue[int] = queue.SimpleQueue()
        waiter = threading.Thread(target=_await_end, args=(process.pid, statuses), daemon=True)
        waiter.start()
        lost, until = False, 0.0
        while True:
            try:
                status = statuses.get(timeout=LOOK_S)
            except queue.Empty:
                if not lost and self._lost():
                    lost, until = True, TERMINATE_S
                    self._send(signal.SIGTERM)
                elif lost:
                    until -= LOOK_S
                    if until <= 0:
                        self._send(signal.SIGKILL)
                continue
            if os.WIFSTOPPED(status):
                _stop_too(process.pid)
                continue
            process.returncode = code = os.waitstatus_to_exitcode(status)
            if lost:
                self._send(signal.SIGKILL)  # kill what still runs in its group
            return (128 - code if code < 0 else code), lost

    # --- signals ---

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        # Ignored signals stay ignored: nohup ignores SIGHUP.
        heeded = [number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._forward) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, _frame: object) -> None:
        if number in ENDING:
            self._signalled = number
        self._send(number)

    def _send(self, number: int) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    # --- output ---

    def _copy(self, source: IO[bytes] | None, target: int, kept: CapturedOutput) -> threading.Thread:
        assert source is not None
        thread = threading.Thread(target=self._copy_all, args=(source, target, kept), daemon=True)
        thread.start()
        return thread

    def _copy_all(self, source: IO[bytes], target: int, kept: CapturedOutput) -> None:
        fd = source.fileno()
        while data := os.read(fd, COPY_BYTES):
            room = self._output_bytes_max - len(kept.data)
            kept.data += data[:room]
            kept.cut = kept.cut or len(data) > room
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(target, left) :]
            except OSError:
                break  # our reader is gone: close the pipe, so that the command gets SIGPIPE
        source.close()


def _await_end(pid: int, statuses: "queue.SimpleQueue[int]") -> None:
    while True:
        _, status = os.waitpid(pid, os.WUNTRACED)
        statuses.put(status)
        if not os.WIFSTOPPED(status):
            return


@contextmanager
def _guarding(group: int) -> Iterator[None]:
    """Run the watchdog, which kills the group if we die inside this block."""
    guard = subprocess.Popen(  # noqa: S603 - a constant, and a process id
        ["/bin/sh", "-c", GUARD, "semel-guard", str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    assert guard.stdin is not None
    try:
        yield
    finally:
        with suppress(OSError):
            guard.stdin.write(b"\n")
            guard.stdin.flush()
        guard.stdin.close()
        guard.wait()


# --- the terminal: only its foreground group may read from it ---


@contextmanager
def _lending_terminal(group: int) -> Iterator[None]:
    """Give our terminal to the command while it runs: it may ask questions, and it gets Ctrl-C."""
    mine = _has_terminal()
    if mine:
        _give_terminal(group)
    try:
        yield
    finally:
        if mine:
            _give_terminal(os.getpgrp())


def _has_terminal() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _give_terminal(group: int) -> None:
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        with suppress(OSError):
            os.tcsetpgrp(0, group)
    finally:
        signal.signal(signal.SIGTTOU, before)


def _stop_too(group: int) -> None:
    """The command was stopped, for example by Ctrl-Z: stop too, so that the shell takes over; then continue it."""
    with suppress(OSError):
        if os.tcgetpgrp(0) == group:
            _give_terminal(os.getpgrp())
            os.kill(os.getpid(), signal.SIGSTOP)
            if _has_terminal():
                _give_terminal(group)
            os.killpg(group, signal.SIGCONT)
