"""A worker of a chaos run: the user's handler in a real runner, which tells the conductor about each phase."""

import asyncio
import inspect
import logging
import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import count
from typing import Any

import msgspec

import semel
from semel.brokers import Route, Runner, RunnerLimits, source_for
from semel.brokers.source import Arrival, DeadLetterInfo, Source
from semel.observe.events import HookEvent, StoreFailed, StoreSent
from semel.runtime.process import load_object
from semel.testing.chaos.lines import LINE_TIMES_MAX, LineTracer, current_run, find_code, lines_of
from semel.testing.chaos.messages import (
    ChaosOrder,
    DeliveriesReceived,
    DeliveryAnswer,
    FromConductor,
    FromWorker,
    Halted,
    Handed,
    HandlerSource,
    Lagged,
    Phase,
    RunBegan,
    RunEnded,
    RunReached,
    Watched,
    from_conductor,
)
from semel.testing.chaos.stores import find_chaos_store
from semel.testing.worker_processes import WorkerSocket

__all__ = ["EFFECTS_TABLE", "start_worker"]

EFFECTS_TABLE = "semel_chaos_effects"
"""The table that notes runs in the handler's transaction, in mode inbox."""
ATTEMPTS_MAX = 1000
RETRY_DELAY_S = 0.05
BEATS_PER_LEASE = 10
LAG_LEASES = 1 / 3
"""A standstill of this many leases may cost a lease: it is reported as a stall."""


