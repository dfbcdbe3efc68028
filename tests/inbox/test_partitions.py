"""An inbox whose ids contain their time, on PostgreSQL: one first per id, whatever day it is and how long it takes."""

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import psycopg
import pytest

import semel
from semel.core.commands import Lookup, Purge, SwitchMode
from semel.errors import IdsMismatch, KeyInvalid, LateEvent, PolicyInvalid, StillRunning, StoreUnavailable
from semel.inbox import retry
from semel.policy import InboxTable
from semel.stores.postgres import PostgresStore, from_url
from semel.stores.postgres.schema import script
from semel.testing import ManualClock
from semel.types import Absent, Record
from tests.services import pgbouncer, postgres
from tests.stores.postgres import places
from tests.stores.postgres.test_partitions import purge_fully, rows, tables, uuid7
from tests.stores.sqlite.tools import line, process
from tests.waiting import await_true

S = 1_000_000
HOUR_US, DAY_US = 3600 * S, 86_400 * S
HOLD = semel.Policy(late="hold", lock_wait_s=30)


class Scene:
    """A consumer of UUIDs of version 7 in mode inbox, at the test's time: 08:00."""

    def __init__(self, store: PostgresStore, clock: ManualClock, place: str) -> None:
        self.store, self.clock, self.place = store, clock, place
        self.once = semel.open(store, consumer="wallet", mode="inbox", ids="uuid7", window="24h", policy=HOLD)
        self.once.records.stats()

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.place.partition("?")[0])

    def first(self, connection: psycopg.Connection[Any], *keys: str) -> list[bool]:
        """Mark in a transaction that stays open: alone by the short way, many by the full statement."""
        return self.once.inbox(connection).first_many(keys)

    def committed(self, *keys: str) -> list[bool]:
        with self.connect() as connection:
            return self.first(connection, *keys)

    def key(self, *, ago_us: int = 0) -> str:
        return uuid7(self.clock.now_us() - ago_us)

    def waits(self, connection: psycopg.Connection[Any]) -> bool:
        return bool(
            postgres.execute(
                self.place,
                "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                f" AND pid = {connection.info.backend_pid}",
            )
        )


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    clock = ManualClock()
    store = places.make(tmp_path, clock)
    found = Scene(store, clock, postgres.place(tmp_path))
    yield found
    found.once.close()
    store.close()


# --- what must hold, as scenarios: a wrong function fails one of them -------------------------------


def copies_on_both_sides_of_midnight_are_one(scene: Scene) -> None:
    key, other = scene.key(), scene.key()
    assert scene.committed(key) == [True]
    assert scene.committed(other, scene.key()) == [True, True]
    for number in range(4):
        scene.clock.advance(us=17 * HOUR_US - number)
        new = scene.key()
        if number == 0:  # the next day, and the window still runs
            assert scene.committed(key) == [False]
            assert scene.committed(key, other, new) == [False, False, True]
    assert scene.committed(key) == [True]  # the window is over, and its partition still there
    assert scene.committed(key) == [False]


def copies_at_the_same_moment_wait_for_one_another(scene: Scene) -> None:
    """Alone and in batches, in any order. Nobody reads what the other has not committed."""
    for keys in ([scene.key()], [scene.key(), scene.key(ago_us=DAY_US)]):
        assert _second(scene, keys, "rollback") == [True] * len(keys)
        assert _second(scene, keys, "commit") == [False] * len(keys)


def _second(scene: Scene, keys: list[str], ending: str) -> list[bool]:
    """Return the answer to a second transaction that began while the first was open; it is rolled back."""
    with scene.connect() as mine, scene.connect() as theirs, ThreadPoolExecutor(1) as thread:
        assert scene.first(mine, *keys) == [True] * len(keys)
        other = thread.submit(scene.first, theirs, *keys)
        assert await_true(lambda: scene.waits(theirs) or other.done(), 10)
        getattr(mine, ending)()
        answer = other.result()
        theirs.rollback()
        return answer


