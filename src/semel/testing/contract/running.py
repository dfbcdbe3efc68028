"""Run a scenario on a store, in threads or in an event loop."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from semel.core.commands import Answer, Command, Count, Item
from semel.core.protocols import AnyStore, AsyncStore, Store
from semel.runtime.channel import channel_for
from semel.runtime.generators import adrive, drive
from semel.testing import ManualClock
from semel.testing.contract.harness import (
    Advance,
    AtOnce,
    AwaitNotification,
    ReadNotifications,
    Reopen,
    Scenario,
    ScenarioContext,
    Send,
    StartWatching,
    StepBack,
    StopWatching,
    brief,
    expect,
)
from semel.types import Id, Stats

AsyncSend: TypeAlias = Callable[[Sequence[Item]], Awaitable[list[Answer]]]

MANUAL_UNIT_US = 1_000_000
REAL_UNIT_US = 50_000
"""Long enough that no lease ends between two calls on a busy computer; short enough to wait for."""
HEAR_S = 5.0
"""How long a notification may take."""
BARRIER_S = 30.0
POLL_S = 0.002
TRACE_LINES = 8


class Harness:
    """One place for records, and how to connect to it.

    `connect` returns an unopened store on that place; each call returns another store on the same records.
    With a `clock` the store must use it, and time passes at once; without one, scenarios wait for the store's
    own clock. Servers may be shared: every scenario uses a tenant of its own. A notification may take `hear_s`.
    """

    def __init__(
        self,
        connect: Callable[[], AnyStore],
        *,
        clock: ManualClock | None = None,
        unit_us: int | None = None,
        hear_s: float = HEAR_S,
    ) -> None:
        self.connect: Callable[[], AnyStore] = connect
        self.clock: ManualClock | None = clock
        self.hear_s: float = hear_s
        self.unit_us: int = unit_us or (REAL_UNIT_US if clock is None else MANUAL_UNIT_US)


def run(scenario: Scenario, harness: Harness) -> None:
    """Run a scenario in this thread. Raises `AssertionError` if the store breaks its promise."""
    session = _Threads(scenario, harness)
    try:
        drive(session.flow, session.perform)
    except BaseException as error:
        session.explain(error)
        raise
    finally:
        session.close()


async def arun(scenario: Scenario, harness: Harness) -> None:
    """Run a scenario in this event loop: natively, or through the client's channel if the store blocks."""
    session = _Loop(scenario, harness)
    try:
        await session.open()
        await adrive(session.flow, session.perform)
    except BaseException as error:
        session.explain(error)
        raise
    finally:
        await session.close()


def async_send(store: AnyStore) -> tuple[AsyncSend, Callable[[], None]]:
    """Return the function that sends to a store from an event loop, and the function that closes it."""
    if isinstance(store, AsyncStore):
        return store.asend, lambda: None
    channel = channel_for(store)
    return channel.asend, channel.close


