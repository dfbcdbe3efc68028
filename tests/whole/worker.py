"""A process of the user's: several clients in both colours, threads and forks, opened and closed at random."""

import asyncio
import contextlib
import itertools
import os
import random
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

import semel
from semel.errors import StillRunning, StoreUnavailable
from semel.testing.worker_processes import die_with_parent
from tests.whole.handlers import WORK_MAX_S, note
from tests.whole.scene import DRIVERS, LEASE_S, Driver, Scene, UserDatabase, pause

__all__ = ["FLOWS", "INBOX_FLOWS", "Worker"]

T = TypeVar("T")

FLOWS = ("run", "many", "charge", "mail", "arun", "acharge")
"""The flows of library clients whose effects are outside."""
INBOX_FLOWS = {"inbox": "chain", "ainbox": "achain"}
"""The flows of inboxes on the user's own connection, each with the flow of the messages that it publishes."""
POLICY = semel.Policy(wait_s=0.5, max_attempts=1000, lock_wait_s=20.0)
STALL_LEASE_S = 0.5
STALLING = msgspec.structs.replace(POLICY, run_max_s=STALL_LEASE_S)
"""Of a client whose handlers take longer than their lease: what ended late must not be recorded."""
PATIENT = msgspec.structs.replace(POLICY, wait_s=30.0)
STALLS = 2
"""Events that are taken over at the end of every storm, however it went."""
DRAINED = 50
"""Events that one connection, or one client of an event loop, finishes at the end."""
_runs = itertools.count()


class Order(msgspec.Struct, frozen=True):
    """What the guarded functions are called with."""

    id: str
    run: str
    """Which call it was, to tell effects apart."""


def new_order(event: str) -> Order:
    """A call of its own for the event."""
    return Order(event, f"{os.getpid()}-{next(_runs)}-{time.monotonic_ns()}")


def taken(event: str, flow: str) -> semel.Message:
    """The message that an inbox publishes with its effect."""
    return semel.Message("order.taken", {"event": event, "flow": INBOX_FLOWS[flow]})


def outcome_word(outcome: Any) -> str:
    """What became of a run: `recorded` says that it ran, and that the store knows."""
    match outcome:
        case semel.Done(replayed=True):
            return "replayed"
        case semel.Done(recorded=True):
            return "recorded"
        case semel.Done():
            return "unrecorded"
        case _:
            return type(outcome).__name__.lower()


@contextlib.asynccontextmanager
async def _committing(connection: Any) -> AsyncIterator[None]:
    """A transaction of aiosqlite, which opens it with the first write."""
    try:
        yield
    except BaseException:
        await connection.rollback()
        raise
    await connection.commit()


