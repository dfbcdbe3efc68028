"""Messages join the caller's transaction on every kind of handle; inside a handler their ids repeat."""

import contextlib
import sqlite3
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import semel
from semel import Message
from semel.errors import NoTransaction, StoreRefused, UsageError, ValueNotEncodable, ValueTooLarge
from semel.outbox.message import id_for_event, new_id
from tests.django_connections import connection_to, forget
from tests.outbox.tools import Place

pytestmark = pytest.mark.anyio

HOUR_US = 3_600_000_000


class Rolled(Exception):
    """The caller's transaction is to be undone."""


# --- every handle, as its users open transactions -----------------------------------------------


@contextlib.asynccontextmanager
async def psycopg_sync(place: Place) -> AsyncIterator[Any]:
    with place.connect() as connection, connection.transaction():
        yield connection


@contextlib.asynccontextmanager
async def psycopg_async(place: Place) -> AsyncIterator[Any]:
    import psycopg

    async with (
        await psycopg.AsyncConnection.connect(bare(place)) as connection,
        connection.transaction(),
    ):
        yield connection


@contextlib.asynccontextmanager
async def asyncpg_(place: Place) -> AsyncIterator[Any]:
    import asyncpg  # type: ignore[import-untyped]

    connection = await asyncpg.connect(bare(place))
    try:
        async with connection.transaction():
            yield connection
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def sqlite(place: Place) -> AsyncIterator[Any]:
    connection = sqlite3.connect(place.path)
    try:
        with connection:
            yield connection
    finally:
        connection.close()


@contextlib.asynccontextmanager
async def aiosqlite_(place: Place) -> AsyncIterator[Any]:
    import aiosqlite

    async with aiosqlite.connect(place.path) as connection:
        await connection.execute("BEGIN")
        try:
            yield connection
        except BaseException:
            await connection.rollback()
            raise
        await connection.commit()


@contextlib.asynccontextmanager
async def sqlalchemy_sync(place: Place, session: bool) -> AsyncIterator[Any]:
    import sqlalchemy
    from sqlalchemy.orm import Session

    engine = sqlalchemy.create_engine(
        bare(place).replace("postgresql:", "postgresql+psycopg:")
        if place.kind == "postgres"
        else f"sqlite:///{place.path}"
    )
    try:
        with Session(engine) if session else engine.connect() as handle, handle.begin():
            yield handle
    finally:
        engine.dispose()


@contextlib.asynccontextmanager
async def sqlalchemy_async(place: Place, driver: str, session: bool) -> AsyncIterator[Any]:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    engine = create_async_engine(
        bare(place).replace("postgresql:", f"postgresql+{driver}:")
        if place.kind == "postgres"
        else f"sqlite+aiosqlite:///{place.path}"
    )
    try:
        async with AsyncSession(engine) if session else engine.connect() as handle, handle.begin():
            yield handle
    finally:
        await engine.dispose()


def bare(place: Place) -> str:
    return place.url.partition("?")[0]


Opened = Callable[[Place], contextlib.AbstractAsyncContextManager[Any]]
HANDLES: list[tuple[str, str, Opened]] = [
    ("psycopg", "postgres", psycopg_sync),
    ("psycopg async", "postgres", psycopg_async),
    ("asyncpg", "postgres", asyncpg_),
    ("sqlite3", "sqlite", sqlite),
    ("aiosqlite", "sqlite", aiosqlite_),
    *(
        (f"sqlalchemy {'session' if session else 'connection'} {kind}", kind, opened)
        for kind in ("sqlite", "postgres")
        for session in (False, True)
        for opened in [lambda place, session=session: sqlalchemy_sync(place, session)]
    ),
    *(
        (f"sqlalchemy async {driver} {'session' if session else 'connection'}", kind, opened)
        for kind, driver in (("sqlite", "aiosqlite"), ("postgres", "asyncpg"), ("postgres", "psycopg"))
        for session in (False, True)
        for opened in [lambda place, d=driver, s=session: sqlalchemy_async(place, d, s)]
    ),
]


@pytest.fixture(params=HANDLES, ids=[name for name, _, _ in HANDLES])
async def handle(request: Any, tmp_path: Path) -> AsyncIterator[tuple[Place, Opened]]:
    _, kind, opened = request.param
    place = Place(kind, tmp_path)
    yield place, opened
    place.close()


async def published(outbox: Any, message: Message, **more: Any) -> str:
    answer: str | Awaitable[str] = outbox.publish(message, **more)
    return answer if isinstance(answer, str) else await answer


