"""The workers of the demo.

A worker takes deliveries, applies their effect, acknowledges. It may be killed at any point.
"""

import os
import signal
import socket
import sqlite3
import sys
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec

import semel
from semel.cli.demo.queue import Ack, Arrived, Deliver, Go, Mode, Nack, Phase, Ready, from_queue
from semel.stores import Store
from semel.testing.worker_processes import Nursery, WorkerSocket

__all__ = ["LEASE_S", "DemoFolder", "Order", "new_nursery", "start_worker", "work"]

LEASE_S = 0.4
"""Short, so that the claims of killed workers end soon."""
ATTEMPTS_MAX = 1000

Halt = Callable[..., None]
"""Called at each phase of a delivery: where the queue may kill or stop the worker."""
Handler = Callable[[Deliver, Halt], Ack | Nack]


class DemoFolder:
    """The folder of one run: the store, and ledgers without unique keys, which can hold an event twice."""

    def __init__(self, folder: Path, mode: Mode) -> None:
        self.mode: Mode = mode
        self.database: Path = folder / f"{mode}.db"
        self.effects: Path = folder / f"{mode}-effects.log"
        self.sink: Path = folder / f"{mode}-sink.db"

    def new_store(self) -> Store:
        """Return a new store on the file. Only processes die here, not the computer: NORMAL is as safe, and faster."""
        from semel.stores.sqlite import SqliteStore

        return SqliteStore(self.database, synchronous="NORMAL", busy_wait_s=60.0)

    def prepare(self) -> None:
        """Create the tables of the application, without unique keys on events."""
        with closing(self.new_store()) as store:
            store.open()
        with closing(sqlite3.connect(self.database)) as connection, connection:
            connection.execute("CREATE TABLE ledger (event TEXT NOT NULL, worker INTEGER NOT NULL)")
        self.effects.touch()
        with closing(sqlite3.connect(self.sink)) as connection, connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("CREATE TABLE keys (key TEXT PRIMARY KEY)")
            connection.execute("CREATE TABLE applied (event TEXT NOT NULL)")


