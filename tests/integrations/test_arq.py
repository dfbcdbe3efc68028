"""A guarded coroutine in jobs of arq, run by a real worker on a real Redis."""

from pathlib import Path

import pytest

from tests.integrations.elsewhere import ledger, run_in
from tests.services import redis

ENQUEUE = """
import asyncio
from arq import create_pool
from tests.integrations.arq_jobs import WorkerSettings
async def main():
    pool = await create_pool(WorkerSettings.redis_settings)
    for order in ("a", "a", "b"):
        await pool.enqueue_job("send_job", order)
asyncio.run(main())
"""
RESULTS = """
import asyncio
from arq import create_pool
from tests.integrations.arq_jobs import WorkerSettings
async def main():
    pool = await create_pool(WorkerSettings.redis_settings)
    print(*sorted(f"{each.result}, try {each.job_try}" for each in await pool.all_job_results()), sep="\\n")
asyncio.run(main())
"""


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.service
def test_jobs_that_are_sent_and_tried_twice_have_one_effect(tmp_path: Path) -> None:
    with redis.own(tmp_path) as own:
        broker = own.url
        sent = run_in("arq", "-c", ENQUEUE, folder=tmp_path, BROKER=broker)
        assert sent.returncode == 0, sent.stderr
        worker = ["-m", "arq", "tests.integrations.arq_jobs.WorkerSettings", "--burst"]
        ran = run_in("arq", *worker, folder=tmp_path, BROKER=broker)
        results = run_in("arq", "-c", RESULTS, folder=tmp_path, BROKER=broker)
    assert results.stdout.splitlines() == ["sent a, try 2", "sent a, try 2", "sent b, try 2"], ran.stderr
    assert ledger(tmp_path) == ["a", "b"]
