"""How a batch of deliveries is worked: each message by itself, or all that are new with one call."""

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Protocol, TypeAlias

from msgspec.structs import replace

from semel.brokers.routes import Call, Route, in_thread
from semel.brokers.source import Arrival
from semel.client import deliver
from semel.client.client_async import AsyncSemel
from semel.core.settlement import NotStarted
from semel.runtime.context import running
from semel.runtime.process import asyncio
from semel.types import Delivery, Inquiry, Outcome

__all__ = ["BeforeFail", "Deliveries", "Handling", "OnOutcome", "call_of", "work_for"]

Deliveries: TypeAlias = Sequence[Delivery[Arrival]]
BeforeFail: TypeAlias = deliver.BeforeFail[Arrival]
OnOutcome: TypeAlias = Callable[[int, Outcome[Any]], object]
"""Called with each outcome as soon as it is known, and with its delivery's position; not for later copies of a key."""


class Handling(Protocol):
    """What a route does with a batch of deliveries."""

    @property
    def whole(self) -> bool:
        """Whether a batch takes the place of one handler, however many messages it has."""
        ...

    async def deliver(
        self, deliveries: Deliveries, share: int, before_fail: BeforeFail, on_outcome: OnOutcome, /
    ) -> list[Outcome[Any]]:
        """Bring each to its outcome, by position; with up to `share` handlers at once."""
        ...

    async def close(self) -> None:
        """Let go of what was opened for it."""
        ...


def work_for(route: Route, threads: Executor, is_stopping: Callable[[], bool]) -> Handling:
    """The way of working that a route's client and handler ask for.

    `is_stopping`: once it is true no further handler starts; the outcome of the rest is `Errored(NotStarted)`.
    """
    if route.once.mode == "inbox":
        from semel.brokers.inbox_handling import InboxHandling

        return InboxHandling(route, threads, is_stopping)
    work = BatchHandling if route.batch else SingleHandling
    return work(route, threads, is_stopping)


def call_of(route: Route, threads: Executor) -> Call:
    """What runs for one message: the middlewares from the outside in, then the handler."""
    reads, handler = route.reads, route.handler

    async def call(arrival: Arrival) -> Any:
        return await handler(reads(arrival))

    async def call_thread(arrival: Arrival) -> Any:
        return await in_thread(threads, handler, reads(arrival))

    return route.around(call_thread if route.blocks else call)


def probing(route: Route) -> AsyncSemel:
    """The route's client, whose probe is given the message as the handler would be."""
    probe = route.once.policy.probe
    if probe is None:
        return route.once

    def ask(inquiry: Inquiry) -> Any:
        (arrival,) = inquiry.args
        return probe(replace(inquiry, args=(route.reads(arrival),)))

    return route.once.using(replace(route.once.policy, probe=ask))


class SingleHandling:
    """Each message under a claim of its own, and by a call of its own."""

    whole = False

    def __init__(self, route: Route, threads: Executor, is_stopping: Callable[[], bool]) -> None:
        self._once = probing(route)
        self._call = call_of(route, threads)
        self._is_stopping = is_stopping

    async def deliver(
        self, deliveries: Deliveries, share: int, before_fail: BeforeFail, on_outcome: OnOutcome, /
    ) -> list[Outcome[Any]]:
        """As `run_many` does."""
        return await deliver.deliver(
            self._once, deliveries, self._call, share, before_fail, on_outcome, self._is_stopping
        )

    async def close(self) -> None:
        """Nothing was opened."""


class BatchHandling:
    """Each message under a claim of its own, and one call for all that are claimed together."""

    whole = True

    def __init__(self, route: Route, threads: Executor, is_stopping: Callable[[], bool]) -> None:
        self._route = route
        self._once = probing(route)
        self._is_stopping = is_stopping
        handler = route.handler
        self._call = partial(in_thread, threads, handler) if route.blocks else handler

    async def deliver(
        self, deliveries: Deliveries, _share: int, before_fail: BeforeFail, on_outcome: OnOutcome, /
    ) -> list[Outcome[Any]]:
        """All claimed in one round trip start together, and so find each other in one group."""
        call = self._route.around(Groups(self._route.reads, self._call, self._is_stopping))
        return await deliver.deliver(
            self._once, deliveries, call, len(deliveries), before_fail, on_outcome, self._is_stopping
        )

    async def close(self) -> None:
        """Nothing was opened."""


class Groups:
    """Gives those who call in the same turn of the loop one group."""

    def __init__(
        self,
        reads: Callable[[Arrival], Any],
        call: Callable[[list[Any]], Awaitable[Any]],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._reads = reads
        self._call = call
        self._is_stopping = is_stopping
        self._open: Group | None = None

    async def __call__(self, arrival: Arrival) -> None:
        """Join the group that is open, or a new one. Raises what the handler raised for this message."""
        message = self._reads(arrival)
        if self._open is None or self._open.started:
            self._open = Group(self._call, self._is_stopping)
        await self._open.join(message)


class Group:
    """One call of a batch handler, and those whose messages are in it."""

    def __init__(self, call: Callable[[list[Any]], Awaitable[Any]], is_stopping: Callable[[], bool]) -> None:
        self._call = call
        self._is_stopping = is_stopping
        self._messages: list[Any] = []
        self._errors: dict[int, Exception] = {}
        self._wanted = 0
        self._running: asyncio.Task[None] | None = None
        self.started: bool = False

    async def join(self, message: Any) -> None:
        """Have the message handled with the others. The handler is cancelled only when nobody wants it any more.

        Whoever is cancelled waits for its end all the same: the claim is not free before.
        """
        at = len(self._messages)
        self._messages.append(message)
        self._wanted += 1
        if self._running is None:
            self._running = asyncio.create_task(self._run(), context=_nobodys())
        cancelled = None
        while not self._running.done():
            try:
                await asyncio.wait([self._running])
            except asyncio.CancelledError as error:
                if cancelled is None:
                    self._wanted -= 1
                cancelled = error
                if not self._wanted:
                    self._running.cancel()
        if self._running.cancelled():
            raise cancelled or asyncio.CancelledError
        self._running.result()
        if at in self._errors:
            raise self._errors[at]

    async def _run(self) -> None:
        self.started = True
        try:
            await self._call(self._messages)
        except Exception as error:  # noqa: BLE001 - it may be the fault of one
            if len(self._messages) == 1:
                self._errors[0] = error
                return
        else:
            return
        for at, message in enumerate(self._messages):
            if self._is_stopping():
                self._errors[at] = NotStarted()
                continue
            try:
                await self._call([message])
            except Exception as error:  # noqa: BLE001 - it is this message's
                self._errors[at] = error


def _nobodys() -> Context:
    """A context in which no single claim is the current one."""
    context = copy_context()
    context.run(running.set, None)
    return context
