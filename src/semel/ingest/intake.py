"""Accept events that arrive once: journal each with its claim, answer, then run it, here or on another instance.

    take ──► claim + journal, one atomic operation ──► "accepted" ──► handler ──► done
      │          └─► known, or claimed and journaled by another: "duplicate"
      └─► the store does not answer: retry for as long as the caller allows, then "busy"

After "accepted" the event is in the store: if its instance dies, another finds the journaled claim
after its lease and runs it. Failed attempts are repeated in the same way, so nothing waits in memory.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from math import inf
from time import monotonic
from typing import Any, Self

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from semel.client import deliver
from semel.client.client_async import AsyncSemel
from semel.core.backoff import backoff_s
from semel.core.error_info import DeadLetterUnwritten, handlers_error, redact
from semel.core.settlement import attempts_exhausted
from semel.errors import (
    AttemptsExhausted,
    NotApplied,
    PolicyInvalid,
    RecordCorrupt,
    StoreError,
    StoreUnavailable,
    UsageError,
)
from semel.ingest.receipts import Receipt, receipt_for
from semel.observe.limited_log import LimitedLog
from semel.observe.log_format import about
from semel.policy import ATTEMPTS_LIMIT
from semel.runtime.context import current
from semel.runtime.handlers import awaitable
from semel.runtime.jitter import jitter, spread_s
from semel.runtime.process import new_owner
from semel.runtime.tasks import end_tasks
from semel.types import Delivery, Done, Errored, Failed, Lost, Outcome, Record, Unavailable, Unknown

__all__ = ["DeadLetterHandler", "Event", "Handler", "Intake", "IntakeLimits", "body_from_journal"]

_log = LimitedLog(logging.getLogger("semel"))

RETRY_DELAY_S = 1.0
"""The delay before the second attempt, unless the policy has one: an orphan is found at once."""
HOLD_FIRST_S, HOLD_MAX_S = 0.05, 2.0
"""The delay between two claims while the store does not answer."""
SWEEP_MIN_S, SWEEP_MAX_S = 0.05, 10.0
STUCK_FIRST_S = 0.1
"""The delay after a sweep that finished no orphan; doubled each time, up to `SWEEP_MAX_S`."""
TYPE_BYTES_MAX = 128


class Event(Struct, frozen=True, kw_only=True):
    """The argument of a handler."""

    id: str
    """The event's key: chosen by its producer."""
    type: str = ""
    tenant: str = ""
    """The tenant of the event."""
    body: bytes
    """The body as received."""

    @property
    def payload(self) -> Any:
        """The body decoded as JSON. Raises `ValueError` if it is not JSON."""
        return msgspec.json.decode(self.body)


Handler = Callable[[Event], Awaitable[Any]]
DeadLetterHandler = Callable[[Event, Exception], Awaitable[None]]
"""Called with a dead event before its record becomes `failed`. If it raises, it is called again later."""
FindOrphans = Callable[[int], Awaitable[Sequence[Record]]]
"""Called with the most records that are wanted; returns orphans of the client's consumer."""


class IntakeLimits(Struct, frozen=True, kw_only=True):
    """Limits of an intake."""

    concurrency: int = 10
    """The most handlers at once."""
    pending_max: int = 1000
    """The most unfinished events. Above it `take` and the socket wait; a webhook gets 503."""
    sweep_s: float | None = None
    """How often to look for orphans; `None`: a third of the lease, 10 s at most. `inf`: only when a retry is
    due here; the owner passes orphans to `adopt`."""
    drain_s: float = 30.0
    """How long a stop waits for handlers; then they are cancelled and their claims released."""

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= self.pending_max:
            raise PolicyInvalid("IntakeLimits needs 1 <= concurrency <= pending_max")
        if self.drain_s < 0 or (self.sweep_s is not None and self.sweep_s < SWEEP_MIN_S):
            raise PolicyInvalid(f"IntakeLimits needs drain_s >= 0 and sweep_s >= {SWEEP_MIN_S:g}")


