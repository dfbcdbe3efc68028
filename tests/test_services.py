"""The programs that tests use are known and documented, and no process of a run outlives it, however that ends."""

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.services import guard
from tests.services.guard import MARKER
from tests.services.programs import PROGRAMS
from tests.waiting import await_true

ROOT = Path(__file__).resolve().parent.parent
TREE = """
import os, signal, subprocess, sys
sleeper = [sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.pause()"]
child = subprocess.Popen(sleeper, env={})
daemon = subprocess.Popen(sleeper, start_new_session=True)
print(os.getpid(), child.pid, daemon.pid, flush=True)
signal.pause()
"""
"""A server with a child that has lost its environment, and a daemon that has left its session."""
RUN = """
import sys
from pathlib import Path
from tests.services import server
server.spawn([sys.executable, "-c", sys.argv[2]], Path(sys.argv[1]) / "log", env={})
sys.stdin.read()
"""
needs_linux = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


@contextmanager
def server_of(run_pid: int, folder: Path) -> Iterator[list[int]]:
    """The processes of a server, started by a worker of the run that then leaves."""
    environment = {**os.environ, MARKER: f"{uuid.uuid4().hex}-{run_pid}"}
    command = [sys.executable, "-c", RUN, str(folder), TREE]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE) as worker:
        log = folder / "log"
        assert await_true(lambda: log.exists() and log.read_text().endswith("\n"))
        tree = [int(pid) for pid in log.read_text().split()]
        worker.communicate()
    assert all(map(guard.is_alive, tree))  # the run goes on without the worker that started them
    try:
        yield tree
    finally:
        for pid in filter(guard.is_alive, tree):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@needs_linux
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_a_run_that_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    """The run here is a chain of two, as with pytest's workers: the one that starts the server is not the first."""
    first = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with server_of(first.pid, tmp_path) as tree:
        first.send_signal(how)
        first.communicate()
        assert await_true(lambda: not any(map(guard.is_alive, tree)))


@pytest.mark.slow
@needs_linux
def test_a_run_ends_with_its_make(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text("import os; print(os.getpid(), flush=True); input()")
    (tmp_path / "Makefile").write_text(f"run:\n\t@{sys.executable} run.py\n")
    command = ["make", "--no-print-directory", "run"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as make:
        assert make.stdout is not None
        run_pid = int(make.stdout.readline())
        with server_of(run_pid, tmp_path) as tree:
            make.kill()
            assert await_true(lambda: not any(map(guard.is_alive, [run_pid, *tree])))


def test_an_id_that_another_process_has_now_is_left_alone(tmp_path: Path) -> None:
    guard.write_down(os.getpid(), tmp_path)
    assert guard.still_written_down(tmp_path) == [os.getpid()]
    (tmp_path / "servers" / str(os.getpid())).write_text("12345")
    assert guard.still_written_down(tmp_path) == []


def test_the_page_lists_every_program_and_where_it_comes_from() -> None:
    page = (ROOT / "docs/howto/run-the-tests.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| (.+?) \| (.+?) \| (.*?) ?\|$", page, re.MULTILINE)
    expected = [
        (each.name, each.used_for, each.source, f"`{each.instead}`" if each.instead else "")
        for each in PROGRAMS.values()
    ]
    assert rows == expected
    named = {package for each in PROGRAMS.values() if (package := each.package)}
    command = re.search(r"apt-get install --no-install-recommends ((?:.|\\\n)+?)\n```", page)
    assert command is not None
    assert set(command[1].replace("\\\n", " ").split()) == named


@pytest.mark.slow
def test_a_test_that_needs_a_server_says_so(tmp_path: Path) -> None:
    """In a run without servers, an unmarked test that uses one fails instead of starting it."""
    test = tmp_path / "test_unmarked.py"
    test.write_text("from tests.services import redis\ndef test_it(): redis.place('x')\n", encoding="utf-8")
    options = [
        "-p",
        "tests.services",
        "-p",
        "tests.leftovers",
        "-m",
        "not service",
        "-q",
        "--rootdir",
        str(ROOT),
    ]
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), *options, str(test)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED, ran.stdout
    assert "mark it with @pytest.mark.service" in ran.stdout
