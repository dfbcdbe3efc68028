"""Several real worker processes of gunicorn and of uvicorn behind one port: one key has one effect in all of them."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests.services import redis, server
from tests.waiting import await_true

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
APP = "tests.http.workers_app"
ASKED = 24
WORKERS = 2


def command(kind: str, port: int) -> list[str]:
    if kind == "gunicorn":
        options = ["--preload", "--workers", str(WORKERS), "--bind", f"127.0.0.1:{port}", f"{APP}:wsgi"]
        return [sys.executable, "-m", "gunicorn", *options]
    options = ["--workers", str(WORKERS), "--port", str(port), "--lifespan", "off", f"{APP}:asgi"]
    return [sys.executable, "-m", "uvicorn", *options]


@pytest.mark.parametrize(
    ("kind", "store"),
    [("gunicorn", "sqlite"), pytest.param("uvicorn", "redis", marks=pytest.mark.service)],
)
def test_one_effect_in_all_workers(kind: str, store: str, tmp_path: Path) -> None:
    port, ledger = server.free_port(), tmp_path / "ledger"
    url = f"sqlite:///{tmp_path}/events.db" if store == "sqlite" else redis.place("workers")
    env = {**os.environ, "STORE": url, "LEDGER": str(ledger), "PYTHONPATH": str(ROOT)}
    with (tmp_path / "log").open("wb") as log:
        running = subprocess.Popen(
            command(kind, port), cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
        )

    def ask(key: str) -> tuple[int, str]:
        address = f"http://127.0.0.1:{port}/charges"
        answer = httpx2.post(address, headers={"Idempotency-Key": key}, timeout=60, trust_env=False)
        return answer.status_code, answer.text

    def answers() -> bool:
        try:
            httpx2.get(f"http://127.0.0.1:{port}/", timeout=60, trust_env=False)
        except httpx2.TransportError:
            assert running.poll() is None, (tmp_path / "log").read_text()[-3000:]
            return False
        return True

    seen: dict[str, str] = {}

    def workers_seen() -> bool:
        key = f"other-{len(seen)}"
        seen[key] = ask(key)[1]
        return len(set(seen.values())) == WORKERS

    try:
        assert await_true(answers)
        assert await_true(workers_seen)  # each worker has written to the store
        before = ledger.read_text().count("charged")
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(ask, ["k1"] * ASKED))
        assert {status for status, _ in got} <= {201, 409}  # 409: the first one was still running
        assert len({pid for status, pid in got if status == 201}) == 1  # of the worker that charged
        assert ledger.read_text().count("charged") == before + 1
        assert [ask(key) for key in seen] == [(201, pid) for pid in seen.values()]  # replayed by any worker
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
