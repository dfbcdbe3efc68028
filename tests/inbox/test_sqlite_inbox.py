"""Mark and effect in one transaction of a `sqlite3` connection."""

import sqlite3
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.client.items import ItemBuilder
from semel.connections import CallerConnection, handle_for
from semel.core.commands import Forget, Granted, Purge, Scan
from semel.errors import (
    NoTransaction,
    OutcomeUnknown,
    StillRunning,
    UsageError,
    ValueNotEncodable,
    ValueTooLarge,
    WrongDatabase,
)
from semel.inbox import Inbox, inbox_for
from semel.policy import Policy
from semel.stores.memory.store import MemoryStore
from semel.stores.sqlite import SqliteStore
from semel.testing import ManualClock
from semel.types import Done
from tests.stores.sqlite.tools import HOUR, LEASE, SECOND, claim, hold, line, lookup, process, settle

WINDOWS = {("", "billing", "short"): SECOND, ("", "billing", "off"): 0}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "a.db", synchronous="NORMAL", clock=clock)
    store.open()
    yield store
    store.close()


@pytest.fixture
def connection(store: SqliteStore) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(store.path)
    connection.execute("CREATE TABLE wallet (id INTEGER PRIMARY KEY, balance INTEGER CHECK (balance >= 0))")
    connection.execute("INSERT INTO wallet VALUES (1, 0)")
    connection.commit()
    yield connection
    connection.close()


def inbox(connection: Any, store: Any, lock_wait_s: float = 2.0) -> Inbox:
    plan = ItemBuilder(
        consumer="billing",
        tenant="",
        window=3600,
        lease=30,
        mode="inbox",
        policy=Policy(lock_wait_s=lock_wait_s),
    )
    handle = handle_for(connection)
    assert isinstance(handle, CallerConnection)
    return inbox_for(handle, store, plan, lambda: WINDOWS)


def credit(connection: sqlite3.Connection, amount: int = 1) -> None:
    connection.execute("UPDATE wallet SET balance = balance + ?", (amount,))


def balance(connection: sqlite3.Connection) -> int:
    total: int = connection.execute("SELECT balance FROM wallet").fetchone()[0]
    return total


def test_mark_and_effect_commit_together(connection: sqlite3.Connection, store: SqliteStore) -> None:
    for _ in range(3):
        with connection:
            if inbox(connection, store).first("evt_1"):
                credit(connection)
    assert balance(connection) == 1
    record = lookup(store, "evt_1")
    assert (record.state, record.attempt, len(record.owner)) == ("done", 1, 16)
    assert record.expires_at_us == record.settled_at_us + HOUR
    assert [each.key for each in store.send([Scan()])[0].records] == ["evt_1"]


def test_mark_and_effect_roll_back_together(connection: sqlite3.Connection, store: SqliteStore) -> None:
    held = inbox(connection, store)
    assert held.first("evt_1")
    credit(connection)
    assert not held.first("evt_1")
    connection.rollback()
    assert balance(connection) == 0
    assert held.first("evt_1")
    connection.commit()
    assert not held.first("evt_1")


def test_a_rollback_to_a_savepoint_makes_it_first_again(
    connection: sqlite3.Connection, store: SqliteStore
) -> None:
    held = inbox(connection, store)
    assert held.first("outer")
    connection.execute("SAVEPOINT one")
    assert held.first_many(["a", "b"]) == [True, True]
    connection.execute("ROLLBACK TO one")
    assert held.first_many(["a", "outer"]) == [True, False]
    connection.execute("RELEASE one")
    connection.commit()
    assert held.first_many(["a", "b", "outer"]) == [False, True, False]
    connection.rollback()


def test_it_never_commits(connection: sqlite3.Connection, store: SqliteStore) -> None:
    inbox(connection, store).first("evt_1")
    assert connection.in_transaction
    assert lookup(store, "evt_1").__class__.__name__ == "Absent"
    inbox(connection, store).store("evt_1", 1)
    inbox(connection, store).replay("evt_1")
    assert connection.in_transaction
    connection.rollback()


def test_many_are_folded(connection: sqlite3.Connection, store: SqliteStore) -> None:
    held = inbox(connection, store)
    assert held.first_many(["a", "b", "a", "c", "b"]) == [True, True, False, True, False]
    assert held.first_many([]) == []
    assert held.first_many([f"k{number}" for number in range(1200)]) == [True] * 1200
    connection.commit()
    assert sum(held.first_many([f"k{number}" for number in range(1201)])) == 1
    connection.rollback()


def test_many_are_written_by_one_statement(connection: sqlite3.Connection, store: SqliteStore) -> None:
    held = inbox(connection, store)
    held.first("before")
    statements: list[str] = []
    connection.set_trace_callback(statements.append)
    held.first_many([f"k{number}" for number in range(100)])
    connection.set_trace_callback(None)
    assert sum("INSERT INTO semel_records" in statement for statement in statements) == 1
    connection.rollback()


