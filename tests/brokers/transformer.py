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
from semel.brokers import Arrival, RunnerLimits
from semel.brokers.kafka.transactions import KafkaTransaction, Output
from semel.brokers.kafka.transactor import PartitionBatch, TransactionResult


async def copied(message: Arrival, pause_s: float = 0.0) -> Output:
    """The same again, after a while."""
    await asyncio.sleep(pause_s)
    return Output(message.body)


LEASE_S = 0.7


class Stalls(KafkaTransaction):
    """Stopped by a signal once, just before its first transaction or just after it."""

    stall: Path | None = None
    stall_at = ""

    def _stop_here(self, at: str) -> None:
        if self.stall is not None and at == self.stall_at:
            place, self.stall = self.stall, None
            place.touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    async def _end_transaction(self, parts: Sequence[PartitionBatch]) -> TransactionResult:
        self._stop_here("before")
        ended = await super()._end_transaction(parts)
        self._stop_here("after")
        return ended


async def main(
    url: str,
    store: str,
    output: str,
    marks: str = "",
    stall: str = "",
    stall_at: str = "",
    pause_s: str = "0",
) -> None:
    """Work until SIGTERM; print what was done."""
    once = semel.aopen(
        store, consumer="copy", mode="transaction", lease=LEASE_S, policy=semel.Policy(retry_delay_s=0.05)
    )

    async def handler(message: Arrival) -> Output:
        return await copied(message, float(pause_s))

    transaction = Stalls(url, handler, once=once, output=output, marks=marks, pace=RunnerLimits(batch=20))
    transaction.stall, transaction.stall_at = Path(stall) if stall else None, stall_at
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, transaction.stop)
    async with once:
        await transaction.run()
    said: dict[str, Any] = msgspec.to_builtins(transaction.counts)
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
