"""Run many flows at once: each round's commands of a kind in one batch, handlers in between.

Completions leave as handlers finish, so that a crash repeats at most those that are still under way.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any

from msgspec.structs import replace

from semel.coalesce import BATCH_MAX, give_back
from semel.core.commands import Answer, Claim, Command, Flow, Granted, Invoke, Item, Mark, Ran, Settle, Watch
from semel.core.folding import Fold, leaders
from semel.drive import AsyncHands, Bench, Hands, adrive, drive
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


class Rounds:
    """Flows under way, sorted by what each of them waits for."""

    def __init__(self, flows: Sequence[Flow[Outcome[Any]]], bench: Bench) -> None:
        self._flows = flows
        self._bench = bench
        self.outcomes: list[Any] = [None] * len(flows)
        self.asking: list[tuple[Item, int]] = []
        """Claims and marks: asked together."""
        self.handlers: deque[tuple[Invoke, int]] = deque()
        self.alone: list[tuple[Command[Any], int]] = []
        """What is carried out one by one at the end: waits, and events that may have killed a worker before."""
        self.landed: SimpleQueue[tuple[int, Answer]] = SimpleQueue()
        self.flying = 0
        """Settles posted and not yet answered."""
        self.interrupt: BaseException | None = None
        self.on_landed: Callable[[], object] | None = None
        for at in range(len(flows)):
            self.advance(at, None)

    def advance(self, at: int, answer: Any) -> None:
        """Send a flow its answer and file it under what it asks for next."""
        try:
            command = self._flows[at].send(answer)
        except StopIteration as end:
            self.ended(at, end.value)
            return
        if isinstance(command, Claim | Mark):
            self.asking.append((command, at))
        elif isinstance(command, Invoke):
            self.handlers.append((command, at))
        elif isinstance(command, Settle):
            self._post(command, at)
        else:
            self.alone.append((command, at))

    def _post(self, settle: Settle, at: int) -> None:
        self.flying += 1

        def landed(answers: list[Answer]) -> None:
            if not isinstance(answers[0], Unavailable):
                self._bench.keeper.drop(settle.owner)
            self.landed.put((at, answers[0]))
            if self.on_landed is not None:
                self.on_landed()

        self._bench.channel.post((settle,), landed)

    def land(self, *, wait: bool = False) -> None:
        """Advance the flows whose settles were answered; with `wait`, until all are."""
        while self.flying and (wait or not self.landed.empty()):
            at, answer = self.landed.get()
            self.flying -= 1
            self.advance(at, answer)

    def questions(self) -> list[Fold[int]]:
        """The claims and marks to ask now, folded, a batch each."""
        asking, self.asking = self.asking, []
        return [Fold(asking[at : at + BATCH_MAX]) for at in range(0, len(asking), BATCH_MAX)]

    def answered(self, fold: Fold[int], answers: Sequence[Answer], sent_at: float) -> list[Settle]:
        """Advance the flows whose claims were answered; returns what is to be given back.

        An event that was tried before may have killed its worker: it is set apart, to be claimed again
        alone, so that it cannot drag its neighbours along.
        """
        apart: list[Settle] = []
        for slot, answer in zip(fold.slots, answers, strict=True):
            for at, view in slot.takers:
                mine = answer if view is None else view(answer)
                if isinstance(slot.item, Claim) and view is None:
                    if isinstance(mine, Granted) and mine.attempt > 1 and len(self._flows) > 1:
                        apart.append(give_back(slot.item, mine))
                        self.alone.append((slot.item, at))
                        continue
                    self._bench.answered(slot.item, mine, sent_at)
                self.advance(at, mine)
        self.asking += fold.later
        return apart

    def resume(self) -> list[tuple[Flow[Outcome[Any]], Command[Any], int]]:
        """The flows to be driven one by one, each with the command it waits for."""
        alone, self.alone = self.alone, []
        return [(self._flows[at], command, at) for command, at in alone]

    def ended(self, at: int, outcome: Outcome[Any]) -> None:
        """Note a flow's outcome; an interrupt ends the whole batch."""
        self.outcomes[at] = outcome
        if isinstance(outcome, Errored) and not isinstance(outcome.error, Exception):
            self.interrupt = self.interrupt or outcome.error

    def stop(self) -> None:
        """Give back the claims whose handlers have not started."""
        while self.handlers:
            command, _ = self.handlers.popleft()
            if command.claim is not None and command.granted is not None:
                self._bench.keeper.drop(command.claim.owner)
                self._bench.channel.post((give_back(command.claim, command.granted),), lambda _answers: None)


