"""A runner on a queue in the same process: duplicates, a failure that passes, and one that does not."""

import asyncio
import logging

import msgspec

import semel
from semel.brokers import Runner
from semel.testing.queue import Queue

logging.getLogger("semel").setLevel(logging.CRITICAL)  # the failures below are intended


class Paid(msgspec.Struct):
    order: str
    cents: int


async def charge(paid: Paid) -> None:
    attempt = semel.current().attempt
    if paid.order == "shaky" and attempt == 1:
        raise ConnectionError("the bank did not answer")
    if paid.cents < 0:
        raise semel.GiveUp("nobody pays a negative amount")
    print(paid.order, "charged at attempt", attempt)


async def main() -> None:
    queue = Queue()  # instead of source_for("kafka://..."): the same behaviour, no broker
    for order, cents in [("a", 500), ("shaky", 700), ("odd", -1), ("a", 500)]:
        queue.send(msgspec.json.encode(Paid(order, cents)), {"message_id": order})
    policy = semel.Policy(retry_delay_s=0.05)
    async with semel.aopen("memory:", consumer="billing", policy=policy) as once:
        runner = Runner(queue.source(), charge, once=once)
        runner.stop_when_idle()
        await runner.run()
    print(runner.counts.duplicates, "duplicate,", len(queue), "left in the queue")
    for _, letter in queue.dead:
        print("dead letter:", letter.key, letter.error)


asyncio.run(main())

# prints:
# a charged at attempt 1
# shaky charged at attempt 2
# 1 duplicate, 0 left in the queue
# dead letter: odd GiveUp: nobody pays a negative amount