async def test_a_message_commits_with_its_transaction(handle: tuple[Place, Opened]) -> None:
    place, opened = handle
    message = Message("order.created", {"n": 1}, aggregate=("order", "1"), headers={"a": "b"})
    async with opened(place) as connection:
        written = await published(place.once.outbox(connection), message)
    with contextlib.suppress(Rolled):
        async with opened(place) as connection:
            await published(place.once.outbox(connection), message)
            raise Rolled
    (entry,) = await place.entries()
    assert (entry.row.id, entry.row.payload, entry.row.headers) == (written, b'{"n":1}', {"a": "b"})
    assert (entry.row.aggregate, entry.row.source, entry.state) == (("order", "1"), "orders", "pending")


async def test_an_async_client_writes_too(handle: tuple[Place, Opened]) -> None:
    place, opened = handle
    async with semel.aopen(place.url, consumer="parcels") as once, opened(place) as connection:
        written = await published(once.outbox(connection), Message("sent"))
    (entry,) = await place.entries()
    assert (entry.row.id, entry.row.source) == (written, "parcels")


def test_django_writes_too(sqlite_place: Place) -> None:
    from django.db import transaction  # type: ignore[import-untyped]

    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(sqlite_place.path)}
    connection = connection_to("outbox", database)
    try:
        with transaction.atomic(using="outbox"):
            sqlite_place.once.outbox(connection).publish(Message("order.created"))
        with contextlib.suppress(Rolled), transaction.atomic(using="outbox"):
            sqlite_place.once.outbox(connection).publish(Message("order.created"))
            raise Rolled
        with pytest.raises(NoTransaction):
            sqlite_place.once.outbox(connection).publish(Message("order.created"))
        with closing(sqlite3.connect(sqlite_place.path)) as reader, reader:
            assert reader.execute("SELECT count(*) FROM semel_outbox").fetchone() == (1,)
    finally:
        forget(connection)


async def test_without_a_transaction_nothing_is_written(place: Place) -> None:
    connection = place.connect()
    if place.kind == "postgres":
        connection.autocommit = True
    else:
        connection.isolation_level = None
    with pytest.raises(NoTransaction):
        place.once.outbox(connection).publish(Message("order.created"))
    connection.close()
    assert await place.entries() == []


# --- ids of the caller's own ---------------------------------------------------------------------

OWN = uuid.UUID("0192f0c1-2d3e-4f50-8a6b-7c8d9e0f1a2b")


@pytest.mark.parametrize(
    "given", [OWN, str(OWN), str(OWN).upper(), OWN.hex], ids=["uuid", "text", "upper", "hex"]
)
async def test_a_caller_may_choose_the_id(place: Place, given: Any) -> None:
    assert place.write(Message("order.created", {"n": 1}, id=given)) == [str(OWN)]
    (entry,) = await place.entries()
    assert entry.row.id == str(OWN)


async def test_the_same_message_again_is_written_once_on_every_handle(handle: tuple[Place, Opened]) -> None:
    place, opened = handle
    message = Message("order.created", {"n": 1}, id=OWN)
    for _ in range(2):
        async with opened(place) as connection:
            outbox = place.once.outbox(connection)
            assert await published(outbox, message) == str(OWN)
            assert await published(outbox, message) == str(OWN)
    (entry,) = await place.entries()
    assert (entry.row.id, entry.row.payload) == (str(OWN), b'{"n":1}')


async def test_another_message_under_the_same_id_is_refused_on_every_handle(
    handle: tuple[Place, Opened],
) -> None:
    place, opened = handle
    async with opened(place) as connection:
        await published(place.once.outbox(connection), Message("order.created", {"n": 1}, id=OWN))
    for other in (Message("order.created", {"n": 2}, id=OWN), Message("order.moved", {"n": 1}, id=OWN)):
        with pytest.raises(UsageError, match="another message with the id"):
            await in_one(place, opened, Message("order.paid"), other)
    assert [entry.row.payload for entry in await place.entries()] == [b'{"n":1}'], "nothing half written"


async def in_one(place: Place, opened: Opened, *messages: Message) -> None:
    """All of them in one transaction."""
    async with opened(place) as connection:
        for message in messages:
            await published(place.once.outbox(connection), message)


async def test_an_id_that_was_rolled_back_is_free(place: Place) -> None:
    connection = place.connect()
    outbox = place.once.outbox(connection)
    with contextlib.suppress(Rolled), transaction(place, connection):
        outbox.publish(Message("order.created", 1, id=OWN))
        raise Rolled
    with transaction(place, connection):
        outbox.publish(Message("order.created", 2, id=OWN))
    connection.close()
    (entry,) = await place.entries()
    assert entry.row.payload == b"2"


