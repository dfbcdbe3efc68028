"""A workflow and its activity in Temporal: the example of the page. The first try has the effect and then fails."""

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

import semel

once = semel.open(os.environ["STORE"], consumer="shop")
LEDGER = Path(os.environ["LEDGER"])


@once.guard(key="key", name="dag.pay")
def pay(key: str, order_id: str) -> str:
    with LEDGER.open("a") as ledger:
        ledger.write(order_id + "\n")
    return f"paid {order_id}"


@activity.defn  # type: ignore[untyped-decorator]
def temporal_activity(order_id: str) -> str:
    info = activity.info()
    paid = pay(f"{info.workflow_id}/{info.workflow_run_id}/{info.activity_id}", order_id)
    if info.attempt == 1:
        raise TimeoutError("the reply was lost")
    return f"{paid} in attempt {info.attempt}"


@workflow.defn
class Shop:
    @workflow.run  # type: ignore[untyped-decorator]
    async def run(self, order_id: str) -> Any:
        return await workflow.execute_activity(
            temporal_activity, order_id, start_to_close_timeout=timedelta(minutes=1)
        )


async def main(address: str) -> None:
    client = await Client.connect(address)
    with ThreadPoolExecutor() as threads:
        worker = Worker(
            client,
            task_queue="shop",
            workflows=[Shop],
            activities=[temporal_activity],
            activity_executor=threads,
            workflow_runner=UnsandboxedWorkflowRunner(),
        )
        async with worker:
            for order_id in ("o-1", "o-2"):
                paid = await client.execute_workflow(Shop.run, order_id, id=order_id, task_queue="shop")
                sys.stdout.write(paid + "\n")
    once.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
