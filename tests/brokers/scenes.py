"""Transformers from one topic to another that come and go, in this process and in others."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import semel
from semel.brokers import RunnerLimits
from semel.brokers.kafka.transactions import KafkaTransaction
from semel.client.client_async import AsyncSemel
from semel.stores.memory.store import MemoryStore
from semel.testing.broker_contract import Sent
from tests.brokers.topics import Pipe
from tests.brokers.transformer import LEASE_S, copied
from tests.cli.processes import ROOT, environment

QUICK = "&session_s=4&transaction_s=4"
"""As short as a busy computer allows: a member that gets no processor for that long is expelled."""


class Died(BaseException):
    """The process is gone: nothing of it is said or done any more."""


class Scene:
    """A pipe, a store, and transformers that come and go."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.store: MemoryStore | str = MemoryStore()

    def client(self, **policy: Any) -> AsyncSemel:
        policy = {"retry_delay_s": 0.05, **policy}
        return semel.aopen(
            self.store, consumer="copy", mode="transaction", lease=LEASE_S, policy=semel.Policy(**policy)
        )

    def transaction(
        self,
        handler: Any = copied,
        *,
        kind: type[KafkaTransaction] = KafkaTransaction,
        marks: bool = False,
        **more: Any,
    ) -> KafkaTransaction:
        options = more.pop("options", "")
        return kind(
            f"{self.pipe.url}{QUICK}{options}",
            handler,
            once=more.pop("once", None) or self.client(),
            output=self.pipe.output,
            marks=self.pipe.marks if marks else "",
            pace=RunnerLimits(batch=20, **more),
        )

    @asynccontextmanager
    async def running(self, *arguments: Any, **more: Any) -> Any:
        transaction = self.transaction(*arguments, **more)
        task = asyncio.create_task(transaction.run())
        try:
            yield transaction
        finally:
            transaction.stop()
            await task
            if isinstance(self.store, str):
                await transaction.route.once.close()

    async def until_settled(self, *arguments: Any, **more: Any) -> KafkaTransaction:
        async with self.running(*arguments, **more) as transaction:
            await self.pipe.settled()
        return transaction  # type: ignore[no-any-return]

    async def send(self, *keys: str) -> None:
        await self.pipe.send([Sent(key, key.encode()) for key in keys])


@contextmanager
def worker(scene: Scene, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A transformer in a process of its own; killed at the end, if it still lives."""
    process = started(scene, **more)
    try:
        yield process
    finally:
        kill(process)


def started(scene: Scene, **more: str) -> subprocess.Popen[str]:
    """Start a transformer in a process of its own."""
    pipe = scene.pipe
    said = {"url": f"{pipe.url}{QUICK}", "store": scene.store, "output": pipe.output, **more}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.brokers.transformer", json.dumps(said)],
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def kill(process: subprocess.Popen[str]) -> None:
    """As the kernel would."""
    if process.poll() is None:
        process.kill()
        process.communicate()


async def woken(zombie: subprocess.Popen[str]) -> dict[str, int]:
    """Let a stopped process go on, then end it; what it says that it has done."""
    zombie.send_signal(signal.SIGCONT)
    zombie.send_signal(signal.SIGTERM)
    said, _ = await asyncio.to_thread(zombie.communicate, timeout=30)
    counts: dict[str, int] = json.loads(said)
    return counts
