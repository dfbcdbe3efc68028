import gc
import os
import sqlite3
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.leftovers import await_none_left, marked_processes
from tests.services.guard import MARKER

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")


def test_a_process_that_outlives_its_test_is_found() -> None:
    marker = uuid.uuid4().hex
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, MARKER: marker}
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert list(marked_processes(marker)) == [child.pid]
        assert list(await_none_left(marker, grace_s=0.0)) == [child.pid]
        child.communicate(b"\n")
    assert await_none_left(marker, grace_s=0.0) == {}


def test_the_run_itself_is_marked() -> None:
    assert os.environ[MARKER]


def test_a_connection_that_is_left_open_names_its_test(tmp_path: Path) -> None:
    def leave_open() -> None:
        sqlite3.connect(tmp_path / "left.db")
        gc.collect()  # its cache of statements refers to it

    with pytest.warns(ResourceWarning, match="test_a_connection_that_is_left_open_names_its_test"):
        leave_open()
