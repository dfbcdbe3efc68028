"""Migrations, the view for operators, and what a URL may say."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from semel.core.commands import Claim, Granted, Lookup, Scan, Settle
from semel.core.ids import digest
from semel.errors import PolicyInvalid, StoreRefused
from semel.stores.postgres import PostgresStore, from_url, schema_sql
from semel.stores.postgres.schema import VERSION, migrations, outbox_channel_of, statements
from semel.types import ErrorInfo
from tests.services import postgres
from tests.stores.postgres import places

MINUTE_US = 60 * 1_000_000


@pytest.fixture
def schema(tmp_path: Path) -> str:
    return places.make(tmp_path).place.schema


def shape(place: str, schema: str) -> list[tuple[object, ...]]:
    """Every column, index, view and function of a schema."""
    return postgres.execute(
        place,
        f"SELECT 'column', table_name::text, column_name::text, data_type::text, is_nullable::text"
        f" FROM information_schema.columns WHERE table_schema = '{schema}'"
        f" UNION ALL SELECT 'index', tablename::text, indexname::text, replace(indexdef, '{schema}', 's'), ''"
        f" FROM pg_indexes WHERE schemaname = '{schema}'"
        f" UNION ALL SELECT 'view', viewname::text, replace(definition, '{schema}', 's'), '', ''"
        f" FROM pg_views WHERE schemaname = '{schema}' ORDER BY 1, 2, 3",
    )


def test_the_schema_is_the_sum_of_its_migrations(place: str, schema: str) -> None:
    by_hand = schema + "_h"
    postgres.execute(place, schema_sql(by_hand))
    store = from_url(place)
    store.open()
    store.close()
    assert shape(place, schema) == shape(place, by_hand)
    assert max(migrations()) == VERSION
    assert sorted(migrations()) == list(range(1, VERSION + 1))


def test_a_database_of_an_older_version_keeps_its_records(place: str, schema: str) -> None:
    older = "\n".join(
        text.replace("{schema}", f'"{schema}"').replace("{outbox_channel}", outbox_channel_of(schema))
        for number, text in migrations().items()
        if number < 6
    )
    postgres.execute(place, f'CREATE SCHEMA "{schema}"; {older}')
    record_id = ("", "c", "old")
    postgres.execute(
        place,
        f"INSERT INTO {schema}.consumers (tenant, consumer) VALUES ('', 'c');"
        f"INSERT INTO {schema}.records (digest, state, owner, fence, lease_until, attempt, consumer_id, key)"
        f" SELECT '{digest(record_id).hex()}', 0, 'o', 1, 2, 1, id, 'old' FROM {schema}.consumers",
    )
    store = from_url(place)
    store.open()
    (granted,) = store.send([Claim(record_id, b"n" * 16, MINUTE_US, MINUTE_US)])
    assert granted.attempt == 2
    info = ErrorInfo("app.Refused", "no")
    store.send([Settle(record_id, b"n" * 16, granted.fence, "released", error=info)])
    (after,) = store.send([Lookup(record_id)])
    assert [(each.attempt, each.kind) for each in after.errors] == [(1, "lease ended"), (2, "app.Refused")]
    kinds = postgres.execute(place, f"SELECT errors->-1->>'kind' FROM {schema}.records")
    assert kinds == [("app.Refused",)]
    store.close()


def test_many_may_migrate_at_once(place: str, schema: str) -> None:
    barrier = threading.Barrier(6, timeout=30)

    def migrate(_number: int) -> None:
        store = from_url(place)
        barrier.wait()
        store.open()
        store.close()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(migrate, range(6)))
    assert postgres.execute(place, f"SELECT count(*)::int FROM {schema}.meta") == [(1,)]


def test_a_newer_schema_is_refused(store: PostgresStore, place: str) -> None:
    store.close()
    postgres.execute(
        place, f"UPDATE {store.place.schema}.meta SET value = '999' WHERE name = 'schema_version'"
    )
    with pytest.raises(StoreRefused, match="999"):
        store.open()


@pytest.fixture
def servant(place: str, schema: str) -> Iterator[str]:
    """A role that may write but not create."""
    postgres.execute(place, schema_sql(schema))
    name = f"r_{schema}"[:40]
    postgres.execute(
        place,
        f"CREATE ROLE {name} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {name};"
        f" GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {name};"
        f" GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {name}",
    )
    yield place.replace("//semel@", f"//{name}@")
    postgres.execute(place, f"DROP OWNED BY {name}; DROP ROLE {name}")


def test_a_role_without_the_right_to_create_is_enough(servant: str) -> None:
    store = from_url(servant)
    store.open()
    (answer,) = store.send([Claim(("", "c", "k"), b"o" * 16, MINUTE_US, MINUTE_US)])
    assert isinstance(answer, Granted)
    store.close()


def test_a_role_that_cannot_create_is_told_what_to_do(servant: str) -> None:
    store = from_url(re.sub("schema=[^&]+", "schema=elsewhere", servant))
    with pytest.raises(StoreRefused, match="semel migrate --sql"):
        store.open()


def test_operators_read_a_view(store: PostgresStore, place: str) -> None:
    claims = [
        Claim(("acme", "billing", key), b"o" * 16, MINUTE_US, MINUTE_US, event_type="order")
        for key in ("evt_1", "evt_2", "evt_3", "evt_4", "evt_5")
    ]
    values = [b'j{"amount": 1}', b"r\xff", b"j\xff", b'o{"total": 2}', b'j"\\u0000"']
    for claim, granted, value in zip(claims, store.send(claims), values, strict=True):
        store.send([Settle(claim.id, claim.owner, granted.fence, "done", value, MINUTE_US)])
    rows = postgres.execute(
        place,
        "SELECT event_id, event_type, tenant, consumer, state, attempt, value,"
        " processed_at BETWEEN now() - interval '1 minute' AND now(), expires_at > now()"
        f" FROM {store.place.schema}.events ORDER BY event_id",
    )
    assert rows == [
        (key, "order", "acme", "billing", "done", 1, value, True, True)
        for key, value in (
            ("evt_1", {"amount": 1}),
            ("evt_2", None),
            ("evt_3", None),
            ("evt_4", {"total": 2}),
            ("evt_5", None),
        )
    ]
    amounts = f"SELECT event_id FROM {store.place.schema}.events WHERE value @> '{{\"amount\": 1}}'"
    assert postgres.execute(place, amounts) == [("evt_1",)]


def test_without_readable_keys_only_digests_are_kept(place: str) -> None:
    store = from_url(place + "&readable_keys=false")
    store.open()
    plain = Claim(("", "c", "secret"), b"o" * 16, MINUTE_US, MINUTE_US)
    named = Claim(("", "c", "named"), b"o" * 16, MINUTE_US, MINUTE_US, quarantine=True)
    kept = Claim(("", "c", "kept"), b"o" * 16, MINUTE_US, MINUTE_US, journal=b"payload")
    store.send([plain, named, kept])
    (page,) = store.send([Scan()])
    keys = {record.key for record in page.records}
    assert {"named", "kept"} < keys
    assert "secret" not in keys
    store.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://h/db?schema=Bad", "schema"),
        ("postgresql://h/db?schema=a%22b", "schema"),
        ("postgresql://h/db?schema=1a", "schema"),
        ("postgresql://h/db?schema=pg_x", "schema"),
        ("postgresql://h/db?pool_max=0", "pool_max"),
        ("postgresql://h/db?pool_max=x", "pool_max"),
        ("postgresql://h/db?wait_s=0", "wait_s"),
        ("postgresql://h/db?pooler=perhaps", "pooler"),
        ("postgresql://h/db?shema=x", "did you mean schema"),
        ("postgresql://h/db?sslmod=require", "did you mean sslmode"),
        ("postgresql://h/db?schema=a&schema=b", "twice"),
        ("postgresql://h/db#x", "PostgreSQL URL"),
    ],
)
def test_what_a_url_must_not_say(url: str, words: str) -> None:
    with pytest.raises(PolicyInvalid, match=words):
        from_url(url)


def test_what_a_url_may_say() -> None:
    store = from_url(
        "postgresql://me:s3cret@h:6432/db?schema=x_1&pool_max=7&wait_s=2.5&pooler=true&sslmode=require"
    )
    place = store.place
    assert (place.schema, place.pool_max, place.wait_s, place.pooler) == ("x_1", 7, 2.5, True)
    parameters = place.parameters()
    assert parameters["sslmode"] == "require"
    assert parameters["prepare_threshold"] is None
    assert "options" not in parameters
    assert store.name == "postgresql://h:6432/db?schema=x_1"
    assert "s3cret" not in repr(store)
    assert "force_generic_plan" in from_url("postgres://h/db").place.parameters()["options"]
    mine = from_url("postgres://h/db?options=-c%20work_mem%3D8MB").place.parameters()["options"]
    assert mine.endswith(" -c work_mem=8MB")  # the driver's URLs know no + for a blank


def test_every_statement_names_its_schema_and_leaves_nothing_open() -> None:
    for name, text in statements("some_schema").items():
        assert "{" not in text, name
        for table in ("records", "marks", "consumers", "windows", "extras", "journal", "listeners", "meta"):
            for match in re.finditer(rf"\b(?:FROM|INTO|JOIN|UPDATE)\s+{table}\b", text):
                raise AssertionError(f"{name}: {match[0]} without its schema")
