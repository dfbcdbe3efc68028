"""Run the real program in a process of its own, with pipes or in a pseudo-terminal."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEMEL = (sys.executable, "-m", "semel")
WITHIN_S = 60.0
"""Far more than anything here takes, also on a computer that is busy with other tests."""

_IN_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def environment(**more: str) -> dict[str, str]:
    """Ours without settings of semel, but with the mark by which processes that are left behind are found."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SEMEL_")}
    marks = {name: value for name, value in os.environ.items() if name.startswith("SEMEL_TEST_")}
    return {**kept, **marks, "TERM": "xterm", "COLUMNS": "100", **more}


def semel(*arguments: str, cwd: Path, given: bytes = b"", **more: str) -> subprocess.CompletedProcess[bytes]:
    """Run it to its end, in a process that is forked from one with everything imported; bytes in, bytes out."""
    return Warm.run(list(arguments), cwd, given, environment(**more))


class Warm:
    """What `semel` forks from: started at first use, ended by the fixture `warm`."""

    _process: ClassVar[subprocess.Popen[str] | None] = None

    @classmethod
    def run(
        cls, arguments: list[str], cwd: Path, given: bytes, env: dict[str, str]
    ) -> subprocess.CompletedProcess[bytes]:
        """Have one command run, and wait for its end."""
        if cls._process is None:
            cls._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cli.warm"],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        process = cls._process
        assert process.stdin is not None
        assert process.stdout is not None
        with tempfile.TemporaryDirectory(prefix="semel-test-") as name:
            streams = Path(name)
            (streams / "stdin").write_bytes(given)
            request = {"args": arguments, "cwd": str(cwd), "env": env, "streams": name}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            assert select.select([process.stdout], [], [], WITHIN_S)[0], f"semel {arguments} did not end"
            code = int(process.stdout.readline())
            return subprocess.CompletedProcess(
                arguments, code, (streams / "stdout").read_bytes(), (streams / "stderr").read_bytes()
            )

    @classmethod
    def end(cls) -> None:
        """End it, if it runs."""
        process, cls._process = cls._process, None
        if process is not None:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def warm() -> Iterator[None]:
    """For `pytest.mark.usefixtures`: leave no process behind."""
    yield
    Warm.end()


def start(*arguments: str, cwd: Path, **more: str) -> subprocess.Popen[bytes]:
    """Start it, with pipes on all sides."""
    return subprocess.Popen(
        [*SEMEL, *arguments],
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(**more),
    )


def alive(pid: int) -> bool:
    """Whether the process runs; one that is dead and not yet fetched does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return not Path("/proc/self").exists()


class Terminal:
    """The program in a pseudo-terminal of its own. `said` is all that it has shown."""

    def __init__(self, command: Sequence[str], cwd: Path, *, stdout: int | None = None) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, *command],
            cwd=cwd,
            stdin=theirs,
            stdout=theirs if stdout is None else stdout,
            stderr=theirs,
            env=environment(),
        )
        os.close(theirs)
        self.said = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._ours, 65536):
                self.said += data.decode(errors="replace")
        except OSError:
            return  # the other end is closed

    def type(self, text: str) -> None:
        """As if at the keyboard."""
        os.write(self._ours, text.encode())

    def wait(self) -> int:
        """The exit code, once everything has been shown."""
        code = self.process.wait(WITHIN_S)
        self._reader.join(WITHIN_S)
        os.close(self._ours)
        return code


def run_page(page: Path, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Run the console blocks of a page, one after the other: each command, what the page says, what it says."""
    program = folder / ".bin" / "semel"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m semel "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            ended = subprocess.run(
                ["/bin/sh", "-c", f"exec 2>&1; {command}"],
                cwd=folder,
                env=environment(PATH=path),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=WITHIN_S,
                check=False,
            )
            yield command, expected, ended.stdout.decode()