@pytest.mark.parametrize(
    "mode", ["isolation_level", *(["autocommit"] if sys.version_info >= (3, 12) else [])]
)
def test_without_a_transaction_it_refuses(
    store: SqliteStore, connection: sqlite3.Connection, mode: str
) -> None:
    if mode == "isolation_level":
        connection.isolation_level = None
    else:
        setattr(connection, mode, True)
    held = inbox(connection, store)
    with pytest.raises(NoTransaction, match="execute BEGIN first"):
        held.first("evt_1")
    with pytest.raises(NoTransaction):
        held.store("evt_1", 1)
    assert held.replay("evt_1") is None
    connection.execute("BEGIN")
    assert held.first("evt_1")
    connection.execute("COMMIT")


@pytest.mark.parametrize("level", ["", "DEFERRED", "IMMEDIATE", "EXCLUSIVE"])
def test_a_transaction_that_the_driver_opens_will_do(
    store: SqliteStore, connection: sqlite3.Connection, level: Any
) -> None:
    connection.isolation_level = level
    assert inbox(connection, store).first("evt_1")
    assert connection.in_transaction
    connection.rollback()


def test_another_database_is_refused(store: SqliteStore, tmp_path: Path) -> None:
    for name in (":memory:", str(tmp_path / "b.db")):
        other = sqlite3.connect(name)
        with pytest.raises(WrongDatabase, match="use one file for both"):
            inbox(other, store).first("evt_1")
        other.close()


