"""What only PostgreSQL, or only some of its drivers, can show."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import scoped_session, sessionmaker

import semel
import semel.core.ids
from semel.connections import handle_for
from semel.core.commands import Purge, Scan
from semel.inbox import AsyncInbox, Inbox, retry
from tests.inbox.bench import CONSUMER, Bench
from tests.inbox.kinds import Psycopg
from tests.services import postgres
from tests.waiting import await_true


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(Psycopg, tmp_path)


def opened(bench: Bench, **policy: Any) -> semel.Semel:
    return semel.open(
        bench.store_url, consumer=CONSUMER, mode="inbox", window="1h", policy=semel.Policy(**policy)
    )


# --- many at once -------------------------------------------------------------------------------


def test_overlapping_batches_in_any_order_meet_without_a_deadlock(bench: Bench) -> None:
    keys = [f"evt_{number}" for number in range(60)]

    def work(seed: int) -> int:
        credited = 0
        with psycopg.connect(bench.url) as connection:
            for turn in range(6):
                batch = random.Random(seed * 100 + turn).sample(keys, 40)
                firsts = once.inbox(connection).first_many(batch)
                credited += sum(firsts)
                connection.execute(f"UPDATE {bench.wallet} SET balance = balance + {sum(firsts)}")
                connection.commit()
        return credited

    with opened(bench, lock_wait_s=30) as once, ThreadPoolExecutor(6) as threads:
        once.records.stats()
        assert sum(threads.map(work, range(6))) == len(keys)
    assert bench.balance() == len(keys)


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_racing_transactions_with_snapshots_apply_each_event_once(bench: Bench, level: str) -> None:
    def work(seed: int) -> None:
        with psycopg.connect(bench.url) as connection:
            for number in random.Random(seed).sample(range(8), 8):

                def transaction(key: str = f"evt_{number}") -> None:
                    connection.rollback()
                    connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
                    if once.inbox(connection).first(key):
                        connection.execute(f"UPDATE {bench.wallet} SET balance = balance + 1")
                    connection.commit()

                retry(transaction, tries_max=100)

    with opened(bench, lock_wait_s=30) as once, ThreadPoolExecutor(4) as threads:
        once.records.stats()
        list(threads.map(work, range(4)))
    assert bench.balance() == 8


def test_the_first_use_of_a_consumer_inside_a_snapshot_asks_for_another(bench: Bench) -> None:
    with opened(bench) as warm:
        warm.records.stats()
    once = semel.open(bench.store_url, consumer="newcomer", mode="inbox")
    with closing(once), bench.other() as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT 1")
        with pytest.raises(psycopg.errors.SerializationFailure, match="newcomer"):
            once.inbox(connection).first("evt_1")
        connection.rollback()
        assert once.inbox(connection).first("evt_1")


def test_duplicates_write_nothing(bench: Bench) -> None:
    with opened(bench) as once, bench.other() as connection:
        once.inbox(connection).first("evt_1")
        connection.commit()
        assert not once.inbox(connection).first("evt_1")
        assert connection.execute("SELECT pg_current_xact_id_if_assigned()").fetchone() == (None,)
        assert once.inbox(connection).first("evt_2")
        assert connection.execute("SELECT pg_current_xact_id_if_assigned()").fetchone() != (None,)


@pytest.mark.parametrize("state", [0, 1, 2, 3, 4, 8])
def test_one_key_is_answered_as_by_the_statement_for_many(bench: Bench, state: int) -> None:
    """The short way decides new and done keys alone, and leaves every other state to the full statement."""
    schema, future, past = handle_schema(bench), 4102444800000000, 1
    decided = set()
    with opened(bench) as once, bench.other() as connection:
        once.records.stats()
        identity = postgres.execute(bench.url, f"SELECT {schema}.identity()")[0][0]
        for lease, expiry, stored, given, owner in product(
            (None, past, future),
            (None, past, future),
            (None, b"1a"),
            (None, b"1a", b"1b", b"2b"),
            (b"", b"o"),
        ):
            digest = semel.core.ids.digest(
                ("", CONSUMER, f"{lease} {expiry} {stored!r} {given!r} {owner!r}")
            ).hex()
            connection.execute(
                f"INSERT INTO {schema}.records (digest, state, owner, fence, lease_until, attempt, expires_at,"
                " consumer_id, fingerprint) VALUES (%s, %s, %s, 1, %s, 1, %s, 1, %s)",
                (digest, state, owner, lease, expiry, stored),
            )
            answers = []
            for function, wanted in (("inbox_first_one", f"'{digest}'"), ("inbox_first", f"'{{{digest}}}'")):
                connection.execute("SAVEPOINT before")
                row = connection.execute(
                    f"SELECT * FROM {schema}.{function}(%s, '', %s, {wanted}, NULL, NULL, 3600000000, 'me', 2000, %s)",
                    (identity, CONSUMER, given),
                ).fetchone()
                answers.append(row)
                connection.execute("ROLLBACK TO before")
            alone, (verdict, _, _, firsts) = answers
            if alone != (None,):
                assert (verdict, firsts) == ("marked", str(alone[0]))
                decided.add((state, *alone))
    assert decided == ({(state, 0)} if state in (1, 2) else set())


def test_a_session_that_was_checked_is_checked_again_for_another_store(bench: Bench) -> None:
    """The session remembers which store it belongs to; a store with another identity is refused all the same."""
    with opened(bench) as once, opened(bench) as copied, bench.other() as connection:
        assert once.inbox(connection).first("evt_1")
        connection.commit()
        setting = f"semel.identity_{table_number(connection, handle_schema(bench))}"
        identity = postgres.execute(bench.url, f"SELECT {handle_schema(bench)}.identity()")[0]
        assert connection.execute("SELECT current_setting(%s, true)", (setting,)).fetchone() == identity
        copied.records.stats()
        vars(copied._runtime.store)["identity"] = "1/2/3"
        with pytest.raises(semel.errors.WrongDatabase, match="for both"):
            copied.inbox(connection).first("evt_2")
        connection.rollback()
        assert not once.inbox(connection).first("evt_1")


def test_a_rollback_takes_back_that_the_session_was_checked(bench: Bench) -> None:
    with opened(bench) as once, bench.other() as connection:
        once.inbox(connection).first("evt_1")
        connection.rollback()
        setting = f"semel.identity_{table_number(connection, handle_schema(bench))}"
        assert connection.execute("SELECT current_setting(%s, true)", (setting,)).fetchone() in (
            (None,),
            ("",),
        )
        assert once.inbox(connection).first("evt_1")


def table_number(connection: Any, schema: str) -> int:
    (number,) = connection.execute("SELECT %s::regclass::oid::bigint", (f"{schema}.records",)).fetchone()
    return int(number)


def test_a_table_that_grows_is_not_scanned(bench: Bench) -> None:
    """On a small table a scan is cheap, and the session would keep that plan while the table grows."""
    schema = handle_schema(bench)
    with opened(bench) as once:
        with bench.other() as connection:
            once.inbox(connection).first_many([f"early_{number}" for number in range(8)])
            connection.commit()
        postgres.execute(bench.url, f"VACUUM ANALYZE {schema}.records")
        with bench.other() as connection:
            inbox = once.inbox(connection)
            for number in range(8):
                inbox.first(f"second_{number}")
            inbox.first_many([f"evt_{number}" for number in range(3000)])
            connection.commit()
            before = scans(bench, schema)
            for number in range(20):
                assert not inbox.first(f"evt_{number}")
            connection.commit()
        assert scans(bench, schema) == before


def test_what_turns_out_to_be_claimed_while_waiting_takes_the_others_back(bench: Bench) -> None:
    with opened(bench) as once, bench.other() as connection, bench.other() as other:
        inbox = once.inbox(connection)
        once.records.stats()
        digest = semel.core.ids.digest(("", CONSUMER, "raced")).hex()
        other.execute(
            f"INSERT INTO {handle_schema(bench)}.records (digest, state, owner, fence, lease_until, attempt,"
            f" expires_at, consumer_id) VALUES ('{digest}', 0, 'o', 1, 4102444800000000, 1, 4102444800000000, 1)"
        )
        with bench.later(other.commit), pytest.raises(semel.errors.StillRunning, match="raced"):
            inbox.first_many(["new", "raced", "newer"])
        assert inbox.first_many(["new", "newer"]) == [True, True]


def handle_schema(bench: Bench) -> str:
    return bench.store_url.partition("schema=")[2].partition("&")[0]


def scans(bench: Bench, schema: str) -> list[tuple[Any, ...]]:
    postgres.execute(bench.url, "SELECT pg_stat_clear_snapshot()")
    return postgres.execute(
        bench.url,
        f"SELECT seq_scan FROM pg_stat_user_tables WHERE schemaname = '{schema}' AND relname = 'records'",
    )


# --- same table, same upkeep --------------------------------------------------------------------


def test_marks_are_records_like_any_other(bench: Bench) -> None:
    with opened(bench) as once, bench.other() as connection:
        once.windows.set("0.02s", event_type="short")
        inbox = once.inbox(connection)
        assert inbox.first_many(["a", "b"])
        assert inbox.first("c", event_type="short")
        inbox.store("a", {"cents": 5})
        connection.commit()
        with bench.store() as store:
            assert {each.key for each in store.send([Scan("", CONSUMER)])[0].records} >= {"a", "b"}
            assert await_true(lambda: store.send([Purge()])[0].count == 1)
        found = once.records.lookup("a")
        assert isinstance(found, semel.types.Record)
        assert (found.state, found.event_type) == ("done", "")
        rows = postgres.execute(
            bench.url, f"SELECT event_id, state, value FROM {handle_schema(bench)}.events ORDER BY event_id"
        )
        assert rows == [("a", "done", {"cents": 5}), ("b", "done", None)]


def test_keys_are_not_kept_where_they_are_not_wanted(bench: Bench) -> None:
    bench.store_url += "&readable_keys=false"
    with opened(bench) as once, bench.other() as connection:
        assert once.inbox(connection).first_many(["a", "b"]) == [True, True]
        connection.commit()
        assert once.inbox(connection).first_many(["a", "c"]) == [False, True]
        connection.rollback()
    assert postgres.execute(bench.url, f"SELECT count(key) FROM {handle_schema(bench)}.records") == [(0,)]


# --- drivers ------------------------------------------------------------------------------------


def test_the_callers_factories_do_not_matter(bench: Bench) -> None:
    with (
        opened(bench) as once,
        psycopg.connect(bench.url, row_factory=dict_row, cursor_factory=psycopg.ClientCursor) as connection,
    ):
        inbox = once.inbox(connection)
        assert inbox.first("evt_1")
        inbox.store("evt_1", b"\x00\xff")
        assert inbox.replay("evt_1") == semel.Done(b"\x00\xff", replayed=True)
        connection.rollback()


def test_a_pipeline_is_refused(bench: Bench) -> None:
    with opened(bench) as once, bench.other() as connection:
        inbox = once.inbox(connection)
        with connection.pipeline(), pytest.raises(semel.errors.UsageError, match="leave the pipeline"):
            inbox.first("evt_1")
        assert inbox.first("evt_1")


def test_a_failed_transaction_stays_the_callers(bench: Bench) -> None:
    with opened(bench) as once, bench.other() as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("SELECT 1 / 0")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            once.inbox(connection).first("evt_1")


def test_a_connection_of_the_callers_own_class_is_known() -> None:
    class Own(psycopg.Connection[Any]):
        pass

    connection: Any = Own.__new__(Own)
    assert type(handle_for(connection)).__name__ == "PsycopgHandle"


def test_the_handle_says_whether_to_await(bench: Bench) -> None:
    async def check() -> None:
        once = opened(bench)
        aonce = semel.aopen(bench.store_url, consumer=CONSUMER, mode="inbox")
        connection = await asyncpg.connect(bench.url)
        with psycopg.connect(bench.url) as blocking:
            assert isinstance(once.inbox(blocking), Inbox)
            with pytest.raises(TypeError, match=r"semel\.open\(\)"):
                aonce.inbox(blocking)  # type: ignore[arg-type]
        held = once.inbox(connection)
        assert isinstance(held, AsyncInbox)
        assert isinstance(aonce.inbox(connection), AsyncInbox)
        async with connection.transaction():
            assert await held.first("evt_1")
            assert not await aonce.inbox(connection).first("evt_1")
        await connection.close()
        await aonce.close()
        await once.twin.close()
        once.close()

    asyncio.run(check())


def test_scoped_sessions(bench: Bench) -> None:
    engine = create_engine(bench.url.replace("postgresql:", "postgresql+psycopg:"))
    sessions = scoped_session(sessionmaker(engine))
    with opened(bench) as once:
        assert once.inbox(sessions).first("evt_1")
        sessions.commit()
        assert not once.inbox(sessions).first("evt_1")
        sessions.remove()
    engine.dispose()

    async def check() -> None:
        aengine = create_async_engine(bench.url.replace("postgresql:", "postgresql+asyncpg:"))
        asessions: async_scoped_session[AsyncSession] = async_scoped_session(
            async_sessionmaker(aengine), asyncio.current_task
        )
        async with semel.aopen(bench.store_url, consumer=CONSUMER, mode="inbox") as aonce:
            assert not await aonce.inbox(asessions).first("evt_1")
            assert await aonce.inbox(asessions).first("evt_2")
            await asessions.commit()
            await asessions.remove()
        await aengine.dispose()

    asyncio.run(check())


def test_the_rights_that_the_documents_name_are_enough(bench: Bench) -> None:
    schema, role = handle_schema(bench), f"r_{handle_schema(bench)}"
    with opened(bench) as once:
        once.records.stats()
        postgres.execute(
            bench.url,
            f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA {schema} TO {role};"
            f"GRANT SELECT ON {schema}.consumers TO {role};"
            f"GRANT SELECT, INSERT, UPDATE ON {schema}.records TO {role}",
        )
        with bench.other() as connection:
            connection.execute(f"SET ROLE {role}")
            inbox = once.inbox(connection)
            assert inbox.first("evt_1")
            inbox.store("evt_1", 1)
            assert inbox.replay("evt_1") == semel.Done(1, replayed=True)
            assert not inbox.first("evt_1")
            connection.commit()
            assert inbox.committed("evt_1")


def test_time_goes_on_inside_a_transaction(bench: Bench) -> None:
    with opened(bench) as once, bench.other() as other, bench.other() as connection:
        once.windows.set("0.2s", event_type="short")
        connection.execute("SELECT now()")  # its transaction begins before the mark is even made
        once.inbox(other).first("evt_1", event_type="short")
        other.commit()
        inbox = once.inbox(connection)
        assert await_true(lambda: inbox.first("evt_1"))
        assert connection.execute("SELECT clock_timestamp() > now() + interval '0.2 s'").fetchone() == (True,)
