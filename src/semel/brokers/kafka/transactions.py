"""Kafka to Kafka: outputs and offsets commit in one transaction, once for each key.

::

    receive ──► key ──► claim together ──► marks ──► handlers ──► one transaction ──► complete together
                           │                                        outputs, marks, dead letters, offsets
                           ├── Done, Failed: nothing is sent, the offset moves
                           └── Busy, unavailable, to be retried: its partition waits before it

A handler returns its outputs; it produces nothing itself. The transaction is committed before the record
is completed: a crash in between leaves a record that looks unfinished and an offset that has
moved, so nothing is lost. In the other order a redelivery would find the key done without its output.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace

from semel.brokers.dead_letters import DeadLetters, headers_of, letter_for
from semel.brokers.handling import call_of
from semel.brokers.kafka.batch import Backlog, Piece, TransactionClaims, hold_back, parts_of
from semel.brokers.kafka.options import place_of
from semel.brokers.kafka.sending import is_too_large
from semel.brokers.kafka.transactor import (
    PartitionBatch,
    ProducedMessage,
    TransactionOptions,
    TransactionResult,
    Transactor,
    Where,
)
from semel.brokers.outages import OUTAGE_MAX_S, RECEIVE_WAIT_S, SourceLink, outage_pause_s
from semel.brokers.retry_queue import FailureLog, RunnerCounters, RunnerLimits
from semel.brokers.routes import Middleware, Route, event_facts
from semel.brokers.source import DeadLetterInfo
from semel.client import deliver
from semel.client.claims import Claimed
from semel.client.client_async import AsyncSemel
from semel.core.backoff import backoff_s
from semel.core.commands import Invoke, Raised
from semel.core.settlement import attempts_exhausted, is_last
from semel.errors import KeyInvalid, KeyMissing, SourceUnavailable, UsageError
from semel.runtime.process import asyncio
from semel.runtime.tasks import end_tasks
from semel.types import Busy, Done, Failed, Late, Mismatch, Mode, Unavailable, Unknown

__all__ = ["KafkaTransaction", "Output", "TransactionCounts"]

_log = logging.getLogger("semel.kafka")

ABORT_FIRST_S = 0.02
ABORT_MAX_S = 2.0


class Output(msgspec.Struct, frozen=True):
    """A message that a handler wants produced."""

    body: bytes
    key: bytes | None = None
    topic: str = ""
    """Empty: the transaction's own output."""
    headers: Sequence[tuple[str, bytes]] = ()


class TransactionCounts(RunnerCounters):
    """Counts since its start."""

    transactions: int = 0
    aborts: int = 0
    marked: int = 0
    """Duplicates that only the marks recognized."""
    unrecorded: int = 0
    """Committed, but not recorded in the store: until its lease ends the key is busy, then a duplicate may run."""


class Transform(Route):
    """The handler of a transaction."""

    refuses: ClassVar[frozenset[Mode]] = frozenset({"inbox", "lease", "quarantine", "mark", "observe"})
    instead: ClassVar[str] = 'open the client with mode="transaction"'