class ConductorLink:
    """The worker's end of the socket. Threads may use it; a second thread reads."""

    def __init__(self, end: socket.socket) -> None:
        self._socket: WorkerSocket[FromConductor] = WorkerSocket(end, from_conductor)
        self._sending = threading.Lock()
        self._halting = threading.Lock()
        self._proceed = threading.Semaphore(0)
        self._watched: frozenset[str] = frozenset()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.messages: asyncio.Queue[Any] = asyncio.Queue()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read from now on; messages of the queue go to this loop."""
        self._loop = loop
        threading.Thread(target=self._read, name="chaos-link", daemon=True).start()

    def say(self, message: FromWorker) -> None:
        """Send one message. Ends this process if the conductor is gone."""
        with self._sending:
            try:
                self._socket.say(message)
            except OSError:
                os._exit(0)

    def halt(self, key: str, phase: Phase, run: str = "", line: int = 0, share: float = 0.0) -> None:
        """Wait until the conductor lets this delivery go on, or kills this process. Only for watched keys."""
        if key in self._watched:
            with self._halting:
                self.say(Halted(key, phase, run, line, share))
                self._proceed.acquire()

    def _read(self) -> None:
        try:
            while True:
                for message in self._socket.hear():
                    self._on_message(message)
        except (EOFError, OSError):
            os._exit(0)

    def _on_message(self, message: FromConductor) -> None:
        assert self._loop is not None
        match message:
            case Handed(messages):
                for each in messages:
                    self._loop.call_soon_threadsafe(self.messages.put_nowait, each)
            case Watched(keys):
                self._watched = frozenset(keys)
            case _:
                self._proceed.release()


class ConductorSource:
    """A `Source` of the conductor's own queue."""

    redelivers: bool = True
    name: str = "chaos queue"

    def __init__(self, link: ConductorLink, visibility_s: float) -> None:
        self._link = link
        self.deadline_s: float | None = visibility_s

    async def open(self) -> None:
        """Do nothing: the socket is open."""

    async def receive(self, limit: int, wait_s: float) -> Sequence[Arrival]:
        """Return the deliveries that the conductor has handed over."""
        try:
            first = await asyncio.wait_for(self._link.messages.get(), max(wait_s, 0.001))
        except TimeoutError:
            return []
        handed = [first]
        while len(handed) < limit and not self._link.messages.empty():
            handed.append(self._link.messages.get_nowait())
        return [
            Arrival(
                headers={"message_id": each.key},
                body=each.body.encode(),
                position=each.position,
                transport="queue",
                deliveries=each.deliveries,
            )
            for each in handed
        ]

    async def ack(self, arrivals: Sequence[Arrival]) -> None:
        """Do nothing: the report of the answer is the answer."""

    async def nack(self, arrivals: Sequence[Arrival], delay_s: float) -> None:
        """Do nothing: the report of the answer is the answer."""

    async def extend(self, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        """Do nothing: the report of the answer is the answer."""
        del arrivals
        return []

    async def dead_letter(self, arrival: Arrival, letter: DeadLetterInfo) -> None:
        """Do nothing: dead letters are only reported."""

    async def close(self) -> None:
        """Do nothing."""


class ReportingSource:
    """A source that reports each delivery and each answer to the conductor. Dead letters are only reported."""

    def __init__(self, inner: Source, link: ConductorLink) -> None:
        self._inner = inner
        self._link = link
        self.name: str = inner.name
        self.deadline_s: float | None = inner.deadline_s
        self.redelivers: bool = inner.redelivers

    async def open(self) -> None:
        """Open the source."""
        await self._inner.open()

    async def receive(self, limit: int, wait_s: float) -> Sequence[Arrival]:
        """Receive, and report what has arrived."""
        arrivals = await self._inner.receive(limit, wait_s)
        if arrivals:
            self._link.say(DeliveriesReceived([(_position(each), _key(each)) for each in arrivals]))
            for each in arrivals:
                self._link.halt(_key(each), "received")
        return arrivals

    async def ack(self, arrivals: Sequence[Arrival]) -> None:
        """Acknowledge, and report it."""
        for each in arrivals:
            self._link.halt(_key(each), "recorded")
        positions = [_position(each) for each in arrivals]
        self._link.say(DeliveryAnswer("acking", positions))
        await self._inner.ack(arrivals)
        self._link.say(DeliveryAnswer("ack", positions))

    async def nack(self, arrivals: Sequence[Arrival], delay_s: float) -> None:
        """Return deliveries, and report it."""
        await self._inner.nack(arrivals, delay_s)
        self._link.say(DeliveryAnswer("nack", [_position(each) for each in arrivals], delay_s))

    async def extend(self, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        """Ask for more time, and report it."""
        lost = await self._inner.extend(arrivals)
        self._link.say(DeliveryAnswer("extend", [_position(each) for each in arrivals]))
        return lost

    async def dead_letter(self, arrival: Arrival, letter: DeadLetterInfo) -> None:
        """Report a dead letter; it is not written, so that a broker's own dead letters stay as they are."""
        self._link.say(DeliveryAnswer("dead", [_position(arrival)], reason=letter.reason))

    async def close(self) -> None:
        """Close the source."""
        await self._inner.close()


def _position(arrival: Arrival) -> str:
    return arrival.position or ""


def _key(arrival: Arrival) -> str:
    return arrival.by_name.get("message_id") or ""


class RecordedRun:
    """One run of the handler."""

    def __init__(self, link: ConductorLink, run: str, key: str) -> None:
        self._link = link
        self._run = run
        self.key: str = key
        self._times: Counter[int] = Counter()

    def reach(self, line: int, share: float | None) -> None:
        """Report a line that is about to run; before its first time in this run a fault may hit."""
        self._times[line] += 1
        if self._times[line] > LINE_TIMES_MAX:
            return
        self._link.say(RunReached(self._run, line))
        if share is not None and self._times[line] == 1:
            self._link.halt(self.key, "line", self._run, line, share)

    def end(self, error: BaseException | None = None) -> None:
        """Report the end; after a normal one a fault may hit."""
        self._link.say(RunEnded(self._run, "" if error is None else repr(error)))
        if error is None:
            self._link.halt(self.key, "returned", self._run)


class HandlerRecorder:
    """Wraps the user's handler: each call is reported, with its lines."""

    def __init__(self, handler: Callable[..., Any], link: ConductorLink, *, effects_table: bool) -> None:
        self._handler = handler
        self._link = link
        self._effects_table = effects_table
        self._numbers = count()
        code = find_code(handler)
        self._tracer = None if code is None else LineTracer(code)
        lines = [0] if code is None else lines_of(code)
        file = "" if code is None else code.co_filename
        first = 0 if code is None else code.co_firstlineno
        self.source: HandlerSource = HandlerSource(file, first, lines[-1])

    def wrap(self) -> Callable[..., Any]:
        """Return the handler to run: of the same colour, and with the same signature."""
        handler = self._handler
        if inspect.iscoroutinefunction(handler):

            @wraps(handler)
            async def acall(*given: Any) -> Any:
                run = self._begin()
                token = current_run.set(run)
                try:
                    value = await handler(*given)
                except BaseException as error:
                    run.end(error)
                    raise
                finally:
                    current_run.reset(token)
                if self._effects_table:
                    await given[0].execute(note_effect(run.key))
                run.end()
                return value

            return acall

        @wraps(handler)
        def call(*given: Any) -> Any:
            run = self._begin()
            token = current_run.set(run)
            try:
                value = handler(*given)
            except BaseException as error:
                run.end(error)
                raise
            finally:
                current_run.reset(token)
            if self._effects_table:
                given[0].execute(note_effect(run.key))
            run.end()
            return value

        return call

    def _begin(self) -> RecordedRun:
        current = semel.current()
        name = f"{os.getpid()}-{next(self._numbers)}"
        self._link.say(RunBegan(name, current.key, current.attempt))
        self._link.halt(current.key, "claimed", name)
        if self._tracer is not None:
            self._tracer.install()
        return RecordedRun(self._link, name, current.key)


def note_effect(key: str) -> str:
    """Return the statement that notes a run; keys of a chaos run have no character that needs quoting."""
    return f"INSERT INTO {EFFECTS_TABLE} (event) VALUES ('{key}')"  # noqa: S608 - see above


def start_worker(end: socket.socket, order: bytes) -> int:
    """Run one worker in a process that was just forked; returns its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the conductor, which ends its workers itself
    wanted = msgspec.json.decode(order, type=ChaosOrder)
    sys.path[:] = wanted.path
    try:
        asyncio.run(_work(end, wanted))
    except Exception as error:  # noqa: BLE001 - the conductor shows it
        sys.stderr.write(f"worker {os.getpid()}: {error!r}\n")
        sys.stderr.flush()
        return 1
    return 0


async def _work(end: socket.socket, order: ChaosOrder) -> None:
    logging.getLogger("semel").setLevel(logging.ERROR)  # faults are expected here; the report shows them
    link = ConductorLink(end)
    recorder = HandlerRecorder(load_object(order.handler), link, effects_table=order.effects_table)
    policy = semel.Policy(max_attempts=ATTEMPTS_MAX, retry_delay_s=RETRY_DELAY_S)
    once = semel.aopen(
        find_chaos_store(order.store),
        consumer=order.consumer,
        mode=order.mode,
        lease=order.lease_s,
        policy=policy,
        hooks=[_store_watch(link, order.lease_s)],
    )
    source: Source = source_for(order.source) if order.source else ConductorSource(link, order.visibility_s)
    pace = RunnerLimits(batch=order.concurrency, concurrency=order.concurrency, in_hand=4 * order.concurrency)
    async with once:
        runner = Runner(ReportingSource(source, link), [Route(recorder.wrap(), once=once)], pace=pace)
        link.start(asyncio.get_running_loop())
        link.say(recorder.source)
        beating = asyncio.create_task(_beat(link, order.lease_s))
        try:
            await runner.run()
        finally:
            beating.cancel()


def _store_watch(link: ConductorLink, lease_s: float) -> Callable[[HookEvent], None]:
    """Return a hook that reports a slow or failing store: that may cost a lease as a stall does."""

    def on_event(event: HookEvent) -> None:
        if isinstance(event, StoreFailed):
            link.say(Lagged(0.0, store=True))
        elif isinstance(event, StoreSent) and event.duration_s > lease_s * LAG_LEASES:
            link.say(Lagged(event.duration_s, store=True))

    return on_event


async def _beat(link: ConductorLink, lease_s: float) -> None:
    """Report when the event loop stood still for long: the handler, or a busy computer, delayed renewals."""
    loop = asyncio.get_running_loop()
    pause_s = lease_s / BEATS_PER_LEASE
    while True:
        began = loop.time()
        await asyncio.sleep(pause_s)
        late_s = loop.time() - began - pause_s
        if late_s > lease_s * LAG_LEASES:
            link.say(Lagged(late_s))
