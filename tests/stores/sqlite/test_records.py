"""What rows hold, what they cost, and what broken ones answer."""

import os
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import semel
from semel.core.commands import (
    Admit,
    Claim,
    Count,
    Granted,
    Lookup,
    Mark,
    Marked,
    Purge,
    Purged,
    ReadSettings,
    Renew,
    Scan,
    SetWindow,
)
from semel.core.ids import time_in
from semel.core.machine import standing
from semel.errors import KeyInvalid, RecordCorrupt
from semel.stores.memory.store import MemoryStore
from semel.stores.rows import flags_of
from semel.stores.sqlite import SqliteStore, encoding
from semel.testing import ManualClock
from semel.types import FOREVER, Absent, Busy, Completed, Record, Unavailable
from tests.stores.sqlite.tools import HOUR, LEASE, SECOND, WINDOW, claim, finish, hold, lookup, named, settle

TIMES = st.integers(1, FOREVER - 1)
RECORDS = st.builds(
    Record,
    id=st.just(named("k")),
    state=st.sampled_from(["claimed", "done", "failed"]),
    owner=st.binary(min_size=1, max_size=16),
    fence=TIMES,
    lease_until_us=TIMES,
    attempt=st.integers(0, 10**6),
    expires_at_us=st.one_of(TIMES, st.just(FOREVER)),
    first_seen_us=TIMES,
    value=st.none() | st.binary(max_size=20),
    fingerprint=st.none() | st.binary(max_size=20),
    event_type=st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    quarantine=st.booleans(),
    sliding=st.booleans(),
)


@given(RECORDS, TIMES)
def test_a_row_brings_back_its_record(record: Record, settled_at: int) -> None:
    if record.state != "claimed":
        record = Record(
            **{name: getattr(record, name) for name in Record.__struct_fields__}
            | {"settled_at_us": settled_at}
        )
    row = encoding.to_row(record, flags_of(record))
    stored = (7, b"d", *row[:8], 5, *row[8:])
    assert encoding.from_row(stored, record.id) == record


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Any:
    store = SqliteStore(tmp_path / "a.db", synchronous="NORMAL", clock=clock)
    store.open()
    yield store
    store.close()


def raw(store: SqliteStore, statement: str, *parameters: Any) -> list[Any]:
    connection = sqlite3.connect(store.path)
    with connection:
        rows = connection.execute(statement, parameters).fetchall()
    connection.close()
    return rows


@pytest.mark.parametrize(
    "damage",
    ["state = 5", "state = 200", "state = 'done'", "owner = 'me'", "fence = 'x'", "value = 'text'", "state = 65",
     "attempt = -1", "fence = -1861920000000001", "fingerprint = 'x'", "event_type = X'00'", "state = 3"],
)  # fmt: skip
def test_a_broken_row_is_its_own_items_trouble(store: SqliteStore, damage: str) -> None:
    finish(store, "good")
    finish(store, "broken")
    raw(store, f"UPDATE semel_records SET {damage} WHERE key = 'broken'")
    good, broken, new, again = store.send(
        [Lookup(named("good")), Lookup(named("broken")), claim("new"), claim("broken")]
    )
    assert good.state == "done"
    assert isinstance(new, Granted)
    for answer in (broken, again):
        assert isinstance(answer, Unavailable)
        assert isinstance(answer.error, RecordCorrupt)
    assert lookup(store, "new").state == "claimed"


def test_a_broken_row_spoils_a_list_but_not_the_search_for_orphans(
    store: SqliteStore, clock: ManualClock
) -> None:
    hold(store, "good", journal=b"p")
    hold(store, "broken", journal=b"p")
    raw(store, "UPDATE semel_records SET owner = 'me' WHERE key = 'broken'")
    clock.advance(us=LEASE)
    listed, orphans = store.send([Scan(), Scan(orphaned=True)])
    assert isinstance(listed, Unavailable)
    assert [record.key for record in orphans.records] == ["good"]


def test_text_that_is_no_text_is_its_own_items_trouble(store: SqliteStore) -> None:
    answers = store.send(
        [claim("good"), claim("\ud800"), claim("typed", event_type="\ud800"), Mark("", "m", ["\ud800"], HOUR)]
    )
    assert isinstance(answers[0], Granted)
    for answer in answers[1:]:
        assert isinstance(answer, Unavailable)
        assert isinstance(answer.error, KeyInvalid)
    assert lookup(store, "good").state == "claimed"
    assert lookup(store, "typed") == Absent()


