"""Deliveries in the runner's own transactions: marks and effects commit together, then the message is acknowledged.

::

    BEGIN ──► mark all that are new ──► handler(connection, message) for each ──► COMMIT ──► ack
                                              │ fails: undone, and each by itself on a savepoint
                                              └ given up: claim, dead letter, `failed` record, ack

A message that may have killed its process runs alone, after the others, and its attempt is recorded before it runs.

After a COMMIT without an answer nothing is acknowledged: the marks show at the next try whether it was committed.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from semel.brokers.attempts import Attempt, Attempts, Progress, ended_each_time
from semel.brokers.handling import BeforeFail, Deliveries, OnOutcome
from semel.brokers.retry_queue import FailureCounts
from semel.brokers.routes import Route, in_thread
from semel.brokers.source import Arrival
from semel.brokers.transaction_connections import TransactionConnections, desk_for
from semel.client import deliver
from semel.core.commands import Granted
from semel.core.folding import leaders
from semel.core.settlement import NotStarted, attempts_exhausted, retry_later
from semel.errors import ModeMismatch, NoTransaction, StoreError, UsageError, WrongDatabase
from semel.inbox import AsyncInbox, Inbox, ainbox_for, aretry, inbox_for, retry
from semel.runtime.context import HandlerRun, running
from semel.runtime.keeper import LiveClaim
from semel.runtime.process import asyncio
from semel.runtime.reporter import NOT_OBSERVED, DeliveryObserver
from semel.runtime.scheduler import copies
from semel.types import Delivery, Done, Errored, Outcome, Unavailable

__all__ = ["InboxHandling"]

OFF_DELIVERIES = 2
"""A factor of `max_attempts`: if the window of an event type is off, nothing is recorded, and a message with more
deliveries than this is dead-lettered."""
_alone: "WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]" = WeakKeyDictionary()
"""One suspected message at a time in a process, so that a crash counts only for the one that runs."""


class InboxHandling:
    """One transaction for each batch, on connections of the runner's own to the store's database."""

    whole = True

    def __init__(self, route: Route, threads: Executor, is_stopping: Callable[[], bool]) -> None:
        if route.blocks and route.middleware:
            raise UsageError(
                f"{route.name} blocks, so its transaction runs in a thread, where no middleware can be awaited;"
                " make it async def"
            )
        self._route = route
        self._once = route.once
        self._plan = deliver.items_of(route.once)
        self._reporter = deliver.reporter_of(route.once)
        self._threads = threads
        self._is_stopping = is_stopping
        self._tally = FailureCounts()
        self._attempts = Attempts(route.once)
        self._progress = Progress(route.once)
        self._desk: TransactionConnections = desk_for(route.once.store, awaits=not route.blocks)
        self._turns = asyncio.Semaphore(self._desk.at_once)
        self._idle: list[Any] = []
        self._observers: dict[int, DeliveryObserver] = {}
        """What reports each delivery in hand, by the identity of its object."""

    # --- a batch ---

    async def deliver(
        self, deliveries: Deliveries, _share: int, before_fail: BeforeFail, on_outcome: OnOutcome, /
    ) -> list[Outcome[Any]]:
        """Run new messages together, then failed ones one by one, then suspects, which may have killed a process.

        Suspects with the most attempts come last.
        """
        first_at, place_of = leaders([each.key for each in deliveries])
        outcomes: list[Any] = [None] * len(first_at)
        observers = [deliver.observe(self._once, deliveries[at], self._route.handler) for at in first_at]

        def settle(place: int, outcome: Outcome[Any]) -> None:
            outcomes[place] = outcome
            observers[place].note_outcome(outcome)
            on_outcome(first_at[place], outcome)

        self._observers.update(
            (id(deliveries[at]), each) for at, each in zip(first_at, observers, strict=True)
        )
        try:
            await self._deliver([deliveries[at] for at in first_at], before_fail, settle)
        finally:
            for at, place in enumerate(first_at):
                self._observers.pop(id(deliveries[place]), None)
                if outcomes[at] is None:
                    observers[at].note_outcome(Errored(NotStarted(), 0))
        spread = copies(outcomes, place_of, first_at, [None] * len(deliveries))
        deliver.report_copies(self._once, deliveries, self._route.handler, (first_at, place_of), spread)
        return spread

    async def _deliver(self, deliveries: Deliveries, before_fail: BeforeFail, settle: OnOutcome) -> None:
        """Run deliveries of distinct keys; `settle` gets each outcome."""
        new, retries, suspects = await self._sort(deliveries)
        if new:
            batch = [deliveries[place] for place in new]
            for place, outcome in zip(new, await self._run_new(batch, before_fail), strict=True):
                settle(place, outcome)
        for place, number in retries:
            settle(place, await self._run_alone(deliveries[place], number, before_fail))
        for place in suspects:
            settle(place, await self._run_suspect(deliveries[place], before_fail))

    async def _sort(self, deliveries: Deliveries) -> tuple[list[int], list[tuple[int, int]], list[int]]:
        """Return the positions of new messages, of failed ones (with the next attempt's number), and of suspects."""
        await deliver.windows(self._once)
        await self._progress.look([each.body for each in deliveries])
        new, retries, doubtful = list[int](), list[tuple[int, int]](), list[int]()
        for place, each in enumerate(deliveries):
            if each.body.deliveries > 1 or (
                each.key not in self._tally and self._progress.was_started(each.body)
            ):
                doubtful.append(place)
            elif each.key in self._tally:
                retries.append((place, self._tally.attempts(each.key) + 1))
            else:
                new.append(place)
        suspects = list[tuple[int, int, int]]()
        records = await self._attempts.lookup([deliveries[place] for place in doubtful])
        for place, record in zip(doubtful, records, strict=True):
            count = deliveries[place].body.deliveries
            if count and ended_each_time(record, count):
                assert record is not None
                retries.append((place, record.attempt + 1))
            else:
                suspects.append((0 if record is None else record.attempt, count, place))
        return new, retries, [place for _, _, place in sorted(suspects)]

    async def _run_new(self, batch: Deliveries, before_fail: BeforeFail) -> list[Outcome[Any]]:
        async with self._turns:
            await self._progress.start([each.body for each in batch])
            ran = await self._run_in_transaction(batch, 1)
        return [
            await self._outcome_of_delivery(each, outcome, 1, before_fail)
            for each, outcome in zip(batch, ran, strict=True)
        ]

    async def _run_alone(
        self, delivery: Delivery[Arrival], number: int, before_fail: BeforeFail
    ) -> Outcome[Any]:
        """Run a message whose earlier attempts all ended without a crash."""
        if self._is_stopping():
            return Errored(NotStarted(), 0)
        async with self._turns:
            [outcome] = await self._run_in_transaction([delivery], number)
        return await self._outcome_of_delivery(delivery, outcome, number, before_fail)

    async def _run_suspect(self, delivery: Delivery[Arrival], before_fail: BeforeFail) -> Outcome[Any]:
        """Run a message that may have killed its process: its attempt is recorded before it runs."""
        async with _alone.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if self._is_stopping():
                return Errored(NotStarted(), 0)
            async with self._turns:
                attempt = await self._attempts.begin(delivery)
                if not isinstance(attempt, Attempt):
                    return attempt
                outcome = await self._run_attempt(delivery, attempt)
        if outcome is None:
            error = attempts_exhausted(None, attempt.number, self._once.policy.max_attempts)
            return await self._give_up(delivery, error, attempt.number, before_fail, attempt)
        return await self._outcome_of_delivery(delivery, outcome, attempt.number, before_fail, attempt)

    async def _run_attempt(self, delivery: Delivery[Arrival], attempt: Attempt) -> Outcome[Any] | None:
        """Return the outcome of a recorded attempt; `None`: there were too many before, and it did not run.

        An attempt that fails for reasons outside the message does not count.
        """
        limit = self._once.policy.max_attempts
        if attempt.number > (limit if attempt.claim is not None else limit * OFF_DELIVERIES):
            return None
        try:
            [outcome] = await self._run_in_transaction([delivery], attempt.number)
        except BaseException:
            await asyncio.shield(self._attempts.end(attempt, counts=False))
            raise
        if not isinstance(outcome, Done) and not _is_failure(outcome):
            await self._attempts.end(attempt, counts=False)
        return outcome

    async def _run_in_transaction(self, batch: Deliveries, number: int) -> list[Outcome[Any]]:
        """Run the batch in one transaction; if only its COMMIT is refused, run each delivery in its own."""
        try:
            return await (
                self._in_thread(batch, number) if self._route.blocks else self._run_async(batch, number)
            )
        except (ModeMismatch, NoTransaction, WrongDatabase, UsageError):
            raise  # a retry cannot fix it
        except Exception as error:  # noqa: BLE001 - of the database, or of a constraint that is checked only now
            if isinstance(error, (StoreError, OSError, *self._desk.unavailable)):
                return [Unavailable(error)] * len(batch)
            if len(batch) == 1:
                return [Errored(error, 1)]
        return [outcome for each in batch for outcome in await self._run_in_transaction([each], number)]

    async def _outcome_of_delivery(
        self,
        delivery: Delivery[Arrival],
        outcome: Outcome[Any],
        number: int,
        before_fail: BeforeFail,
        attempt: Attempt | None = None,
    ) -> Outcome[Any]:
        """Return the outcome for the runner of a delivery whose transaction has ended.

        A failed attempt is recorded, so that it counts for the next process.
        """
        if not _is_failure(outcome):
            if isinstance(outcome, Done):
                self._tally.forget(delivery.key)
            return outcome
        assert isinstance(outcome, Errored)
        policy, error = self._once.policy, outcome.error
        if isinstance(error, policy.permanent):
            return await self._give_up(delivery, error, number, before_fail, attempt)
        if number >= policy.max_attempts:
            exhausted = attempts_exhausted(error, number, policy.max_attempts)
            return await self._give_up(delivery, exhausted, number, before_fail, attempt)
        self._tally.note(delivery.key, number)
        if attempt is None:
            await self._attempts.add_failed(delivery, error)
        else:
            await self._attempts.end(attempt, error, counts=True)
        return Errored(error, number, retry_later(policy, number).delay_s)

    async def _give_up(
        self,
        delivery: Delivery[Arrival],
        error: Exception,
        number: int,
        before_fail: BeforeFail,
        attempt: Attempt | None,
    ) -> Outcome[Any]:
        """Claim the key, write the dead letter, then set the record to `failed`."""

        async def with_attempt(each: Delivery[Arrival], why: BaseException, granted: Granted) -> None:
            await before_fail(each, why, replace(granted, attempt=number))

        owner = None if attempt is None or attempt.claim is None else attempt.claim.owner
        outcome = await deliver.fail_delivery(self._once, delivery, error, with_attempt, owner)
        if not isinstance(outcome, Errored | Unavailable):
            self._tally.forget(delivery.key)
        return outcome

    # --- async transactions ---

    async def _run_async(self, batch: Deliveries, number: int) -> list[Outcome[Any]]:
        windows = await deliver.windows(self._once)

        async def ensure_connected() -> Any:
            return windows

        async with self._connection() as connection:
            handle, left = self._desk.handle(connection), list[Delivery[Arrival]]()
            handler = self._handler(connection, number, left)

            async def transaction() -> list[Outcome[Any]]:
                async with self._desk.transaction(connection):
                    box: AsyncInbox = ainbox_for(handle, self._once.store, self._plan, ensure_connected)
                    outcomes = await box.run_batch(batch, handler)
                    if left:
                        await box.unmark([each.key for each in left])
                    return _without(left, batch, outcomes)

            return await aretry(transaction)

    def _handler(
        self, connection: Any, number: int, left: list[Delivery[Arrival]]
    ) -> Callable[[list[Delivery[Arrival]]], Awaitable[None]]:
        """Return the handler of the transaction. Deliveries that a stop prevents go into `left`."""
        reads, handler = self._route.reads, self._route.handler

        async def each(deliveries: list[Delivery[Arrival]]) -> None:
            left.clear()
            for at, delivery in enumerate(deliveries):
                if self._stops(deliveries, at, left):
                    break
                token = running.set(self._handler_run(delivery, number))
                try:
                    with self._report_call((delivery,), number):
                        await call(delivery.body)
                finally:
                    running.reset(token)

        async def all_of_them(deliveries: list[Delivery[Arrival]]) -> None:
            left.clear()
            if not self._stops(deliveries, 0, left):
                with self._report_call(deliveries, number):
                    await handler(connection, [reads(delivery.body) for delivery in deliveries])

        async def one(arrival: Arrival) -> Any:
            return await handler(connection, reads(arrival))

        call = self._route.around(one)
        return all_of_them if self._route.batch else each

    def _stops(self, deliveries: list[Delivery[Arrival]], at: int, left: list[Delivery[Arrival]]) -> bool:
        """Whether a stop prevents the deliveries from `at` on. Raises `NotStarted` for a single one."""
        if not self._is_stopping():
            return False
        if len(deliveries) == 1:
            raise NotStarted
        left.extend(deliveries[at:])
        return True

    @asynccontextmanager
    async def _connection(self) -> Any:
        """Lend a connection outside any transaction; after an error it is not reused."""
        connection = self._idle.pop() if self._idle else await self._desk.connect()
        try:
            yield connection
        except BaseException:
            await self._desk.let_go(connection)
            raise
        self._idle.append(connection)

    # --- a transaction in a thread ---

    async def _in_thread(self, batch: Deliveries, number: int) -> list[Outcome[Any]]:
        windows = await deliver.windows(self._once)
        async with self._connection() as connection:
            handle, left = self._desk.handle(connection), list[Delivery[Arrival]]()

            def transaction() -> list[Outcome[Any]]:
                with self._desk.transaction(connection):
                    box: Inbox = inbox_for(handle, self._once.store, self._plan, lambda: windows)
                    outcomes = box.run_batch(batch, handler)
                    if left:
                        box.unmark([each.key for each in left])
                    return _without(left, batch, outcomes)

            def handler(deliveries: list[Delivery[Arrival]]) -> None:
                left.clear()
                self._call(connection, deliveries, number, left)

            outcomes: list[Outcome[Any]] = await in_thread(self._threads, retry, transaction)
            return outcomes

    def _call(
        self,
        connection: Any,
        deliveries: list[Delivery[Arrival]],
        number: int,
        left: list[Delivery[Arrival]],
    ) -> None:
        reads, handler = self._route.reads, self._route.handler
        if self._route.batch:
            if not self._stops(deliveries, 0, left):
                with self._report_call(deliveries, number):
                    handler(connection, [reads(delivery.body) for delivery in deliveries])
            return
        for at, delivery in enumerate(deliveries):
            if self._stops(deliveries, at, left):
                break
            token = running.set(self._handler_run(delivery, number))
            try:
                with self._report_call((delivery,), number):
                    handler(connection, reads(delivery.body))
            finally:
                running.reset(token)

    # --- both ---

    @contextmanager
    def _report_call(self, deliveries: Deliveries, number: int) -> Iterator[None]:
        """Report the handler's call for these deliveries to hooks."""
        if not self._reporter.listens:
            yield
            return
        observers = [self._observers.get(id(each), NOT_OBSERVED) for each in deliveries]
        began, error = [observer.note_began(number) for observer in observers], None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            for observer, at in zip(observers, began, strict=True):
                observer.note_ended(at, error)

    def _handler_run(self, delivery: Delivery[Arrival], number: int) -> HandlerRun:
        """Return the handler's context: there is no claim, so it has no fence and no steps."""
        once = self._once
        claim = self._plan.claim_for_delivery({}, delivery)  # a name for the context; it is never sent
        granted = Granted(fence=0, attempt=number, lease_until_us=0, first_seen_us=0)
        kept = LiveClaim.since(claim, granted, monotonic(), once.policy.run_max_s)
        return HandlerRun(kept, granted, None, 0, unclaimed=True)

    async def close(self) -> None:
        """Close idle connections; users close those in use."""
        idle, self._idle = self._idle, []
        for connection in idle:
            await asyncio.shield(self._desk.let_go(connection))


def _without(left: Deliveries, batch: Deliveries, outcomes: Sequence[Outcome[Any]]) -> list[Outcome[Any]]:
    """Return the outcomes of a batch; deliveries that a stop left out are `Errored(NotStarted)`."""
    out = {id(each) for each in left}
    return [
        Errored(NotStarted(), 0) if id(each) in out else outcome
        for each, outcome in zip(batch, outcomes, strict=True)
    ]


def _is_failure(outcome: Outcome[Any]) -> bool:
    """Whether the handler started and failed."""
    return isinstance(outcome, Errored) and not isinstance(outcome.error, NotStarted)