class Intake:
    """Journals events, runs `handler(event)` in tasks, and takes over from instances that died.

    Use it as `async with intake:`; leaving drains. The client needs a durable store, because the journal is there;
    the owner of the client closes it. The handler may run again after a crash: pass
    `semel.current().idempotency_key` to the systems that it calls, or write with a unique id. `source`: where
    its events come from, for metrics. `find_orphans`: replaces the client's own search.
    """

    def __init__(
        self,
        once: AsyncSemel,
        handler: Handler,
        *,
        pace: IntakeLimits | None = None,
        dead: DeadLetterHandler | None = None,
        instance: str | None = None,
        source: str = "",
        find_orphans: FindOrphans | None = None,
    ) -> None:
        policy = once.policy
        self._handler = awaitable(handler)
        self._dead = dead
        self._pace = pace = pace or IntakeLimits()
        self._max_attempts = policy.max_attempts
        self._permanent = policy.permanent
        # Attempts are counted here, so that the dead-letter callback runs before the record becomes `failed`.
        self._once = once.using(
            replace(
                policy,
                wait_s=0,
                max_attempts=ATTEMPTS_LIMIT,
                retry_delay_s=policy.retry_delay_s or RETRY_DELAY_S,
                on_unavailable="refuse",  # an event that is not journaled is not accepted: its sender sends it again
            )
        )
        deliver.items_of(self._once).source = source
        self._source = source
        self._find_orphans: FindOrphans = find_orphans or (lambda most: once.records.orphans(limit=most))
        lease_s = deliver.items_of(once).lease_us / 1e6
        self._sweep_s: float = pace.sweep_s or min(SWEEP_MAX_S, max(SWEEP_MIN_S, lease_s / 3))
        self.instance: str = instance or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        """The name of this instance, stored with each record that it claims first."""
        self._room = asyncio.Semaphore(pace.pending_max)
        self._hands = asyncio.Semaphore(pace.concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._here: set[str] = set()
        """Keys that this process handles: its sweep skips them."""
        self._look = asyncio.Event()
        self._sweeper: asyncio.Task[None] | None = None
        self._draining = False
        self._finished = 0
        """Events with a settled record, counted to detect a sweep without progress."""

    @property
    def pending(self) -> int:
        """Events taken here and not finished."""
        return len(self._tasks)

    @property
    def body_bytes_max(self) -> int:
        """The largest body that the journal takes."""
        return self._once.policy.value_bytes_max - 1  # one byte for the encoding

    async def __aenter__(self) -> Self:
        if self._sweeper is not None:
            raise UsageError("this intake was started before; create another")
        try:
            await self._once.windows.list()  # connects: only then it is known whether the store is durable
        except StoreUnavailable as error:
            _log.warning("the store does not answer yet: %s", error)
        for place in (self._handler, getattr(self._handler, "__self__", None)):
            if (check := getattr(place, "check_at_start", None)) is not None:
                await check()  # for a table of events: refuse events that it cannot hold
        deliver.check_journal(self._once, b"")  # before anything is accepted
        self._sweeper = asyncio.create_task(self._sweep_on(), name="semel-sweeper")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.drain()

    async def drain(self) -> None:
        """Accept no more events, wait for running handlers, release the rest. Idempotent."""
        self._draining = True
        await end_tasks(self._sweeper)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._pace.drain_s)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def take(
        self, event: Event, *, hold_s: float | None = None, fingerprint: bytes | None = None
    ) -> Receipt:
        """Journal the event and start it. Returns when it is journaled or known.

        `hold_s`: how long it waits in memory while the store does not answer or the intake is full; `None`: for
        ever, for sources that never send again. Cancelling the call does not cancel the event.
        """
        if self._sweeper is None:
            raise UsageError("an intake works inside `async with intake:`")
        give_up_at = inf if hold_s is None else monotonic() + hold_s
        try:
            async with asyncio.timeout(hold_s):
                await self._room.acquire()
        except TimeoutError:
            return Receipt("busy", 1.0, "too many events are waiting here")
        if self._draining:
            self._room.release()
            return Receipt("busy", 1.0, "this instance is stopping")
        if event.tenant != self._once.tenant:
            event = replace(event, tenant=self._once.tenant)
        receipt: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        delivery = Delivery(
            key=event.id,
            body=event,
            event_type=event.type,
            fingerprint=fingerprint,
            journal=event.body,
            meta={"instance": self.instance},
        )
        self._start(self._carry(delivery, receipt, give_up_at))
        return await asyncio.shield(receipt)

    # --- one event ---

    def _start(self, carrying: Any) -> None:
        task = asyncio.create_task(carrying)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._room.release()
        if not task.cancelled() and task.exception() is not None:
            _log.error(
                "an event did not finish here; its claim ends with its lease", exc_info=task.exception()
            )

    async def _carry(
        self, delivery: Delivery[Event], receipt: asyncio.Future[Receipt], give_up_at: float
    ) -> None:
        """Claim until the store answers, then run the event if the claim is ours.

        Each try has the same owner, so a claim whose answer was lost is recognized as ours.
        """
        owner = new_owner()
        try:
            for tries in count():
                outcome = await self._run(replace(delivery, again=tries > 0), receipt, owner)
                if receipt.done():
                    return
                answer = receipt_for(outcome)
                left_s = give_up_at - monotonic()
                if answer.status != "busy" or self._draining or left_s <= 0:
                    receipt.set_result(answer)
                    return
                await asyncio.sleep(min(left_s, spread_s(backoff_s(tries, HOLD_FIRST_S, HOLD_MAX_S))))
        except asyncio.CancelledError:
            if not receipt.done():
                receipt.set_result(Receipt("busy", 1.0, "this instance is stopping"))
            raise
        except Exception as error:
            if receipt.done():
                raise
            receipt.set_exception(error)

    async def _run(
        self,
        delivery: Delivery[Event],
        receipt: asyncio.Future[Receipt] | None = None,
        owner: bytes | None = None,
        earlier: str = "",
    ) -> Outcome[Any]:
        key = delivery.key
        first = key not in self._here
        self._here.add(key)
        try:
            handle = partial(self._handle, receipt, earlier)
            handle.__wrapped__ = self._handler  # type: ignore[attr-defined]  # hooks report its name
            outcome: Outcome[Any] = await deliver.deliver_one(self._once, delivery, handle, owner)
        except StoreError as error:
            outcome = Unavailable(error)
        finally:
            if first:
                self._here.discard(key)
        if not isinstance(outcome, Unavailable):
            self._finished += 1
        self._note(key, outcome, ran=receipt is None or receipt.done())
        return outcome

    async def _handle(self, receipt: asyncio.Future[Receipt] | None, earlier: str, event: Event) -> None:
        """Run a claimed and journaled event. `earlier`: the last recorded error of its attempts, if any."""
        if receipt is not None and not receipt.done():
            receipt.set_result(Receipt("accepted"))
        attempt = current().attempt
        if attempt > self._max_attempts:
            error = attempts_exhausted(None, attempt, self._max_attempts)
            if earlier:
                error = AttemptsExhausted(f"attempt {attempt} of {self._max_attempts} allowed: {earlier}")
            await self._dead_letter(event, error)
            raise error
        try:
            await self._hands.acquire()
        except asyncio.CancelledError:
            if self._once.mode == "quarantine":  # it has not begun, so its outcome is not unknown
                raise NotApplied("the instance stopped before the handler started") from None
            raise
        try:
            await self._handler(event)
        except self._permanent as error:
            await self._dead_letter(event, error)
            raise
        except Exception as error:
            if attempt < self._max_attempts or isinstance(error, NotApplied):
                raise
            last = attempts_exhausted(error, attempt, self._max_attempts)
            await self._dead_letter(event, last)
            raise last from error
        finally:
            self._hands.release()

    async def _dead_letter(self, event: Event, error: Exception) -> None:
        if self._dead is None:
            return
        try:
            await self._dead(event, error)
        except Exception as failure:  # noqa: BLE001 - it may raise anything
            record_id = deliver.items_of(self._once).id(event.id)
            deliver.reporter_of(self._once).report_stuck_dead_letter(record_id, self._source, failure)
            said, why = self._error_text(error), repr(failure)
            _log.error(
                "the dead-letter callback failed for event %r and will be called again: %s (given up for %s)",
                event.id, why, said, extra=about("dead_letter_stuck", key=event.id, error=why, reason=said,
                                                 next="the callback is called again"),
            )  # fmt: skip
            raise DeadLetterUnwritten(f"the dead-letter callback failed: {why}") from error
        self._report_dead_letter(event, error)

    def _error_text(self, error: BaseException) -> str:
        """Return an error for the log, redacted as its record is."""
        policy = self._once.policy
        if policy.redact_error is None:
            return repr(error)
        info = redact(handlers_error(error), policy)
        return ascii(f"{info.kind}: {info.message}")

    def _report_dead_letter(self, event: Event, error: Exception) -> None:
        reason = "unknown" if isinstance(error, RecordCorrupt) else "failed"
        items = deliver.items_of(self._once)
        deliver.reporter_of(self._once).report_dead_letter(
            items.id(event.id),
            self._handler,
            items.with_event_type(
                Delivery(key=event.id, body=None, event_type=event.type, source=self._source)
            ),
            reason=reason,
            attempts=current().attempt,
            error=error,
        )

    def _note(self, key: str, outcome: Outcome[Any], *, ran: bool) -> None:
        """Log the outcome, and schedule a sweep for a retry."""
        match outcome:
            case Errored(error, attempt, retry_after_s) if isinstance(error, Exception):
                after, said = f"the next in {retry_after_s:g} s", self._error_text(error)
                _log.warning(
                    "attempt %d at event %r failed, %s: %s", attempt, key, after, said,
                    extra=about("failed", key=key, attempt=attempt, error=said, next=after),
                )  # fmt: skip
                asyncio.get_running_loop().call_later(retry_after_s, self._look.set)
            case Failed(error, replayed=False):
                said = self._error_text(error)
                _log.error(
                    "event %r is given up: %s; semel forget lets it run again", key, said,
                    extra=about("given_up", key=key, error=said, next="semel forget lets it run again"),
                )  # fmt: skip
            case Unknown(_, error) if error is not None:
                said = self._error_text(error)
                _log.error("event %r waits for a decision (semel resolve, semel forget): %s", key, said)
            case Lost() if ran:
                _log.warning(
                    "another instance took event %r over; its result counts", key,
                    extra=about("lost", key=key, next="the other instance's result counts"),
                )  # fmt: skip
            case Done(recorded=False):
                _log.warning("event %r ran, but the store could not record it: it may run again", key)
            case _:
                pass

    # --- orphans ---

    async def _sweep_on(self) -> None:
        """Sweep regularly and when a retry is due. Backs off without progress."""
        stuck = 0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._sweep_s * jitter.uniform(0.7, 1.3)):  # jitter
                    await self._look.wait()
            self._look.clear()
            begun, finished = 0, self._finished
            try:
                begun = await self.sweep()
            except StoreError as error:
                _log.warning("the search for orphans failed: %s", error)
            except Exception:  # noqa: BLE001 - the sweeper must not die of one bad turn
                _log.exception("the search for orphans failed")
            if begun and finished == self._finished:
                await asyncio.sleep(backoff_s(stuck, STUCK_FIRST_S, SWEEP_MAX_S))
                stuck = 0 if finished != self._finished else stuck + 1

    async def sweep(self) -> int:
        """Start journaled events without an owner, as many as the limits allow. Returns their number."""
        return await self.adopt(await self._find_orphans(4 * self._pace.concurrency))

    async def adopt(self, records: Sequence[Record]) -> int:
        """Start as many of these orphans as the limits allow. Returns their number."""
        limit, begun = self._pace.concurrency, 0
        # Other instances see the same orphans, so each starts at a random one.
        for record in jitter.sample(records, len(records)):
            if record.key in self._here or self._draining or self._hands.locked() or self._room.locked():
                continue
            await self._room.acquire()
            self._here.add(record.key)
            self._start(self._recover(record))
            begun += 1
            if begun == limit:
                self._look.set()  # there may be more orphans
                break
        return begun

    async def _recover(self, record: Record) -> None:
        try:
            event = Event(
                id=record.key, type=record.event_type, tenant=record.tenant, body=record.journal or b""
            )
            # It was received when it was journaled, by this instance or by another.
            delivery = Delivery(key=event.id, body=event, event_type=event.type, again=True)
            try:
                event = replace(event, body=body_from_journal(record.journal))
            except RecordCorrupt as error:
                await self._quarantine(delivery, error)
            else:
                earlier = "".join(
                    f"{each.kind.removeprefix('builtins.')}: {each.message}" for each in record.errors[-1:]
                )
                await self._run(replace(delivery, body=event), earlier=earlier)
        finally:
            self._here.discard(record.key)

    async def _quarantine(self, delivery: Delivery[Event], error: Exception) -> None:
        """Leave an event whose journal cannot be read to a person: it becomes `unknown`, and keeps its journal.

        The dead letter gets the bytes first.
        """

        async def refuse(event: Event) -> None:
            try:
                await self._dead_letter(event, error)
            except Exception as failure:
                raise NotApplied("its dead letter was not written") from failure
            raise error

        refuse.__wrapped__ = self._handler  # type: ignore[attr-defined]  # hooks report its name
        outcome: Outcome[Any] = await deliver.deliver_one(self._once, delivery, refuse, quarantine=True)
        self._finished += 1
        self._note(delivery.key, outcome, ran=True)


def body_from_journal(journal: bytes | None) -> bytes:
    """Return the body of a journaled event. Raises `RecordCorrupt` for any other journal."""
    if journal is None:
        return b""
    if journal[:1] == b"r":  # the codec's form of bytes; nothing else is accepted
        return journal[1:]
    raise RecordCorrupt("the journal of an event holds its bytes, and this one something else")
