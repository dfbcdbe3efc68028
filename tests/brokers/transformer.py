"""A transformer in a process of its own: it copies messages from topic to topic, and stalls or dies on demand.

`python -m tests.brokers.transformer '{"url": ..., "store": ..., "output": ...}'`
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import semel
from semel.brokers import Arrival, Pace
from semel.brokers.kafka_transactions import KafkaTransaction, Output
from semel.brokers.kafka_transactor import Ended, Part


async def copied(message: Arrival, pause_s: float = 0.0) -> Output:
    """The same again, after a while."""
    await asyncio.sleep(pause_s)
    return Output(message.body)


class Stalls(KafkaTransaction):
    """Stopped by a signal just before its first transaction: everything is checked, nothing is written."""

    stalled_at: Path | None = None

    async def _ended(self, parts: Sequence[Part]) -> Ended:
        if self.stalled_at is not None:
            place, self.stalled_at = self.stalled_at, None
            place.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return await super()._ended(parts)


async def main(
    url: str, store: str, output: str, marks: str = "", stall: str = "", pause_s: str = "0"
) -> None:
    """Work until SIGTERM; print what was done."""
    once = semel.aopen(
        store, consumer="copy", mode="transaction", lease="1s", policy=semel.Policy(retry_delay_s=0.05)
    )

    async def handler(message: Arrival) -> Output:
        return await copied(message, float(pause_s))

    transaction = Stalls(url, handler, once=once, output=output, marks=marks, pace=Pace(batch=20))
    transaction.stalled_at = Path(stall) if stall else None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, transaction.stop)
    async with once:
        await transaction.run()
    said: dict[str, Any] = msgspec.to_builtins(transaction.counts)
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
