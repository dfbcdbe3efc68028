"""The table of events: one row for each, whoever writes it and however often."""

import asyncio
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

import semel
from semel.errors import PolicyInvalid, StoreUnavailable, StoreUnknown
from semel.ingest.event_table import columns_of
from semel.ingest.intake import Event
from semel.ingest.sockets import Columns, EventTable, Intake
from tests.ingest.fleet import Fleet
from tests.services import postgres

pytestmark = pytest.mark.anyio


async def nothing() -> None: ...


def event(number: int) -> Event:
    return Event(id=f"evt-{number}", type="paid", body=b'{"amount": %d}' % number)


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Fleet:
    """Rows without any instance."""
    rows = f"sqlite:///{tmp_path / 'rows.db'}" if request.param == "sqlite" else postgres.url()
    return Fleet(tmp_path, "sqlite:///unused.db", rows)


async def test_many_writers_make_the_table_and_one_row_for_each_event(place: Fleet) -> None:
    tables = [EventTable(place.rows_url, table=place.table) for _ in range(5)]
    await asyncio.gather(*(table.persist(event(number)) for table in tables for number in range(20)))
    for table in tables:
        await table.close()
        await table.close()
    rows = place.rows()
    assert len(rows) == 20
    assert set(rows.values()) == {1}


async def test_a_handler_that_fails_leaves_no_row(place: Fleet) -> None:
    async def handle(given: Event) -> None:
        raise ConnectionError(given.id)

    async with EventTable(place.rows_url, table=place.table) as table:
        await table.persist(event(1))
        with pytest.raises(ConnectionError):
            await table.after(handle)(event(2))
    assert list(place.rows()) == ["evt-1"]


async def test_what_is_written() -> None:
    name = f"events_{uuid4().hex[:12]}"
    async with EventTable(postgres.url(), table=name) as table:
        odd = Event(id="nul", type="", tenant="acme", body=b'{"a": "\\u0000 \\ud800", "n": 1e9999}')
        bad = Event(id="bad", type="", body=b"no JSON")
        told = await asyncio.gather(
            *(table.persist(each) for each in (event(7), odd, bad, event(8))), return_exceptions=True
        )
    assert [type(each) for each in told] == [
        type(None),
        type(None),
        psycopg.errors.InvalidTextRepresentation,
        type(None),
    ]
    with psycopg.connect(postgres.url()) as connection:
        rows = connection.execute(
            f"SELECT tenant, event_id, type, payload::text FROM {name} ORDER BY event_id"
        ).fetchall()
    assert rows == [
        ("", "evt-7", "paid", '{"amount": 7}'),
        ("", "evt-8", "paid", '{"amount": 8}'),
        ("acme", "nul", "", odd.body.decode()),
    ]


async def test_two_tenants_may_have_equal_ids(place: Fleet) -> None:
    async with EventTable(place.rows_url, table=place.table) as table:
        for tenant in ("", "acme", "globex", "acme"):
            await table.persist(Event(id="evt-1", tenant=tenant, body=b"{}"))
    assert place.rows() == {"evt-1": 3}


async def test_the_url_may_be_that_of_a_store(place: Fleet) -> None:
    sqlite = place.rows_url.startswith("sqlite")
    url = f"{place.rows_url}?synchronous=normal" if sqlite else postgres.place(place.table)
    async with semel.aopen(url, consumer="c") as once, EventTable(url, table=place.table) as table:
        await table.check()
        await once.run("k", nothing)
        await table.persist(event(1))
        await table.check()
    assert place.rows() == {"evt-1": 1}


async def test_a_table_for_something_else_is_left_alone(place: Fleet) -> None:
    if place.rows_url.startswith("sqlite"):
        with closing(sqlite3.connect(place.rows_url.removeprefix("sqlite:///"))) as file:
            file.execute(f"CREATE TABLE {place.table} (event_id TEXT, guests INTEGER)")
    else:
        postgres.execute(place.rows_url, f"CREATE TABLE {place.table} (event_id text, guests integer)")
    with pytest.raises(PolicyInvalid, match="for something else: it has no payload, tenant, type"):
        async with EventTable(place.rows_url, table=place.table):
            pass