class KafkaTransaction:
    """Consume, transform and produce in transactions. One event loop; stop it with `stop()`.

    `handler(message)` returns the `Output`s of a message: one, a list, or `None`. `marks`: a compacted topic, with as
    many partitions as the consumed one, for committed keys: it closes the gap between commit and
    completion for duplicates in the same partition.
    """

    def __init__(
        self,
        url: str,
        handler: Callable[..., Any],
        *,
        once: AsyncSemel,
        output: str = "",
        marks: str = "",
        key: Any = None,
        middleware: Sequence[Middleware] = (),
        pace: RunnerLimits | None = None,
    ) -> None:
        self.route: Transform = Transform(handler, once=once, key=key, middleware=middleware)
        self.source: Transactor = Transactor(*place_of(url, TransactionOptions), output, marks)
        self.pace: RunnerLimits = pace or RunnerLimits()
        self.counts: TransactionCounts = TransactionCounts()
        self._failure_log = FailureLog(self.source.name)
        self._link = SourceLink(self.source, lambda: self._stopping)
        self._dead_letters = DeadLetters(self.source, self._link, self.counts, self._failure_log)
        self._once = self.route.once
        self._holdings = TransactionClaims(self._once)
        self._output = output
        self._call: Any = None
        self._backlog = Backlog()
        self._outages = 0
        self._stopping = False
        self._stopped_at = 0.0
        self._until_idle = False
        self._fatal: BaseException | None = None

    def stop(self) -> None:
        """Receive nothing more, finish running handlers, and let `run` return. Safe in a signal handler of the loop."""
        if not self._stopping:
            self._stopping, self._stopped_at = True, monotonic()

    def stop_when_idle(self) -> None:
        """Stop when there is nothing to consume and nothing pending."""
        self._until_idle = True

    @property
    def left(self) -> int:
        """Messages that will be redelivered: none, because a log takes nothing back."""
        return 0

    async def run(self) -> None:
        """Run until `stop`. Raises `Fenced`, `SourceRefused` and other permanent errors."""
        with ThreadPoolExecutor(self.pace.concurrency, thread_name_prefix="semel-handler") as threads:
            self._call = call_of(self.route, threads)
            beating = asyncio.create_task(self._poll_group())
            try:
                await self._retry_while_unavailable(self.source.open)
                while not self._stopping:
                    await self._turn()
            finally:
                await end_tasks(beating)
                await self._link.close()
        if self._fatal is not None:
            raise self._fatal

    async def _turn(self) -> None:
        """Run one transaction, or wait shortly."""
        pieces = await self._take_batch()
        if not pieces:
            return
        for number, piece in enumerate(pieces):
            piece.number = number
        try:
            await self._claim(pieces)
            hold_back(pieces)
            await self._handle(pieces)
            hold_back(pieces)
            await self._finish(pieces)
        except BaseException:
            self._holdings.drop(pieces)
            raise

    async def _finish(self, pieces: Sequence[Piece]) -> None:
        """Commit, then complete; release the rest."""
        committed = await self._commit(pieces)
        await self._record(pieces, committed)

    # --- receive ---

    async def _take_batch(self) -> list[Piece]:
        self._backlog.keep(self.source.ours)
        await self._retry_while_unavailable(
            lambda: self.source.hold(self._backlog.full_partitions(self.pace.batch))
        )
        room = self.pace.in_hand - len(self._backlog)
        ready = self._backlog.ready()
        if ready < self.pace.batch and room > 0:
            arrivals = await self._retry_while_unavailable(
                lambda: self.source.receive(min(self.pace.batch, room), 0.0 if ready else self._wait_s())
            )
            self.counts.received += len(arrivals or ())
            self._backlog.add(arrivals or ())
            if not arrivals and self._until_idle and not len(self._backlog) and self.source.caught_up:
                self.stop()
        elif not ready:
            await asyncio.sleep(self._wait_s())
        self._backlog.keep(self.source.ours)
        return self._backlog.take(self.pace.batch)

    def _wait_s(self) -> float:
        """Return the time until the next event."""
        next_at = self._backlog.next_at()
        return RECEIVE_WAIT_S if next_at is None else min(RECEIVE_WAIT_S, max(0.0, next_at - monotonic()))

    async def _retry_while_unavailable(self, ask: Callable[[], Any]) -> Any:
        return await self._link.ask(ask)

    async def _poll_group(self) -> None:
        """Poll the group while handlers run, to stay a member."""
        while True:
            await asyncio.sleep(self.source.deadline_s / 3)
            with suppress(SourceUnavailable):
                await self.source.extend(())

    # --- claim ---

    async def _claim(self, pieces: Sequence[Piece]) -> None:
        """Find the keys, claim them in one round trip, and decide about each record."""
        firsts: dict[str, Piece] = {}
        for piece in pieces:
            if self._find_key(piece):
                assert piece.delivery is not None
                leader = firsts.setdefault(piece.delivery.key, piece)
                if leader is not piece:
                    self._follow(piece, leader)
        asked = list(firsts.values())
        answers = await self._holdings.claim(asked, self.route.handler)
        for piece, answer in zip(asked, answers, strict=True):
            self._note_answer(piece, answer)
        tried = [piece for piece in pieces if piece.runs and piece.claim and piece.claim.attempt > 1]
        if len(pieces) > 1:
            for piece in tried:
                self._backlog.alone(piece)
                piece.again_s = 0.0

    def _find_key(self, piece: Piece) -> bool:
        try:
            event_type, event_time_us = event_facts(piece.arrival)
            delivery = self.route.delivery(piece.arrival, event_type, event_time_us)
        except (KeyMissing, KeyInvalid) as error:
            if self.pace.no_key == "refuse":
                self._fatal = self._fatal or error
                piece.again_s = 0.0
                self.stop()
            else:
                self._dead_letter(piece, "no-key", error)
            return False
        delivery = replace(delivery, again=piece.again)
        [piece.delivery] = deliver.items_of(self._once).with_fingerprints([delivery])
        return True

    def _follow(self, piece: Piece, leader: Piece) -> None:
        """Handle a copy within the batch; one with another payload is claimed after the first is settled."""
        piece.leader = leader
        assert piece.delivery is not None
        assert leader.delivery is not None
        if piece.delivery.fingerprint != leader.delivery.fingerprint:
            piece.again_s = 0.0

    def _note_answer(self, piece: Piece, answer: Any) -> None:
        if not isinstance(answer, Unavailable):
            self._outages = 0
        match answer:
            case Claimed():
                self._holdings.hold(piece, answer)
                piece.runs = not self._is_marked(piece, answer)
            case Done() | Failed():
                pass  # its offset moves, and nothing is sent
            case Unknown(_, error):
                self._dead_letter(piece, "unknown", error)
            case Mismatch():
                self._dead_letter(piece, "mismatch")
            case Late():
                self._dead_letter(piece, "late")
            case Busy(retry_after_s):
                self.counts.parked += 1
                piece.again_s = retry_after_s
            case Unavailable(error):
                piece.again_s = self._outage_s(error)
            case _:
                raise AssertionError(f"no answer to a claim: {answer!r}")

    def _is_marked(self, piece: Piece, claim: Claimed) -> bool:
        """Whether the key was committed but not recorded."""
        marks = self.source.marks
        found = marks is not None and marks.has(piece.where, claim.key, claim.claim.window_us)
        self.counts.marked += found
        if found:
            deliver.observer_of(claim).expect(known=True)
        return found

    def _outage_s(self, error: BaseException) -> float:
        delay_s = outage_pause_s(self._outages)
        _log.warning("the store cannot be reached (%s); again in %.1f s", error, delay_s)
        self._outages += 1
        return delay_s

    # --- handlers ---

    async def _handle(self, pieces: Sequence[Piece]) -> None:
        """Run handlers: those of one lane in order, lanes at the same time."""
        lanes: dict[str, list[Piece]] = defaultdict(list)
        for piece in pieces:
            if piece.runs and piece.again_s is None:
                lanes[piece.arrival.lane].append(piece)
        free = asyncio.Semaphore(self.pace.concurrency)
        stopped: set[Any] = set()

        async def work(lane: Sequence[Piece]) -> None:
            for piece in lane:
                if piece.where in stopped:
                    piece.again_s = 0.0
                    continue
                async with free:
                    await self._run(piece)
                if piece.again_s is not None:
                    stopped.add(piece.where)

        tasks = {asyncio.create_task(work(lane)) for lane in lanes.values()}
        left = tasks
        while left:
            _, left = await asyncio.wait(left, timeout=RECEIVE_WAIT_S)
            if self._overdue:
                for task in left:
                    task.cancel()
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    @property
    def _overdue(self) -> bool:
        """Whether the drain time of a stop is over."""
        return self._stopping and monotonic() - self._stopped_at > self.pace.drain_s

    async def _run(self, piece: Piece) -> None:
        claim = piece.claim
        assert claim is not None
        most = self._once.policy.max_attempts
        if claim.attempt > most:
            self._handle_error(piece, attempts_exhausted(None, claim.attempt, most))
            return
        if self._stopping:  # no further handler starts; its claim is given back
            piece.again_s = 0.0
            return
        call = Invoke(partial(self._call, piece.arrival), claim.claim, claim.granted)
        observer = deliver.observer_of(claim)
        began = observer.note_began(claim.attempt)
        ran = await deliver.invoke(self._once, call)
        observer.note_ended(began, ran.error if isinstance(ran, Raised) else None)
        if isinstance(ran, Raised):
            if ran.lost:
                piece.again_s = 0.0
                self._holdings.lose([piece])
            else:
                self._handle_error(piece, ran.error)
            return
        try:
            piece.sends = self._sends(piece, claim, ran.value)
        except UsageError as error:
            self._handle_error(piece, error)

    def _sends(self, piece: Piece, claim: Claimed, returned: Any) -> list[ProducedMessage]:
        """Return the handler's outputs and the mark of its key."""
        outputs = [returned] if isinstance(returned, Output) else list(returned or ())
        sends = []
        for each in outputs:
            if not isinstance(each, Output) or not (each.topic or self._output):
                raise UsageError(f"{self.route.name} returned {each!r}; return Output(body) with a topic")
            sends.append(
                ProducedMessage(piece.number, each.topic or self._output, each.key, each.body, each.headers)
            )
        marks = self.source.marks
        if marks is not None:
            position = (piece.arrival.position or "").encode()
            sends.append(
                ProducedMessage(piece.number, marks.topic, claim.key.encode(), position, (), piece.where[1])
            )
        return sends

    def _handle_error(self, piece: Piece, error: BaseException) -> None:
        """Handle an error: retry later, or dead-letter in the same transaction."""
        claim = piece.claim
        assert claim is not None
        leaving = deliver.items_of(self._once).leaving
        verdict = leaving(claim.claim, claim.granted, error)
        if is_last(Raised(error), verdict, claim.attempt, self._once.policy):
            error = attempts_exhausted(error, claim.attempt, self._once.policy.max_attempts)
            verdict = leaving(claim.claim, claim.granted, error)
        piece.sends = ()
        if verdict.to == "failed":
            piece.failure = error
            self._dead_letter(piece, "failed", error)
            return
        piece.again_s, piece.counts, piece.error = verdict.delay_s, verdict.count_attempt, error
        deliver.observer_of(claim).expect(error=error)
        if isinstance(error, Exception):
            self.counts.errors += 1
            policy = self._once.policy
            self._failure_log.log_failure(claim.key, claim.attempt, verdict.delay_s, error, policy)

    def _dead_letter(self, piece: Piece, reason: str, error: BaseException | None = None) -> None:
        """Add the dead letter to the transaction that moves the offset past the message."""
        claim = piece.claim
        letter = letter_for(
            reason,
            self._once.consumer,
            "" if piece.delivery is None else piece.delivery.key,
            error,
            self._once.policy,
            fence=0 if claim is None else claim.fence,
            attempts=0 if claim is None else claim.attempt,
        )
        self._send_letter(piece, letter)

    def _send_letter(self, piece: Piece, letter: DeadLetterInfo) -> None:
        arrival = piece.arrival
        information = [(name, value.encode()) for name, value in headers_of(letter).items()]
        topic, body = self.source.dead_letter_name(piece.where[0]), None if letter.body_at else arrival.body
        piece.letter = letter
        piece.sends = [
            ProducedMessage(piece.number, topic, piece.place.key, body, [*arrival.headers, *information])
        ]

    # --- commit, then complete ---

    async def _commit(self, pieces: Sequence[Piece]) -> Collection[Where]:
        """Commit one transaction; returns the partitions whose part is committed."""
        tries = 0
        while True:
            await self._holdings.check(pieces, self._outage_s)
            hold_back(pieces)
            parts = parts_of(pieces)
            if not parts:
                return ()
            ended = await self._end_transaction(parts)
            if not ended.aborted:
                self.counts.transactions += bool(ended.committed)
                return ended.committed
            self.counts.aborts += 1
            _log.info("%s: a transaction was aborted: %s", self.source.name, ended.aborted)
            self._handle_refusal(pieces, ended.refused)
            if self._overdue:
                return ()
            tries += 1
            await asyncio.sleep(backoff_s(tries, ABORT_FIRST_S, ABORT_MAX_S))
            with suppress(SourceUnavailable):
                await self.source.look_in()

    async def _end_transaction(self, parts: Sequence[PartitionBatch]) -> TransactionResult:
        """Return how a transaction ended; retries until it is known, or until the drain time is over."""
        tries = 0
        while True:
            try:
                return await self.source.transact(parts)
            except SourceUnavailable as error:
                if self._overdue:
                    raise
                delay_s = outage_pause_s(tries)
                _log.warning("%s: the end of a transaction is not known (%s)", self.source.name, error)
                tries += 1
                await asyncio.sleep(delay_s)

    def _handle_refusal(self, pieces: Sequence[Piece], refused: Mapping[int, BaseException]) -> None:
        """Handle refused messages: an output is its handler's error; a dead letter loses its body, or waits."""
        for number, error in refused.items():
            piece, letter = pieces[number], pieces[number].letter
            if letter is None:
                if piece.claim is not None:
                    self._handle_error(piece, error)
            elif is_too_large(error) and not letter.body_at:
                self._send_letter(piece, replace(letter, body_at=piece.arrival.position or "unknown"))
            else:
                self._dead_letters.report(piece.arrival, letter, error, self._once)
                piece.again_s = OUTAGE_MAX_S

    async def _record(self, pieces: Sequence[Piece], committed: Collection[Where]) -> None:
        """Record committed keys in the store, and release the others."""
        for piece in pieces:
            if piece.again_s is None and piece.where not in committed:
                piece.again_s = 0.0
        gone = [piece for piece in pieces if piece.again_s is None]
        self._backlog.mark_committed(gone)
        self._backlog.postpone(pieces)
        self.counts.acked += len(gone)
        self.counts.duplicates += sum(piece.claim is None and not piece.dead_lettered for piece in gone)
        for piece in gone:
            if piece.letter is not None:
                self._dead_letters.note_written(piece.arrival, piece.letter, self.route)
        self._holdings.report_copies(gone, self.route.handler)
        marks = self.source.marks
        if marks is not None:
            for piece in gone:
                if piece.runs and piece.claim is not None and not piece.dead_lettered:
                    marks.add(piece.where, piece.claim.key, piece.claim.claim.window_us)
        self.counts.unrecorded += await self._holdings.settle(gone, lambda: self._overdue)
        await self._holdings.give_back(pieces)
