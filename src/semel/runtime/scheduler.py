"""Run many flows at once: each round's commands of a kind in one batch, handlers in between.

Completions leave as handlers finish, so that a crash repeats at most those that are still under way.
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
    """Flows under way, sorted by what each of them waits for."""

    def __init__(
        self,
        flows: Sequence[Flow[Outcome[Any]]],
        bench: ExecutorBase,
        told: Callable[[int, Any], object] | None = None,
    ) -> None:
        self._flows = flows
        self._bench = bench
        self._instant = isinstance(bench.channel, Direct)
        self._told = told
        """Hears of each outcome as soon as it is known."""
        self.outcomes: list[Any] = [None] * len(flows)
        self.asking: list[tuple[Item, int]] = []
        """Claims and marks: asked together."""
        self.handlers: deque[tuple[Invoke, int]] = deque()
        self.pausing: list[tuple[Pause, int]] = []
        """Those that found the store out of reach: they back off together, and ask together again."""
        self.alone: list[tuple[Command[Any], int]] = []
        """What is carried out one by one at the end: waits, and events that may have killed a worker before."""
        self.landed: SimpleQueue[list[tuple[int, Answer]]] = SimpleQueue()
        self.flying: int = 0
        """Settles that are not yet answered."""
        self._gate = Lock()
        self._gathered: list[tuple[Settle, int]] = []
        """Settles that leave as soon as those under way have landed: a round trip for each would cost more."""
        self._under_way = False
        self.interrupt: BaseException | None = None
        self.on_landed: Callable[[], object] | None = None
        for at in range(len(flows)):
            self.advance(at, None)

    def advance(self, at: int, answer: Any) -> None:
        """Send a flow its answer and file it under what it asks for next."""
        try:
            command = self._flows[at].send(answer)
        except StopIteration as end:
            self.note_end(at, end.value)
            return
        except RecordCorrupt as error:  # what is stored under this key does not read: the others go on
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

    def ran(self, at: int, ran: Ran) -> None:
        """A handler has ended. An interrupt ends the batch: no other handler starts after it."""
        if isinstance(ran, Raised) and not isinstance(ran.error, Exception):
            self.interrupt = self.interrupt or ran.error
        self.advance(at, ran)

    def _post(self, settle: Settle, at: int) -> None:
        """Have a settle sent at once, or together with its like when those under way have landed."""
        if self._bench.window_may_have_changed(settle):
            settle = self._bench.with_current_window(settle)
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
        """The store answers at once: nothing is under way that others could wait for."""
        try:
            answer = self._bench.channel.send((settle,))[0]
        except StoreClosed as error:
            self._bench.drop(settle.owner, None)  # nothing is left to repeat it on
            answer = Unavailable(error)
        if type(answer) is not Unavailable:
            self._bench.drop(settle.owner, None)
        self.advance(at, answer)

    def _send_gathered(self) -> None:
        with self._gate:
            batch, self._gathered = self._gathered[:BATCH_MAX], self._gathered[BATCH_MAX:]
            self._under_way = bool(batch)
        if not batch:
            return
        try:
            self._bench.channel.post([settle for settle, _ in batch], partial(self._land_batch, batch))
        except StoreClosed as error:
            for settle, _ in batch:
                self._bench.drop(settle.owner, None)  # nothing is left to repeat it on
            self._land_batch(batch, [Unavailable(error)] * len(batch))

    def _land_batch(self, batch: list[tuple[Settle, int]], answers: list[Answer]) -> None:
        """In whichever thread has the answers: hand them over, and send what has gathered meanwhile."""
        for (settle, _), answer in zip(batch, answers, strict=True):
            if type(answer) is not Unavailable:
                self._bench.drop(settle.owner, None)
        self.landed.put([(at, answer) for (_, at), answer in zip(batch, answers, strict=True)])
        if self.on_landed is not None:
            self.on_landed()
        self._send_gathered()

    def land(self, *, wait: bool = False) -> None:
        """Advance the flows whose settles were answered; with `wait`, until all are."""
        while self.flying and (wait or not self.landed.empty()):
            for at, answer in self.landed.get():
                self.flying -= 1
                self.advance(at, answer)

    def questions(self) -> list[Fold[int]]:
        """The claims and marks to ask now, folded, a batch each."""
        asking, self.asking = self.asking, []
        return [Fold(asking[at : at + BATCH_MAX]) for at in range(0, len(asking), BATCH_MAX)]

    def advance_claimed(self, fold: Fold[int], answers: Sequence[Answer], sent_at: float) -> list[Settle]:
        """Advance the flows whose claims were answered; returns what is to be given back.

        An event that was tried before may have killed its worker: it is set apart, to be claimed again
        alone, so that it cannot drag its neighbours along.
        """
        apart: list[Settle] = []
        bench = self._bench
        for slot, answer in zip(fold.slots, answers, strict=True):
            for at, view in slot.takers:
                mine = answer if view is None else view(answer)
                if isinstance(slot.item, Claim) and isinstance(mine, Granted):
                    if mine.attempt > 1 and len(self._flows) > 1:
                        apart.append(give_back(slot.item, mine.fence))
                        self.alone.append((slot.item, at))
                        continue
                    bench.keeper.keep(LiveClaim.since(slot.item, mine, sent_at, bench.run_max_s))
                self.advance(at, mine)
        self.asking += fold.later
        return apart

    def pauses(self) -> tuple[float, list[tuple[int, bool]]]:
        """How long to back off for all that do, and for each whether it has the time for another try."""
        pausing, self.pausing = self.pausing, []
        delays = [self._bench.pause_s(command) for command, _ in pausing]
        patient = [(at, delay is not None) for (_, at), delay in zip(pausing, delays, strict=True)]
        return max((delay for delay in delays if delay is not None), default=0.0), patient

    def stop(self, at: int) -> None:
        """End a flow that holds no claim, before its handler has started."""
        self._flows[at].close()
        self.note_end(at, Errored(NotStarted(), 0))

    def stop_waiting(self) -> None:
        """After a stop: end the flows that wait for a claim."""
        waiting = [at for _, at in (*self.asking, *self.pausing, *self.alone)]
        self.asking, self.pausing, self.alone = [], [], []
        for at in waiting:
            self.stop(at)

    @property
    def busy(self) -> bool:
        """Whether there is something to be done together."""
        return bool(self.asking or self.handlers or self.flying or self.pausing)

    def resume(self) -> list[tuple[Flow[Outcome[Any]], Command[Any], int]]:
        """The flows to be driven one by one, each with the command it waits for."""
        alone, self.alone = self.alone, []
        return [(self._flows[at], command, at) for command, at in alone]

    def end_refused(self, at: int, error: UsageError) -> None:
        """End a flow that would wait for a claim of its own caller: its fault alone, the others keep their outcomes."""
        self._flows[at].close()
        self.note_end(at, Errored(error, attempt=0))

    def note_end(self, at: int, outcome: Outcome[Any]) -> None:
        """Note a flow's outcome; an interrupt ends the whole batch."""
        self.outcomes[at] = outcome
        if self._told is not None:
            self._told(at, outcome)
        if isinstance(outcome, Errored) and not isinstance(outcome.error, Exception):
            self.interrupt = self.interrupt or outcome.error


