"""The writes that the documents say need no record, delivered twice and at once on PostgreSQL."""

import hashlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from tests.services import postgres

PAGE = Path(__file__).parent.parent.parent / "docs" / "howto" / "naturally-idempotent-writes.md"
DELIVERIES = 12


def statements() -> list[str]:
    """The statements of the page, in order."""
    blocks = re.findall(r"```sql\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [statement.strip() for block in blocks for statement in block.split(";") if statement.strip()]


UPSERT, UPDATE, CHILD, SUM = statements()


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    schema = "n_" + hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]
    postgres.execute(
        postgres.url(),
        f"CREATE SCHEMA {schema};"
        f"CREATE TABLE {schema}.profile (id integer PRIMARY KEY, email text, version integer);"
        f"CREATE TABLE {schema}.orders (id integer PRIMARY KEY, state text);"
        f"CREATE TABLE {schema}.payment (event_id text PRIMARY KEY, account integer, cents integer CHECK (cents > 0));"
        f"INSERT INTO {schema}.orders VALUES (12, 'placed')",
    )
    yield f"{postgres.url()}?options=-csearch_path%3D{schema}"
    postgres.execute(postgres.url(), f"DROP SCHEMA {schema} CASCADE")


def deliver(url: str, statement: str) -> list[int]:
    """Every delivery at once, each on a connection of its own; how many rows each changed."""

    def once(_number: int) -> int:
        with psycopg.connect(url) as connection:
            return connection.execute(statement).rowcount

    with ThreadPoolExecutor(DELIVERIES) as threads:
        return list(threads.map(once, range(DELIVERIES)))


def read(url: str, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(statement).fetchall()


def test_set_do_not_add(url: str) -> None:
    assert sum(deliver(url, UPSERT)) == 1
    deliver(url, UPSERT.replace("3", "2").replace("ada@", "old@"))
    assert read(url, "SELECT email, version FROM profile") == [("ada@example.org", 3)]


def test_change_only_from_the_state_you_expect(url: str) -> None:
    assert sum(deliver(url, UPDATE)) == 1
    assert read(url, "SELECT state FROM orders") == [("paid",)]


def test_one_child_row_per_event(url: str) -> None:
    assert sum(deliver(url, CHILD)) == 1
    assert read(url, SUM) == [(500,)]
    with pytest.raises(psycopg.errors.CheckViolation):
        deliver(url, CHILD.replace("evt_1", "evt_2").replace("500", "-500"))
