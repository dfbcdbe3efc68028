"""What is promised to cost little: round trips, log written by duplicates, plans that do not flip."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.core.commands import Claim, Known, Lookup, Mark, Renew, Settle
from semel.stores.postgres import PostgresStore, encoding, from_url, queries
from semel.stores.postgres import batch as batching
from tests.services import postgres
from tests.stores.postgres import places
from tests.waiting import await_true

DAY_US = 86_400 * 1_000_000
MINUTE_US = 60 * 1_000_000
SOAK = bool(os.environ.get("SEMEL_SOAK"))


def claims(count: int, consumer: str = "c") -> list[Claim]:
    return [Claim(("", consumer, f"key {n}"), os.urandom(16), MINUTE_US, DAY_US) for n in range(count)]


def finish(store: PostgresStore, batch: list[Claim]) -> None:
    answers = store.send(batch)
    store.send(
        [
            Settle(claim.id, claim.owner, answer.fence, "done", b"j1", DAY_US)
            for claim, answer in zip(batch, answers, strict=True)
        ]
    )


def test_duplicates_write_no_log() -> None:
    with postgres.own() as own:  # on a shared server others write
        store = PostgresStore(own.url)
        store.open()
        least = written_by_duplicates(store, own.url)
        store.close()
    assert least == 0


def written_by_duplicates(store: PostgresStore, place: str) -> int:
    """Bytes of log and transaction numbers that a round of duplicates costs."""
    finish(store, claims(500))
    keys = [f"key {n}" for n in range(500)]
    store.send([Mark("", "m", keys, DAY_US)])
    running = claims(100, "running")
    store.send(running)
    store.send(claims(500))  # the first look may tidy a page, which writes
    store.send(claims(100, "running"))
    postgres.execute(place, "CHECKPOINT")

    def written() -> tuple[int, int]:
        """Bytes of log, and transaction numbers used."""
        at = store._open_pool()
        with at.connection() as line:
            row = line.execute(
                "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint,"
                " pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
            ).fetchone()
        assert row is not None
        return row

    least = 10**9
    for _ in range(5):  # the server's own doings in between are not ours
        before = written()
        answers = store.send(claims(500))
        (marked,) = store.send([Mark("", "m", keys, DAY_US)])
        store.send(claims(100, "running"))
        after = written()
        assert all(isinstance(answer, Known) for answer in answers)
        assert not any(marked.firsts)
        least = min(least, after[0] - before[0] + after[1] - before[1])
    return least


def explain(store: PostgresStore, items: list[Any]) -> dict[str, Any]:
    """How the server carries out the statement of these items, and what it did."""
    batch = batching.PostgresBatch(items, store.consumers)
    (stage,) = batching.stages(batch)
    ask = next(queries.talk_of(batch, stage))
    with store._open_pool().connection() as line:
        line.execute("BEGIN")
        cursor = line.execute(
            f"EXPLAIN (ANALYZE, FORMAT JSON) {store.statements[ask.name]}",
            ask.parameters,
        )
        row = cursor.fetchone()
        line.execute("ROLLBACK")
    assert row is not None
    plan: dict[str, Any] = row[0][0]["Plan"]
    return plan


def scans(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if plan.get("Relation Name") in ("records", "marks") and plan["Node Type"].endswith("Scan"):
        yield plan
    for part in plan.get("Plans", ()):
        yield from scans(part)


def fill(place: str, schema: str, count: int) -> None:
    """Rows without statistics on them."""
    postgres.execute(
        place,
        f"INSERT INTO {schema}.records (digest, state, owner, fence, attempt, settled_at, expires_at, consumer_id)"
        f" SELECT gen_random_uuid(), 1, '\\x11', 1, 1, 1, 4000000000000000, 1 FROM generate_series(1, {count})",
    )
    postgres.execute(
        place,
        f"INSERT INTO {schema}.marks (digest, expires_at, consumer_id)"
        f" SELECT gen_random_uuid(), 4000000000000000, 1 FROM generate_series(1, {count})",
    )


TEMPTING = (
    "options=-c%20random_page_cost%3D10000%20-c%20seq_page_cost%3D0.001%20-c%20cpu_tuple_cost%3D0.000001"
)
"""To the planner an index costs the world, and a scan of the table nothing. Behind a pooler it decides for itself,
and may rightly prefer a scan while the table is small."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "lie"),
    [
        (0, ""),
        (20_000, ""),
        (20_000, "nearly empty"),
        (20_000, "scans are free"),
        (200_000, "a pooler"),
        *([(2_000_000, ""), (2_000_000, "nearly empty"), (2_000_000, "a pooler")] if SOAK else []),
    ],
)
def test_one_index_probe_for_each_key(place: str, rows: int, lie: str) -> None:
    more = {"scans are free": f"&{TEMPTING}", "a pooler": "&pooler=true"}.get(lie, "")
    with contextlib.closing(from_url(place + more)) as store:
        store.open()
        batch = claims(200)
        granted = list(zip(batch, store.send(batch), strict=True))
        schema = store.place.schema
        for table in ("records", "marks"):
            postgres.execute(place, f"ALTER TABLE {schema}.{table} SET (autovacuum_enabled = off)")
            if lie == "nearly empty":
                postgres.execute(place, f"ANALYZE {schema}.{table}")  # before it is filled
        fill(place, schema, rows)
        for items in (
            [Settle(c.id, c.owner, a.fence, "done", None, DAY_US) for c, a in granted],
            [Renew(c.id, c.owner, a.fence, MINUTE_US) for c, a in granted],
            claims(200),
            claims(200, "other"),
            [Lookup(claim.id) for claim in batch],
            [Mark("", "c", [f"key {n}" for n in range(200)], DAY_US)],
        ):
            if items[0].__class__ is Claim:
                store.consumers.setdefault(items[0].id[:2], 1)
            probed(list(scans(explain(store, items))))