def drive_many(flows: Sequence[Flow[Outcome[Any]]], hands: Hands, concurrency: int) -> Outcomes:
    """Run the flows to their ends, blocking; outcomes by position."""
    rounds = Rounds(flows, hands)
    try:
        while rounds.asking or rounds.handlers or rounds.flying:
            for fold in rounds.questions():
                sent_at = hands.steady_s()
                answers = hands.channel.send([slot.item for slot in fold.slots])
                if apart := rounds.answered(fold, answers, sent_at):
                    hands.channel.send(apart)
            _invoke_all(rounds, hands, concurrency)
            rounds.land(wait=True)
            if rounds.interrupt is not None:
                raise rounds.interrupt
        # All waits start together, so that the last one does not wait for the sum of them.
        started = [
            (flow, hands(command), at) if isinstance(command, Watch) else (flow, command, at)
            for flow, command, at in rounds.resume()
        ]
        for flow, next_, at in started:
            answer = hands(next_) if isinstance(next_, Command) else next_
            rounds.ended(at, drive(flow, hands, answer))
            if rounds.interrupt is not None:
                raise rounds.interrupt
    finally:
        rounds.stop()
    return rounds.outcomes


def _invoke_all(rounds: Rounds, hands: Hands, concurrency: int) -> None:
    if concurrency == 1:
        while rounds.handlers and rounds.interrupt is None:
            command, at = rounds.handlers.popleft()
            rounds.advance(at, hands.invoke(command))
            rounds.land()
        return
    with ThreadPoolExecutor(concurrency, thread_name_prefix="semel-handler") as pool:
        running: dict[Future[Ran], int] = {}
        while running or (rounds.handlers and rounds.interrupt is None):
            while rounds.handlers and len(running) < concurrency and rounds.interrupt is None:
                command, at = rounds.handlers.popleft()
                running[pool.submit(copy_context().run, hands.invoke, command)] = at
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                rounds.advance(running.pop(future), future.result())
            rounds.land()


async def adrive_many(flows: Sequence[Flow[Outcome[Any]]], hands: AsyncHands, concurrency: int) -> Outcomes:
    """Run the flows to their ends, awaiting; outcomes by position."""
    rounds = Rounds(flows, hands)
    landed = asyncio.Event()
    loop = asyncio.get_running_loop()
    rounds.on_landed = lambda: loop.call_soon_threadsafe(landed.set)
    try:
        while rounds.asking or rounds.handlers or rounds.flying:
            for fold in rounds.questions():
                sent_at = hands.steady_s()
                answers = await hands.channel.asend([slot.item for slot in fold.slots])
                if apart := rounds.answered(fold, answers, sent_at):
                    await hands.channel.asend(apart)
            await _ainvoke_all(rounds, hands, concurrency)
            while rounds.flying:
                landed.clear()
                if rounds.landed.empty():
                    await landed.wait()
                rounds.land()
            if rounds.interrupt is not None:
                raise rounds.interrupt
        started = [
            (flow, await hands(command), at) if isinstance(command, Watch) else (flow, command, at)
            for flow, command, at in rounds.resume()
        ]
        for flow, next_, at in started:
            answer = await hands(next_) if isinstance(next_, Command) else next_
            rounds.ended(at, await adrive(flow, hands, answer))
            if rounds.interrupt is not None:
                raise rounds.interrupt
    finally:
        rounds.stop()
    return rounds.outcomes


async def _ainvoke_all(rounds: Rounds, hands: AsyncHands, concurrency: int) -> None:
    async def work() -> None:
        while rounds.handlers and rounds.interrupt is None:
            command, at = rounds.handlers.popleft()
            rounds.advance(at, await hands.invoke(command))
            rounds.land()

    if concurrency == 1:
        await work()
        return
    workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(rounds.handlers)))]
    if not workers:
        return
    try:
        await asyncio.wait(workers)
    except asyncio.CancelledError as cancelled:
        rounds.interrupt = cancelled
        for worker in workers:
            worker.cancel()
        await asyncio.wait(workers)  # a claim is released when its handler has ended, not before
