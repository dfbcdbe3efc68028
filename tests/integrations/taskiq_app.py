"""A Taskiq application for tests: its tasks write to a ledger, and wait or die where they are told to."""

import asyncio
import os
import signal
from pathlib import Path

from taskiq import SimpleRetryMiddleware
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

import semel
from semel.integrations.taskiq import OnceTasks
from tests.waiting import until

FOLDER = Path(os.environ["FOLDER"])
once = semel.open(os.environ["STORE"], consumer="billing", lease="1s", policy=semel.Policy(wait_s=0.05))
results: RedisAsyncResultBackend[str] = RedisAsyncResultBackend(os.environ["BROKER"])
broker = (
    RedisStreamBroker(
        os.environ["BROKER"],
        queue_name="taskiq-shop",
        idle_timeout=1000,
        xread_block=100,
        xread_count=1,
        unacknowledged_lock_timeout=1,
    )
    .with_result_backend(results)
    .with_middlewares(SimpleRetryMiddleware(), OnceTasks(once))
)


def book(line: str) -> int:
    with (FOLDER / "ledger").open("a") as ledger:
        ledger.write(line + "\n")
    return (FOLDER / "ledger").read_text().splitlines().count(line)


@broker.task(task_name="shop.charge", once="order")
async def charge(order: str) -> str:
    return f"{order} {book(order)}"


@broker.task(task_name="shop.blocking", once="order")
def blocking(order: str) -> str:
    return f"{order} {book(order)}"


@broker.task(task_name="shop.flaky", once=True, retry_on_error=True, max_retries=5)
async def flaky(name: str) -> str:
    if book(f"try {name}") < 3:
        raise TimeoutError
    return "third time"


@broker.task(task_name="shop.slow", once="order")
async def slow(order: str) -> str:
    """Takes longer than the idle timeout: the broker delivers it again while it runs."""
    book(order)
    await until((FOLDER / "go").exists)
    return "slow"


@broker.task(task_name="shop.dies", once="order")
async def dies(order: str) -> str:
    """Its first worker is killed with -9 before the effect."""
    if not (FOLDER / "died").exists():
        (FOLDER / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(0)
    return f"{order} {book(order)}"
