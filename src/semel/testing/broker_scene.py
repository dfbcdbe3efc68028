"""Parts of the broker scenarios: a broker, its outages, a store, and the list of handled messages."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, Protocol, Self, TypeAlias

import msgspec

from semel.brokers.retry_queue import RunnerLimits
from semel.brokers.routes import Route
from semel.brokers.runner import Runner
from semel.brokers.source import Arrival, Source
from semel.client.client import aopen
from semel.client.client_async import AsyncSemel
from semel.errors import SourceRefused
from semel.policy import Policy
from semel.stores.memory.store import MemoryStore
from semel.testing.contract.harness import check, equal

__all__ = [
    "SCENARIOS",
    "WITHIN_S",
    "Broker",
    "CutOffBroker",
    "Outages",
    "Reports",
    "Scenario",
    "Scene",
    "Sent",
    "needs_order",
    "scenario",
    "sent",
]

WITHIN_S = 60.0
"""Much longer than any step takes. On a loaded computer a broker's own command line needs half a minute to start."""


class Sent(msgspec.Struct, frozen=True):
    """A message as a producer sends it."""

    key: str
    """Empty: without an id."""
    body: bytes = b"{}"
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
        async with asyncio.timeout(WITHIN_S):
            while await self.broker.count_unsettled():  # noqa: ASYNC110 - a broker has no event to wait for
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


def sent(*keys: str, lane: str = "") -> list[Sent]:
    """Return messages whose bodies are their keys."""
    return [Sent(key, key.encode(), lane) for key in keys]


REPORTED_WITHIN_S = 15.0
"""An outage is reported within three seconds; the rest is for a computer that is busy with other tests."""
QUIET_S = 3.0
"""No further line may be logged for this long, although the runner retries several times."""
STOPPED_WITHIN_S = 3.0
"""A stop takes at most a second; the rest is for a busy computer."""
REFUSED_WITHIN_S = 30.0
KEYS = [f"k{number:02}" for number in range(60)]
HANDLER_S = 0.02
LINES_MAX = 4


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


class CutOffBroker(Broker, Protocol):
    """A broker that can be cut off from its sources; the test's own client still reaches it."""

    async def cut_off(self) -> None:
        """Cut the connections of the sources, and refuse new ones."""
        ...

    async def reconnect(self) -> None:
        """Let sources reach the broker again."""
        ...


class Outages:
    """Scenarios of brokers that do not answer or that refuse, for pytest to collect with a broker's suite.

    The runner reports them and still stops at once. A suite provides a source at an address where nobody listens,
    sources that the broker refuses, and a broker that can be cut off from its sources. Each is optional: without it,
    its scenarios are skipped.
    """

    def away(self) -> Source | None:
        """Return a source at an address where nobody listens, or `None` to skip the scenario."""
        return None

    def refused_sources(self) -> Sequence[Source]:
        """Return sources that the broker always refuses: wrong credentials, a missing queue or stream."""
        return ()

    async def cut_off_broker(self) -> CutOffBroker | None:
        """Return a fresh broker that can be cut off, or `None` to skip the scenario."""
        return None

    def test_an_outage_is_reported_once_and_a_stop_is_quick(self) -> None:
        """A broker that is away at the start: one line at once, no flood, and a stop within a second."""
        source = self.away()
        if source is not None:
            asyncio.run(_outage(source))

    def test_a_permanent_refusal_ends_the_runner(self) -> None:
        """Wrong credentials, or no such queue: the runner ends with the reason instead of trying for ever."""
        for source in self.refused_sources():
            asyncio.run(_refusal(source))

    def test_an_outage_in_the_middle_loses_nothing_and_a_stop_is_quick(self) -> None:
        """A broker that goes away while handlers run: one line; nothing is lost or run twice, even after a stop."""

        async def scenario() -> None:
            broker = await self.cut_off_broker()
            if broker is None:
                return
            try:
                await _outage_in_the_middle(broker)
                await _stop_in_an_outage(broker)
            finally:
                await broker.reconnect()
                await broker.close()

        asyncio.run(scenario())


def _client() -> AsyncSemel:
    return aopen(MemoryStore(), consumer="contract")


async def _nothing(_message: Arrival) -> Any:
    raise AssertionError("nothing can be delivered")


async def _outage(source: Source) -> None:
    async with _client() as once:
        runner = Runner(source, _nothing, once=once)
        with Reports() as reports:
            task = asyncio.create_task(runner.run())
            async with asyncio.timeout(REPORTED_WITHIN_S):
                await reports.first.wait()
            await asyncio.sleep(QUIET_S)
            equal(len(reports.lines), 1, f"lines about the outage: {reports.lines}")
            check(source.name in reports.lines[0], f"the line names the source: {reports.lines[0]}")
            stopped_at = monotonic()
            runner.stop()
            async with asyncio.timeout(REFUSED_WITHIN_S):
                await task
    took_s = monotonic() - stopped_at
    check(took_s < STOPPED_WITHIN_S, f"a stop took {took_s:.1f} s while {source.name} was away")


async def _outage_in_the_middle(broker: CutOffBroker) -> None:
    scene = Scene(broker)
    with Reports() as reports:
        async with _in_the_middle(scene) as name:
            await _cut_off(broker, reports)
            await asyncio.sleep(QUIET_S)
            equal(len(reports.of(name)), 1, f"lines about the outage: {reports.lines}")
            await broker.reconnect()
            await scene.wait_until_settled()
    equal(sorted(scene.ran), KEYS, "handled keys")
    equal(len(reports.of(name)), 2, f"lines about the outage and its end: {reports.lines}")
    check(len(reports.lines) <= LINES_MAX, f"lines, those of the client library included: {reports.lines}")


async def _stop_in_an_outage(broker: CutOffBroker) -> None:
    scene = Scene(broker)
    with Reports() as reports:
        async with _in_the_middle(scene):
            await _cut_off(broker, reports)
            stopped_at = monotonic()
    took_s = monotonic() - stopped_at
    check(took_s < STOPPED_WITHIN_S, f"a stop took {took_s:.1f} s while the broker was away")
    await broker.reconnect()
    async with scene.running(source=broker.source(deadline_s=1.0)):
        await scene.wait_until_settled()
    equal(sorted(scene.ran), KEYS, "handled keys")


@asynccontextmanager
async def _in_the_middle(scene: Scene) -> Any:
    """Run a runner until it has handled some messages and more remain; yields the name of its source."""

    async def slow(message: Arrival) -> None:
        await asyncio.sleep(HANDLER_S)
        await scene.note(message)

    await scene.broker.send(sent(*KEYS))
    source = scene.broker.source(deadline_s=1.0)
    async with scene.running(slow, source=source, concurrency=2, batch=10):
        async with asyncio.timeout(WITHIN_S):
            while not scene.ran:  # noqa: ASYNC110 - a handler has no event
                await asyncio.sleep(HANDLER_S)
        yield source.name


async def _cut_off(broker: CutOffBroker, reports: Reports) -> None:
    await broker.cut_off()
    async with asyncio.timeout(REPORTED_WITHIN_S):
        await reports.first.wait()


async def _refusal(source: Source) -> None:
    async with _client() as once:
        runner = Runner(source, _nothing, once=once)
        try:
            async with asyncio.timeout(REFUSED_WITHIN_S):
                await runner.run()
        except SourceRefused as error:
            check(bool(str(error)), "the error message is empty: it must name what was refused")
        except TimeoutError:
            raise AssertionError(f"{source.name} is refused, and the runner retries for ever") from None
        else:
            raise AssertionError(f"{source.name} is refused, and the runner ended without a reason")
