"""A guarded function in jobs of RQ, run by a real worker on a real Redis."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from redis import Redis
from rq import Queue, Retry

from tests.services import redis

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.service
def test_two_jobs_for_one_order_have_one_effect(tmp_path: Path) -> None:
    store = redis.place("rq")
    address, ledger = store.partition("?")[0], tmp_path / "ledger"
    env = {**os.environ, "STORE": store, "LEDGER": str(ledger), "PYTHONPATH": str(ROOT)}
    with Redis.from_url(address) as connection:
        queue = Queue("semel-shop", connection=connection)
        name = "tests.integrations.rq_jobs.job"
        jobs = [queue.enqueue(name, order, retry=Retry(max=2)) for order in ("a", "a", "flaky")]
        worker = [sys.executable, "-m", "rq.cli", "worker", "--burst", "--url", address, "semel-shop"]
        ran = subprocess.run(worker, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        values = [job.return_value(refresh=True) for job in jobs]
    assert values == ["refunded a", "refunded a", "refunded flaky"], ran.stderr[-3000:]
    assert ledger.read_text().split() == ["a", "flaky", "flaky"]
