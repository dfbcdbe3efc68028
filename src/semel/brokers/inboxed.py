"""Deliveries in transactions of the runner's own: marks and effects commit together, then the broker hears of it.

::

    BEGIN ──► mark all that are new ──► handler(connection, message) for each ──► COMMIT ──► ack
                                              │ fails: undone, and each by itself on a savepoint
                                              └ given up: claim, dead letter, `failed` record, ack

A COMMIT without an answer is not guessed at: nothing is acknowledged, and the marks say at the next try which it was.
"""

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

from msgspec.structs import replace

from semel.batches import copies
from semel.brokers.desks import Desk, desk_for
from semel.brokers.routes import Route, in_thread
from semel.brokers.source import Arrival
from semel.brokers.tally import Tally
from semel.brokers.work import Deliveries, LastWords, Told
from semel.context import Context, _current
from semel.core.commands import Granted
from semel.core.folding import leaders
from semel.core.verdicts import postponed
from semel.errors import AttemptsExhausted, ModeMismatch, NoTransaction, StoreError, UsageError, WrongDatabase
from semel.inbox import AsyncInbox, Inbox, ainbox_for, aretry, inbox_for, retry
from semel.keeper import Kept
from semel.lazily import asyncio
from semel.types import Delivery, Done, Errored, Outcome, Unavailable

__all__ = ["Inboxed"]

UNRUN_AFTER = 2
"""Times `max_attempts`: a message that was delivered more often than this seems to kill who runs it, and is given
up without. A lower bound would give up neighbours that were only in the same hand when it struck."""


