"""No server outlives the run that started it, however that ends."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.leftovers import MARKER
from tests.services import guard
from tests.waiting import await_true

ROOT = Path(__file__).resolve().parent.parent
RUN = """
import os, sys
from pathlib import Path
from tests.services import server
command = [sys.executable, "-c", "import signal; signal.pause()"]
print(server.spawn(command, Path(sys.argv[1]) / "log", env={}), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_a_run_that_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    """The run here is a chain of two, as with pytest's workers: the one that starts the server is not the first."""
    first = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    marker = f"{uuid.uuid4().hex}-{first.pid}"
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, MARKER: marker}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        worker.communicate()
    assert guard.is_alive(pid)  # the run goes on without the worker that started it
    first.send_signal(how)
    first.communicate()
    assert await_true(lambda: not guard.is_alive(pid), 20)


def test_an_id_that_another_process_has_now_is_left_alone(tmp_path: Path) -> None:
    guard.write_down(os.getpid(), tmp_path)
    assert guard.still_written_down(tmp_path) == [os.getpid()]
    (tmp_path / "servers" / str(os.getpid())).write_text("12345")
    assert guard.still_written_down(tmp_path) == []