def probed(found: list[dict[str, Any]]) -> None:
    """Each of 200 keys was looked up in the index, and nothing else was read."""
    assert found
    for scan in found:
        assert scan["Node Type"] in ("Index Scan", "Index Only Scan"), scan
        assert scan["Actual Rows"] * scan["Actual Loops"] <= 200
        assert scan["Actual Loops"] in (0, 200)
        assert scan.get("Rows Removed by Filter", 0) == 0


def test_a_record_and_a_mark_take_little_room(tmp_path: Path) -> None:
    schema = places.make(tmp_path).place.schema
    store = PostgresStore(postgres.url(), schema=schema, readable_keys=False, pool_max=2)
    store.open()
    try:
        for number in range(40):
            finish(
                store,
                [Claim(("", "c", f"{number}-{n}"), os.urandom(16), MINUTE_US, DAY_US) for n in range(500)],
            )
            store.send([Mark("", "m", [f"{number}-{n}" for n in range(500)], DAY_US)])
        schema = store.place.schema
        # A snapshot that another test holds keeps old versions of rows alive for a moment.
        assert await_true(lambda: bytes_without_dead_rows(f"{schema}.records") / 20_000 <= 290, 60)
        assert await_true(lambda: bytes_without_dead_rows(f"{schema}.marks") / 20_000 <= 104, 60)
    finally:
        store.close()


def bytes_without_dead_rows(table: str) -> int:
    postgres.execute(postgres.url(), f"VACUUM FULL {table}")
    ((size,),) = postgres.execute(postgres.url(), f"SELECT pg_total_relation_size('{table}')::int")
    return int(size)


def test_packed_arrays_are_what_the_server_reads(store: PostgresStore) -> None:
    digests = [os.urandom(16) for _ in range(3)]
    with store._open_pool().connection() as line:
        row = line.execute(
            "SELECT %(u)b, %(b)b, %(i)b, %(s)b, %(y)b, %(t)b, %(e)b",
            {
                "u": encoding.uuids(digests),
                "b": encoding.bigints([1, None, -(2**62)]),
                "i": encoding.integers([7, 7]),
                "s": encoding.smallints([None]),
                "y": encoding.byteas([b"", None, b"\0x"]),
                "t": encoding.texts(["a", None, "\u00e4"]),
                "e": encoding.byteas([]),
            },
        ).fetchone()
    assert row is not None
    assert [each.bytes for each in row[0]] == digests
    assert row[1:] == ([1, None, -(2**62)], [7, 7], [None], [b"", None, b"\0x"], ["a", None, "\u00e4"], [])


@pytest.mark.parametrize("text", ["", "plain", "\0", "a\0b", "\ue000", "\ue000\0", "\0\ue000\ue000\u2400"])
def test_every_text_can_be_stored(text: str) -> None:
    assert "\0" not in encoding.storable(text)
    assert encoding.original(encoding.storable(text)) == text
    assert encoding.storable(text + "more").startswith(encoding.storable(text))
