"""Tasks in real Taskiq workers, on a real Redis."""

import asyncio
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
from semel.integrations.taskiq import OnceTasks
from tests.services import redis
from tests.waiting import await_true, until

pytestmark = [pytest.mark.slow, pytest.mark.service]
ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    folder = tmp_path_factory.mktemp("taskiq")
    store = redis.place("taskiq")
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"FOLDER": str(folder), "STORE": store, "BROKER": store.partition("?")[0]}.items():
            patched.setenv(name, value)
        from tests.integrations import taskiq_app

        with (folder / "log").open("wb") as log:
            command = [sys.executable, "-m", "taskiq", "worker", "--workers", "2", "--no-configure-logging"]
            command += ["tests.integrations.taskiq_app:broker"]
            running = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        yield taskiq_app, folder
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        taskiq_app.once.close()


def lines(folder: Path) -> list[str]:
    ledger = folder / "ledger"
    return ledger.read_text().splitlines() if ledger.exists() else []


def test_a_task_runs_once_for_its_key(place: Any) -> None:
    shop, folder = place

    async def result(task: Any, *arguments: str) -> str:
        sent = await task.kiq(*arguments)
        return str((await sent.wait_result(timeout=WITHIN_S)).return_value)

    async def scene() -> None:
        await shop.broker.startup()
        try:
            assert await result(shop.charge, "o-1") == await result(shop.charge, "o-1") == "o-1 1"
            assert await result(shop.charge, "o-2") == "o-2 1"
            assert await result(shop.blocking, "b-1") == await result(shop.blocking, "b-1") == "b-1 1"
            assert await result(shop.flaky, "f") == "third time"  # each retry has the same id
            first = await shop.slow.kiq("slow-1")
            again = await shop.slow.kiq("slow-1")  # a second send, with an id of its own
            await until(lambda: "slow-1" in lines(folder))
            await until(lambda: read_log(folder).count(again.task_id) >= 2)  # it came, and was sent again
            await until(lambda: read_log(folder).count(first.task_id) >= 2)  # the broker delivered it again
            (folder / "go").touch()
            values = [(await sent.wait_result(timeout=WITHIN_S)).return_value for sent in (first, again)]
            assert values == ["slow", "slow"]
            died = await shop.dies.kiq("d-1")

            async def taken_over() -> bool:
                await shop.charge.kiq(
                    "o-1"
                )  # this broker looks for abandoned messages when a new one arrives
                return bool(await died.is_ready())

            await until(taken_over)
            assert (await died.get_result()).return_value == "d-1 1"  # by another worker
            assert await shop.charge("o-1") == "o-1 2"  # a direct call is not guarded
        finally:
            await shop.broker.shutdown()

    asyncio.run(scene())
    assert await_true((folder / "died").exists)
    assert sorted(lines(folder)) == sorted(
        ["o-1", "o-2", "b-1", "try f", "try f", "try f", "slow-1", "d-1", "o-1"]
    )


def read_log(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")


def test_an_inbox_is_refused() -> None:
    with (
        semel.open("sqlite:///never.db", consumer="c", mode="inbox") as inbox,
        pytest.raises(UsageError, match="inbox"),
    ):
        OnceTasks(inbox)
