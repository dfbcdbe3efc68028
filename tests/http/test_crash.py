"""A server that is killed amid a request, and what its client gets when it asks again."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.waiting import await_true

WAIT_S = 30.0
ROOT = Path(__file__).parent.parent.parent


class Victim:
    """One server process after another, on one port and one folder."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.folder = folder
        self.mode = mode
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.http.victim", str(self.port), str(self.folder), self.mode], cwd=ROOT
        )
        assert await_true(self._answers)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self.process is not None:
            os.kill(self.process.pid, number)
            self.process.wait(WAIT_S)
            self.process = None

    def post(self) -> httpx2.Response:
        return httpx2.post(
            f"http://127.0.0.1:{self.port}/charges",
            headers={"Idempotency-Key": "k1"},
            timeout=WAIT_S,
            trust_env=False,
        )

    @property
    def runs(self) -> list[str]:
        path = self.folder / "runs"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def victim(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Victim]:
    made = Victim(tmp_path, getattr(request, "param", "lease"))
    yield made
    made.end()


def interrupted(victim: Victim, number: signal.Signals) -> None:
    """A request is under way, its effect has happened, and the server ends."""
    lost: list[object] = []

    def ask() -> None:
        try:
            if not (answer := victim.post()).is_success:  # as a server that shuts down in time says
                lost.append(answer)
        except httpx2.HTTPError as error:
            lost.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert await_true(lambda: victim.runs)
    victim.end(number)
    asking.join(WAIT_S)
    assert lost, "it was answered as done"


@pytest.mark.slow
def test_killed_amid_a_request_it_runs_again_under_the_same_key_for_its_sink(victim: Victim) -> None:
    interrupted(victim, signal.SIGKILL)
    victim.start()
    (victim.folder / "leave").touch()
    answer = victim.post()
    assert answer.status_code == 201
    assert "idempotent-replayed" not in answer.headers
    assert len(victim.runs) == 2, "a kill between effect and record repeats the handler"
    assert len(list((victim.folder / "charges").iterdir())) == 1, (
        "and the sink, which knows the key, charges once"
    )
    assert victim.post().headers["idempotent-replayed"] == "true"
    assert len(victim.runs) == 2


@pytest.mark.slow
def test_killed_after_the_answer_it_does_not_run_again(victim: Victim) -> None:
    (victim.folder / "leave").touch()
    first = victim.post()
    victim.end()
    victim.start()
    retry = victim.post()
    assert retry.json() == first.json()
    assert retry.headers["idempotent-replayed"] == "true"
    assert len(victim.runs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["quarantine"], indirect=True)
def test_killed_in_quarantine_it_is_not_run_again_unasked(victim: Victim) -> None:
    interrupted(victim, signal.SIGKILL)
    victim.start()
    (victim.folder / "leave").touch()
    answer = victim.post()
    assert answer.status_code == 409
    assert answer.json()["type"] == "urn:semel:outcome-unknown"
    assert len(victim.runs) == 1


@pytest.mark.slow
def test_a_shutdown_stops_the_handler_and_releases_its_claim(victim: Victim) -> None:
    interrupted(victim, signal.SIGTERM)
    victim.start()
    (victim.folder / "leave").touch()
    assert victim.post().status_code == 201
    assert len(victim.runs) == 2
