"""Parts of the broker scenarios: a broker, a store, the list of handled messages, and the log."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, Self, TypeAlias

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
    "Reports",
    "Scenario",
    "Scene",
    "Sent",
    "messages_of",
    "needs_order",
    "scenario",
]

WITHIN_S = 60.0
"""Much longer than any step takes. On a loaded computer a broker's own command line needs half a minute to start."""


class Sent(msgspec.Struct, frozen=True):
    """A message as a producer sends it."""

    key: str
    """Empty: without an id."""
    body: bytes | None = b"{}"
    """`None`: a tombstone, if the broker has them."""
    lane: str = ""
    """The key by which the broker orders: the message key or the group."""
    event_type: str = ""


class Broker(Protocol):
    """One queue, topic or stream of a real broker, fresh for the scenario, seen from outside."""

    ordered: bool
    """Whether messages of one lane come in order."""

    async def send(self, messages: Sequence[Sent]) -> None:
        """Publish the messages as a producer does, and wait for the confirmation."""
        ...

    def source(self, *, deadline_s: float | None = None) -> Source:
        """Return another consumer of the same group, not yet open; `deadline_s` applies if the broker has deadlines."""
        ...

    async def count_unsettled(self) -> int:
        """Return how many messages of the group the broker still holds unacknowledged."""
        ...

    async def dead(self) -> list[tuple[Mapping[str, str], bytes]]:
        """Return the headers and bodies of the dead letters."""
        ...

    async def close(self) -> None:
        """Remove the queues, topics or streams of the scenario."""
        ...


class Scene:
    """A broker, a store, and the list of handled messages."""

    def __init__(self, broker: Broker) -> None:
        self.broker: Broker = broker
        self.store: MemoryStore = MemoryStore()
        self.ran: list[str] = []
        self.stopped: bool = False
        """Whether the scenario has stopped its runner: from then on handlers need not be slow."""
        self.task: asyncio.Task[None] | None = None
        """The runner that was started last."""

    def client(self, **options: Any) -> AsyncSemel:
        """Return a client of the scene's store, with short delays."""
        policy = options.pop("policy", Policy(retry_delay_s=0.05))
        return aopen(options.pop("store", self.store), consumer="contract", policy=policy, **options)

    @asynccontextmanager
    async def inbox(self, **options: Any) -> Any:
        """Yield a client in mode inbox, on an SQLite file of its own."""
        with TemporaryDirectory() as folder:
            store = f"sqlite:///{Path(folder) / 'records.db'}"
            async with self.client(store=store, mode="inbox", **options) as once:
                yield once

    async def note(self, message: Arrival) -> None:
        """Note that the message's handler ran."""
        self.ran.append(bytes(message.body).decode())

    async def wait_until_settled(self) -> None:
        """Wait until the broker holds no message any more."""
        await self.wait_until_settled_or(lambda: False)

    async def wait_until_settled_or(self, is_over: Callable[[], bool]) -> None:
        """Wait until the broker holds no message any more, or until the condition is true."""
        async with asyncio.timeout(WITHIN_S):
            while not is_over() and await self.broker.count_unsettled():  # noqa: ASYNC110 - a broker has no event
                await asyncio.sleep(0.02)

    async def deliver_to_the_dead(self, count: int) -> list[Arrival]:
        """Deliver this many messages to a consumer that dies before it acknowledges them."""
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
        """Run a runner; at the end stop it and raise its errors. `many`: the handler takes lists."""
        once = options.pop("once", None) or self.client()
        source = options.pop("source", None) or self.broker.source()
        routes = [Route(handler or self.note, once=once, batch=options.pop("many", False))]
        runner = Runner(source, routes, pace=RunnerLimits(**options))
        self.task = task = asyncio.create_task(runner.run())
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


def messages_of(*keys: str, lane: str = "") -> list[Sent]:
    """Return messages whose bodies are their keys."""
    return [Sent(key, key.encode(), lane) for key in keys]


class Reports(logging.Handler):
    """Collects the runner's log lines of level warning and above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.first: asyncio.Event = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self.lines.append(record.getMessage())
        self.first.set()

    def of(self, source: str) -> list[str]:
        """Return the lines that name the source. A client library may log lines of its own."""
        return [line for line in self.lines if source in line]

    def __enter__(self) -> Self:
        logging.getLogger("semel").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("semel").removeHandler(self)