class _NotificationLog:
    """Collects the notifications of a watch, from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._notified: list[Id] = []
        self.stop: Callable[[], None] = lambda: None

    def __call__(self, record_id: Id) -> None:
        with self._changed:
            self._notified.append(record_id)
            self._changed.notify_all()

    def notifications(self) -> list[Id]:
        with self._changed:
            return list(self._notified)

    def wait(self, record_id: Id, wait_s: float) -> bool:
        with self._changed:
            found = self._changed.wait_for(lambda: record_id in self._notified, wait_s)
            self._notified.clear()
            return found


class _Session:
    """A running scenario; the part that both colours share."""

    def __init__(self, scenario: Scenario, harness: Harness) -> None:
        self.harness = harness
        self.ear = _NotificationLog()
        self._scenario = scenario
        self.flow = scenario.flow(ScenarioContext(harness.unit_us, manual=harness.clock is not None))
        self._trace: deque[str] = deque(maxlen=TRACE_LINES)

    def note(self, command: Command[Any], answer: Any) -> None:
        """Keep the command and its answer for `explain`."""
        self._trace.append(f"{brief(command)} -> {brief(answer)}")

    def explain(self, error: BaseException) -> None:
        """Add the broken promise and the last commands to an error."""
        error.add_note(f"scenario {self._scenario.name}: {self._scenario.about}")
        for line in self._trace:
            error.add_note(f"    {line}")

    def perform_shared(self, command: Command[Any], store: AnyStore) -> Any:
        """Carry out a command that is the same in both colours."""
        match command:
            case StepBack(us):
                self._manual().step_back(us=us)
            case StartWatching():
                self.ear.stop = store.watch(self.ear)
            case StopWatching():
                self.ear.stop()
            case ReadNotifications():
                return self.ear.notifications()
            case _:
                raise TypeError(f"a scenario yielded {command!r}")
        return None

    def _manual(self) -> ManualClock:
        if self.harness.clock is None:
            raise TypeError("this scenario needs a manual clock")
        return self.harness.clock


class _Threads(_Session):
    def __init__(self, scenario: Scenario, harness: Harness) -> None:
        super().__init__(scenario, harness)
        self._store = self._connect()

    def perform(self, command: Command[Any]) -> Any:
        answer = self._carry_out(command)
        self.note(command, answer)
        return answer

    def _carry_out(self, command: Command[Any]) -> Any:
        match command:
            case Send(items):
                return self._store.send(items)
            case AtOnce(batches):
                return self._at_once(batches)
            case Advance(us):
                return self._advance(us)
            case AwaitNotification(record_id):
                return self.ear.wait(record_id, self.harness.hear_s)
            case Reopen():
                self._store.close()
                self._store = self._connect()
                return None
            case StepBack() | StartWatching() | StopWatching() | ReadNotifications():
                return self.perform_shared(command, self._store)
            case _:
                return self._store.send([command])[0]  # type: ignore[list-item]  # an item, by the flow's type

    def close(self) -> None:
        self.ear.stop()
        self._store.close()

    def _connect(self) -> Store:
        store = self.harness.connect()
        if not isinstance(store, Store):
            raise TypeError(f"{store.name} is for event loops only; use arun")
        store.open()
        return store

    def _at_once(self, batches: Sequence[Sequence[Item]]) -> list[list[Answer]]:
        barrier = threading.Barrier(len(batches), timeout=BARRIER_S)

        def send(batch: Sequence[Item]) -> list[Answer]:
            barrier.wait()
            return self._store.send(batch)

        with ThreadPoolExecutor(len(batches)) as threads:
            return list(threads.map(send, batches))

    def _advance(self, us: int) -> None:
        if self.harness.clock is not None:
            self.harness.clock.advance(us=us)
            return
        until = self._now() + us
        while (now := self._now()) < until:
            time.sleep(max(POLL_S, (until - now) / 2e6))

    def _now(self) -> int:
        return expect(self._store.send([Count()])[0], Stats).now_us


class _Loop(_Session):
    async def open(self) -> None:
        store = self.harness.connect()
        if isinstance(store, AsyncStore):
            await store.aopen()
        else:
            store.open()
        self._store = store
        self._send, self._end = async_send(store)

    async def perform(self, command: Command[Any]) -> Any:
        answer = await self._carry_out(command)
        self.note(command, answer)
        return answer

    async def _carry_out(self, command: Command[Any]) -> Any:
        match command:
            case Send(items):
                return await self._send(items)
            case AtOnce(batches):
                return await asyncio.gather(*map(self._send, batches))
            case Advance(us):
                return await self._advance(us)
            case AwaitNotification(record_id):
                return await asyncio.to_thread(self.ear.wait, record_id, self.harness.hear_s)
            case Reopen():
                await self._close()
                return await self.open()
            case StepBack() | StartWatching() | StopWatching() | ReadNotifications():
                return self.perform_shared(command, self._store)
            case _:
                return (await self._send([command]))[0]  # type: ignore[list-item]  # as above

    async def close(self) -> None:
        self.ear.stop()
        await self._close()

    async def _close(self) -> None:
        self._end()
        if isinstance(self._store, AsyncStore):
            await self._store.aclose()
        else:
            self._store.close()

    async def _advance(self, us: int) -> None:
        if self.harness.clock is not None:
            self.harness.clock.advance(us=us)
            return
        until = await self._now() + us
        while (now := await self._now()) < until:  # noqa: ASYNC110 - a server's clock sends no event
            await asyncio.sleep(max(POLL_S, (until - now) / 2e6))

    async def _now(self) -> int:
        return expect((await self._send([Count()]))[0], Stats).now_us