def a_transaction_that_lasts_over_midnight_counts(scene: Scene) -> None:
    """The copy comes on the next day, while the first transaction is open: no partition changes under it."""
    key = scene.key()
    with scene.connect() as mine, scene.connect() as theirs, ThreadPoolExecutor(1) as thread:
        assert scene.first(mine, key) == [True]
        scene.clock.advance(us=17 * HOUR_US)
        scene.store.send([Purge()])
        other = thread.submit(scene.first, theirs, key)
        assert await_true(lambda: scene.waits(theirs) or other.done(), 10)
        mine.commit()
        assert other.result() == [False]


def an_id_that_is_too_old_or_too_new_is_late(scene: Scene) -> None:
    """It is neither new nor a duplicate, nothing is marked with it, and the transaction goes on."""
    good = scene.key()
    for bad, age in ((scene.key(ago_us=8 * DAY_US), 8), (scene.key(ago_us=-HOUR_US), -1 / 24)):
        with scene.connect() as connection:
            for keys in ([bad], [good, bad]):
                with pytest.raises(LateEvent) as raised:
                    scene.first(connection, *keys)
                assert raised.value.age_s == pytest.approx(age * 86400, abs=60)
    assert scene.committed(good) == [True]
    assert scene.store.send([Lookup(("", "wallet", bad))]) == [Absent()]


def an_event_that_ran_on_time_never_runs_again(scene: Scene) -> None:
    """Its partition goes while the cleaner runs; from the moment on when it may go, copies are late."""
    key = scene.key()
    assert scene.committed(key) == [True]
    outcomes: list[object] = []
    for _ in range(24):
        scene.clock.advance(us=9 * HOUR_US)
        scene.store.send([Purge()])
        with scene.connect() as connection:
            try:
                outcomes.append(scene.first(connection, key))
            except LateEvent:
                outcomes.append("late")
            connection.rollback()
    assert outcomes[:2] == [[False], [False]]
    assert outcomes[-1] == "late"
    late = outcomes.index("late")
    assert outcomes[late:] == ["late"] * len(outcomes[late:])
    assert (
        late + 1
    ) * 9 == 171  # the first that is older than 7 days: its partition lives for one more window


def a_claim_of_another_attempt_is_found(scene: Scene) -> None:
    """The runner counts attempts with claims, which are in the same partition as the mark."""
    key, done = scene.key(), scene.key()
    scene.store.send([SwitchMode("", "wallet", "lease")])
    with semel.open(
        scene.store, consumer="wallet", ids="uuid7", window="24h", lease="60s", policy=HOLD
    ) as leasing:
        assert isinstance(leasing.claim(key), semel.Claimed)
        leasing.run(done, lambda: 1)
    postgres.execute(
        scene.place, f"UPDATE {scene.store.place.schema}.consumers SET mode = 'inbox' WHERE mode = 'lease'"
    )
    with scene.connect() as connection:
        for keys in ([key], [scene.key(), key]):
            with pytest.raises(StillRunning, match=key):
                scene.first(connection, *keys)
        assert scene.first(connection, done) == [False]
        connection.rollback()
    scene.clock.advance(us=120 * S)
    assert scene.committed(key) == [True]