class Worker:
    """One process. `deadline`: when it ends by itself, on the monotonic clock."""

    def __init__(self, scene: Scene, seed: str, deadline: float) -> None:
        self._scene = scene
        self._chance = random.Random(seed)
        self._seed = seed
        self._deadline = deadline
        self._users = UserDatabase(scene)
        self._connecting = threading.Lock()
        """Held while a connection of the user's is open, and during a fork: SQLite must not be carried across one."""

    def live(self) -> None:
        """Threads with clients of their own; forks in between."""
        threads = [threading.Thread(target=self._in_thread, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        while self._goes_on():
            pause(self._chance.uniform(0.2, 0.8))
            self._fork()
        for thread in threads:
            thread.join()

    def _goes_on(self) -> bool:
        return time.monotonic() < self._deadline

    def _in_thread(self, number: int) -> None:
        chance = random.Random(f"{self._seed}:{number}")
        with self._reporting("thread"):
            while self._goes_on():
                if chance.random() < 0.35:
                    asyncio.run(self._async_clients(chance))
                    if self._scene.is_sql and chance.random() < 0.7:
                        events = [self._scene.current_event(chance) for _ in range(3)]
                        self.run_async_inboxes(events, chance)
                else:
                    self._clients(chance)

    def _fork(self) -> None:
        """A child that uses a client of its parent and one of its own."""
        with semel.open(self._scene.store, consumer="runs", lease=LEASE_S, policy=POLICY) as once:
            with self._reporting("parent"):
                self.run_one(once, self._scene.current_event(self._chance))
            with self._connecting:
                child = os.fork()
            if child == 0:
                die_with_parent()
                with self._reporting("child"):
                    self.run_one(once, self._scene.current_event(self._chance))
                    self._clients(random.Random(f"{self._seed}:{os.getpid()}"))
                os._exit(0)
            os.waitpid(child, 0)

    @contextlib.contextmanager
    def _reporting(self, where: str) -> Iterator[None]:
        """Errors that no promise covers are noted: nothing but what is expected may be raised."""
        try:
            yield
        except (StoreUnavailable, StillRunning):
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                self._scene.ledger.write("error", where, "", detail=repr(error))
        except Exception as error:  # noqa: BLE001 - the audit shows it
            self._scene.ledger.write("error", where, "", detail=repr(error))

    # --- clients that block ---

    def _clients(self, chance: random.Random) -> None:
        """Open some clients on one store, use them, close them in any order."""
        with contextlib.ExitStack() as stack:
            opened = {
                consumer: stack.enter_context(
                    semel.open(self._scene.store, consumer=consumer, lease=LEASE_S, policy=POLICY)
                )
                for consumer in chance.sample(("runs", "many", "guards"), chance.randint(1, 3))
            }
            for _ in range(chance.randint(1, 8)):
                consumer = chance.choice(list(opened))
                event = self._scene.current_event(chance)
                if consumer == "runs":
                    self.run_one(opened[consumer], event)
                elif consumer == "many":
                    self.run_many(opened[consumer], [self._scene.current_event(chance) for _ in range(4)])
                else:
                    self.run_guarded(opened[consumer], event)
            if chance.random() < 0.2:
                self.run_stalled(self._scene.current_event(chance))
            if self._scene.is_sql and chance.random() < 0.7:
                self.run_inboxes([self._scene.current_event(chance) for _ in range(3)])

    def _ended(self, flow: str, order: Order, outcome: Any) -> str:
        word = outcome_word(outcome)
        self._scene.ledger.write("end", flow, order.id, order.run, word)
        if isinstance(outcome, semel.Done) and not str(outcome.value).startswith(f"{flow} {order.id} "):
            self._scene.ledger.write("error", flow, order.id, detail=f"was given the value {outcome.value!r}")
        return word

    def _effect(self, flow: str, order: Order) -> str:
        note(self._scene, flow, order.id, order.run)
        pause(random.uniform(0, WORK_MAX_S))
        return f"{flow} {order.id} {order.run}"

    def run_one(self, once: semel.Semel, event: str) -> bool:
        """One call of `run`; whether it is done."""
        order = new_order(event)
        outcome = once.run(event, self._effect, "run", order)
        return self._ended("run", order, outcome) in ("recorded", "replayed")

    def run_many(self, once: semel.Semel, events: Sequence[str]) -> bool:
        """One call of `run_many`; whether all are done."""
        orders = [new_order(event) for event in dict.fromkeys(events)]
        deliveries = [semel.Delivery(key=order.id, body=order) for order in orders]
        outcomes = once.run_many(deliveries, lambda order: self._effect("many", order))
        words = [self._ended("many", order, each) for order, each in zip(orders, outcomes, strict=True)]
        return set(words) <= {"recorded", "replayed"}

    def run_guarded(self, once: semel.Semel, event: str) -> bool:
        """Two guarded functions of one client; whether both are done."""

        @once.guard(key="order.id", name="charge")
        def charge(order: Order) -> str:
            return self._effect("charge", order)

        @once.guard(key="order.id", name="mail")
        def mail(order: Order) -> str:
            return self._effect("mail", order)

        first, second = new_order(event), new_order(event)
        words = {
            self._ended("charge", first, charge.call(first)),
            self._ended("mail", second, mail.call(second)),
        }
        return words <= {"recorded", "replayed"}

    def run_stalled(self, event: str) -> bool:
        """Two runs of one event: the first one's lease ends while it works, and the second takes over."""
        first, second = new_order(event), new_order(event)
        begun, taken_over = threading.Event(), threading.Event()
        store = self._scene.store

        def stall() -> str:
            begun.set()
            value = self._effect("stalled", first)
            taken_over.wait()
            return value

        def run_first() -> None:
            with self._reporting("stalled"):
                self._ended("stalled", first, slow.run(event, stall))
            begun.set()  # a duplicate, or the store is away

        with (
            semel.open(store, consumer="stalls", lease=STALL_LEASE_S, policy=STALLING) as slow,
            semel.open(store, consumer="stalls", lease=LEASE_S, policy=PATIENT) as quick,
        ):
            thread = threading.Thread(target=run_first)
            thread.start()
            try:
                begun.wait()
                word = self._ended("stalled", second, quick.run(event, self._effect, "stalled", second))
            finally:
                taken_over.set()
                thread.join()
        return word in ("recorded", "replayed")

    def run_inboxes(self, events: Sequence[str]) -> bool:
        """Marks, effects and messages in transactions of the user's own connection."""
        with (
            self._connecting,
            semel.open(self._scene.store, consumer="inboxes", mode="inbox", policy=POLICY) as once,
            self._users.connected() as connection,
        ):
            for event in events:
                with connection if self._scene.kind == "sqlite" else connection.transaction():
                    if once.inbox(connection).first(event):
                        self._users.insert(connection, "inbox", event)
                        once.outbox(connection).publish(taken(event, "inbox"))
        return True

    # --- clients of an event loop ---

    async def _async_clients(self, chance: random.Random) -> None:
        calls: list[Callable[[semel.AsyncSemel, str], Awaitable[bool]]] = [self.arun_one, self.arun_guarded]
        async with semel.aopen(self._scene.store, consumer="aruns", lease=LEASE_S, policy=POLICY) as once:
            for _ in range(chance.randint(1, 4)):
                call = chance.choice(calls)
                events = [self._scene.current_event(chance) for _ in range(3)]
                await asyncio.gather(*(call(once, event) for event in events))

    async def _aeffect(self, flow: str, order: Order) -> str:
        note(self._scene, flow, order.id, order.run)
        await asyncio.sleep(random.uniform(0, WORK_MAX_S))
        return f"{flow} {order.id} {order.run}"

    async def arun_one(self, once: semel.AsyncSemel, event: str) -> bool:
        """As `run_one`."""
        order = new_order(event)
        outcome = await once.run(event, self._aeffect, "arun", order)
        return self._ended("arun", order, outcome) in ("recorded", "replayed")

    async def arun_guarded(self, once: semel.AsyncSemel, event: str) -> bool:
        """One guarded coroutine."""

        @once.guard(key="order.id", name="charge")
        async def acharge(order: Order) -> str:
            return await self._aeffect("acharge", order)

        order = new_order(event)
        return self._ended("acharge", order, await acharge.call(order)) in ("recorded", "replayed")

    def run_async_inboxes(self, events: Sequence[str], chance: random.Random) -> bool:
        """As `run_inboxes`, on a connection that is awaited."""
        with self._connecting:
            asyncio.run(self._async_inboxes(events, chance.choice(DRIVERS[self._scene.kind])))
        return True

    async def _async_inboxes(self, events: Sequence[str], driver: Driver) -> None:
        async with (
            semel.aopen(self._scene.store, consumer="ainboxes", mode="inbox", policy=POLICY) as once,
            self._users.aconnected(driver) as connection,
        ):
            for event in events:
                async with _committing(connection) if driver == "aiosqlite" else connection.transaction():
                    if await once.inbox(connection).first(event):
                        await self._users.ainsert(connection, driver, "ainbox", event)
                        await once.outbox(connection).publish(taken(event, "ainbox"))

    # --- the end: everything that is left ---

    def drain(self) -> None:
        """Deliver every event of every flow again, until each is done."""
        scene = self._scene
        todo = [(flow, event) for event in scene.events for flow in ("run", "many", "guarded")]
        todo += [("stalled", f"stall{number}") for number in range(STALLS)]
        with (
            semel.open(scene.store, consumer="runs", lease=LEASE_S, policy=POLICY) as runs,
            semel.open(scene.store, consumer="many", lease=LEASE_S, policy=POLICY) as many,
            semel.open(scene.store, consumer="guards", lease=LEASE_S, policy=POLICY) as guards,
        ):
            steps: dict[str, Callable[[str], bool]] = {
                "run": lambda event: self.run_one(runs, event),
                "many": lambda event: self.run_many(many, [event]),
                "guarded": lambda event: self.run_guarded(guards, event),
                "stalled": self.run_stalled,
            }
            while todo:
                todo = [(flow, event) for flow, event in todo if not self._done(steps[flow], event)]
        for batch in self._batches():
            while not self._done(lambda events: asyncio.run(self._adrain(events)), batch):
                pass
        if scene.is_sql:
            self._drain_inboxes()
        scene.ledger.write("end", "drain", "", detail="done")

    def _drain_inboxes(self) -> None:
        """The same for inboxes, many events on one connection."""
        for batch in self._batches():
            while not self._done(self.run_inboxes, batch):
                pass
            while not self._done(lambda some: self.run_async_inboxes(some, self._chance), batch):
                pass

    def _batches(self) -> Iterator[list[str]]:
        events = self._scene.events
        return (events[at : at + DRAINED] for at in range(0, len(events), DRAINED))

    async def _adrain(self, events: Sequence[str]) -> bool:
        async with semel.aopen(self._scene.store, consumer="aruns", lease=LEASE_S, policy=POLICY) as once:
            done = [
                await call(once, event) for event in events for call in (self.arun_one, self.arun_guarded)
            ]
        return all(done)

    def _done(self, step: Callable[[T], bool], given: T) -> bool:
        ended: list[bool] = []
        with self._reporting("drain"):
            ended.append(step(given))
        return ended == [True]