class Inboxed:
    """One transaction for each batch, on connections of the runner's own to the store's database."""

    whole = True

    def __init__(self, route: Route, threads: Executor) -> None:
        if route.blocks and route.middleware:
            raise UsageError(
                f"{route.name} blocks, so its transaction runs in a thread, where no middleware can be awaited;"
                " make it async def"
            )
        self._route = route
        self._once = route.once
        self._plan = route.once._plan  # noqa: SLF001 - the runner and its client are one mechanism
        self._threads = threads
        self._tally = Tally()
        self._desk: Desk = desk_for(route.once.store, awaits=not route.blocks)
        self._turns = asyncio.Semaphore(self._desk.at_once)
        self._idle: list[Any] = []

    # --- a batch ---

    async def deliver(
        self, deliveries: Deliveries, _share: int, last_words: LastWords, told: Told, /
    ) -> list[Outcome[Any]]:
        """What is delivered for the first time goes together; what was before goes alone, and after the others.

        A message that kills whoever runs it cannot drag its neighbours along for ever.
        """
        first_at, place_of = leaders([each.key for each in deliveries])
        outcomes: list[Any] = [None] * len(first_at)
        new, again = list[int](), list[int]()
        for place, at in enumerate(first_at):
            each = deliveries[at]
            (again if each.body.deliveries > 1 or each.key in self._tally else new).append(place)
        for places in (*((new,) if new else ()), *([place] for place in again)):
            batch = [deliveries[first_at[place]] for place in places]
            for place, outcome in zip(places, await self._outcomes(batch, last_words), strict=True):
                outcomes[place] = outcome
                told(first_at[place], outcome)
        return copies(outcomes, place_of, first_at, [None] * len(deliveries))

    async def _outcomes(self, batch: Deliveries, last_words: LastWords) -> list[Outcome[Any]]:
        limit = self._once.policy.max_attempts
        if len(batch) == 1 and (count := batch[0].body.deliveries) > limit * UNRUN_AFTER:
            exhausted = AttemptsExhausted(f"delivered {count} times, with {limit} attempts allowed")
            return [await self._give_up(batch[0], exhausted, count, last_words)]
        ran = await self._transacted(batch)
        return [await self._judged(*pair, last_words) for pair in zip(batch, ran, strict=True)]

    async def _transacted(self, batch: Deliveries) -> list[Outcome[Any]]:
        """The batch in one transaction; where only its COMMIT is refused, each in one of its own."""
        try:
            return await (self._in_thread(batch) if self._route.blocks else self._awaited(batch))
        except (ModeMismatch, NoTransaction, WrongDatabase, UsageError):
            raise  # no repetition cures it
        except Exception as error:  # noqa: BLE001 - the database's, or of a constraint that is looked at only now
            if isinstance(error, (StoreError, OSError, *self._desk.unavailable)):
                return [Unavailable(error)] * len(batch)
            if len(batch) == 1:
                return [Errored(error, 1)]
        return [outcome for each in batch for outcome in await self._transacted([each])]

    async def _judged(
        self, delivery: Delivery[Arrival], outcome: Outcome[Any], last_words: LastWords
    ) -> Outcome[Any]:
        """What the runner is to hear of a delivery whose transaction has ended."""
        if not isinstance(outcome, Errored):
            if isinstance(outcome, Done):
                self._tally.forget(delivery.key)
            return outcome
        policy, error = self._once.policy, outcome.error
        attempt = self._tally.failed(delivery.key, delivery.body.deliveries)
        if isinstance(error, policy.permanent):
            return await self._give_up(delivery, error, attempt, last_words)
        if attempt >= policy.max_attempts:
            exhausted = AttemptsExhausted(f"attempt {attempt} of {policy.max_attempts} allowed")
            exhausted.__cause__ = error
            return await self._give_up(delivery, exhausted, attempt, last_words)
        return Errored(error, attempt, postponed(policy, attempt).delay_s)

    async def _give_up(
        self, delivery: Delivery[Arrival], error: Exception, attempt: int, last_words: LastWords
    ) -> Outcome[Any]:
        """By a claim of the key, as where records count: the dead letter, then `failed`, and nobody in between."""

        async def words(each: Delivery[Arrival], why: BaseException, granted: Granted) -> None:
            await last_words(each, why, replace(granted, attempt=attempt))

        outcome = await self._once._give_up(delivery, error, words)  # noqa: SLF001 - the runner's own way in
        if not isinstance(outcome, Errored | Unavailable):
            self._tally.forget(delivery.key)
        return outcome

    # --- a transaction, awaited ---

    async def _awaited(self, batch: Deliveries) -> list[Outcome[Any]]:
        windows = await self._once._connect()  # noqa: SLF001 - as any verb of the client

        async def connected() -> Any:
            return windows

        async with self._connection() as connection:
            handle, handler = self._desk.handle(connection), self._handler(connection)

            async def transaction() -> list[Outcome[Any]]:
                async with self._desk.begun(connection):
                    box: AsyncInbox = ainbox_for(handle, self._once.store, self._plan, connected)
                    return await box.run_batch(batch, handler)

            return await aretry(transaction)

    def _handler(self, connection: Any) -> Callable[[list[Delivery[Arrival]]], Awaitable[None]]:
        reads, handler, attempts = self._route.reads, self._route.handler, self._context

        async def each(deliveries: list[Delivery[Arrival]]) -> None:
            for delivery in deliveries:
                token = _current.set(attempts(delivery))
                try:
                    await call(delivery.body)
                finally:
                    _current.reset(token)

        async def all_of_them(deliveries: list[Delivery[Arrival]]) -> None:
            await handler(connection, [reads(delivery.body) for delivery in deliveries])

        async def one(arrival: Arrival) -> Any:
            return await handler(connection, reads(arrival))

        call = self._route.around(one)
        return all_of_them if self._route.batch else each

    @asynccontextmanager
    async def _connection(self) -> Any:
        """A connection outside any transaction; one on which something went wrong is not used again."""
        async with self._turns:
            connection = self._idle.pop() if self._idle else await self._desk.connect()
            try:
                yield connection
            except BaseException:
                await self._desk.let_go(connection)
                raise
            self._idle.append(connection)

    # --- a transaction in a thread ---

    async def _in_thread(self, batch: Deliveries) -> list[Outcome[Any]]:
        windows = await self._once._connect()  # noqa: SLF001 - as above
        async with self._connection() as connection:
            handle = self._desk.handle(connection)

            def transaction() -> list[Outcome[Any]]:
                with self._desk.begun(connection):
                    box: Inbox = inbox_for(handle, self._once.store, self._plan, lambda: windows)
                    return box.run_batch(batch, handler)

            def handler(deliveries: list[Delivery[Arrival]]) -> None:
                self._call(connection, deliveries)

            outcomes: list[Outcome[Any]] = await in_thread(self._threads, retry, transaction)
            return outcomes

    def _call(self, connection: Any, deliveries: Sequence[Delivery[Arrival]]) -> None:
        reads, handler = self._route.reads, self._route.handler
        if self._route.batch:
            handler(connection, [reads(delivery.body) for delivery in deliveries])
            return
        for delivery in deliveries:
            token = _current.set(self._context(delivery))
            try:
                handler(connection, reads(delivery.body))
            finally:
                _current.reset(token)

    # --- both ---

    def _context(self, delivery: Delivery[Arrival]) -> Context:
        """What the handler can ask about itself: there is no claim, so it has no fence and no steps to note."""
        once = self._once
        claim = self._plan.delivered({}, delivery)  # a name for the context; it is never sent
        granted = Granted(fence=0, attempt=max(1, delivery.body.deliveries), lease_until=0, first_seen=0)
        kept = Kept.since(claim, granted, monotonic(), once.policy.run_max_s)
        return Context(kept, granted, None, 0, _loose=True)

    async def close(self) -> None:
        """Close the connections; those in use are closed by their users."""
        idle, self._idle = self._idle, []
        for connection in idle:
            await asyncio.shield(self._desk.let_go(connection))