SCENARIOS: list[Callable[[Scene], None]] = [
    copies_on_both_sides_of_midnight_are_one,
    copies_at_the_same_moment_wait_for_one_another,
    a_transaction_that_lasts_over_midnight_counts,
    an_id_that_is_too_old_or_too_new_is_late,
    an_event_that_ran_on_time_never_runs_again,
    a_claim_of_another_attempt_is_found,
]
OUTSIDE_MANY = "i.id_time < low OR i.id_time > t.now + 300000000 OR t.now - i.id_time > live - span"
OUTSIDE_ONE = "wanted_time < low OR wanted_time > now + 300000000 OR now - wanted_time > live - span"
MUTANTS: dict[str, tuple[list[tuple[str, str]], Callable[[Scene], None]]] = {
    "records go to the partition of their arrival": (
        [
            ("SELECT c.id_time, c.digest", "SELECT c.now, c.digest"),
            ("VALUES (wanted_time,", "VALUES (now,"),
        ],
        copies_on_both_sides_of_midnight_are_one,
    ),
    "a conflict counts as new": (
        [("RETURN CASE WHEN FOUND THEN 1 END;", "RETURN 1;")],
        copies_at_the_same_moment_wait_for_one_another,
    ),
    "a conflict overwrites what is done": (
        [("ELSE r.state & 7 IN (0, 4) OR r.expires_at <= excluded.fence\n", "ELSE true\n")],
        copies_at_the_same_moment_wait_for_one_another,
    ),
    "a record that is over counts": (
        [("AND (seen.expires_at IS NULL OR seen.expires_at > now)", "")],
        copies_on_both_sides_of_midnight_are_one,
    ),
    "the many look into the latest partition alone": (
        [("x.id_time >= oldest AND", "x.id_time >= newest AND")],
        copies_on_both_sides_of_midnight_are_one,
    ),
    "ids from the future are accepted": (
        [("i.id_time > t.now + 300000000 OR ", ""), ("wanted_time > now + 300000000 OR ", "")],
        an_id_that_is_too_old_or_too_new_is_late,
    ),
    "old ids are accepted as new": (
        [(OUTSIDE_MANY, "i.id_time > t.now + 300000000"), (OUTSIDE_ONE, "wanted_time > now + 300000000")],
        an_event_that_ran_on_time_never_runs_again,
    ),
    "an id is accepted although its partition goes before its window ends": (
        [("live - span", "live")],
        an_event_that_ran_on_time_never_runs_again,
    ),
    "a running claim is overtaken": (
        [
            ("WHEN r.state & 7 = 0 AND r.lease_until > t.now THEN 3", ""),
            ("WHEN r.state & 7 = 0 AND r.lease_until > excluded.fence THEN false", ""),
        ],
        a_claim_of_another_attempt_is_found,
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_an_inbox_in_partitions(scenario: Callable[[Scene], None], scene: Scene) -> None:
    scenario(scene)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_function_is_noticed(name: str, scene: Scene) -> None:
    changes, scenario = MUTANTS[name]
    text = script(9, scene.store.place.schema)
    for right, wrong in changes:
        assert right in text
        text = text.replace(right, wrong)
    for function in re.findall(r"^CREATE FUNCTION .*?^END \$\$;", text, re.MULTILINE | re.DOTALL):
        postgres.execute(scene.place, function.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION"))
    with pytest.raises((AssertionError, pytest.fail.Exception, StillRunning)):
        scenario(scene)


# --- partitions ---------------------------------------------------------------------------------


def test_a_mark_locks_the_partition_of_its_id_alone(scene: Scene) -> None:
    """The locks last as long as the caller's transaction: they must not be as many as there are partitions."""
    for keys, expected in (([scene.key()], 1), ([scene.key(), scene.key(ago_us=DAY_US)], 2)):
        with scene.connect() as connection:
            scene.first(connection, *keys)
            found = postgres.execute(
                scene.place,
                "SELECT DISTINCT c.relname FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation"
                f" WHERE l.pid = {connection.info.backend_pid} AND c.relkind = 'r' AND c.relname ~ '^timed_[0-9]'",
            )
            assert len(found) == expected
            connection.rollback()
    assert len(tables(scene.store, scene.place)) >= 15


def test_the_cleaner_drops_partitions_while_transactions_are_open(scene: Scene) -> None:
    """One of them has marked an id of a partition that goes meanwhile; its copies are late, then and afterwards."""
    old = scene.key()
    kept = [scene.key() for _ in range(20)]
    assert all(scene.committed(*kept))
    scene.clock.advance(us=6 * DAY_US)
    with scene.connect() as mine:
        assert scene.first(mine, old) == [True]  # a week old, so new, and not committed for long
        scene.clock.advance(us=4 * DAY_US)
        purge_fully(scene.store, scene.clock)
        assert scene.committed(scene.key()) == [True]  # nobody waits for either
        with scene.connect() as theirs, pytest.raises(LateEvent):
            scene.first(theirs, old)
        mine.commit()

    def is_gone() -> bool:
        purge_fully(scene.store, scene.clock)  # it passes over a partition whose lock it does not get
        return "timed_" + day(scene, -10) not in tables(scene.store, scene.place)

    assert await_true(is_gone)
    assert rows(scene.store, scene.place, "SELECT count(*)::int FROM {s}.timed_records") == [(1,)]
    with pytest.raises(LateEvent):
        scene.committed(old)


def day(scene: Scene, days: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp((scene.clock.now_us() + days * DAY_US) / 1e6, UTC).strftime("%Y%m%d")


def test_marks_after_a_month_without_a_cleaner(scene: Scene) -> None:
    """Nobody has created partitions: the mark asks for them on the store's own connection, and then finds one."""
    scene.clock.advance(us=30 * DAY_US)
    key, other = scene.key(), scene.key(ago_us=DAY_US)
    with scene.connect() as connection:
        assert scene.first(connection, key) == [True]
        assert scene.first(connection, key, other) == [False, True]
        connection.commit()
    assert scene.committed(key, other) == [False, False]

    async def main() -> None:
        scene.clock.advance(us=30 * DAY_US)
        new = scene.key()
        connection = await asyncpg.connect(scene.place.partition("?")[0])
        async with connection.transaction():
            inbox = scene.once.twin.inbox(connection)
            assert await inbox.first_many([new, new]) == [True, False]
        await connection.close()
        await scene.once.twin.close()

    asyncio.run(main())


def test_a_role_that_may_not_make_tables_says_who_may(scene: Scene) -> None:
    schema = scene.store.place.schema
    name = f"r_{schema}"[:40]
    postgres.execute(
        scene.place,
        f"CREATE ROLE {name} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {name};"
        f" GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {name};"
        f" GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {name};"
        f" GRANT pg_monitor TO {name}",
    )
    servant = from_url(scene.place.replace("//semel@", f"//{name}@"))
    servant.clock = scene.store.clock
    try:
        with (
            semel.open(servant, consumer="wallet", mode="inbox", ids="uuid7", policy=HOLD) as once,
            psycopg.connect(scene.place.partition("?")[0].replace("//semel@", f"//{name}@")) as connection,
        ):
            assert once.inbox(connection).first(scene.key())
            connection.commit()
            scene.clock.advance(us=30 * DAY_US)
            with pytest.raises(StoreUnavailable, match="semel purge"):
                once.inbox(connection).first(scene.key())
            with pytest.raises(StoreUnavailable, match="semel purge"):  # no delivery's own fault
                once.inbox(connection).run_batch(
                    [semel.Delivery(key=scene.key(), body=1) for _ in range(2)], lambda _: None
                )
    finally:
        servant.close()
        postgres.execute(scene.place, f"DROP OWNED BY {name}; DROP ROLE {name}")


def test_the_rights_that_a_caller_needs(scene: Scene) -> None:
    schema = scene.store.place.schema
    name = f"c_{schema}"[:40]
    postgres.execute(
        scene.place,
        f"CREATE ROLE {name} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {name};"
        f" GRANT SELECT ON {schema}.consumers, {schema}.meta TO {name};"
        f" GRANT SELECT, INSERT, UPDATE ON {schema}.timed_records TO {name}",
    )
    url = scene.place.partition("?")[0].replace("//semel@", f"//{name}@")
    try:
        with psycopg.connect(url) as connection:
            key = scene.key()
            assert scene.first(connection, key) == [True]
            assert scene.first(connection, key, scene.key()) == [False, True]
            inbox = scene.once.inbox(connection)
            inbox.store(key, 5)
            assert inbox.replay(key) == semel.Done(5, replayed=True)
            connection.commit()
    finally:
        postgres.execute(scene.place, f"DROP OWNED BY {name}; DROP ROLE {name}")


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_racing_transactions_with_snapshots_apply_each_event_once(scene: Scene, level: str) -> None:
    keys = [scene.key(ago_us=number * DAY_US) for number in range(6)]
    scene.committed()  # the consumer is recorded

    def work(turn: int) -> int:
        won = 0
        with scene.connect() as connection:
            for number in range(len(keys)):

                def transaction(at: int = number) -> bool:
                    connection.rollback()
                    connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
                    connection.execute("SELECT 1")
                    first = scene.first(connection, keys[(at * (turn + 1)) % len(keys)])[0]
                    connection.commit()
                    return first

                won += retry(transaction, tries_max=100)
        return won

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(work, [0, 4, 0, 4])) == len(keys)


def test_an_old_snapshot_cannot_mark_in_a_partition_that_is_gone(scene: Scene) -> None:
    """It does not see that its id has become too old; the partition that would take the row is not there."""
    key = scene.key()
    assert scene.committed(key) == [True]
    behind = from_url(scene.place)
    behind.clock = ManualClock(scene.clock.now_us() + HOUR_US)  # by its clock the id is fit for a record
    with (
        semel.open(behind, consumer="wallet", mode="inbox", ids="uuid7", policy=HOLD) as once,
        scene.connect() as connection,
    ):
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT 1")
        scene.clock.advance(us=10 * DAY_US)
        assert purge_fully(scene.store, scene.clock)
        for keys in ([key], [key, uuid7(behind.clock.now_us() + DAY_US // 2)]):
            with pytest.raises(StoreUnavailable, match="begin the transaction again"):
                once.inbox(connection).first_many(keys)
        connection.rollback()
        with pytest.raises(LateEvent):
            once.inbox(connection).first(key)
    behind.close()


# --- processes, poolers, clients ------------------------------------------------------------------

HOLDING = """
import sys
import psycopg
import semel
store_url, url, key = sys.argv[1:]
once = semel.open(store_url, consumer="wallet", mode="inbox", ids="uuid7", policy=semel.Policy(late="hold"))
connection = psycopg.connect(url)
assert once.inbox(connection).first(key)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_holder_that_stands_still_is_waited_for_and_one_that_was_killed_is_not(tmp_path: Path) -> None:
    place = postgres.place(tmp_path)
    key = semel.keys.uuid7("wallet")
    impatient = semel.Policy(late="hold", lock_wait_s=0.3)
    with (
        semel.open(place, consumer="wallet", mode="inbox", ids="uuid7", policy=impatient) as once,
        psycopg.connect(place.partition("?")[0]) as mine,
    ):
        once.records.stats()
        with process(HOLDING, place, place.partition("?")[0], key) as child:
            assert line(child).strip() == "held"
            os.kill(child.pid, signal.SIGSTOP)
            for keys in ([key], [semel.keys.uuid7("wallet"), key]):
                with pytest.raises(StillRunning):
                    once.inbox(mine).first_many(keys)
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            assert once.using(HOLD).inbox(mine).first(key)  # in the same transaction
            mine.commit()
        assert not once.inbox(mine).first(key)
        assert isinstance(once.records.lookup(key), Record)


def test_behind_a_pooler(tmp_path: Path) -> None:
    """Also before the client is connected, in a transaction that holds one of the pooler's connections."""
    with pgbouncer.before(postgres.url()) as at:
        pooled = f"{at}?{postgres.place(tmp_path).partition('?')[2]}&pooler=true"
        key = semel.keys.uuid7("wallet")
        for expected in (True, False):
            once = semel.open(pooled, consumer="wallet", mode="inbox", ids="uuid7", policy=HOLD)
            with closing(once), psycopg.connect(at, prepare_threshold=None) as connection:
                inbox = once.inbox(connection)
                assert inbox.first(key) is expected
                assert inbox.first_many([key, semel.keys.uuid7("wallet")]) == [False, True]
                inbox.store(key, {"cents": 5})
                connection.commit()
                assert inbox.replay(key) == semel.Done({"cents": 5}, replayed=True)
                assert inbox.committed(key) is expected
        once = semel.open(pooled, consumer="wallet", mode="inbox", policy=HOLD)
        with (
            closing(once),
            psycopg.connect(at, prepare_threshold=None) as connection,
            pytest.raises(IdsMismatch),
        ):
            once.inbox(connection).first(key)


def test_late_events_of_a_batch_are_told_and_hold_back_nobody(scene: Scene) -> None:
    events: list[Any] = []
    with semel.open(
        scene.store, consumer="wallet", mode="inbox", ids="uuid7", policy=HOLD, hooks=[events.append]
    ) as once:
        keys = [scene.key(), scene.key(ago_us=9 * DAY_US), scene.key()]
        ran: list[str] = []

        def handler(deliveries: list[semel.Delivery[int]]) -> None:
            ran.extend(each.key for each in deliveries)

        with scene.connect() as connection:
            inbox = once.inbox(connection)
            outcomes = inbox.run_batch([semel.Delivery(key=key, body=1) for key in keys], handler)
            with pytest.raises(LateEvent):
                inbox.first(keys[1])
            connection.commit()
    assert [type(each) for each in outcomes] == [semel.Done, semel.Late, semel.Done]
    assert ran == [keys[0], keys[2]]
    assert [each.name for each in events].count("late") == 2


def test_clients_of_an_inbox_declare_their_ids(tmp_path: Path) -> None:
    place = postgres.place(tmp_path)
    refused: list[dict[str, Any]] = [
        {"ids": "opaque", "policy": HOLD},
        {"ids": "uuid7"},
        {"ids": "uuid7", "policy": semel.Policy(late="hold", inbox_table=InboxTable("seen"))},
    ]
    for options in refused:
        with pytest.raises(PolicyInvalid):
            semel.open(place, consumer="wallet", mode="inbox", **options)
    with (
        closing(
            semel.open(place, consumer="wallet", mode="inbox", ids="uuid7", window="9d", policy=HOLD)
        ) as long,
        psycopg.connect(place.partition("?")[0]) as connection,
        pytest.raises(PolicyInvalid, match="partition_live"),
    ):
        long.inbox(connection).first(semel.keys.uuid7("wallet"))
    with (
        semel.open(place, consumer="wallet", mode="inbox", ids="uuid7", policy=HOLD) as once,
        psycopg.connect(place.partition("?")[0]) as connection,
        pytest.raises(KeyInvalid, match="uuid7"),
    ):
        once.inbox(connection).first("order-17")
    with (
        closing(semel.open(place, consumer="wallet", mode="inbox")) as other,
        psycopg.connect(place.partition("?")[0]) as connection,
        pytest.raises(IdsMismatch),
    ):
        other.inbox(connection).first("order-17")


def test_sqlite_records_the_declaration_with_the_first_mark(tmp_path: Path) -> None:
    import sqlite3

    url = f"sqlite:///{tmp_path}/app.db"
    key = semel.keys.uuid7("wallet")
    with (
        semel.open(url, consumer="wallet", mode="inbox", ids="uuid7", policy=HOLD) as once,
        semel.open(url, consumer="wallet", mode="inbox") as other,
        closing(sqlite3.connect(tmp_path / "app.db")) as connection,
    ):
        with pytest.raises(KeyInvalid, match="uuid7"):
            once.inbox(connection).first("order-17")
        other.records.stats()  # it is connected before anybody has recorded the consumer
        assert [once.inbox(connection).first(key) for _ in range(2)] == [True, False]
        once.inbox(connection).store(key, 5)
        connection.commit()
        assert once.inbox(connection).replay(key) == semel.Done(5, replayed=True)
        assert isinstance(once.records.lookup(key), Record)
        with pytest.raises(IdsMismatch):
            other.inbox(connection).first("order-17")
        connection.rollback()
