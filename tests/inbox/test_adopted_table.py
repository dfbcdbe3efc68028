"""An existing table of processed events as the inbox: a row is a mark, and its own unique key decides."""

import asyncio
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import asyncpg  # type: ignore[import-untyped]
import psycopg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

import semel
from semel.errors import PolicyInvalid, StillRunning, UsageError
from semel.policy import InboxColumns, InboxTable, Policy
from tests.services import postgres


def client(url: str, table: InboxTable, tenant: str = "") -> semel.Semel:
    return semel.open(
        url, consumer="wallet", mode="inbox", policy=Policy(inbox_table=table, lock_wait_s=0.2), tenant=tenant
    )


@pytest.fixture
def app(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "app.db")) as connection:
        connection.execute(
            "CREATE TABLE processed_events (id TEXT PRIMARY KEY, at TEXT DEFAULT CURRENT_TIMESTAMP)"
        )
        connection.execute("CREATE TABLE wallet (cents INTEGER)")
        connection.execute("INSERT INTO processed_events (id) VALUES ('old')")
        connection.commit()
        yield connection


TABLE = InboxTable("processed_events", InboxColumns(event_id="id"))


def test_rows_of_the_table_are_marks_in_the_callers_transaction(
    app: sqlite3.Connection, tmp_path: Path
) -> None:
    with client(f"sqlite:///{tmp_path / 'app.db'}", TABLE) as wallet:
        box = wallet.inbox(app)
        assert not box.first("old"), "a row that was there before"
        assert box.first("new")
        app.execute("INSERT INTO wallet VALUES (1)")
        app.rollback()
        assert box.first_many(["new", "old", "new", "third"]) == [True, False, False, True]
        app.commit()
        assert not box.first("new")
        assert box.replay("new") == semel.Done(None, replayed=True, kept=False)
        assert box.replay("absent") is None
        with pytest.raises(UsageError, match="keeps no values"):
            box.store("new", 1)
        with pytest.raises(UsageError, match="keeps no fingerprints"):
            box.first("x", fingerprint=b"x")
        with pytest.raises(UsageError, match="which attempt"):
            box.committed("new")
    assert app.execute("SELECT count(*) FROM wallet").fetchone() == (0,)
    assert app.execute("SELECT id FROM processed_events ORDER BY id").fetchall() == [
        ("new",),
        ("old",),
        ("third",),
    ]


@pytest.mark.parametrize(
    ("definition", "columns", "reason"),
    [
        ("(id TEXT)", InboxColumns(event_id="id"), "unique key over exactly id, and has none"),
        ("(id TEXT, kind TEXT, UNIQUE (id, kind))", InboxColumns(event_id="id"), "and has id, kind"),
        ("(id TEXT UNIQUE, who TEXT NOT NULL)", InboxColumns(event_id="id"), "needs a value for who"),
        ("(id TEXT UNIQUE)", InboxColumns(), "has no column event_id; it has id"),
        ("(id TEXT UNIQUE)", InboxColumns(event_id="id", consumer="who"), "has no column who"),
    ],
)
def test_a_table_whose_key_does_not_fit_is_refused(
    tmp_path: Path, definition: str, columns: InboxColumns, reason: str
) -> None:
    with closing(sqlite3.connect(tmp_path / "app.db")) as connection:
        connection.execute(f"CREATE TABLE processed_events {definition}")
        connection.commit()
        with client(f"sqlite:///{tmp_path / 'app.db'}", InboxTable("processed_events", columns)) as wallet:
            with pytest.raises(PolicyInvalid, match=reason):
                wallet.inbox(connection).first("evt_1")
            connection.rollback()
            assert connection.execute("SELECT count(*) FROM processed_events").fetchone() == (0,)


def test_a_tenant_needs_a_column_and_names_are_checked(app: sqlite3.Connection, tmp_path: Path) -> None:
    with (
        client(f"sqlite:///{tmp_path / 'app.db'}", TABLE, tenant="acme") as wallet,
        pytest.raises(PolicyInvalid, match="no column for tenants"),
    ):
        wallet.inbox(app)
    with pytest.raises(PolicyInvalid, match="not a valid name"):
        InboxTable("x; DROP TABLE y")
    with pytest.raises(PolicyInvalid, match="not a valid name"):
        InboxColumns(event_id="a b")
    with (
        client(f"sqlite:///{tmp_path / 'app.db'}", InboxTable("absent")) as wallet,
        pytest.raises(PolicyInvalid, match="no table absent"),
    ):
        wallet.inbox(app).first("x")


def test_on_postgresql_the_second_transaction_waits_for_the_first(tmp_path: Path) -> None:
    url, table = postgres.place(tmp_path), f"processed_{uuid.uuid4().hex[:8]}"
    postgres.execute(
        url,
        f"CREATE TABLE {table} (id uuid, who text, at timestamptz DEFAULT now(), UNIQUE (who, id))",
    )
    one, two = (str(uuid.uuid4()) for _ in range(2))
    plain = url.partition("?")[0]
    adopted = InboxTable(table, InboxColumns(event_id="id", consumer="who"))
    with (
        client(url, adopted) as wallet,
        psycopg.connect(plain) as first,
        psycopg.connect(plain) as second,
    ):
        assert wallet.inbox(first).first_many([one, two]) == [True, True]
        with pytest.raises(StillRunning, match="another transaction"):
            wallet.inbox(second).first(one)
        assert second.execute("SHOW lock_timeout").fetchone() == ("0",)  # usable still, with its own setting
        first.rollback()
        assert wallet.inbox(second).first(one.upper())
        second.commit()
        box = wallet.inbox(first)
        assert box.first_many([two, one]) == [True, False]
        box.unmark([two, one])  # removes its own mark only
        first.commit()
    assert postgres.execute(url, f"SELECT id::text, who FROM {table}") == [(one, "wallet")]


def test_it_works_with_every_kind_of_async_connection(tmp_path: Path) -> None:
    url, table = postgres.place(tmp_path), f"processed_{uuid.uuid4().hex[:8]}"
    postgres.execute(url, f"CREATE TABLE {table} (event_id bigint PRIMARY KEY)")
    plain = url.partition("?")[0]

    async def mark() -> None:
        policy = Policy(inbox_table=InboxTable(table), lock_wait_s=0.2)
        async with semel.aopen(url, consumer="wallet", mode="inbox", policy=policy) as wallet:
            first = await asyncpg.connect(plain)
            async with first.transaction():
                assert await wallet.inbox(first).first_many(["1", "2"]) == [True, True]
            await first.close()
            async with await psycopg.AsyncConnection.connect(plain) as second:
                assert await wallet.inbox(second).first_many(["1", "3"]) == [False, True]
            engine = create_async_engine(plain.replace("postgresql://", "postgresql+asyncpg://"))
            async with engine.begin() as third:
                assert await wallet.inbox(third).first_many(["3", "4"]) == [False, True]
            await engine.dispose()

    asyncio.run(mark())
    assert postgres.execute(url, f"SELECT count(*) FROM {table}") == [(4,)]
