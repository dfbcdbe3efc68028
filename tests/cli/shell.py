"""Run the real program: in a pipe, or in a pseudo-terminal."""

import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
"""How long a busy computer may take; nothing waits for it to pass."""
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# The terminal becomes the controlling one, so that its Ctrl-C reaches the program.
IN_TERMINAL = (
    "import fcntl, runpy, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    " runpy.run_module('semel', run_name='__main__', alter_sys=True)"
)


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what would change the program's answers."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if (not name.startswith("SEMEL_") or name.startswith("SEMEL_TEST_"))
        and name not in {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TERM"}
    }
    return {**kept, "TZ": "UTC", "COLUMNS": "100", **more}


@dataclass(frozen=True)
class Ended:
    """How a program ended and what it said."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


class Warm:
    """The program in waiting: see `warm.py`. Used by one test at a time."""

    process: subprocess.Popen[str] | None = None

    @classmethod
    def run(cls, args: tuple[str | bytes, ...], cwd: Path, env: dict[str, str], stdin: str) -> Ended:
        if cls.process is None:
            cls.process = subprocess.Popen(
                [sys.executable, "-m", "tests.cli.warm"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert cls.process.stdin is not None
        assert cls.process.stdout is not None
        with TemporaryDirectory() as folder:
            streams = Path(folder)
            (streams / "stdin").write_text(stdin, encoding="utf-8")
            request = {
                "args": [os.fsdecode(arg) for arg in args],
                "cwd": str(cwd),
                "env": env,
                "streams": folder,
            }
            cls.process.stdin.write(json.dumps(request) + "\n")
            cls.process.stdin.flush()
            code = int(cls.process.stdout.readline())
            out, err = (streams / "stdout").read_text("utf-8"), (streams / "stderr").read_text("utf-8")
        return Ended(code, out, err)

    @classmethod
    def end(cls) -> None:
        if cls.process is not None:
            cls.process.communicate(timeout=PATIENCE_S)
            cls.process = None


def semel(*args: str | bytes, cwd: Path, env: Mapping[str, str] | None = None, stdin: str = "") -> Ended:
    """Run `semel` to its end, in a process of its own that is forked from a warm one."""
    return Warm.run(args, cwd, environment(**(env or {})), stdin)


def cold(*args: str | bytes, cwd: Path, env: Mapping[str, str] | None = None, stdin: str = "") -> Ended:
    """Run `python -m semel` to its end."""
    answer = subprocess.run(
        [sys.executable, "-m", "semel", *args],
        cwd=cwd,
        env=environment(**(env or {})),
        input=stdin.encode(),
        capture_output=True,
        check=False,
        timeout=PATIENCE_S,
    )
    return Ended(answer.returncode, answer.stdout.decode(), answer.stderr.decode())


class Terminal:
    """A program in a pseudo-terminal: what it shows, and what is typed."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self._process = process
        self._master = master
        self.raw = ""

    @property
    def text(self) -> str:
        """What was shown so far, without the escapes that move the cursor."""
        return ESCAPE.sub("", self.raw)

    def until(self, pattern: str) -> str:
        """Read until the pattern is shown; what was shown since the last call."""
        give_up_at = time.monotonic() + PATIENCE_S
        while not (match := re.search(pattern, self.text)):
            if not self._read(give_up_at - time.monotonic()):
                raise AssertionError(f"{pattern!r} was never shown: {self.raw!r}")
        shown, self.raw = self.text, ""
        return shown[: match.end()]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def end(self) -> int:
        """Read to the end; the exit code."""
        give_up_at = time.monotonic() + PATIENCE_S
        while self._read(give_up_at - time.monotonic()):
            pass
        return self._process.wait(PATIENCE_S)

    def _read(self, patience_s: float) -> bool:
        if patience_s <= 0 or not select.select([self._master], [], [], patience_s)[0]:
            return False
        try:
            chunk = os.read(self._master, 65536)
        except OSError:  # Linux says so when the program has let go of the terminal
            return False
        self.raw += chunk.decode(errors="replace")
        return bool(chunk)


@contextmanager
def terminal(
    *args: str, cwd: Path, env: Mapping[str, str] | None = None, columns: int = 100
) -> Iterator[Terminal]:
    """Run `semel` in a pseudo-terminal."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *args],
        cwd=cwd,
        env=environment(TERM="xterm-256color", COLUMNS=str(columns), **(env or {})),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)
        os.close(master)
