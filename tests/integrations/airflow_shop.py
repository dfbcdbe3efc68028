"""A task of Airflow: the example of the page. The first try has the effect and then fails."""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, task

import semel

once = semel.open(os.environ["STORE"], consumer="shop")
LEDGER = Path(os.environ["LEDGER"])


@once.guard(key="key", name="dag.pay")
def pay(key: str, order_id: str) -> str:
    with LEDGER.open("a") as ledger:
        ledger.write(order_id + "\n")
    return f"paid {order_id}"


with DAG("shop", schedule=None) as dag:

    @task(retries=2, retry_delay=timedelta(0))  # type: ignore[untyped-decorator]
    def airflow_task(order_id: str, run_id: str, ti: Any) -> str:
        paid = pay(f"{run_id}/{ti.task_id}/{ti.map_index}", order_id)
        if ti.try_number == 1:
            raise TimeoutError("the reply was lost")
        return f"{paid} in try {ti.try_number}"

    airflow_task.expand(order_id=["o-1", "o-2"])


if __name__ == "__main__":
    sys.stdout.write(f"state {dag.test().state}\n")
