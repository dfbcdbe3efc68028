"""What scenarios about brokers are made of: a broker seen from outside, a store, and what handlers have done."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeAlias

import msgspec

from semel.brokers.retry_queue import RunnerLimits
from semel.brokers.routes import Route
from semel.brokers.runner import Runner
from semel.brokers.source import Arrival, Source
from semel.client.client import aopen
from semel.client.client_async import AsyncSemel
from semel.policy import Policy
from semel.stores.memory.store import MemoryStore

__all__ = [
    "SCENARIOS",
    "WITHIN_S",
    "Broker",
    "Scenario",
    "Scene",
    "Sent",
    "build_messages",
    "needs_order",
    "scenario",
]

WITHIN_S = 60.0
"""Much longer than any step takes. On a loaded computer a broker's own command line needs half a minute to start."""


class Sent(msgspec.Struct, frozen=True):
    """A message as a producer sends it."""

    key: str
    """Empty: without an id."""
    body: bytes = b"{}"
    lane: str = ""
    """What the broker orders by: the message key, the group."""
    event_type: str = ""


class Broker(Protocol):
    """One queue, topic or stream of a real broker, fresh for the scenario, seen from outside."""

    ordered: bool
    """Whether messages of one lane come in order."""

    async def send(self, messages: Sequence[Sent]) -> None:
        """Publish as any producer would, confirmed."""
        ...

    def source(self, *, deadline_s: float | None = None) -> Source:
        """Another consumer of the same group, not yet open; with the broker's deadline where it has one."""
        ...

    async def count_unsettled(self) -> int:
        """Return how many messages the broker still holds for the group: those not yet acknowledged."""
        ...

    async def dead(self) -> list[tuple[Mapping[str, str], bytes]]:
        """The headers and bodies at the dead-letter destination."""
        ...

    async def close(self) -> None:
        """Remove what was made for the scenario."""
        ...


class Scene:
    """A broker, a store, and what handlers have done."""

    def __init__(self, broker: Broker) -> None:
        self.broker: Broker = broker
        self.store: MemoryStore = MemoryStore()
        self.ran: list[str] = []
        self.stopped: bool = False
        """Whether the scenario has stopped its runner: from then on handlers need not be slow."""

    def client(self, **options: Any) -> AsyncSemel:
        """A client of the scene's own store; short delays, so that nothing waits long."""
        policy = options.pop("policy", Policy(retry_delay_s=0.05))
        return aopen(options.pop("store", self.store), consumer="contract", policy=policy, **options)

    @asynccontextmanager
    async def inbox(self, **options: Any) -> Any:
        """A client of mode inbox, on an SQLite file of its own."""
        with TemporaryDirectory() as folder:
            store = f"sqlite:///{Path(folder) / 'records.db'}"
            async with self.client(store=store, mode="inbox", **options) as once:
                yield once

    async def note(self, message: Arrival) -> None:
        """Note that the message's handler ran."""
        self.ran.append(bytes(message.body).decode())

    async def wait_until_settled(self) -> None:
        """Wait until the broker holds no more messages."""
        async with asyncio.timeout(WITHIN_S):
            while await self.broker.count_unsettled():  # noqa: ASYNC110 - a broker has no event to wait for
                await asyncio.sleep(0.02)

    async def deliver_to_the_dead(self, count: int) -> list[Arrival]:
        """Have so many messages delivered to a consumer that dies with them in hand."""
        source = self.broker.source(deadline_s=1.0)
        await source.open()
        got: list[Arrival] = []
        async with asyncio.timeout(WITHIN_S):
            while len(got) < count:
                got += await source.receive(count - len(got), 0.2)
        await source.close()
        return got

    @asynccontextmanager
    async def running(self, handler: Any = None, **options: Any) -> Any:
        """A runner at work; stopped, and its errors raised, at the end. `many`: the handler is given lists."""
        once = options.pop("once", None) or self.client()
        source = options.pop("source", None) or self.broker.source()
        routes = [Route(handler or self.note, once=once, batch=options.pop("many", False))]
        runner = Runner(source, routes, pace=RunnerLimits(**options))
        task = asyncio.create_task(runner.run())
        try:
            yield runner
        finally:
            runner.stop()
            async with asyncio.timeout(WITHIN_S):
                await task


Scenario: TypeAlias = Callable[[Scene], Awaitable[None]]
SCENARIOS: dict[str, tuple[Scenario, bool]] = {}
"""By name: the scenario, and whether it needs a broker that keeps an order."""


def scenario(run: Scenario) -> Scenario:
    """Add a scenario to the contract."""
    SCENARIOS[run.__name__] = (run, False)
    return run


def needs_order(run: Scenario) -> Scenario:
    """Add a scenario for brokers that keep an order."""
    SCENARIOS[run.__name__] = (run, True)
    return run


def build_messages(*keys: str, lane: str = "") -> list[Sent]:
    """Build messages whose bodies are their keys."""
    return [Sent(key, key.encode(), lane) for key in keys]
