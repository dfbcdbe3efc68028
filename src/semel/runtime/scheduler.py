"""Run many flows at once: each round's commands of a kind in one batch, handlers in between.

Completions are sent as handlers finish, so a crash repeats at most the unfinished ones.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from threading import Lock, get_ident
from typing import Any

from msgspec.structs import replace

from semel.core.commands import (
    Answer,
    Claim,
    Command,
    Flow,
    Granted,
    Invoke,
    Item,
    Mark,
    Pause,
    Raised,
    Ran,
    Settle,
    Watch,
)
from semel.core.folding import Fold, leaders
from semel.core.settlement import NotStarted
from semel.errors import RecordCorrupt, StoreClosed, UsageError
from semel.runtime.channel import Direct
from semel.runtime.executor import AsyncExecutor, Executor, ExecutorBase
from semel.runtime.generators import adrive, drive
from semel.runtime.keeper import LiveClaim
from semel.runtime.process import asyncio, futures
from semel.runtime.send_queue import BATCH_MAX, give_back, recall
from semel.types import Done, Errored, Failed, Mismatch, Outcome, Unavailable

__all__ = ["adrive_many", "copies", "drive_many", "leaders"]

Outcomes = list[Outcome[Any]]


def copies(
    outcomes: Outcomes, place_of: Sequence[int], first_at: Sequence[int], prints: Sequence[bytes | None]
) -> Outcomes:
    """Give each later copy of a key the outcome of the first one."""
    if len(first_at) == len(place_of):
        return outcomes  # there are no copies
    spread: Outcomes = []
    for at, place in enumerate(place_of):
        outcome = outcomes[place]
        if first_at[place] != at:
            if prints[at] and prints[first_at[place]] and prints[at] != prints[first_at[place]]:
                outcome = Mismatch()
            elif isinstance(outcome, Done | Failed):
                outcome = replace(outcome, replayed=True)
        spread.append(outcome)
    return spread


class FlowScheduler:
    """Running flows, sorted by what each of them waits for."""

    def __init__(
        self,
        flows: Sequence[Flow[Outcome[Any]]],
        executor: ExecutorBase,
        on_outcome: Callable[[int, Any], object] | None = None,
    ) -> None:
        self._flows = flows
        self._executor = executor
        self._instant = isinstance(executor.channel, Direct)
        self._on_outcome = on_outcome
        """Called with each outcome as soon as it is known."""
        self.outcomes: list[Any] = [None] * len(flows)
        self.asking: list[tuple[Item, int]] = []
        """Claims and marks, sent together."""
        self.handlers: deque[tuple[Invoke, int]] = deque()
        self.pausing: list[tuple[Pause, int]] = []
        """Flows that found the store unavailable: they back off together, and try again together."""
        self.alone: list[tuple[Command[Any], int]] = []
        """Commands that are executed one by one at the end: waits, and events that may have killed a worker before."""
        self.landed: SimpleQueue[list[tuple[int, Answer]]] = SimpleQueue()
        self.flying: int = 0
        """Settles that are not yet answered."""
        self._gate = Lock()
        self._gathered: list[tuple[Settle, int]] = []
        """Settles that are sent when the pending ones are answered: a round trip for each would cost more."""
        self._under_way = False
        self.interrupt: BaseException | None = None
        self.on_landed: Callable[[], object] | None = None
        for at in range(len(flows)):
            self.advance(at, None)

    def advance(self, at: int, answer: Any) -> None:
        """Send a flow its answer, and sort it by its next command."""
        try:
            command = self._flows[at].send(answer)
        except StopIteration as end:
            self.note_end(at, end.value)
            return
        except RecordCorrupt as error:  # the record of this key is unreadable: the others continue
            self.note_end(at, Unavailable(error))
            return
        kind = type(command)
        if kind is Claim or kind is Mark:
            self.asking.append((command, at))  # type: ignore[arg-type]
        elif kind is Invoke:
            self.handlers.append((command, at))  # type: ignore[arg-type]
        elif kind is Settle:
            self._post(command, at)  # type: ignore[arg-type]
        elif kind is Pause:
            self.pausing.append((command, at))  # type: ignore[arg-type]
        else:
            self.alone.append((command, at))

    def end_handler(self, at: int, ran: Ran) -> None:
        """Note the end of a handler. An interrupt ends the batch: no other handler starts after it."""
        if isinstance(ran, Raised) and not isinstance(ran.error, Exception):
            self.interrupt = self.interrupt or ran.error
        self.advance(at, ran)

    def _post(self, settle: Settle, at: int) -> None:
        """Send a settle at once, or together with others when the pending ones are answered."""
        if self._executor.window_may_have_changed(settle):
            settle = self._executor.with_current_window(settle)
        if self._instant:
            self._settle_now(settle, at)
            return
        self.flying += 1
        with self._gate:
            self._gathered.append((settle, at))
            if self._under_way:
                return
            self._under_way = True
        self._send_gathered()

    def _settle_now(self, settle: Settle, at: int) -> None:
        """Send a settle to a store that answers at once: there are no pending settles to wait for."""
        try:
            answer = self._executor.channel.send((settle,))[0]
        except StoreClosed as error:
            self._executor.drop(settle.owner, None)  # nothing is left to repeat it on
            answer = Unavailable(error)
        if type(answer) is not Unavailable:
            self._executor.drop(settle.owner, None)
        self.advance(at, answer)

    def _send_gathered(self) -> None:
        with self._gate:
            batch, self._gathered = self._gathered[:BATCH_MAX], self._gathered[BATCH_MAX:]
            self._under_way = bool(batch)
        if not batch:
            return
        try:
            self._executor.channel.post([settle for settle, _ in batch], partial(self._land_batch, batch))
        except StoreClosed as error:
            for settle, _ in batch:
                self._executor.drop(settle.owner, None)  # nothing is left to repeat it on
            self._land_batch(batch, [Unavailable(error)] * len(batch))

    def _land_batch(self, batch: list[tuple[Settle, int]], answers: list[Answer]) -> None:
        """Pass on the answers, and send the settles gathered meanwhile. Runs in the thread that has the answers."""
        for (settle, _), answer in zip(batch, answers, strict=True):
            if type(answer) is not Unavailable:
                self._executor.drop(settle.owner, None)
        self.landed.put([(at, answer) for (_, at), answer in zip(batch, answers, strict=True)])
        if self.on_landed is not None:
            self.on_landed()
        self._send_gathered()

    def land(self, *, wait: bool = False) -> None:
        """Advance the flows whose settles were answered; with `wait`, until all are answered."""
        while self.flying and (wait or not self.landed.empty()):
            for at, answer in self.landed.get():
                self.flying -= 1
                self.advance(at, answer)

    def questions(self) -> list[Fold[int]]:
        """Return the claims and marks to send now, folded into batches."""
        asking, self.asking = self.asking, []
        return [Fold(asking[at : at + BATCH_MAX]) for at in range(0, len(asking), BATCH_MAX)]

    def advance_claimed(self, fold: Fold[int], answers: Sequence[Answer], sent_at: float) -> list[Settle]:
        """Advance the flows whose claims were answered. Returns the releases to send.

        An event that was tried before may have killed its worker: its claim is released, and it is claimed
        again alone, so that a crash does not affect the others.
        """
        apart: list[Settle] = []
        executor = self._executor
        for slot, answer in zip(fold.slots, answers, strict=True):
            for at, view in slot.takers:
                mine = answer if view is None else view(answer)
                if type(mine) is Granted and isinstance(slot.item, Claim):
                    if mine.attempt > 1 and len(self._flows) > 1:
                        apart.append(give_back(slot.item, mine.fence))
                        self.alone.append((slot.item, at))
                        continue
                    executor.keeper.keep(LiveClaim.since(slot.item, mine, sent_at, executor.run_max_s))
                self.advance(at, mine)
        self.asking += fold.later
        return apart

    def pauses(self) -> tuple[float, list[tuple[int, bool]]]:
        """Return how long to back off together, and for each flow whether it has time for another try."""
        pausing, self.pausing = self.pausing, []
        delays = [self._executor.pause_s(command) for command, _ in pausing]
        patient = [(at, delay is not None) for (_, at), delay in zip(pausing, delays, strict=True)]
        return max((delay for delay in delays if delay is not None), default=0.0), patient

    def stop(self, at: int) -> None:
        """End a flow that holds no claim, before its handler has started."""
        self._flows[at].close()
        self.note_end(at, Errored(NotStarted(), 0))

    def stop_waiting(self) -> None:
        """End the flows that wait for a claim, after a stop."""
        waiting = [at for _, at in (*self.asking, *self.pausing, *self.alone)]
        self.asking, self.pausing, self.alone = [], [], []
        for at in waiting:
            self.stop(at)

    @property
    def busy(self) -> bool:
        """Whether there are commands to execute together."""
        return bool(self.asking or self.handlers or self.flying or self.pausing)

    def resume(self) -> list[tuple[Flow[Outcome[Any]], Command[Any], int]]:
        """Return the flows to drive one by one, each with its pending command."""
        alone, self.alone = self.alone, []
        return [(self._flows[at], command, at) for command, at in alone]

    def end_refused(self, at: int, error: UsageError) -> None:
        """End a flow that would wait for a claim of its own caller; the others keep their outcomes."""
        self._flows[at].close()
        self.note_end(at, Errored(error, attempt=0))

    def note_end(self, at: int, outcome: Outcome[Any]) -> None:
        """Note a flow's outcome; an interrupt ends the whole batch."""
        self.outcomes[at] = outcome
        if self._on_outcome is not None:
            self._on_outcome(at, outcome)
        if (
            type(outcome) is not Done
            and isinstance(outcome, Errored)
            and not isinstance(outcome.error, Exception)
        ):
            self.interrupt = self.interrupt or outcome.error