async def test_a_connection_that_was_cut_is_made_again() -> None:
    name = f"events_{uuid4().hex[:12]}"
    async with EventTable(postgres.url(), table=name) as table:
        await table.persist(event(1))
        with psycopg.connect(postgres.url(), autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE query LIKE %s AND pid <> pg_backend_pid()",
                (f"INSERT INTO {name}%",),
            )
        with pytest.raises(StoreUnavailable):
            await table.persist(event(2))
        await table.persist(event(2))


def test_other_places_and_names_are_refused() -> None:
    with pytest.raises(StoreUnknown):
        EventTable("mysql://localhost/app")
    with pytest.raises(StoreUnknown):
        EventTable("sqlite:///rows.db", table="events; drop table users")


# --- tables that are there ----------------------------------------------------------------------

DOCUMENTED = """CREATE TABLE {table} (
    id {number}, event_id {text} UNIQUE NOT NULL, event_type {text} NOT NULL, payload {json} NOT NULL,
    processed_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP {more}
)"""
NAMES = Columns(type="event_type", tenant="")


def make(place: Fleet, statement: str = DOCUMENTED, more: str = "") -> None:
    if place.rows_url.startswith("sqlite"):
        words = {"number": "INTEGER PRIMARY KEY", "text": "TEXT", "json": "TEXT"}
        with closing(sqlite3.connect(place.rows_url.removeprefix("sqlite:///"))) as file:
            file.execute(statement.format(table=place.table, more=more, **words))
    else:
        words = {"number": "BIGSERIAL PRIMARY KEY", "text": "VARCHAR", "json": "JSONB"}
        postgres.execute(place.rows_url, statement.format(table=place.table, more=more, **words))


async def test_a_table_with_other_names_works_as_it_is(place: Fleet) -> None:
    make(place)
    async with EventTable(place.rows_url, table=place.table, columns=NAMES) as table:
        await table.persist(event(1))
        await table.persist(event(1))
        await table.persist(event(2))
        found = await table.find("", "evt-1")
        assert found is not None
        assert (found.type, found.payload) == ("paid", {"amount": 1})
        assert await table.find("", "evt-3") is None
        with pytest.raises(PolicyInvalid, match="no column for tenants"):
            await table.persist(Event(id="evt-1", type="paid", tenant="acme", body=b"{}"))
    assert place.rows() == {"evt-1": 1, "evt-2": 1}


async def test_a_table_is_made_with_the_names_that_are_given(place: Fleet) -> None:
    async with EventTable(place.rows_url, table=place.table, columns=NAMES) as table:
        await table.persist(event(1))
        await table.check()
    assert place.rows() == {"evt-1": 1}


@pytest.mark.parametrize(
    ("statement", "more", "said"),
    [
        (
            DOCUMENTED.replace("UNIQUE ", ""),
            "",
            "would hold an event twice: CREATE UNIQUE INDEX",
        ),
        (DOCUMENTED, ", region {text} NOT NULL", "needs a value for region"),
    ],
)
async def test_a_table_that_would_lose_events_is_refused_before_any_is_accepted(
    place: Fleet, statement: str, more: str, said: str
) -> None:
    make(place, statement.replace("{more}", more))
    table = EventTable(place.rows_url, table=place.table, columns=NAMES)

    async def handle(_event: Event) -> None: ...

    for handler in (table.persist, table.after(handle)):
        async with semel.aopen(f"sqlite:///{place.folder / 'claims.db'}", consumer="c") as once:
            with pytest.raises(PolicyInvalid, match=said):
                async with Intake(once, handler):
                    pass


async def test_a_plain_function_runs_in_a_thread_before_its_row(place: Fleet) -> None:
    threads: list[str] = []

    def handle(_event: Event) -> None:
        threads.append(threading.current_thread().name)

    async with EventTable(place.rows_url, table=place.table) as table:
        await table.after(handle)(event(1))
    assert len(threads) == 1
    assert threads[0] != threading.main_thread().name
    assert place.rows() == {"evt-1": 1}


def test_columns_as_text() -> None:
    assert columns_of("type=event_type,tenant=") == NAMES
    assert columns_of("") == Columns()
    with pytest.raises(StoreUnknown, match="known are event_id, type, payload, tenant"):
        columns_of("kind=event_type")
    with pytest.raises(StoreUnknown, match="is not a valid name"):
        columns_of("type=a;b")