def drive_many(flows: Sequence[Flow[Outcome[Any]]], hands: Executor, concurrency: int) -> Outcomes:
    """Run the flows to their ends, blocking; outcomes by position. Raises the interrupt that ended it early."""
    rounds = FlowScheduler(flows, hands)
    while rounds.busy:
        for fold in rounds.questions():
            _ask(rounds, hands, fold)
        _invoke_all(rounds, hands, concurrency)
        rounds.land(wait=True)
        if rounds.interrupt is not None:
            raise rounds.interrupt
        delay_s, patient = rounds.pauses()
        if patient:
            time.sleep(delay_s)
        for at, again in patient:
            rounds.advance(at, again)
    _finish_alone(rounds, hands)
    return rounds.outcomes


def _finish_alone(rounds: FlowScheduler, hands: Executor) -> None:
    """Drive the flows that are left, one by one."""
    # All waits start together, so that the last one does not wait for the sum of them.
    started: list[tuple[Flow[Outcome[Any]], Any, int]] = []
    for flow, command, at in rounds.resume():
        try:
            started.append((flow, hands(command) if isinstance(command, Watch) else command, at))
        except UsageError as error:
            rounds.end_refused(at, error)
    for flow, next_, at in started:
        try:
            answer = hands(next_) if isinstance(next_, Command) else next_
            rounds.note_end(at, drive(flow, hands, answer))
        except RecordCorrupt as error:
            rounds.note_end(at, Unavailable(error))
        except UsageError as error:
            rounds.end_refused(at, error)
        if rounds.interrupt is not None:
            raise rounds.interrupt


