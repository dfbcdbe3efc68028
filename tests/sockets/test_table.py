"""The table of events: one row for each, whoever writes it and however often."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

import semel
from semel.errors import PolicyInvalid, StoreUnavailable, StoreUnknown
from semel.intake import Event
from semel.sockets import EventTable
from tests.services import postgres
from tests.sockets.fleet import Fleet

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
    async with EventTable(place.rows_url, table=place.table) as table:
        with pytest.raises(
            PolicyInvalid, match="for something else: it has no payload, processed_at, tenant, type"
        ):
            await table.check()


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
