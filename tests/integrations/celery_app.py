"""A Celery application for tests: its tasks write to a ledger, and wait or die where they are told to."""

import os
import signal
from pathlib import Path
from typing import Any

from celery import Celery

import semel
from semel.integrations.celery import once_task, task
from tests.waiting import await_true

FOLDER = Path(os.environ["FOLDER"])
app = Celery("shop", broker=os.environ["BROKER"], backend=os.environ["BROKER"])
app.conf.update(
    broker_transport_options={
        "visibility_timeout": 1,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
    broker_connection_retry_on_startup=True,
    task_default_queue=os.environ["QUEUE"],
    worker_prefetch_multiplier=1,
)
once = semel.open(os.environ["STORE"], consumer="billing", lease="2s")


def book(line: str) -> int:
    with (FOLDER / "ledger").open("a") as ledger:
        ledger.write(line + "\n")
    return (FOLDER / "ledger").read_text().splitlines().count(line)


@task(app, once, key="order", name="shop.charge")
def charge(order: str) -> str:
    return f"{order} {book(order)}"


@app.task(base=once_task(once), bind=True, name="shop.flaky", max_retries=5)  # type: ignore[untyped-decorator]
def flaky(self: Any, name: str) -> str:
    if book(f"try {name}") < 3:
        raise self.retry(countdown=0)
    return "third time"


@task(app, once, key="order", name="shop.slow")
def slow(order: str) -> str:
    """Takes longer than the visibility timeout: the broker delivers it again while it runs."""
    book(order)
    assert await_true((FOLDER / "go").exists)
    return "slow"


@task(app, once, key="order", name="shop.dies")
def dies(order: str) -> str:
    """Its first worker is killed with -9 before the effect."""
    if not (FOLDER / "died").exists():
        (FOLDER / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return f"{order} {book(order)}"