def drive_many(flows: Sequence[Flow[Outcome[Any]]], executor: Executor, concurrency: int) -> Outcomes:
    """Run the flows to their ends, blocking; outcomes by position. Raises the interrupt that ended it early."""
    rounds = FlowScheduler(flows, executor)
    while rounds.busy:
        for fold in rounds.questions():
            _ask(rounds, executor, fold)
        _invoke_all(rounds, executor, concurrency)
        rounds.land(wait=True)
        if rounds.interrupt is not None:
            raise rounds.interrupt
        delay_s, patient = rounds.pauses()
        if patient:
            time.sleep(delay_s)
        for at, again in patient:
            rounds.advance(at, again)
    _finish_alone(rounds, executor)
    return rounds.outcomes


def _finish_alone(rounds: FlowScheduler, executor: Executor) -> None:
    """Drive the remaining flows one by one."""
    # All waits start together, so that the last one does not wait for the sum of them.
    started: list[tuple[Flow[Outcome[Any]], Any, int]] = []
    for flow, command, at in rounds.resume():
        try:
            started.append((flow, executor(command) if isinstance(command, Watch) else command, at))
        except UsageError as error:
            rounds.end_refused(at, error)
    for flow, next_, at in started:
        try:
            answer = executor(next_) if isinstance(next_, Command) else next_
            rounds.note_end(at, drive(flow, executor, answer))
        except RecordCorrupt as error:
            rounds.note_end(at, Unavailable(error))
        except UsageError as error:
            rounds.end_refused(at, error)
        if rounds.interrupt is not None:
            raise rounds.interrupt