def connect(path: Path) -> sqlite3.Connection:
    """Open the application's connection; the application begins and ends transactions."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=60.0)
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def inbox_handler(place: DemoFolder) -> Handler:
    """Return a handler that commits effect and mark in one transaction."""
    once = semel.open(place.new_store(), consumer="demo", mode="inbox")
    once.__enter__()  # connect now: inside our own transaction it would block on our lock
    connection = connect(place.database)

    def handle(delivery: Deliver, halt: Halt) -> Ack:
        connection.execute("BEGIN IMMEDIATE")
        inbox = once.inbox(connection)
        first = inbox.first(delivery.event)
        if first:
            answer = new_answer()
            halt("claimed")
            connection.execute("INSERT INTO ledger VALUES (?, ?)", (delivery.event, os.getpid()))
            inbox.store(delivery.event, answer)
            halt("effect done")
        else:
            replay = inbox.replay(delivery.event)
            answer = "" if replay is None else str(replay.value)
        connection.execute("COMMIT")
        if first:
            halt("committed")
        return Ack(delivery.number, not first, answer)

    return handle


def lease_handler(place: DemoFolder) -> Handler:
    """Return a handler with an effect outside: a file that takes duplicates, and a sink with idempotency keys."""
    policy = semel.Policy(wait_s=0, max_attempts=ATTEMPTS_MAX)
    once = semel.open(place.new_store(), consumer="demo", lease=LEASE_S, policy=policy)
    sink = connect(place.sink)
    effects = os.open(place.effects, os.O_WRONLY | os.O_APPEND)

    def handle(delivery: Deliver, halt: Halt) -> Ack | Nack:
        attempt = 1

        def effect() -> str:
            nonlocal attempt
            current = semel.current()
            attempt = current.attempt
            halt("claimed", attempt)
            os.write(effects, f"{delivery.event}\n".encode())
            apply_once(sink, current.idempotency_key, delivery.event)
            halt("effect done", attempt)
            return new_answer()

        number = delivery.number
        match once.run(delivery.event, effect):
            case semel.Done(value, replayed=True):
                return Ack(number, duplicate=True, answer=value)
            case semel.Done(value, recorded=True):
                halt("committed", attempt)
                return Ack(number, duplicate=False, answer=value, attempt=attempt)
            case semel.Busy(retry_after_s):
                return Nack(number, retry_after_s)
            case semel.Lost() | semel.Done():
                return Nack(number, lost=True)
            case other:
                return Nack(number, 0.1, why=repr(other))

    return handle


def apply_once(sink: sqlite3.Connection, key: str, event: str) -> None:
    """Apply an event as a system with idempotency keys does: a second request with the same key changes nothing."""
    sink.execute("BEGIN IMMEDIATE")
    if sink.execute("INSERT OR IGNORE INTO keys VALUES (?)", (key,)).rowcount:
        sink.execute("INSERT INTO applied VALUES (?)", (event,))
    sink.execute("COMMIT")


def control_handler(place: DemoFolder) -> Handler:
    """Return a handler that does the same work without semel: handle, then acknowledge."""
    connection = connect(place.database)

    def handle(delivery: Deliver, halt: Halt) -> Ack:
        connection.execute("BEGIN IMMEDIATE")
        halt("claimed")
        connection.execute("INSERT INTO ledger VALUES (?, ?)", (delivery.event, os.getpid()))
        halt("effect done")
        connection.execute("COMMIT")
        halt("committed")
        return Ack(delivery.number, duplicate=False, answer="")

    return handle


HANDLERS: dict[Mode, Callable[[DemoFolder], Handler]] = {
    "inbox": inbox_handler,
    "lease": lease_handler,
    "control": control_handler,
}


def new_answer() -> str:
    """Return a value that is different for each run, so that a replay can be traced to its run."""
    return uuid.uuid4().hex


def work(end: socket.socket, folder: Path, mode: Mode) -> None:
    """Serve deliveries from this socket until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the queue, which ends its workers itself
    line = WorkerSocket(end, from_queue)
    handle = HANDLERS[mode](DemoFolder(folder, mode))
    line.say(Ready(os.getpid()))
    waiting: deque[Deliver] = deque()

    def hear() -> bool:
        """Queue the messages that arrived. Returns whether one of them was `Go`."""
        heard = list(line.hear())
        waiting.extend(message for message in heard if isinstance(message, Deliver))
        return any(isinstance(message, Go) for message in heard)

    def halt(delivery: Deliver, phase: Phase, attempt: int = 1) -> None:
        if delivery.watched:
            line.say(Arrived(delivery.number, phase, attempt))
            while not hear():
                pass

    while True:
        while not waiting:
            hear()
        delivery = waiting.popleft()
        reply = handle(delivery, lambda *at, of=delivery: halt(of, *at))
        if isinstance(reply, Ack):
            halt(delivery, "before ack", reply.attempt)
        line.say(reply)


def run_worker(end: socket.socket, folder: Path, mode: Mode) -> int:
    """Work until the queue is gone; returns the exit code."""
    try:
        work(end, folder, mode)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except Exception as error:  # noqa: BLE001 - the queue shows it
        print(f"worker {os.getpid()}: {error!r}", file=sys.stderr, flush=True)
        return 1
    return 0


class Order(msgspec.Struct, frozen=True):
    """A request for one worker."""

    folder: str
    mode: Mode


def start_worker(end: socket.socket, order: bytes) -> int:
    """Run one worker in a process that was just forked; returns its exit code."""
    wanted = msgspec.json.decode(order, type=Order)
    return run_worker(end, Path(wanted.folder), wanted.mode)


def new_nursery(errors: Path) -> Nursery:
    """Return the process that starts the demo's workers; their errors go to this file."""
    return Nursery("semel.cli.demo.worker:start_worker", errors)
