"""The one loop behind every broker: receive, claim, run, complete, and only then acknowledge.

::

    receive ──► key ──► claim together ──► handlers ──► complete together ──► outcome
                                                                                 │
       ack    ◄── Done (recorded, or unguarded by choice), Failed (dead-lettered before it was recorded) ◄──────┤
       dead-letter, ack ◄── Unknown, Mismatch, Late, no key ◄───────────────────────────┤
       retry  ◄── Busy, Unavailable: kept in hand, claimed again later ◄─────────┤
       nack   ◄── Errored, Lost, Done (not recorded) ◄───────────────────────────┘

A message is in hand from its receipt until one of these answers. While it is in hand, the runner sends heartbeats for
it to the broker. Nothing is acknowledged before it is durable, so a crash anywhere repeats a delivery and loses none.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from time import monotonic
from typing import Any

import msgspec
from msgspec.structs import replace

from semel.brokers.answers import Answers
from semel.brokers.dead_letters import DeadLetters, letter_for
from semel.brokers.handling import Handling, work_for
from semel.brokers.outages import NOTICE_S, RECEIVE_WAIT_S, SourceLink, outage_pause_s
from semel.brokers.retry_queue import FailureCounts, FailureLog, RetryQueue, RunnerCounters, RunnerLimits
from semel.brokers.routes import Route, event_facts, route_for
from semel.brokers.source import Arrival, DeadLetterInfo, Source
from semel.client.client_async import AsyncSemel
from semel.core.commands import Granted
from semel.core.settlement import NotStarted, retry_later
from semel.errors import KeyInvalid, KeyMissing, SourceUnavailable, StoreError, UsageError
from semel.observe.limited_log import OutageLog
from semel.runtime.process import asyncio
from semel.runtime.tasks import end_tasks
from semel.types import (
    Busy,
    Delivery,
    Done,
    Errored,
    Failed,
    Late,
    Lost,
    Mismatch,
    Outcome,
    Unavailable,
    Unknown,
)

__all__ = ["Runner"]

_log = logging.getLogger("semel.runner")

LEFT_MAX = 100_000
"""The most keys of returned messages that are remembered."""


class HeldDelivery(msgspec.Struct, eq=False):
    """A delivery in hand."""

    arrival: Arrival
    route: Route | None = None
    delivery: Delivery[Arrival] | None = None
    tries: int = 0
    running: bool = False
    """Whether processing has begun; before that, returning it costs nothing."""
    gone: bool = False
    """Whether the broker has given it to another consumer: it is not answered any more."""


class Runner:
    """Runs handlers for the messages of a source, once for each key. One event loop; stop it with `stop()`."""

    def __init__(
        self,
        source: Source,
        handler: Callable[..., Any] | Sequence[Route],
        *,
        once: AsyncSemel | None = None,
        pace: RunnerLimits | None = None,
    ) -> None:
        self.source: Source = source
        self.pace: RunnerLimits = pace or RunnerLimits()
        self.counts: RunnerCounters = RunnerCounters()
        if callable(handler):
            if once is None:
                raise UsageError("a bare handler needs a client: Runner(source, handler, once=aopen(...))")
            self.routes: tuple[Route, ...] = (Route(handler, once=once),)
        else:
            self.routes = tuple(handler)
        if not self.routes:
            raise UsageError("a runner needs at least one handler")
        self._failure_log = FailureLog(source.name)
        self._link = SourceLink(source, lambda: self._stopping)
        self._dead_letters = DeadLetters(source, self._link, self.counts, self._failure_log)
        self._tally: FailureCounts = FailureCounts()
        self._room: RetryQueue[HeldDelivery] = RetryQueue(self.pace.room)
        self._lanes: dict[str, deque[HeldDelivery]] = {}
        self._waiting: deque[list[HeldDelivery]] = deque()
        self._hand: set[HeldDelivery] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._free = self.pace.concurrency
        self._answers = Answers(
            source,
            self._link,
            self.counts,
            self._spawn,
            batch=self.pace.batch,
            more_may_come=lambda: bool(self._hand) and not self._stopping,
        )
        self._outages = 0
        self._outage_until = 0.0
        after = "nothing is acknowledged until it answers"
        self._store_outage = OutageLog(_log, "the store", event="store_outage", then=after, grace_s=1.0)
        self._stopping = False
        self._left: set[str] = set()
        self._until_idle = False
        self._fatal: BaseException | None = None

    def stop(self) -> None:
        """Receive nothing more, finish running handlers, and let `run` return. Safe in a signal handler of the loop."""
        self._stopping = True

    @property
    def stopping(self) -> bool:
        """Whether the runner is stopping: it receives nothing more."""
        return self._stopping

    def stop_when_idle(self) -> None:
        """Stop as soon as the source has nothing to deliver and nothing is in hand."""
        self._until_idle = True

    @property
    def left(self) -> int:
        """How many messages were returned to the broker and not done since: they will be delivered again."""
        return len(self._left)

    async def run(self) -> None:
        """Run until `stop()`. Raises errors that a retry cannot fix, after draining."""
        with ThreadPoolExecutor(self.pace.concurrency, thread_name_prefix="semel-handler") as threads:
            self._works: dict[Route, Handling] = {
                route: work_for(route, threads, lambda: self._stopping, self._note_silence)
                for route in self.routes
            }
            beating: asyncio.Task[None] | None = None
            try:
                await self._retry_while_unavailable(self.source.open)
                if self.source.deadline_s:
                    beating = asyncio.create_task(self._beat())
                while not self._stopping:
                    await self._turn()
            finally:
                await self._drain(beating)
        if self._fatal is not None:
            raise self._fatal

    # --- receive ---

    async def _turn(self) -> None:
        """Start due retries, then receive once from the broker."""
        now = monotonic()
        self._dispatch(self._room.due(now))
        next_at = self._room.next_at()
        wait_s = RECEIVE_WAIT_S if next_at is None else min(RECEIVE_WAIT_S, max(0.0, next_at - now))
        limit = min(self.pace.batch, self.pace.in_hand - len(self._hand))
        if (
            limit <= 0
            or self._waiting
            or self._store_is_away
            or (self._room.full and not self.source.redelivers)
        ):
            await self._wait_for_handler(wait_s)
            return
        # A message that a handler gives back while this waits is not in hand and not here: the next turn sees it.
        nothing_in_hand = not self._hand
        arrivals = await self._retry_while_unavailable(lambda: self.source.receive(limit, wait_s))
        if arrivals:
            self.counts.received += len(arrivals)
            held = [HeldDelivery(arrival) for arrival in arrivals]
            self._hand.update(held)
            self._dispatch(held)
        elif self._until_idle and nothing_in_hand and getattr(self.source, "caught_up", True):
            self.stop()

    @property
    def _store_is_away(self) -> bool:
        """Whether to receive nothing for now: the messages in hand will show when the store is back."""
        return self._outages > 0 and bool(self._room or self._tasks)

    async def _wait_for_handler(self, wait_s: float) -> None:
        """Wait until a handler has ended, at most `wait_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(wait_s)

    async def _retry_while_unavailable(self, ask: Callable[[], Any]) -> Any:
        return await self._link.ask(ask)

    # --- dispatch ---

    def _dispatch(self, held: Sequence[HeldDelivery]) -> None:
        """Find routes and keys, and start batches while handlers are free."""
        ready = []
        for each in held:
            if each.gone:
                self._release(each)
            elif each.delivery is not None or self._find_route_and_key(each):
                ready.append(each)
        if self.pace.order:
            for each in ready:
                lane = self._lanes.setdefault(each.arrival.lane, deque())
                if not each.tries:
                    lane.append(each)
                if lane[0] is each:  # those behind it wait, also while it is parked
                    self._waiting.append([each])
        else:
            by_route: dict[Route, list[HeldDelivery]] = {}
            for each in ready:
                assert each.route is not None
                by_route.setdefault(each.route, []).append(each)
            self._waiting.extend(by_route.values())
        self._launch()

    def _find_route_and_key(self, held: HeldDelivery) -> bool:
        """Find the route and the key. Returns `False` if there is none; the message is then acked or dead-lettered."""
        try:
            event_type, event_time_us = event_facts(held.arrival)
            route = route_for(self.routes, event_type)
            if route is None:  # no route takes this type: acknowledged, as a filter would
                self._ack(held)
                return False
            held.route = route
            held.delivery = route.delivery(held.arrival, event_type, event_time_us)
        except (KeyMissing, KeyInvalid) as error:
            if self.pace.no_key == "refuse":
                self._fatal = self._fatal or error
                self._return(held, 0.0)
                self.stop()
            else:
                self._start_dead_letter(held, "no-key", error)
            return False
        return True

    def _launch(self) -> None:
        """Start waiting batches while handlers are free; a batch takes at most one handler per message."""
        while self._waiting and self._free > 0 and not self._stopping:
            batch = self._waiting.popleft()
            for each in batch:
                each.running = True
            route = batch[0].route
            assert route is not None
            share = 1 if self._works[route].whole else min(self._free, len(batch))
            self._free -= share
            self._spawn(self._deliver(batch, share))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fatal = self._fatal or error
            self.stop()

    async def _deliver(self, batch: list[HeldDelivery], share: int) -> None:
        """Claim, run and complete a batch; each message is answered as soon as its outcome is known."""
        route = batch[0].route
        assert route is not None
        deliveries = [
            replace(each.delivery, again=True) if each.tries else each.delivery
            for each in batch
            if each.delivery is not None
        ]
        unanswered, kept = set(range(len(batch))), share

        def settle(at: int, outcome: Outcome[Any]) -> None:
            nonlocal kept
            unanswered.discard(at)
            self._settle(batch[at], outcome)
            if len(unanswered) < kept:  # fewer messages than handlers are left: another batch may have one
                kept -= 1
                self._free += 1
                self._launch()

        try:
            outcomes = await self._works[route].deliver(deliveries, share, self._before_fail, settle)
            for at in sorted(unanswered):  # later copies of a key within the batch
                marked = route.once.mode == "mark" and isinstance(outcomes[at], Errored)
                settle(at, Done(None, replayed=True) if marked else outcomes[at])
        except StoreError as error:
            for at in sorted(unanswered):
                settle(at, Unavailable(error))
        finally:
            for at in unanswered:  # cancelled before its turn
                self._return(batch[at], 0.0)
            self._free += kept
            self._launch()

    # --- answer ---

    def _settle(self, held: HeldDelivery, outcome: Outcome[Any]) -> None:
        """Answer the broker according to the outcome."""
        held.running = False
        if isinstance(outcome, Done | Failed | Busy) and getattr(outcome, "recorded", True):
            self._outages = 0  # the store has answered; other outcomes are possible without its answer
            self._store_outage.end()
        if held.gone:
            self._release(held)
            return
        match outcome:
            case Done(recorded=True, replayed=replayed) | Failed(replayed=replayed):
                self.counts.duplicates += replayed
                self._ack(held)
            case Done(guarded=False):  # by the policy's choice: it ran, and it will not be recorded
                self.counts.unguarded += 1
                self._ack(held)
            case Unknown(_, error):
                self._start_dead_letter(held, "unknown", error)
            case Mismatch() | Late():
                self._start_dead_letter(held, "mismatch" if isinstance(outcome, Mismatch) else "late")
            case Busy(retry_after_s):
                self._park(held, retry_after_s)
            case Unavailable(error):
                self._keep(held, self._outage_s(error))
            case Errored(error, attempt, retry_after_s):
                self._handle_failure(held, error, attempt, retry_after_s)
            case Done():
                self._retry(held, self._outage_s("a completion was not stored"))
            case Lost():
                self._failure_log.log_lost("" if held.delivery is None else held.delivery.key)
                self._retry(held, 0.0)

    def _handle_failure(
        self, held: HeldDelivery, error: BaseException, attempt: int, retry_after_s: float
    ) -> None:
        """Retry later. If no record counts the attempts, as in observe mode, they are counted here.

        A mark stays, so a message of mode mark would be a duplicate when it comes again: it goes to the dead letters.
        """
        if isinstance(error, NotStarted):
            self._return(held, 0.0)
            return
        assert held.delivery is not None
        assert held.route is not None
        policy, stuck = held.route.once.policy, self._dead_letters.is_stuck(held.delivery.key)
        self.counts.errors += (
            not stuck or attempt <= policy.max_attempts
        )  # later only its dead letter is tried
        if held.route.once.mode == "mark":
            self._start_dead_letter(held, "failed", error)
            return
        if not retry_after_s:  # a released record would have a delay
            attempt = self._tally.count_failure(held.delivery.key, held.arrival.deliveries)
            if attempt >= policy.max_attempts:
                self._tally.forget(held.delivery.key)
                self._start_dead_letter(held, "failed", error)
                return
            retry_after_s = retry_later(policy, attempt).delay_s
        if not stuck:
            self._failure_log.log_failure(held.delivery.key, attempt, retry_after_s, error, policy)
        self._retry(held, retry_after_s)

    def _outage_s(self, error: object) -> float:
        """Return how long to pause before the store is used again: longer each time, the same for tries at one time."""
        now = monotonic()
        if now >= self._outage_until:
            self._store_outage.report(error)
            self._outage_until = now + outage_pause_s(self._outages)
            self._outages += 1
        return self._outage_until - now

    def _note_silence(self) -> None:
        """Report that completions wait for the store; their outcomes come only when it answers or a lease ends."""
        self._store_outage.report("completions have no answer and are retried")
        self._outages = self._outages or 1

    def _ack(self, held: HeldDelivery) -> None:
        if self._left and held.delivery is not None:
            self._left.discard(held.delivery.key)
        self._release(held)
        self._answers.ack(held.arrival)

    def _park(self, held: HeldDelivery, delay_s: float) -> None:
        """Retry a busy message when the owner's lease ends. If the retry queue is full, return it to the broker."""
        if self._room.full and self.source.redelivers and not self.pace.order:
            self._return(held, delay_s)
        else:
            self._keep(held, delay_s)

    def _retry(self, held: HeldDelivery, delay_s: float) -> None:
        """Retry a message that is not done: the broker redelivers it if it can and no order is kept."""
        if self.source.redelivers and not self.pace.order:
            self._return(held, delay_s)
        else:
            self._keep(held, delay_s)

    def _keep(self, held: HeldDelivery, delay_s: float) -> None:
        self.counts.parked += 1
        held.tries += 1
        self._room.enter(held, monotonic() + delay_s)

    def _return(self, held: HeldDelivery, delay_s: float) -> None:
        self._release(held)
        if not held.gone and self.source.redelivers and not self._link.away:
            if held.delivery is not None and len(self._left) < LEFT_MAX:
                self._left.add(held.delivery.key)
            self._answers.nack([held.arrival], delay_s)

    def _release(self, held: HeldDelivery) -> None:
        """Remove a delivery from those in hand; the next one of its lane may start."""
        self._hand.discard(held)
        lane = self._lanes.get(held.arrival.lane)
        if lane and lane[0] is held:
            lane.popleft()
            if lane:
                self._waiting.append([lane[0]])
            else:
                del self._lanes[held.arrival.lane]

    # --- dead letters ---

    async def _before_fail(self, delivery: Delivery[Arrival], error: BaseException, granted: Granted) -> None:
        """Write the dead letter of a message before it is recorded as failed."""
        route = route_for(self.routes, delivery.event_type)
        await self._dead_letters.write_failed(delivery, error, granted, route)

    def _start_dead_letter(self, held: HeldDelivery, reason: str, error: BaseException | None = None) -> None:
        """Start to dead-letter a message; it is acknowledged afterwards."""
        consumer = "" if held.route is None or held.delivery is None else held.route.once.consumer
        key = "" if held.delivery is None else held.delivery.key
        held.running = True
        policy = None if held.route is None else held.route.once.policy
        self._spawn(self._dead_letter(held, letter_for(reason, consumer, key, error, policy)))

    async def _dead_letter(self, held: HeldDelivery, letter: DeadLetterInfo) -> None:
        try:
            await self._dead_letters.write(held.arrival, letter, held.route)
        except SourceUnavailable:
            held.running = False
            self._keep(held, outage_pause_s(held.tries))
            return
        self._ack(held)

    # --- heartbeat and end ---

    async def _beat(self) -> None:
        """Extend the deadline of all messages in hand, each third of the deadline."""
        assert self.source.deadline_s is not None
        while True:
            await asyncio.sleep(self.source.deadline_s / 3)
            held = list(self._hand)
            if not held:
                continue
            started_at = monotonic()
            try:
                gone = {id(each) for each in await self.source.extend([each.arrival for each in held])}
            except SourceUnavailable as error:
                self._link.report(f"a heartbeat failed: {error}", started_at)
                continue
            for each in held:
                if id(each.arrival) in gone:
                    each.gone = True

    async def _drain(self, beating: "asyncio.Task[None] | None") -> None:
        """Return messages that have not started, finish the others, acknowledge them, and close."""
        self._stopping = True
        self._room.empty()
        self._waiting.clear()
        self._lanes.clear()
        idle = [each for each in self._hand if not each.running]
        for held in idle:
            self._release(held)
        back = [held.arrival for held in idle if not held.gone]
        if back and self.source.redelivers and not self._link.away:  # else it redelivers them by itself
            self._answers.nack(back, 0.0)
        until = monotonic() + self.pace.drain_s
        while left := self._tasks | self._answers.tasks:
            await asyncio.wait(left, timeout=NOTICE_S, return_when=asyncio.FIRST_COMPLETED)
            self._link.break_off()
            if monotonic() >= until:
                until = inf  # a second cancellation would interrupt what a handler does after the first
                for task in self._tasks:
                    task.cancel()
        await end_tasks(beating)
        for work in self._works.values():
            await work.close()
        await self._link.close()