async def test_in_one_batch_too(place: Place) -> None:
    connection = place.connect()
    with transaction(place, connection):
        outbox = place.once.outbox(connection)
        ids = outbox.publish_many([Message("a", 1, id=OWN), Message("b", 2), Message("a", 1, id=OWN)])
    assert (ids[0], ids[2]) == (str(OWN), str(OWN))
    with pytest.raises(UsageError, match="another message"), transaction(place, connection):
        place.once.outbox(connection).publish_many(
            [Message("c", 1, id=OWN.hex[::-1]), Message("c", 2, id=OWN.hex[::-1])]
        )
    connection.close()
    assert [entry.row.payload for entry in await place.entries()] == [b"1", b"2"]


async def test_inside_a_handler_an_own_id_needs_no_name(place: Place) -> None:
    connection = place.connect()

    def handler(name: str | None) -> str:
        with transaction(place, connection):
            return str(place.once.outbox(connection).publish(Message("moved", id=OWN), name=name))

    assert place.once.run("evt_1", handler, None) == semel.Done(str(OWN))
    assert place.once.run("evt_2", handler, "moved") == semel.Done(str(OWN))
    connection.close()
    (entry,) = await place.entries()
    assert (entry.row.id, entry.name) == (str(OWN), None)


@pytest.mark.parametrize("given", ["", "order-1", "0192f0c1", 7, b"0" * 16, "g" * 32], ids=repr)
async def test_an_id_that_is_no_uuid_is_refused(place: Place, given: Any) -> None:
    connection = place.connect()
    with (
        pytest.raises(UsageError, match=r"a message's id is a UUID, not .*uuid5"),
        transaction(place, connection),
    ):
        place.once.outbox(connection).publish(Message("order.created", id=given))
    connection.close()
    assert await place.entries() == []


# --- inside a handler ---------------------------------------------------------------------------


def transaction(place: Place, connection: Any) -> Any:
    return connection.transaction() if place.kind == "postgres" else connection


async def test_a_repeated_handler_publishes_the_same_id(place: Place) -> None:
    attempts: list[str] = []
    connection = place.connect()

    def handler() -> None:
        with transaction(place, connection):
            number = len(attempts)
            attempts.append(place.once.outbox(connection).publish(Message("moved", number), name="moved"))
        if len(attempts) == 1:
            raise ConnectionError("after the commit, before the claim is settled")

    assert isinstance(place.once.run("evt_1", handler), semel.Errored)
    assert isinstance(place.once.run("evt_1", handler), semel.Done)
    connection.close()
    first, second = attempts
    assert first == second
    (entry,) = await place.entries()
    assert (entry.row.id, entry.row.payload, entry.name) == (first, b"0", "moved")


async def test_the_id_follows_from_the_event(place: Place) -> None:
    connection = place.connect()

    def handler() -> tuple[str, int]:
        with transaction(place, connection):
            written = place.once.outbox(connection).publish(Message("moved"), name="moved")
        return written, semel.current().first_seen_us

    outcome = place.once.run("evt_1", handler)
    connection.close()
    assert isinstance(outcome, semel.Done)
    written, first_seen = outcome.value
    assert written == str(id_for_event(("", "orders", "evt_1"), first_seen, "moved"))


def test_a_name_used_twice_in_an_attempt_is_an_error(place: Place) -> None:
    connection = place.connect()

    def handler() -> None:
        with transaction(place, connection):
            place.once.outbox(connection).publish(Message("moved", 1), name="moved")
            place.once.outbox(connection).publish(Message("moved", 2), name="moved")

    outcome = place.once.run("evt_1", handler)
    connection.close()
    assert isinstance(outcome, semel.Errored)
    assert isinstance(outcome.error, UsageError)
    assert "moved" in str(outcome.error)


def test_a_message_of_a_handler_needs_a_name(place: Place) -> None:
    connection = place.connect()

    def handler() -> None:
        with transaction(place, connection):
            place.once.outbox(connection).publish(Message("moved"))

    outcome = place.once.run("evt_1", handler)
    connection.close()
    assert isinstance(outcome, semel.Errored)
    assert "name" in str(outcome.error)


# --- ids and limits -----------------------------------------------------------------------------


def test_derived_ids_have_the_layout_of_version_7() -> None:
    made = id_for_event(("t", "c", "k"), HOUR_US * 500_000, "n")
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert made.int >> 80 == HOUR_US * 500_000 // 1000
    assert str(made) == "01a3185c-5000-71e2-a903-564f9e0b5b24"  # another one would publish old events again