def _ask(rounds: FlowScheduler, executor: Executor, fold: Fold[int]) -> None:
    items = [slot.item for slot in fold.slots]
    sent_at = executor.steady_s()
    try:
        answers = executor.channel.send(items)
        apart = rounds.advance_claimed(fold, answers, sent_at)
    except Exception:
        raise
    except BaseException:  # some claims may be granted that nothing renews yet
        recall(executor.channel, [item for item in items if isinstance(item, Claim)])
        raise
    if apart:
        executor.channel.send(apart)


def _invoke_all(rounds: FlowScheduler, executor: Executor, concurrency: int) -> None:
    if concurrency == 1:
        while rounds.handlers and rounds.interrupt is None:
            command, at = rounds.handlers.popleft()
            ran = executor.invoke(command)
            executor.refresh()
            rounds.end_handler(at, ran)
            rounds.land()
        return
    with futures.ThreadPoolExecutor(concurrency, thread_name_prefix="semel-handler") as pool:
        running: dict[futures.Future[Ran], int] = {}
        while running or (rounds.handlers and rounds.interrupt is None):
            while rounds.handlers and len(running) < concurrency and rounds.interrupt is None:
                command, at = rounds.handlers.popleft()
                running[pool.submit(copy_context().run, executor.invoke, command)] = at
            try:
                ended = futures.wait(running, return_when=futures.FIRST_COMPLETED).done
            except BaseException as interrupt:  # noqa: BLE001 - raised by drive_many, once these handlers have ended
                rounds.interrupt = rounds.interrupt or interrupt
                continue
            executor.refresh()
            for future in ended:
                rounds.end_handler(running.pop(future), future.result())
            rounds.land()


