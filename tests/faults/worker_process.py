"""A worker in a process of its own: handles one delivery, and stops at a named point until it is released or killed.

Its standard output says where it is; it goes on when a line comes in. Effects go to a ledger of their own, outside
of semel: a file that is only appended to, or a database that knows idempotency keys or fences.
"""

import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import psycopg

import semel
from semel.stores.sqlite import SqliteStore
from semel.testing.faults import TrapStore
from semel.types import Record

KEY = "evt_1"
LEASE_S = 0.3
WAIT_S = 20.0

Trap = Callable[[str], None]


class Job(msgspec.Struct, frozen=True):
    """What a worker is told."""

    folder: str
    mode: str
    sink: str = "plain"
    point: str = ""
    journal: bool = False
    """The source will not send it again."""
    server: str = ""
    """For an inbox: the store on PostgreSQL; empty: in an SQLite file."""

    @property
    def database(self) -> Path:
        return Path(self.folder) / "events.db"

    @property
    def wallet(self) -> str:
        """The application's own table, beside the store's."""
        return "wallet" if not self.server else f"wallet_{sha256(self.server.encode()).hexdigest()[:16]}"

    @property
    def ledger(self) -> Path:
        return Path(self.folder) / "ledger"


def never(_point: str) -> None:
    """Stop nowhere."""


def effect(job: Job) -> None:
    """Something that happens in the world, whatever becomes of this process."""
    if job.sink == "plain":
        ledger = os.open(job.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(ledger, b"effect\n")
        os.fsync(ledger)
        os.close(ledger)
        return
    current = semel.current()
    with closing(sqlite3.connect(job.ledger)) as ledger_db, ledger_db:
        ledger_db.execute("CREATE TABLE IF NOT EXISTS effects (key TEXT, fence INTEGER)")
        ledger_db.execute("CREATE TABLE IF NOT EXISTS calls (key TEXT, fence INTEGER)")
        (seen, newest) = ledger_db.execute(
            "SELECT count(*), coalesce(max(fence), 0) FROM effects WHERE key = ?", (current.idempotency_key,)
        ).fetchone()
        refused = seen > 0 if job.sink == "keyed" else current.fence < newest
        if not refused:
            ledger_db.execute("INSERT INTO effects VALUES (?, ?)", (current.idempotency_key, current.fence))
    if refused and job.sink == "fenced":
        raise ConnectionError("the sink knows a newer fence")


def effects(job: Job) -> int:
    """How often it has happened."""
    if job.mode == "inbox":
        database = connected(job)
        (balance,) = database.execute(f"SELECT balance FROM {job.wallet}").fetchone()
        database.close()
        return int(balance)
    if not job.ledger.exists():
        return 0
    if job.sink == "plain":
        return job.ledger.read_text().count("effect\n")
    with closing(sqlite3.connect(job.ledger)) as ledger_db, ledger_db:
        (count,) = ledger_db.execute("SELECT count(*) FROM effects").fetchone()
    return int(count)


@contextmanager
def client(job: Job, trap: Trap) -> Iterator[semel.Semel]:
    """A client on the real file, with traps around its store."""
    store: Any = SqliteStore(job.database, synchronous="NORMAL")
    policy = semel.Policy(lease_s=LEASE_S, wait_s=WAIT_S)
    mode: Any = job.mode
    with (
        closing(store),
        semel.open(TrapStore(store, trap), consumer="kills", mode=mode, lease=LEASE_S, policy=policy) as once,
    ):
        yield once


def work(job: Job, trap: Trap = never) -> Any:
    """Handle one delivery; the outcome says whether to acknowledge it."""
    if job.mode == "inbox":
        return work_in_transaction(job, trap)

    def handler() -> str:
        trap("before_effect")
        effect(job)
        trap("after_effect")
        return "receipt"

    with client(job, trap) as once:
        if job.journal:
            delivery = semel.Delivery(key=KEY, body=None, journal=b"payload")
            (outcome,) = once.run_many([delivery], lambda _body: handler())
        else:
            outcome = once.run(KEY, handler)
    trap("before_ack")
    return outcome


def sweep(job: Job) -> list[Any]:
    """Look for the orphans of other processes, once their leases are over."""
    recovered: list[Any] = []

    def handler(_payload: Any) -> str:
        effect(job)
        return "recovered"

    with client(job, never) as once:
        record = once.records.lookup(KEY)
        if isinstance(record, Record) and record.state == "claimed":
            await_store_clock(once, record.lease_until_us)
        for outcome in once.sweep(handler):
            assert isinstance(outcome, semel.Done)
            recovered.append(outcome.value)
    return recovered


def await_store_clock(once: semel.Semel, until_us: int) -> None:
    """Ask the store for its time until it is past `until_us`."""
    while once.records.stats().now_us <= until_us:
        pass


def connected(job: Job) -> Any:
    """The application's own connection, on which it begins and ends transactions by itself."""
    if job.server:
        return psycopg.connect(job.server.partition("?")[0], autocommit=True)
    return sqlite3.connect(job.database, isolation_level=None, timeout=0.2)


@contextmanager
def inbox_client(job: Job, *, connect: bool = True) -> Iterator[semel.Semel]:
    """A client whose tables stand beside the application's own; not connected, it connects at its first use."""
    with ExitStack() as stack:
        store: Any = job.server
        if not job.server:
            store = SqliteStore(job.database, synchronous="NORMAL", adopt=True, busy_wait_s=0.2)
            stack.enter_context(closing(store))
        policy = semel.Policy(lock_wait_s=0.2)
        once = semel.open(store, consumer="kills", mode="inbox", policy=policy)
        yield stack.enter_context(once if connect else closing(once))


def work_in_transaction(job: Job, trap: Trap) -> bool:
    """The same with mark and effect in one transaction; whether it may be acknowledged."""
    connection = connected(job)
    try:
        with inbox_client(job) as once:
            trap("before_claim")
            connection.execute("BEGIN" if job.server else "BEGIN IMMEDIATE")
            first = once.inbox(connection).first(KEY)
            trap("after_claim")
            if first:
                trap("before_effect")
                connection.execute(f"UPDATE {job.wallet} SET balance = balance + 1")
                trap("after_effect")
            trap("before_complete")
            connection.execute("COMMIT")
            trap("after_complete")
    except (
        ConnectionError,
        sqlite3.OperationalError,
        semel.errors.StillRunning,
        semel.errors.StoreUnavailable,
    ):
        return False
    finally:
        connection.close()
    trap("before_ack")
    return True


def prepare(job: Job) -> None:
    """Create what an application has before its first event."""
    if job.mode == "inbox":
        database = connected(job)
        database.execute(f"CREATE TABLE {job.wallet} (balance INTEGER)")
        database.execute(f"INSERT INTO {job.wallet} VALUES (0)")
        database.close()
        with inbox_client(job):
            pass


def main() -> None:
    """Do the job, and say how it ended."""
    job = msgspec.json.decode(sys.argv[1], type=Job)
    armed = [job.point]

    def trap(point: str) -> None:
        if point in armed:
            armed.remove(point)
            sys.stdout.write(f"{point}\n")
            sys.stdout.flush()
            sys.stdin.readline()

    outcome = work(job, trap)
    sys.stdout.write(f"{type(outcome).__name__}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