def test_the_same_file_by_another_name(store: SqliteStore, tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(store.path)
    connection = sqlite3.connect(tmp_path / "link.db")
    assert inbox(connection, store).first("evt_1")
    connection.close()


def test_a_running_claim_of_somebody_else(
    store: SqliteStore, connection: sqlite3.Connection, clock: ManualClock
) -> None:
    item, granted = hold(store, "evt_1")
    held = inbox(connection, store)
    credit(connection)
    with pytest.raises(StillRunning) as raised:
        held.first_many(["new", "evt_1"])
    assert 29 < raised.value.retry_after_s <= 30
    assert held.first("new")  # nothing was written, and the transaction goes on
    connection.commit()
    assert balance(connection) == 1
    clock.advance(us=LEASE)
    assert held.first("evt_1")  # its lease is over
    connection.commit()
    record = lookup(store, "evt_1")
    assert (record.state, record.attempt, record.first_seen_us) == ("done", 2, granted.first_seen_us)
    assert record.fence > granted.fence
    assert store.send([settle(item, granted)])[0].__class__.__name__ == "Lost"


def test_done_and_quarantined_by_claims(
    store: SqliteStore, connection: sqlite3.Connection, clock: ManualClock
) -> None:
    item, granted = hold(store, "done")
    store.send([settle(item, granted, b'j"value"')])
    hold(store, "unsure", quarantine=True)
    clock.advance(us=LEASE)
    held = inbox(connection, store)
    assert not held.first("done")
    assert held.replay("done") == Done("value", replayed=True)
    with pytest.raises(OutcomeUnknown, match="resolve it"):
        held.first("unsure")
    connection.rollback()


def test_another_writer_is_waited_for(store: SqliteStore, connection: sqlite3.Connection) -> None:
    other = sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    inbox(other, store).first("evt_1")
    connection.execute("PRAGMA busy_timeout = 1234")
    with pytest.raises(StillRunning, match="held the lock"):
        inbox(connection, store, lock_wait_s=0.05).first("evt_1")
    assert connection.execute("PRAGMA busy_timeout").fetchone() == (1234,)
    commit = threading.Timer(0.05, other.execute, ["COMMIT"])
    commit.start()
    assert not inbox(connection, store).first("evt_1")  # it waited, and saw the other's mark
    assert connection.execute("PRAGMA busy_timeout").fetchone() == (1234,)
    connection.rollback()
    commit.join()  # the mark is seen before `execute` has returned: closing now would pull it from under that thread
    other.close()


def test_a_transaction_that_read_too_early_says_what_to_do(
    store: SqliteStore, connection: sqlite3.Connection
) -> None:
    connection.execute("BEGIN")
    assert balance(connection) == 0
    hold(store, "other")
    with pytest.raises(StillRunning, match="roll it back"):
        inbox(connection, store).first("evt_1")
    connection.rollback()
    assert inbox(connection, store).first("evt_1")
    connection.rollback()


def test_the_callers_own_errors_stay_the_callers(store: SqliteStore, connection: sqlite3.Connection) -> None:
    def handle() -> None:
        with connection:
            assert inbox(connection, store).first("evt_1")
            credit(connection, -5)

    with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
        handle()
    assert inbox(connection, store).first("evt_1")  # the mark went with it
    connection.rollback()


def test_expired_marks_are_absent(
    store: SqliteStore, connection: sqlite3.Connection, clock: ManualClock
) -> None:
    held = inbox(connection, store)
    assert held.first("evt_1", event_type="short")
    held.store("evt_1", "old")
    connection.commit()
    fence = lookup(store, "evt_1").fence
    clock.advance(us=2 * SECOND)
    assert held.replay("evt_1") is None
    assert held.first("evt_1", event_type="short")
    assert held.replay("evt_1") == Done(None, replayed=True, kept=False)
    connection.commit()
    assert lookup(store, "evt_1").fence > fence
    clock.advance(us=2 * HOUR)
    assert store.send([Purge()])[0].count == 1


def test_a_window_that_is_off_marks_nothing(store: SqliteStore, connection: sqlite3.Connection) -> None:
    assert inbox(connection, store).first_many(["a", "a"], event_type="off") == [True, True]
    connection.commit()
    assert store.send([Scan()])[0].records == []


def test_a_forgotten_mark_is_first_again(store: SqliteStore, connection: sqlite3.Connection) -> None:
    held = inbox(connection, store)
    held.first("evt_1")
    connection.commit()
    (forgotten,) = store.send([Forget(("", "billing", "evt_1"))])
    assert held.first("evt_1")
    connection.commit()
    assert lookup(store, "evt_1").fence > forgotten.fence


def test_values_are_kept_and_replayed(store: SqliteStore, connection: sqlite3.Connection) -> None:
    held = inbox(connection, store)
    assert held.replay("evt_1") is None
    with pytest.raises(UsageError, match="call first"):
        held.store("evt_1", 1)
    values: list[Any] = [None, 0, "", [], (1, 2), b"raw", {"a": [1.5]}]
    for number, value in enumerate(values):
        assert held.first(f"evt_{number}")
        held.store(f"evt_{number}", value)
        connection.commit()
        assert held.replay(f"evt_{number}") == Done(value, replayed=True)
    with pytest.raises(ValueTooLarge):
        held.store("evt_1", "x" * 300_000)
    with pytest.raises(ValueNotEncodable):
        held.store("evt_1", object())
    connection.rollback()


def test_the_callers_factories_do_not_matter(store: SqliteStore) -> None:
    sqlite3.register_converter("BLOB", lambda raw: "converted")
    sqlite3.register_converter("INTEGER", lambda raw: "converted")
    connection = sqlite3.connect(store.path, detect_types=sqlite3.PARSE_DECLTYPES)
    try:
        connection.row_factory = lambda cursor, row: {"row": row}
        connection.text_factory = bytes
        held = inbox(connection, store)
        assert held.first_many(["a", "b"], event_type="short") == [True, True]
        assert not held.first("a")
        held.store("a", 5)
        assert held.replay("a") == Done(5, replayed=True)
        assert connection.text_factory is bytes
        connection.rollback()
    finally:
        sqlite3.converters.clear()
        connection.close()


def test_time_is_the_stores_and_is_kept_with_the_mark(
    store: SqliteStore, connection: sqlite3.Connection, clock: ManualClock
) -> None:
    held = inbox(connection, store)
    held.first("a")
    connection.commit()
    clock.step_back(us=HOUR)
    held.first("b")
    connection.commit()
    again = SqliteStore(store.path, clock=clock)
    _, granted = hold(again, "c")
    again.close()
    assert lookup(store, "a").fence < lookup(store, "b").fence < granted.fence


def test_claims_that_the_store_remembers_do_not_hide_a_mark(
    store: SqliteStore, connection: sqlite3.Connection, clock: ManualClock
) -> None:
    item, granted = hold(store, "evt_1")
    clock.advance(us=LEASE)
    assert inbox(connection, store).first("evt_1")
    connection.commit()
    assert store.send([settle(item, granted)])[0].__class__.__name__ == "Lost"
    assert not isinstance(store.send([claim("evt_1")])[0], Granted)


def test_the_handle_picks_the_inbox(store: SqliteStore, connection: sqlite3.Connection) -> None:
    assert inbox(connection, store).first("evt_1")
    connection.rollback()
    with pytest.raises(TypeError, match=r"builtins\.str is not a supported connection.*sqlite3"):
        inbox("conn", store)
    with pytest.raises(TypeError, match="needs a sqlite: store, and this one is memory:"):
        inbox(connection, MemoryStore())


CREDITING = """
import sqlite3, sys
import semel
connection = sqlite3.connect(sys.argv[1])
inbox = semel.open("sqlite:///" + sys.argv[1], consumer="billing", mode="inbox").inbox(connection)
for number in range(100_000):
    with connection:
        if inbox.first(f"evt_{number}"):
            connection.execute("UPDATE wallet SET balance = balance + 1")
    print(number, flush=True)
"""


def test_killed_anywhere_the_wallet_agrees_with_the_marks(
    store: SqliteStore, connection: sqlite3.Connection
) -> None:
    said = -1
    for life in range(1, 6):
        with process(CREDITING, store.path) as child:
            for _ in range(said + 30 * life):
                said = max(said, int(line(child)))
            child.kill()
        marks = connection.execute("SELECT count(*) FROM semel_records").fetchone()[0]
        assert balance(connection) == marks >= said + 1