def test_items_on_one_key_in_one_batch_act_in_order(store: SqliteStore) -> None:
    mine, other = claim("k"), claim("k")
    granted, seen, busy, count = store.send([mine, Lookup(named("k")), other, Count()])
    assert isinstance(granted, Granted)
    assert seen.state == "claimed"
    assert isinstance(busy, Busy)
    assert count.states == {"claimed": 1}
    done, known, scanned = store.send([settle(mine, granted, b"j1"), other, Scan()])
    assert done == Completed(at_us=done.at_us)
    assert (known.state, known.value) == ("done", b"j1")
    assert [record.state for record in scanned.records] == ["done"]


def test_what_another_connection_wrote_is_seen_although_claims_are_remembered(tmp_path: Path) -> None:
    one, two = SqliteStore(tmp_path / "a.db"), SqliteStore(tmp_path / "a.db")
    item, granted = hold(one, "k")
    assert two.send([settle(item, granted, b"j2")]) == [Completed(at_us=lookup(two, "k").settled_at_us)]
    (already,) = one.send([settle(item, granted, b"j1")])
    assert already.already
    assert lookup(one, "k").value == b"j2"
    one.close()
    two.close()


def test_remembered_claims_are_bounded(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.stores.sqlite.batch.CLAIMS_MAX", 10)
    items = [claim(f"k{number}") for number in range(50)]
    granted = store.send(items)
    assert len(store._seen.claims) == 10
    done = store.send([settle(item, answer) for item, answer in zip(items, granted, strict=True)])
    assert all(isinstance(answer, Completed) for answer in done)
    assert store._seen.claims == {}


def test_a_batch_that_changes_nothing_writes_nothing(store: SqliteStore) -> None:
    finish(store, "k")
    store.send([Mark("", "m", ["a"], HOUR), Admit("", "m", "mark")])
    log = Path(store.path + "-wal")
    before = (log.stat().st_size, log.read_bytes())
    answers = store.send(
        [
            claim("k"),
            Mark("", "m", ["a"], HOUR),
            Admit("", "m", "lease"),
            Purge(),
            Lookup(named("k")),
            ReadSettings(),
        ]
    )
    assert answers[1:3] == [Marked([False]), "mark"]
    assert (log.stat().st_size, log.read_bytes()) == before


def test_what_only_looks_does_not_wait_for_a_writer(store: SqliteStore) -> None:
    finish(store, "k")
    writer = sqlite3.connect(store.path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    found, page, stats, settings = store.send([Lookup(named("k")), Scan(), Count(), ReadSettings()])
    assert found.state == "done"
    assert len(page.records) == stats.states["done"] == 1
    assert settings.modes == {}
    writer.execute("ROLLBACK")
    writer.close()


def test_the_readable_key_is_beside_the_digest_or_left_out(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db", readable_keys=False)
    finish(store, "secret")
    hold(store, "journaled", journal=b"payload")
    hold(store, "careful", quarantine=True)
    assert {key for (key,) in raw(store, "SELECT key FROM semel_records")} == {None, "journaled", "careful"}
    assert b"secret" not in Path(store.path).read_bytes() + Path(store.path + "-wal").read_bytes()
    page = store.send([Scan()])[0]
    assert [record.key for record in page.records][1:] == ["journaled", "careful"]
    assert (
        page.records[0].key == raw(store, "SELECT lower(hex(digest)) FROM semel_records WHERE id = 1")[0][0]
    )
    assert lookup(store, "secret").key == "secret"
    store.close()


def test_operators_can_read_a_view(store: SqliteStore, clock: ManualClock) -> None:
    finish(store, "order-1", b'j{"total":3}', event_type="order.paid")
    finish(store, "order-2", b"r\x00\x01")
    hold(store, "order-3")
    rows = raw(store, "SELECT event_id, event_type, consumer, state, processed_at, value FROM semel_events")
    assert rows == [
        ("order-1", "order.paid", "billing", "done", "2027-01-15 08:00:00.000", '{"total":3}'),
        ("order-2", None, "billing", "done", "2027-01-15 08:00:00.000", None),
        ("order-3", None, "billing", "claimed", None, None),
    ]


def test_steps_and_journal_have_their_own_tables(store: SqliteStore) -> None:
    item, granted = hold(store, "k", journal=b"payload", meta=b"m")
    store.send([Renew(item.id, item.owner, granted.fence, LEASE, ("mail", b"j1"))])
    record = lookup(store, "k")
    assert (record.journal, record.meta, record.steps) == (b"payload", b"m", (("mail", b"j1"),))
    store.send([settle(item, granted)])
    record = lookup(store, "k")
    assert (record.journal, record.meta, record.steps) == (None, b"m", (("mail", b"j1"),))
    finish(store, "plain")
    assert raw(store, "SELECT count(*) FROM semel_extras") == [(1,)]
    assert raw(store, "SELECT count(*) FROM semel_journal") == [(0,)]


def test_purging_is_batched_and_takes_what_belongs_to_the_record(
    store: SqliteStore, clock: ManualClock
) -> None:
    store.send([claim(f"k{number}", meta=b"m", window_us=HOUR) for number in range(10)])
    store.send([Mark("", "m", [f"k{number}" for number in range(10)], HOUR)])
    hold(store, "journaled", journal=b"payload")
    finish(store, "later")
    assert store.send([Purge()])[0].count == 0
    clock.advance(us=HOUR + LEASE + SECOND)
    assert store.send([Purge(dry_run=True)])[0].count == 20
    purged: list[Purged] = []
    while not purged or purged[-1].more:
        purged += store.send([Purge(limit=4)])
    assert sum(each.count for each in purged) == 20
    assert max(each.count for each in purged) <= 4
    assert 1 <= purged[0].lag_s < 40
    assert {record.key for record in store.send([Scan()])[0].records} == {"journaled", "later"}
    assert raw(store, "SELECT (SELECT count(*) FROM semel_extras), (SELECT count(*) FROM semel_marks)") == [
        (0, 0)
    ]


def test_a_renewed_claim_outlives_its_indexed_minute(store: SqliteStore, clock: ManualClock) -> None:
    item, granted = hold(store, "k", window_us=SECOND)
    clock.advance(us=20 * SECOND)
    store.send([Renew(item.id, item.owner, granted.fence, HOUR)])
    clock.advance(us=30 * 60 * SECOND)
    assert store.send([Purge()])[0].count == 0
    assert lookup(store, "k").state == "claimed"
    clock.advance(us=HOUR)
    assert store.send([Purge()])[0].count == 1


def test_completing_soon_does_not_move_the_index(store: SqliteStore, clock: ManualClock) -> None:
    for number in range(20):
        clock.advance(us=7 * SECOND)
        item, granted = hold(store, f"k{number}")
        (before,) = raw(store, "SELECT purge_at FROM semel_records WHERE key = ?", f"k{number}")
        clock.advance(us=5 * SECOND)
        store.send([settle(item, granted)])
        assert raw(store, "SELECT purge_at FROM semel_records WHERE key = ?", f"k{number}") == [before]


def test_windows_of_existing_records_move(store: SqliteStore, clock: ManualClock) -> None:
    finish(store, "a", event_type="order")
    finish(store, "b", event_type="mail")
    store.send([SetWindow("", "billing", "order", HOUR, existing=True)])
    a, b = lookup(store, "a"), lookup(store, "b")
    assert a.expires_at_us == a.settled_at_us + HOUR
    assert b.expires_at_us == b.settled_at_us + WINDOW
    clock.advance(us=HOUR + 61 * SECOND)
    assert store.send([Purge()])[0].count == 1


def test_it_answers_as_memory_does(tmp_path: Path) -> None:
    """The same seeded items, the same clock: the same answers, page by page."""
    chance = random.Random(7)
    clocks = ManualClock(), ManualClock()
    stores = (
        SqliteStore(tmp_path / "a.db", synchronous="NORMAL", clock=clocks[0]),
        MemoryStore(clock=clocks[1]),
    )
    held: list[tuple[Claim, Granted]] = []
    for _ in range(400):
        step = chance.choice([1, SECOND, 40 * SECOND, 2 * HOUR])
        for clock in clocks:
            clock.advance(us=step)
        items: list[Any] = []
        for _ in range(chance.randint(1, 6)):
            key = f"k{chance.randint(0, 12)}"
            if held and chance.random() < 0.5:
                item, granted = chance.choice(held)
                to = chance.choice(["done", "failed", "released", "unknown"])
                items.append(
                    settle(item, granted, b"j1", to)
                    if chance.random() < 0.8
                    else Renew(item.id, item.owner, granted.fence, LEASE, chance.choice([None, ("s", b"j")]))
                )
            else:
                items.append(
                    claim(
                        key,
                        chance.randbytes(16),
                        window_us=chance.choice([SECOND, HOUR]),
                        quarantine=chance.random() < 0.2,
                        sliding=chance.random() < 0.2,
                        journal=chance.choice([None, None, b"p"]),
                    )
                )
        items += [Lookup(named(f"k{number}")) for number in range(13)]
        mine, theirs = stores[0].send(items), stores[1].send(items)
        assert mine == theirs
        held += [
            (item, answer)
            for item, answer in zip(items, mine, strict=True)
            if isinstance(item, Claim) and isinstance(answer, Granted)
        ]
        if chance.random() < 0.2:
            pages = [store.send([Scan(limit=1000)])[0].records for store in stores]
            assert sorted(record.id for record in pages[0]) == sorted(record.id for record in pages[1])
        if chance.random() < 0.1:
            stores[0].send([Purge()])
            stores[1].send([Purge(dry_run=True)])
    stores[0].close()


def test_what_a_record_and_a_mark_cost_on_disk(tmp_path: Path) -> None:
    number = 20_000
    store = SqliteStore(tmp_path / "a.db", synchronous="NORMAL", readable_keys=False)
    store.open()
    store.close()
    empty = Path(store.path).stat().st_size
    store.open()
    for _ in range(0, number, 500):
        items = [claim(os.urandom(16).hex()) for _ in range(500)]
        granted = store.send(items)
        store.send([settle(item, answer, None) for item, answer in zip(items, granted, strict=True)])
    store.close()
    assert (Path(store.path).stat().st_size - empty) / number <= 120
    marks = SqliteStore(tmp_path / "m.db", synchronous="NORMAL")
    for start in range(0, number, 500):
        marks.send([Mark("", "m", [f"{start}-{each}" for each in range(500)], WINDOW)])
    marks.close()
    # Three of them are pages that the small table left free: their number does not grow with the marks.
    assert (Path(marks.path).stat().st_size - empty) / number <= 38


def test_standing_in_sql_is_standing_in_the_machine(store: SqliteStore, clock: ManualClock) -> None:
    for number, (quarantine, journal, window_us) in enumerate(
        [
            (False, None, SECOND),
            (False, None, WINDOW),
            (True, None, SECOND),
            (False, b"p", SECOND),
            (True, b"p", SECOND),
        ]
    ):
        hold(store, f"claimed{number}", quarantine=quarantine, journal=journal, window_us=window_us)
        item, granted = hold(
            store, f"released{number}", quarantine=quarantine, journal=journal, window_us=window_us
        )
        store.send([settle(item, granted, to="released")])
        finish(store, f"done{number}", quarantine=quarantine, journal=journal, window_us=window_us)
    for passed in (0, 2 * SECOND, 29 * SECOND, 40 * SECOND, 25 * HOUR):
        clock.advance(us=passed)
        page = store.send([Scan(limit=1000)])[0].records
        now = page and store.send([Count()])[0].now_us
        for record in page:
            assert standing(record, now) == record
            assert lookup(store, record.key).state == record.state
        counted = store.send([Count()])[0].states
        assert sum(counted.values()) == len(page)
        for state in ("claimed", "done", "unknown"):
            chosen = store.send([Scan(state=state, limit=1000)])[0].records
            assert [r.id for r in chosen] == [r.id for r in page if r.state == state]
            released = counted.get("released", 0) if state == "claimed" else 0
            assert counted.get(state, 0) + released == len(chosen)


def test_records_of_ids_with_a_time_lie_in_its_order(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/timed.db"
    held = semel.Policy(late="hold")
    keys = [semel.keys.uuid7("n") for _ in range(50)]
    with semel.open(url, consumer="timed", ids="uuid7", policy=held) as once:
        for key in reversed(keys):
            once.run(key, lambda: 1)
    with semel.open(
        url, consumer="timed", ids="uuid7", policy=held
    ) as again:  # another connection knows it too
        assert all(again.run(key, lambda: 2) == semel.Done(1, replayed=True) for key in keys)
        record = again.records.lookup(keys[0])
        assert record is not None
        assert len(list(again.records.list())) == 50
    with closing(sqlite3.connect(tmp_path / "timed.db")) as file, file:
        rows = file.execute("SELECT digest, key FROM semel_records ORDER BY digest").fetchall()
    times = [int.from_bytes(digest[:6]) for digest, _ in rows]
    assert times == sorted(time_in("uuid7", key) // 1000 for key in keys)
    assert [key for _, key in rows if key in keys[:1]] == keys[:1]


def test_a_lookup_of_what_is_no_id_finds_nothing(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "timed.db")
    store.open()
    store.send([Admit("", "timed", "lease", "uuid7")])
    refused, found = store.send(
        [Claim(("", "timed", "k"), b"o" * 16, HOUR, HOUR), Lookup(("", "timed", "k"))]
    )
    assert isinstance(refused.error, semel.errors.KeyInvalid)
    assert found == Absent()
    store.close()