async def adrive_many(
    flows: Sequence[Flow[Outcome[Any]]],
    executor: AsyncExecutor,
    concurrency: int,
    on_outcome: Callable[[int, Any], object] | None = None,
    is_stopping: Callable[[], bool] = lambda: False,
    on_retry: Callable[[], object] = lambda: None,
) -> Outcomes:
    """Run the flows to their ends, awaiting; outcomes by position. Raises the interrupt that ended it early.

    `is_stopping`: once it is true no further handler starts; the outcome of the rest is `Errored(NotStarted)`.
    `on_retry`: called before each retry of items that the store has not answered.
    """
    rounds = FlowScheduler(flows, executor, on_outcome)
    landed = asyncio.Event()
    loop, thread = asyncio.get_running_loop(), get_ident()

    def on_landed() -> None:
        if (
            get_ident() == thread
        ):  # the loop is awake: waking it through its socket would be a system call each time
            landed.set()
            return
        with suppress(RuntimeError):  # the loop is closed, and has no waiters
            loop.call_soon_threadsafe(landed.set)

    rounds.on_landed = on_landed
    while rounds.busy:
        for fold in rounds.questions():
            sent_at = executor.steady_s()
            answers = await executor.channel.asend([slot.item for slot in fold.slots])
            if apart := rounds.advance_claimed(fold, answers, sent_at):
                await executor.channel.asend(apart)
        await _ainvoke_all(rounds, executor, concurrency, is_stopping)
        if is_stopping():
            rounds.stop_waiting()
        await _aland(rounds, landed)
        if rounds.interrupt is not None:
            raise rounds.interrupt
        delay_s, patient = rounds.pauses()
        if patient:
            on_retry()
            await asyncio.sleep(delay_s)
        for at, again in patient:
            rounds.advance(at, again)
    await _afinish_alone(rounds, executor, is_stopping)
    return rounds.outcomes


async def _afinish_alone(
    rounds: FlowScheduler, executor: AsyncExecutor, is_stopping: Callable[[], bool]
) -> None:
    """Drive the remaining flows one by one."""
    started: list[tuple[Flow[Outcome[Any]], Any, int]] = []
    for flow, command, at in rounds.resume():
        try:
            started.append((flow, await executor(command) if isinstance(command, Watch) else command, at))
        except UsageError as error:
            rounds.end_refused(at, error)
    for flow, next_, at in started:
        if is_stopping():
            rounds.stop(at)
            continue
        try:
            answer = await executor(next_) if isinstance(next_, Command) else next_
            rounds.note_end(at, await adrive(flow, executor, answer))
        except RecordCorrupt as error:
            rounds.note_end(at, Unavailable(error))
        except UsageError as error:
            rounds.end_refused(at, error)
        if rounds.interrupt is not None:
            raise rounds.interrupt


async def _aland(rounds: FlowScheduler, landed: "asyncio.Event") -> None:
    while rounds.flying:
        landed.clear()
        if rounds.landed.empty():
            await landed.wait()
        rounds.land()


async def _ainvoke_all(
    rounds: FlowScheduler, executor: AsyncExecutor, concurrency: int, is_stopping: Callable[[], bool]
) -> None:
    async def work() -> None:
        while rounds.handlers and rounds.interrupt is None:
            command, at = rounds.handlers.popleft()
            if (
                command.claim is not None and is_stopping()
            ):  # a dead letter, which is under no claim, still goes out
                rounds.end_handler(at, Raised(NotStarted(), interrupted=True))
                continue
            ran = await executor.invoke(command)
            if not (isinstance(ran, Raised) and ran.interrupted):
                await executor.refresh()
            rounds.end_handler(at, ran)
            rounds.land()

    if concurrency == 1:
        await work()
        return
    workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(rounds.handlers)))]
    if not workers:
        return
    while not all(worker.done() for worker in workers):
        try:
            await asyncio.wait(workers)
        except asyncio.CancelledError as cancelled:
            # A claim is released when its handler has ended, not before: so they are awaited, however often.
            rounds.interrupt = rounds.interrupt or cancelled
            for worker in workers:
                worker.cancel()
    for worker in workers:
        if not worker.cancelled() and (error := worker.exception()) is not None:
            raise error
