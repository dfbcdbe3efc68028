"""Fail the run when a process that a test started outlives it.

Every process of the run inherits a marker in its environment, so that orphans are found too.
Only Linux lets one look; elsewhere nothing is checked.
"""

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.services.guard import MARKER, marked

GRACE_S = 5.0
"""Helpers of `multiprocessing` end a moment after their parent."""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        os.environ[MARKER] = f"{uuid.uuid4().hex}-{os.getpid()}"  # servers end with this process


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    yield
    if hasattr(session.config, "workerinput"):
        return
    leftovers = await_none_left(os.environ[MARKER], GRACE_S)
    if leftovers:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line("")
            for pid, command in sorted(leftovers.items()):
                reporter.write_line(f"left behind by a test: process {pid}: {command}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def await_none_left(marker: str, grace_s: float) -> dict[int, str]:
    """Look until no marked process is left or the grace is over; return those that are left."""
    between_looks = threading.Event()  # never set: the process table sends no signal
    give_up_at = time.monotonic() + grace_s
    while (leftovers := marked_processes(marker)) and time.monotonic() < give_up_at:
        between_looks.wait(0.05)
    return leftovers


def marked_processes(marker: str) -> dict[int, str]:
    """The processes, by id with their command line, whose environment carries the marker."""
    found: dict[int, str] = {}
    for pid in marked(marker):
        with contextlib.suppress(OSError):  # it ended while we looked
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            found[pid] = line.replace(b"\0", b" ").decode(errors="replace")
    return found
