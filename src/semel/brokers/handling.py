"""Process a batch of deliveries: one handler call per message, or one call for all new messages."""

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
    """Processes the batches of a route."""

    @property
    def whole(self) -> bool:
        """Whether a batch counts as one handler, whatever its size."""
        ...

    async def deliver(
        self, deliveries: Deliveries, share: int, before_fail: BeforeFail, on_outcome: OnOutcome, /
    ) -> list[Outcome[Any]]:
        """Process deliveries with up to `share` handlers at once. Returns outcomes by position."""
        ...

    async def close(self) -> None:
        """Close its resources."""
        ...


def work_for(
    route: Route, threads: Executor, is_stopping: Callable[[], bool], on_retry: Callable[[], object]
) -> Handling:
    """Return the handling for a route's client and handler.

    `is_stopping`: once it is true no further handler starts; the outcome of the rest is `Errored(NotStarted)`.
    `on_retry`: called before each retry of a completion that the store has not answered.
    """
    if route.once.mode == "inbox":
        from semel.brokers.inbox_handling import InboxHandling

        return InboxHandling(route, threads, is_stopping)
    work = BatchHandling if route.batch else SingleHandling
    return work(route, threads, is_stopping, on_retry)


def call_of(route: Route, threads: Executor) -> Call:
    """Return the call for one message: the middleware from the outside in, then the handler."""
    reads, handler = route.reads, route.handler

    async def call(arrival: Arrival) -> Any:
        return await handler(reads(arrival))

    async def call_thread(arrival: Arrival) -> Any:
        return await in_thread(threads, handler, reads(arrival))

    return route.around(call_thread if route.blocks else call)


def probing(route: Route) -> AsyncSemel:
    """Return the route's client with a probe that gets the same message as the handler."""
    probe = route.once.policy.probe
    if probe is None:
        return route.once

    def ask(inquiry: Inquiry) -> Any:
        (arrival,) = inquiry.args
        return probe(replace(inquiry, args=(route.reads(arrival),)))

    return route.once.using(replace(route.once.policy, probe=ask))


class SingleHandling:
    """One claim and one handler call per message."""

    whole = False

    def __init__(
        self, route: Route, threads: Executor, is_stopping: Callable[[], bool], on_retry: Callable[[], object]
    ) -> None:
        self._once = probing(route)
        self._call = call_of(route, threads)
        self._is_stopping, self._on_retry = is_stopping, on_retry

    async def deliver(
        self, deliveries: Deliveries, share: int, before_fail: BeforeFail, on_outcome: OnOutcome, /
    ) -> list[Outcome[Any]]:
        """Run the deliveries as `run_many` does."""
        return await deliver.deliver(
            self._once,
            deliveries,
            self._call,
            share,
            before_fail,
            on_outcome,
            self._is_stopping,
            self._on_retry,
        )

    async def close(self) -> None:
        """Do nothing."""


class BatchHandling:
    """One claim per message, and one handler call for all that are claimed together."""

    whole = True

    def __init__(
        self, route: Route, threads: Executor, is_stopping: Callable[[], bool], on_retry: Callable[[], object]
    ) -> None:
        self._route = route
        self._once = probing(route)
        self._is_stopping, self._on_retry = is_stopping, on_retry
        handler = route.handler
        self._call = partial(in_thread, threads, handler) if route.blocks else handler

    async def deliver(
        self, deliveries: Deliveries, _share: int, before_fail: BeforeFail, on_outcome: OnOutcome, /
    ) -> list[Outcome[Any]]:
        """Run the deliveries: those that are claimed in one round trip form one group."""
        call = self._route.around(Groups(self._route.reads, self._call, self._is_stopping))
        return await deliver.deliver(
            self._once,
            deliveries,
            call,
            len(deliveries),
            before_fail,
            on_outcome,
            self._is_stopping,
            self._on_retry,
        )

    async def close(self) -> None:
        """Do nothing."""


class Groups:
    """Puts calls of the same turn of the loop into one group."""

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
        """Join the open group, or a new one. Raises the handler's error for this message."""
        message = self._reads(arrival)
        if self._open is None or self._open.started:
            self._open = Group(self._call, self._is_stopping)
        await self._open.join(message)


class Group:
    """One call of a batch handler, and the callers of its messages."""

    def __init__(self, call: Callable[[list[Any]], Awaitable[Any]], is_stopping: Callable[[], bool]) -> None:
        self._call = call
        self._is_stopping = is_stopping
        self._messages: list[Any] = []
        self._errors: dict[int, Exception] = {}
        self._wanted = 0
        self._running: asyncio.Task[None] | None = None
        self.started: bool = False

    async def join(self, message: Any) -> None:
        """Handle the message with the others. The handler is cancelled only when all callers are.

        A cancelled caller still waits for its end: the claim must not be released before.
        """
        at = len(self._messages)
        self._messages.append(message)
        self._wanted += 1
        if self._running is None:
            self._running = asyncio.create_task(self._run(), context=_context_without_claim())
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


def _context_without_claim() -> Context:
    """Return a context without a current claim."""
    context = copy_context()
    context.run(running.set, None)
    return context