def test_derived_ids_differ_by_every_part() -> None:
    parts = [
        id_for_event(("t", "c", "k"), HOUR_US, "n"),
        id_for_event(("t", "c", "k"), HOUR_US, "m"),
        id_for_event(("t", "c", "j"), HOUR_US, "n"),
        id_for_event(("t", "d", "k"), HOUR_US, "n"),
        id_for_event(("s", "c", "k"), HOUR_US, "n"),
        id_for_event(("t", "c", "k"), HOUR_US * 2, "n"),
        id_for_event(("t", "c", "nk"), HOUR_US, ""),
    ]
    assert len(set(parts)) == len(parts)
    assert id_for_event(("t", "c", "k"), HOUR_US, "n") == parts[0]


def test_minted_ids_sort_by_time() -> None:
    assert new_id().version == 7
    assert new_id() != new_id()


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Message(""), UsageError),
        (Message("a\x00b"), UsageError),
        (Message("x" * 256), UsageError),
        (Message("x", aggregate=("order", "")), UsageError),
        (Message("x", headers={"ce-id": "mine"}), UsageError),
        (Message("x", headers={"Upper": "x"}), UsageError),
        (Message("x", headers={"a": "b\r\nc: d"}), UsageError),
        (Message("x", headers={"a": "b" * 9000}), UsageError),
        (Message("x", traceparent="nonsense"), UsageError),
        (Message("x", object()), ValueNotEncodable),
        (Message("x", b"x" * (256 * 1024 + 1)), ValueTooLarge),
    ],
)
def test_what_no_broker_would_take_is_refused(
    sqlite_place: Place, message: Message, error: type[Exception]
) -> None:
    connection = sqlite_place.connect()
    with pytest.raises(error):
        sqlite_place.once.outbox(connection).publish(message)
    connection.close()


def test_a_database_without_the_tables_says_what_to_do(sqlite_place: Place, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "other.db")
    with pytest.raises(StoreRefused, match="semel migrate"):
        sqlite_place.once.outbox(other).publish(Message("x"))
    other.close()


def test_a_thing_that_is_no_handle_is_a_type_error(sqlite_place: Place) -> None:
    with pytest.raises(TypeError, match="supported connection"):
        sqlite_place.once.outbox(object())  # type: ignore[call-overload]


# --- many at once, and the trace around them ----------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 1200])
async def test_many_messages_keep_their_order(place: Place, count: int) -> None:
    connection = place.connect()
    with connection.transaction() if place.kind == "postgres" else connection:
        ids = place.once.outbox(connection).publish_many(
            [Message("order.moved", number, aggregate=("order", "1")) for number in range(count)]
        )
    connection.close()
    entries = await place.entries()
    assert [entry.row.id for entry in entries] == ids
    assert [entry.row.payload for entry in entries] == [str(number).encode() for number in range(count)]


async def test_many_messages_of_a_handler_repeat_their_ids(place: Place) -> None:
    once = place.once
    ids: list[list[str]] = []

    def handler() -> None:
        connection = place.connect()
        with connection.transaction() if place.kind == "postgres" else connection:
            outbox = once.outbox(connection)
            with pytest.raises(UsageError, match="needs a name"):
                outbox.publish_many([Message("a")])
            with pytest.raises(UsageError, match="one for each"):
                outbox.publish_many([Message("a")], names=["x", "y"])
            ids.append(outbox.publish_many([Message("a"), Message("b")], names=["first", "second"]))
        connection.close()
        if len(ids) == 1:
            raise ConnectionError("after the commit")

    assert isinstance(once.run("evt", handler), semel.Errored)
    assert isinstance(once.using(semel.Policy(wait_s=5)).run("evt", handler), semel.Done)
    assert ids[0] == ids[1]
    assert [entry.row.id for entry in await place.entries()] == ids[0]


async def test_a_message_carries_the_span_in_which_it_is_written(place: Place) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    own = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    with TracerProvider().get_tracer("test").start_as_current_span("order") as span:
        place.write(Message("inside"), Message("told", traceparent=own))
    place.write(Message("outside"))
    context = span.get_span_context()
    inside, told, outside = [entry.row.traceparent for entry in await place.entries()]
    assert (inside or "").rpartition("-")[0] == (
        f"00-{trace.format_trace_id(context.trace_id)}-{trace.format_span_id(context.span_id)}"
    )
    assert (told, outside) == (own, None)
