"""Jobs for a worker of arq: the example of the page, with a ledger."""

import os
from pathlib import Path
from typing import Any, ClassVar

from arq import Retry
from arq.connections import RedisSettings

import semel

jobs = semel.aopen(os.environ["STORE"], consumer="jobs")
LEDGER = Path(os.environ["LEDGER"])


def book(line: str) -> None:
    with LEDGER.open("a") as ledger:
        ledger.write(line + "\n")


@jobs.guard(key="order_id", name="jobs.send")
async def send(order_id: str) -> str:
    book(order_id)
    return f"sent {order_id}"


async def send_job(ctx: dict[str, Any], order_id: str) -> str:
    sent = await send(order_id)
    if ctx["job_try"] == 1:
        raise Retry(defer=0)
    return sent


class WorkerSettings:
    functions: ClassVar = [send_job]
    redis_settings = RedisSettings.from_dsn(os.environ["BROKER"])
