"""Jobs for a worker of RQ: the example of the page, with a ledger."""

import os
from pathlib import Path

import semel

once = semel.open(os.environ["STORE"], consumer="jobs")
LEDGER = Path(os.environ["LEDGER"])


@once.guard(key="order_id", name="jobs.refund")
def refund(order_id: str) -> str:
    with LEDGER.open("a") as ledger:
        ledger.write(order_id + "\n")
    if order_id == "flaky" and LEDGER.read_text().count("flaky") == 1:
        raise TimeoutError
    return f"refunded {order_id}"


def job(order_id: str) -> str:
    return refund(order_id)