def _ask(rounds: FlowScheduler, hands: Executor, fold: Fold[int]) -> None:
    items = [slot.item for slot in fold.slots]
    sent_at = hands.steady_s()
    try:
        answers = hands.channel.send(items)
        apart = rounds.advance_claimed(fold, answers, sent_at)
    except Exception:
        raise
    except BaseException:  # some may be ours that nobody keeps yet
        recall(hands.channel, [item for item in items if isinstance(item, Claim)])
        raise
    if apart:
        hands.channel.send(apart)


def _invoke_all(rounds: FlowScheduler, hands: Executor, concurrency: int) -> None:
    if concurrency == 1:
        while rounds.handlers and rounds.interrupt is None:
            command, at = rounds.handlers.popleft()
            ran = hands.invoke(command)
            hands.refresh()
            rounds.ran(at, ran)
            rounds.land()
        return
    with futures.ThreadPoolExecutor(concurrency, thread_name_prefix="semel-handler") as pool:
        running: dict[futures.Future[Ran], int] = {}
        while running or (rounds.handlers and rounds.interrupt is None):
            while rounds.handlers and len(running) < concurrency and rounds.interrupt is None:
                command, at = rounds.handlers.popleft()
                running[pool.submit(copy_context().run, hands.invoke, command)] = at
            try:
                ended = futures.wait(running, return_when=futures.FIRST_COMPLETED).done
            except BaseException as interrupt:  # noqa: BLE001 - raised by drive_many, once these handlers have ended
                rounds.interrupt = rounds.interrupt or interrupt
                continue
            hands.refresh()
            for future in ended:
                rounds.ran(running.pop(future), future.result())
            rounds.land()


async def adrive_many(
    flows: Sequence[Flow[Outcome[Any]]],
    hands: AsyncExecutor,
    concurrency: int,
    told: Callable[[int, Any], object] | None = None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> Outcomes:
    """Run the flows to their ends, awaiting; outcomes by position. Raises the interrupt that ended it early.

    `is_stopping`: once it is true no further handler starts; the outcome of the rest is `Errored(NotStarted)`.
    """
    rounds = FlowScheduler(flows, hands, told)
    landed = asyncio.Event()
    loop, thread = asyncio.get_running_loop(), get_ident()

    def on_landed() -> None:
        if (
            get_ident() == thread
        ):  # the loop is awake: to wake it by its socket would be a system call each time
            landed.set()
            return
        with suppress(RuntimeError):  # the loop is closed, and nobody waits there any more
            loop.call_soon_threadsafe(landed.set)

    rounds.on_landed = on_landed
    while rounds.busy:
        for fold in rounds.questions():
            sent_at = hands.steady_s()
            answers = await hands.channel.asend([slot.item for slot in fold.slots])
            if apart := rounds.advance_claimed(fold, answers, sent_at):
                await hands.channel.asend(apart)
        await _ainvoke_all(rounds, hands, concurrency, is_stopping)
        if is_stopping():
            rounds.stop_waiting()
        await _aland(rounds, landed)
        if rounds.interrupt is not None:
            raise rounds.interrupt
        delay_s, patient = rounds.pauses()
        if patient:
            await asyncio.sleep(delay_s)
        for at, again in patient:
            rounds.advance(at, again)
    await _afinish_alone(rounds, hands, is_stopping)
    return rounds.outcomes


async def _afinish_alone(
    rounds: FlowScheduler, hands: AsyncExecutor, is_stopping: Callable[[], bool]
) -> None:
    """Drive the flows that are left, one by one."""
    started: list[tuple[Flow[Outcome[Any]], Any, int]] = []
    for flow, command, at in rounds.resume():
        try:
            started.append((flow, await hands(command) if isinstance(command, Watch) else command, at))
        except UsageError as error:
            rounds.end_refused(at, error)
    for flow, next_, at in started:
        if is_stopping():
            rounds.stop(at)
            continue
        try:
            answer = await hands(next_) if isinstance(next_, Command) else next_
            rounds.note_end(at, await adrive(flow, hands, answer))
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
    rounds: FlowScheduler, hands: AsyncExecutor, concurrency: int, is_stopping: Callable[[], bool]
) -> None:
    async def work() -> None:
        while rounds.handlers and rounds.interrupt is None:
            command, at = rounds.handlers.popleft()
            if (
                command.claim is not None and is_stopping()
            ):  # a dead letter, which is under no claim, still goes out
                rounds.ran(at, Raised(NotStarted(), interrupted=True))
                continue
            ran = await hands.invoke(command)
            if not (isinstance(ran, Raised) and ran.interrupted):
                await hands.refresh()
            rounds.ran(at, ran)
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
