"""Tasks in real Celery workers, on a real Redis."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.errors import UsageError
from semel.integrations.celery import once_task
from tests.services import redis
from tests.waiting import await_true

pytestmark = [pytest.mark.slow, pytest.mark.service]
ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("celery")
    store = redis.place("celery")
    env = {"FOLDER": str(folder), "STORE": store, "BROKER": store.partition("?")[0], "QUEUE": "shop"}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in env.items():
            patched.setenv(name, value)
        from tests.integrations import celery_app

        yield celery_app, folder, {**os.environ, "PYTHONWARNINGS": "default"}
        celery_app.app.close()
        celery_app.once.close()


class Workers:
    """Worker processes; each runs one task at a time, in its own process."""

    def __init__(self, env: dict[str, str], folder: Path) -> None:
        self.env, self.folder = env, folder
        self.all: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        command = [sys.executable, "-m", "celery", "-A", "tests.integrations.celery_app", "worker"]
        command += [
            "--pool",
            "solo",
            "--loglevel",
            "INFO",
            "-n",
            f"w{len(self.all)}@test",
            "--without-gossip",
        ]
        command += ["--without-mingle", "--without-heartbeat"]
        with (self.folder / "log").open("ab") as log:
            self.all.append(subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=log, stderr=log))

    def stop(self) -> None:
        for each in self.all:
            each.send_signal(signal.SIGKILL)
            each.wait()


@pytest.fixture(scope="module")
def workers(place: Any) -> Iterator[Workers]:
    _, folder, env = place
    started = Workers(env, folder)
    started.start()
    started.start()
    yield started
    started.stop()


def lines(folder: Path) -> list[str]:
    ledger = folder / "ledger"
    return ledger.read_text().splitlines() if ledger.exists() else []


def test_a_second_send_of_the_same_order_gets_the_first_ones_value(place: Any, workers: Workers) -> None:
    shop, folder, _ = place
    first = shop.charge.delay("o-1").get(timeout=WITHIN_S)
    assert shop.charge.delay("o-1").get(timeout=WITHIN_S) == first == "o-1 1"
    assert shop.charge.delay("o-2").get(timeout=WITHIN_S) == "o-2 1"
    assert lines(folder).count("o-1") == 1


def test_a_retry_of_the_task_runs_again_under_the_same_id(place: Any, workers: Workers) -> None:
    shop, folder, _ = place
    assert shop.flaky.delay("f").get(timeout=WITHIN_S) == "third time"
    assert lines(folder).count("try f") == 3


def test_a_second_send_while_the_first_runs_waits_for_it(place: Any, workers: Workers) -> None:
    shop, folder, _ = place
    sent = shop.slow.delay("slow-1")
    again = shop.slow.delay("slow-1")  # a second send, with an id of its own
    assert await_true(lambda: "slow-1" in lines(folder))
    assert await_true(
        lambda: (folder / "log").read_text().count("shop.slow") >= 3
    )  # it came, and was sent again
    redelivered = (
        f"shop.slow[{sent.id}] received"  # the broker takes the worker for dead after its visibility_timeout
    )
    assert await_true(lambda: (folder / "log").read_text().count(redelivered) >= 2)
    (folder / "go").touch()
    assert sent.get(timeout=WITHIN_S) == again.get(timeout=WITHIN_S) == "slow"
    assert lines(folder).count("slow-1") == 1


def test_a_worker_that_is_killed_loses_nothing(place: Any, workers: Workers) -> None:
    shop, folder, _ = place
    sent = shop.dies.delay("d-1")
    assert await_true((folder / "died").exists)
    assert await_true(lambda: any(each.poll() == -signal.SIGKILL for each in workers.all))
    assert sent.get(timeout=WITHIN_S) == "d-1 1"
    assert lines(folder).count("d-1") == 1


def test_a_direct_call_is_plain_and_an_inbox_is_refused(place: Any) -> None:
    shop, _, _ = place
    assert shop.charge("direct") == "direct 1"
    assert shop.charge("direct") == "direct 2"
    with (
        semel.open("sqlite:///never.db", consumer="c", mode="inbox") as inbox,
        pytest.raises(UsageError, match="inbox"),
    ):
        once_task(inbox)
